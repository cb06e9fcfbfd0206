"""Changes entries of stored elements by place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_tuple, key_str, leaves, unravel
from rollwright._tensors import as_tensor
from rollwright.data.replay_buffers.storages.base import Storage
from rollwright.data.replay_buffers.storages.rows import RowStorage


def flat_entries(data: Mapping[NestedKey, Any] | TensorDictBase) -> dict[NestedKey, Any]:
    """The entries of a TensorDict, or of a dictionary whose values may be such, by their whole names.

    >>> flat_entries({"a": 1, "next": {"b": 2}, ("next", "c"): 3})
    {'a': 1, ('next', 'b'): 2, ('next', 'c'): 3}
    """
    if isinstance(data, TensorDictBase):
        return leaves(data)
    found: dict[NestedKey, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping | TensorDictBase):
            found |= {unravel((*as_tuple(key), *as_tuple(name))): leaf for name, leaf in flat_entries(value).items()}
        else:
            found[unravel(key)] = value
    return found


def set_entries(
    storage: Storage, data: Mapping[NestedKey, Any] | TensorDictBase, index: Any = None, dim: int | None = None
) -> None:
    """Change entries of elements; all come to light at once.

    Args:
        storage: of rows of tensors.
        data: new values of some entries, ``[*index, *entry]`` or what broadcasts to that; dictionaries may be nested.
        index: as ``sample`` and ``extend`` give it, or a slice of places; None: of all that is stored.
        dim: of the batch of all that is stored, the dimension that grows; None: that of the storage.

    Raises:
        TypeError: the storage has no rows of tensors.
        KeyError, ValueError: entries do not fit what is stored.
        IndexError: there is no such element.
    """
    if not isinstance(storage, RowStorage):
        raise TypeError(
            f"storage: {type(storage).__name__} has no entries that can be changed alone. Use a LazyTensorStorage or a "
            "LazyMemmapStorage, or replace elements: buffer[index] = data."
        )
    values = flat_entries(data)
    unknown = [key for key in values if key not in storage.fields]
    if unknown:
        raise KeyError(f"data: expected entries among {key_str(storage.keys())}, got {key_str(unknown)}.")
    with storage.ledger.changing_in_place():
        if index is None or isinstance(index, slice):
            chosen = storage.elements_at(slice(None) if index is None else index, dim)
        else:
            chosen = storage.flat(index)
            if not (storage.generations(chosen) >= 0).all():
                raise IndexError(f"index: expected places of elements that are stored, got {index!r}.")
            dim = storage.dim_extend if dim is None else dim
            values = {key: storage.in_index_order(value, chosen, dim) for key, value in values.items()}
            if storage.ndim == 1:
                chosen = chosen.reshape(index.shape if isinstance(index, torch.Tensor) else np.shape(index))
        entries = {key: _fitting(storage, key, value, chosen.shape) for key, value in values.items()}
        storage.write_entries(chosen.reshape(-1), entries)


def _fitting(storage: RowStorage, key: NestedKey, value: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Values of an entry, ``[n, *entry]``, of its dtype."""
    feature, dtype = storage.fields[key]
    tensor = value if isinstance(value, torch.Tensor) else as_tensor(value, dtype=dtype)
    try:
        if tensor.dtype != dtype:
            raise RuntimeError
        return tensor.broadcast_to((*shape, *feature)).reshape(math.prod(shape), *feature)
    except RuntimeError:
        raise ValueError(
            f"data: expected {key!r} of shape {[*shape, *feature]} and {dtype}, got {list(tensor.shape)} and "
            f"{tensor.dtype}. Convert it."
        ) from None
