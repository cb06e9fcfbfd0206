"""Layout: offsets of typed arrays in raw memory, and tensors over them."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, Self, TypeVar

import torch

from rollwright._memory.segment import Segment

ALIGNMENT = 64  # bytes: a cache line, so that no two arrays share one

K = TypeVar("K", bound=Hashable)


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of ``alignment``."""
    return -(-num_bytes // alignment) * alignment


@functools.cache
def in_numpy(dtype: torch.dtype) -> bool:
    """Whether NumPy has the dtype (it has no bfloat16, for one)."""
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return False
    return True


class Field(NamedTuple, Generic[K]):
    """One array.

    Attributes:
        key: its name.
        shape: of the array.
        dtype: of its elements.
        start: its first byte.
    """

    key: K
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int = 0

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """The byte behind its last one."""
        return self.start + self.num_bytes

    def tensor(self, memory: memoryview, origin: int = 0) -> torch.Tensor:
        """The array as a tensor, which keeps ``memory`` alive (a tensor of no elements has memory of its own).

        Args:
            memory: in which it lies.
            origin: the byte, counted as :attr:`start` is, at which ``memory`` begins.
        """
        count = math.prod(self.shape)
        if not count:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.start - origin).view(self.shape)


class Layout(NamedTuple, Generic[K]):
    """Arrays one behind the other.

    Equal layouts are equal tuples; a layout can be pickled and hashed.

    Attributes:
        fields: the arrays, in order.
        end: the first free byte behind them, aligned.

    Example:
        >>> layout = Layout.of([("a", (2, 3), torch.float32), ("b", (2,), torch.bool)])
        >>> [field.start for field in layout.fields], layout.end
        ([0, 64], 128)
        >>> layout.tensors(memoryview(bytearray(layout.end)))["b"]
        tensor([False, False])
    """

    fields: tuple[Field[K], ...]
    end: int

    @classmethod
    def of(
        cls, entries: Iterable[tuple[K, tuple[int, ...], torch.dtype]], start: int = 0, alignment: int = ALIGNMENT
    ) -> Self:
        """The layout of arrays given by key, shape and dtype.

        Args:
            entries: the arrays.
            start: the first free byte.
            alignment: each array starts at a multiple of it.
        """
        fields, end = [], aligned(start, alignment)
        for key, shape, dtype in entries:
            field = Field(key, tuple(shape), dtype, end)
            fields.append(field)
            end = aligned(field.stop, alignment)
        return cls(tuple(fields), end)

    @property
    def start(self) -> int:
        """The first byte of the arrays."""
        return self.fields[0].start if self.fields else self.end

    @property
    def stop(self) -> int:
        """The byte behind the last one of the arrays, which :attr:`end` rounds up."""
        return self.fields[-1].stop if self.fields else self.end

    def map(self, segment: Segment) -> dict[K, torch.Tensor]:
        """The arrays as tensors over a segment, which is long enough for them."""
        return self.tensors(segment.map(self.start, self.stop - self.start), self.start)

    def tensors(self, memory: memoryview, origin: int = 0) -> dict[K, torch.Tensor]:
        """The arrays as tensors; see :meth:`Field.tensor`."""
        return {field.key: field.tensor(memory, origin) for field in self.fields}
