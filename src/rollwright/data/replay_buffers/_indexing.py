"""Indexing: maps an index of a buffer to elements of its storage."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright.data.replay_buffers.storages.base import Storage

__all__ = ["elements_at", "entry_of"]


def elements_at(storage: Storage, index: Any, dim: int) -> NDArray[np.int64]:
    """Flat indices of the elements at places.

    Args:
        storage: where they rest.
        index: of the batch ``[n]`` of all that is stored; with ``ndim=2`` of ``[B, T]``, and so on.
        dim: of that batch, the dimension that grows.

    Returns:
        int64, of the shape that indexing that batch gives.

    Raises:
        TypeError: the index is a name.
        IndexError: there are no such places.
    """
    if isinstance(index, str):
        raise TypeError(f"index: expected places of elements, got {index!r}. For an entry: buffer[:][{index!r}].")
    index = index.numpy(force=True) if isinstance(index, torch.Tensor) else index
    count = storage.rows_from_0()
    if storage.ndim == 1 and count is not None and isinstance(index, int | np.integer | slice):
        if isinstance(index, slice):
            return np.arange(*index.indices(count))
        live: Any = range(count)
    else:
        rest = storage.rest or (0,) * (storage.ndim - 1)  # of a storage that nothing was written to
        rows = storage.live_index()
        grid = rows.reshape(len(rows) // storage.columns, *rest)
        live = np.moveaxis(grid, 0, dim) if storage.ndim > 1 else grid
    try:
        return np.array(live[index], np.int64, order="C")
    except IndexError as error:
        size = len(storage) if storage.ndim == 1 else list(live.shape)
        raise IndexError(f"index: {index!r} is out of range: the buffer holds {size} elements.") from error


def entry_of(elements: Any, key: NestedKey) -> Any:
    """An entry of elements.

    Raises:
        TypeError: they are no TensorDicts.
    """
    if not isinstance(elements, TensorDictBase):
        raise TypeError(f"index: {key!r} names an entry, and the elements here have none. Pass places, such as [:].")
    return elements[key]
