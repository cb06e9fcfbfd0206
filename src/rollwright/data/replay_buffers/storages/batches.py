"""Batches that a storage is given: their rows, one by one, and messages about what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from tensordict import is_tensor_collection

from rollwright._keys import NestedKey, key_str
from rollwright._options import whole
from rollwright.data.replay_buffers.storages.structures import is_structure, unbound


class _Pieces(list[Any]):
    """Batches to be written one after the other, and published at once."""


def pieces(batches: Sequence[Any]) -> list[Any]:
    """Mark batches as parts of one write, see :meth:`Storage.append`."""
    return _Pieces(batches)


def batches_of(data: Any) -> list[Any]:
    """The batches in data for :meth:`Storage.append`: one, or those of :func:`pieces`."""
    return data if isinstance(data, _Pieces) else [data]


def items_of(data: Any, dim: int) -> list[Any]:
    """The rows in data for :meth:`Storage.append`, one by one; they share memory with it.

    Raises:
        TypeError: it is neither a tensor, an array, a TensorDict, nor a list of elements.
        ValueError: it is one element.
    """
    return [item for batch in batches_of(data) for item in _unbound(batch, dim)]


def items_that_fit(data: Any, dim: int, max_size: int) -> tuple[list[Any], int]:
    """The rows in data that a storage of so many keeps, the last ones, and how many others there are.

    Raises:
        ValueError: there is none; or see :func:`items_of`.
    """
    items = items_of(data, dim)
    if not items:
        raise ValueError("data: expected at least one element, got none.")
    skipped = max(0, len(items) - max_size)
    return items[skipped:], skipped


def items_in_place(data: Any, number: int) -> list[Any]:
    """The rows in data, one by one, that replace so many.

    Raises:
        ValueError: there are more, or fewer.
    """
    items = items_of(data, 0)
    if len(items) != number:
        raise ValueError(f"data: expected {number} elements to replace as many, got {len(items)}.")
    return items


def num_rows(data: Any, dim: int) -> int:
    """Rows in data for :meth:`Storage.append`."""
    if isinstance(data, _Pieces):
        return sum(num_rows(batch, dim) for batch in data)
    if isinstance(data, torch.Tensor) or is_tensor_collection(data):
        return int(data.shape[dim])
    return len(data) if isinstance(data, list) else len(_unbound(data, dim))


def _unbound(batch: Any, dim: int) -> list[Any]:
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biufc":
        batch = torch.from_numpy(batch)
    if isinstance(batch, torch.Tensor) or is_tensor_collection(batch):
        if batch.ndim <= dim:
            raise ValueError(
                f"data: expected a batch with at least {dim + 1} dimensions, got a {type(batch).__name__} of shape "
                f"{list(batch.shape)}. Pass one element to add()."
            )
        return list(batch.unbind(dim))
    rows = None if isinstance(batch, list) or not is_structure(batch) else unbound(batch, dim)
    if rows is not None:
        return rows
    if isinstance(batch, Mapping) or not isinstance(batch, Sequence) or isinstance(batch, str):
        raise TypeError(
            f"data: expected a TensorDict, a tensor, a list of elements, or a dictionary or tuple whose tensors have "
            f"as many rows, got {type(batch).__name__}. "
            "Pass one element to add()."
        )
    return list(batch)


def too_long(frames: int, room: int) -> ValueError:
    """The error over a trajectory that a storage has no room for."""
    return ValueError(
        f"data: a trajectory of {frames} frames is longer than the storage, which has room for {room}. Make the "
        "storage larger, or end trajectories with max_frames_per_traj."
    )


def no_objects(name: str, keys: Sequence[NestedKey], storage: str) -> str:
    """The message for entries that a storage of tensors cannot keep."""
    quoted = ", ".join(repr(key) for key in keys)
    return (
        f"{name}: {storage} keeps tensors only, got text or other objects in {key_str(keys)}. Use a "
        f"RaggedStorage or a ListStorage, which keep them, or leave them out: data.exclude({quoted}); in a collector "
        f"postproc=lambda data: data.exclude({quoted}), or an environment without them "
        "(gymnasium.wrappers.FilterObservation)."
    )


positive = cast("Callable[[str, Any], int]", whole(1).call)
"""``positive(name, value)``: an integer of at least 1; a TypeError or ValueError, which names it, where it is none."""
