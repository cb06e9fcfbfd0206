"""Rows of TensorDicts: read one by one, written as a lazy stack, or padded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    lazy_stack,
)
from torch.nn.utils.rnn import pad_sequence

from rollwright._keys import NestedKey


def rows_of(td: TensorDictBase) -> list[TensorDictBase]:
    """The elements of a TensorDict, of batch size ``[]``, in order."""
    if not td.batch_dims:
        return [td]
    return [row for part in td.unbind(0) for row in rows_of(part)]


def entry(row: TensorDictBase, key: NestedKey) -> Any:
    """An entry of a row: a tensor, a TensorDict, a tensor class, a string or another object; None: there is none."""
    path = (key,) if isinstance(key, str) else key
    value: Any = row
    for name in path:
        if not is_tensor_collection(value):
            return None
        value = value.get(name, None)
    return value.data if isinstance(value, NonTensorData) else value


def tokens_of(row: TensorDictBase, key: NestedKey, mask_keys: Sequence[NestedKey]) -> torch.Tensor | None:
    """Tokens at ``key``, int64 ``[tokens]`` on the CPU, without those that the first mask of their size leaves out."""
    tokens = entry(row, key)
    if not isinstance(tokens, torch.Tensor):
        return None
    for mask_key in mask_keys:
        mask = entry(row, mask_key)
        if isinstance(mask, torch.Tensor) and mask.shape == tokens.shape:
            tokens = tokens[mask.bool()]
            break
    return tokens.to("cpu", torch.int64)


def stacked(rows: Sequence[TensorDictBase], shape: Sequence[int]) -> TensorDictBase:
    """Rows as a lazy stack of batch size ``shape``, stacked along its last dimension."""
    if not shape:
        return rows[0]
    if len(shape) == 1:
        return cast("TensorDictBase", LazyStackedTensorDict(*rows, stack_dim=0))
    columns = [stacked(rows[place :: shape[-1]], shape[:-1]) for place in range(shape[-1])]
    return cast("TensorDictBase", LazyStackedTensorDict(*columns, stack_dim=len(shape) - 1))


def write(
    td: TensorDictBase,
    rows: Sequence[TensorDict],
    shape: Sequence[int],
    pad_value: Callable[[tuple[str, ...]], Any] | None,
) -> TensorDictBase:
    """Write entries of rows into a TensorDict.

    Args:
        td: to write into, of batch size ``shape``.
        rows: entries of its elements.
        shape: of the batch.
        pad_value: what pads the entry at a path; None: entries stay ragged.

    Returns:
        ``td``; where ragged tensors stand at the root and ``td`` is no lazy stack, a lazy stack of its elements.
    """
    if pad_value is not None:
        padded = _padded(rows, pad_value, ())
        return td.update(padded.reshape(tuple(shape)) if shape else padded[0])
    if not shape:
        return td.update(rows[0])
    ragged = any(isinstance(value, torch.Tensor) and value.ndim for value in rows[0].values())
    if isinstance(td, LazyStackedTensorDict) or ragged:
        parts = rows_of(td)
        for part, row in zip(parts, rows, strict=True):
            part.update(row)
        return td if isinstance(td, LazyStackedTensorDict) else stacked(parts, shape)
    both = stacked(rows, shape)
    for key in rows[0].keys():  # noqa: SIM118
        td.set(key, both.get(key))
    return td


def _padded(rows: Sequence[Any], pad_value: Callable[[tuple[str, ...]], Any], path: tuple[str, ...]) -> TensorDict:
    """Rows as one TensorDict ``[rows]``; ragged tensors are padded on the right."""
    result = TensorDict(batch_size=[len(rows)])
    for key in rows[0].keys():  # noqa: SIM118
        values = [row.get(key) for row in rows]
        first = values[0]
        if isinstance(first, torch.Tensor):
            if not first.ndim:
                value: Any = torch.stack(values)
            else:
                value = pad_sequence(values, batch_first=True, padding_value=pad_value((*path, key)))
        elif isinstance(first, TensorDict):
            value = _padded(values, pad_value, (*path, key))
        else:
            value = lazy_stack(values)
        result.set(key, value)
    return result
