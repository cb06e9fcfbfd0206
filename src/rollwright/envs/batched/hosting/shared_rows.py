"""Rows in shared memory: entries with one row for each environment, which processes write and read in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollwright._keys import NestedKey
from rollwright._memory import Segment

__all__ = ["Field", "SharedRows", "lay_out"]

_ALIGNMENT = 64  # bytes: a cache line, so that no two entries share one


class Field(NamedTuple):
    """Where an entry lies.

    Attributes:
        key: its name.
        shape: ``[rows, *]``.
        dtype: of its elements.
        start: its first byte in the segment.
    """

    key: NestedKey
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def lay_out(entries: Mapping[NestedKey, tuple[tuple[int, ...], torch.dtype]], start: int) -> tuple[list[Field], int]:
    """Places for entries, one behind the other.

    Args:
        entries: shapes ``[rows, *]`` and dtypes by key.
        start: the first free byte.

    Returns:
        The fields and the first byte behind them.

    Example:
        >>> lay_out({"a": ((2, 3), torch.float32), "b": ((2,), torch.bool)}, 0)[1]
        128
    """
    fields = []
    for key, (shape, dtype) in entries.items():
        field = Field(key, tuple(shape), dtype, start)
        fields.append(field)
        start += -(-field.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return fields, start


class SharedRows:
    """Fields of a segment, as tensors and as arrays over the same memory.

    Args:
        segment: grown to hold the fields.
        fields: of :func:`lay_out`.

    Attributes:
        tensors: by key.
        arrays: by key, but for dtypes that NumPy does not know.
    """

    def __init__(self, segment: Segment, fields: Iterable[Field]) -> None:
        self.fields = list(fields)
        self.tensors: dict[NestedKey, Tensor] = {}
        self.arrays: dict[NestedKey, NDArray[Any]] = {}
        used = [field for field in self.fields if field.num_bytes]
        start = min((field.start for field in used), default=0)
        stop = max((field.start + field.num_bytes for field in used), default=0)
        if used:
            segment.grow(stop)
        memory = segment.map(start, stop - start) if used else memoryview(b"")
        for field in self.fields:
            count = field.num_bytes // field.dtype.itemsize
            if count:
                flat = torch.frombuffer(memory, dtype=field.dtype, count=count, offset=field.start - start)
                tensor = flat.view(field.shape)
            else:
                tensor = torch.empty(field.shape, dtype=field.dtype)
            self.tensors[field.key] = tensor
            if field.dtype != torch.bfloat16:
                self.arrays[field.key] = tensor.numpy()
