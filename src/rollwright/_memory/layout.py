"""Layouts of typed arrays in raw memory, tensors over them, and the free ranges of a memory that grows."""

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


class FreeList:
    """Allocates stretches of a memory that grows, and takes them back.

    Attributes:
        end: all behind it is free.

    Example:
        >>> memory = FreeList()
        >>> first, second, third = (memory.allocate(100) for _ in range(3))
        >>> first, second, third, memory.end
        (0, 128, 256, 384)
        >>> memory.release(first, 100), memory.release(second, 100)
        (None, None)
        >>> memory.allocate(200), memory.end
        (0, 384)
    """

    def __init__(self) -> None:
        self.end = 0
        self._free: list[tuple[int, int]] = []  # first byte and size, in order, none beside another

    def allocate(self, num_bytes: int) -> int:
        """The first byte of a stretch that was free."""
        size = aligned(num_bytes)
        for i, (start, room) in enumerate(self._free):
            if room >= size:
                self._free[i : i + 1] = [(start + size, room - size)] if room > size else []
                return start
        start, self.end = self.end, self.end + size
        return start

    def release(self, start: int, num_bytes: int) -> None:
        """Make a stretch that was allocated free again."""
        joined: list[tuple[int, int]] = []
        for first, size in sorted([*self._free, (start, aligned(num_bytes))]):
            if joined and sum(joined[-1]) == first:
                joined[-1] = joined[-1][0], joined[-1][1] + size
            elif size:
                joined.append((first, size))
        if joined and sum(joined[-1]) == self.end:
            self.end = joined.pop()[0]
        self._free = joined
