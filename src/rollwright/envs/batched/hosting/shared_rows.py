"""Rows in shared memory: entries with one row for each environment, which processes write and read in place."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from rollwright._keys import NestedKey
from rollwright._memory import Layout, Segment, in_numpy


class SharedRows:
    """Entries of a segment, as tensors and as arrays over the same memory.

    Args:
        segment: grown to hold them.
        layout: of the entries, ``[rows, *]`` each.

    Attributes:
        tensors: by key.
        arrays: by key, but for dtypes that NumPy does not know.
    """

    def __init__(self, segment: Segment, layout: Layout[NestedKey]) -> None:
        self.layout = layout
        segment.grow(layout.end)
        self.tensors: dict[NestedKey, Tensor] = layout.map(segment)
        self.arrays: dict[NestedKey, NDArray[Any]] = {
            key: tensor.numpy() for key, tensor in self.tensors.items() if in_numpy(tensor.dtype)
        }
