"""Ragged entries of a batch: as a list, nested, padded, or packed into one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDictBase, is_non_tensor, is_tensor_collection
from torch import Tensor

from rollwright._keys import NestedKey


def as_list(batch: Any, key: NestedKey) -> list[Any]:
    """An entry of each record, in the order of ``batch.flatten()``; nothing is copied.

    Args:
        batch: of records, of any batch size; stacked lazily, or not.
        key: of the entry.

    Returns:
        Tensors, as the records hold them; of a text strings, of other objects these.

    Raises:
        KeyError: a record has no such entry.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, lazy_stack
        >>> batch = lazy_stack([TensorDict(a=torch.tensor([1, 2])), TensorDict(a=torch.tensor([3]))])
        >>> as_list(batch, "a")
        [tensor([1, 2]), tensor([3])]
        >>> padded(batch, "a", side="left")
        tensor([[1, 2],
                [0, 3]])
        >>> packed(batch, "a")
        (tensor([1, 2, 3]), tensor([0, 2, 3], dtype=torch.int32), 2)
    """
    parts: Any = key if isinstance(key, tuple) else (key,)
    return [_entry(one, parts) for one in flat_records(batch)]


def flat_records(batch: Any) -> list[TensorDictBase]:
    """The records of a batch of any batch size, in the order of ``batch.flatten()``; nothing is copied."""
    found: list[TensorDictBase] = []
    _flatten(_nest(batch), found)
    return found


def as_nested(batch: Any, key: NestedKey) -> Tensor:
    """A ragged entry as a nested tensor of layout ``torch.jagged``, ``[records, lengths, ...]``.

    Args:
        batch: of records, of any batch size.
        key: of a tensor that varies in its first dimension.

    Returns:
        A view, where the records' tensors follow each other in one memory; a copy elsewhere.
    """
    values, offsets, _ = packed(batch, key)
    return torch.nested.nested_tensor_from_jagged(values, offsets.to(torch.int64))


def padded(batch: Any, key: NestedKey, value: float = 0, side: Literal["left", "right"] = "right") -> Tensor:
    """A ragged entry, filled up to the longest.

    Args:
        batch: of records, of any batch size.
        key: of a tensor that varies in its first dimension.
        value: what is filled in.
        side: where.

    Returns:
        ``[*batch_size, longest, ...]``; a view where all are equally long and follow each other in one memory.

    Raises:
        ValueError: ``side`` is neither of the two.
    """
    if side not in ("left", "right"):
        raise ValueError(f"side must be 'left' or 'right'; got {side!r}")
    tensors = _tensors(batch, key)
    shape = _batch_size(batch, len(tensors))
    longest = max(map(len, tensors))
    if all(len(tensor) == longest for tensor in tensors):
        rows = _contiguous(tensors)
        result = torch.cat(tensors) if rows is None else rows
    else:
        first = tensors[0]
        result = first.new_full((len(tensors), longest, *first.shape[1:]), value)
        for row, tensor in zip(result, tensors, strict=True):
            place = longest - len(tensor) if side == "left" else 0
            row[place : place + len(tensor)] = tensor
    return result.view(*shape, longest, *tensors[0].shape[1:])


def packed(batch: Any, key: NestedKey) -> tuple[Tensor, Tensor, int]:
    """A ragged entry as one row, as attention kernels for sequences of unequal lengths read it.

    Args:
        batch: of records, of any batch size.
        key: of a tensor that varies in its first dimension.

    Returns:
        ``values [total, ...]``, a view where the tensors follow each other in one memory; ``cu_seqlens``, int32
        ``[records + 1]``, on the same device: record i is ``values[cu_seqlens[i] : cu_seqlens[i + 1]]``; the longest.
    """
    tensors = _tensors(batch, key)
    values = _contiguous(tensors)
    lengths = torch.tensor([0, *map(len, tensors)], dtype=torch.int32)
    offsets = lengths.cumsum(0, dtype=torch.int32).to(tensors[0].device)
    return torch.cat(tensors) if values is None else values, offsets, int(lengths.max())


def _tensors(batch: Any, key: NestedKey) -> list[Tensor]:
    found = as_list(batch, key)
    if not found:
        raise ValueError(f"batch must hold at least one record; got batch size {tuple(batch.batch_size)}")
    for one in found:
        if not isinstance(one, Tensor) or not one.ndim:
            what = f"a tensor of shape {tuple(one.shape)}" if isinstance(one, Tensor) else type(one).__name__
            raise ValueError(f"{key!r} must be tensors that vary in their first dimension; got {what}; use as_list()")
    return found


def _batch_size(batch: Any, count: int) -> Sequence[int]:
    size = tuple(batch.batch_size) if not isinstance(batch, list | tuple) else (count,)
    return (count,) if -1 in size else size


def _contiguous(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors as one, without a copy; None where they do not follow each other in one memory."""
    first = next((tensor for tensor in tensors if tensor.numel()), tensors[0])
    start = end = first.data_ptr()
    size, base = first.element_size(), first.untyped_storage().data_ptr()
    rows = 0
    for tensor in tensors:
        if not tensor.numel():
            continue
        if tensor.data_ptr() != end or not tensor.is_contiguous() or tensor.untyped_storage().data_ptr() != base:
            return None
        if tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:]:
            return None
        end += tensor.numel() * size
        rows += len(tensor)
    if start == end:
        return first
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _nest(node: Any) -> Any:
    """Records as lists of lists, one level for each batch dimension."""
    if isinstance(node, list | tuple):
        return [_nest(part) for part in node]
    if isinstance(node, LazyStackedTensorDict):
        return _stack([_nest(part) for part in node.tensordicts], node.stack_dim)
    return [_nest(part) for part in node.unbind(0)] if node.batch_dims else node


def _stack(parts: list[Any], dim: int) -> list[Any]:
    if not dim:
        return parts
    return [_stack(list(row), dim - 1) for row in zip(*parts, strict=True)]


def _flatten(nested: Any, found: list[Any]) -> None:
    if isinstance(nested, list):
        for part in nested:
            _flatten(part, found)
    else:
        found.append(nested)


def _entry(record: Any, key: tuple[str, ...]) -> Any:
    value = record
    for name in key:
        keys = value.keys() if is_tensor_collection(value) else ()
        if value is not record and not keys:
            raise KeyError(
                f"a record has no entry {key!r}; what {name!r} was looked for in is a {type(value).__name__}"
            )
        value = value.get(name) if name in keys else None
        if value is None:
            raise KeyError(f"a record has no entry {key!r}; where {name!r} was looked for it has {sorted(keys)}")
    if not is_non_tensor(value):
        return value
    return value.tolist() if isinstance(value, NonTensorStack) else value.data
