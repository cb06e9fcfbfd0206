"""Borrowed memory: released when the last tensor over it is gone, and pooled for the entries of batches."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import weakref
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, cast

import torch
from numpy.typing import NDArray

from rollwright._memory.segment import Field, in_numpy

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
_MOST_MAPPED = 32 * 2**20  # some versions take no more


def keep_freed_memory(most_bytes: int = 256 * 2**20) -> bool:
    """Have this process keep memory that it frees, and use it again.

    By default it goes back to the system as soon as a few hundred KiB are free, and large allocations always do. Then
    each page costs a fault, and is cleared, whenever it is written for the first time: for a megabyte, more than
    copying it. For processes that are our own, and allocate large memory again and again.

    Args:
        most_bytes: free memory that stays with the process.

    Returns:
        Whether the C library can: that of GNU can.

    Example:
        >>> keep_freed_memory() in (True, False)
        True
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library, another system
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    return bool(mallopt(_TRIM_THRESHOLD, most_bytes)) and bool(mallopt(_MMAP_THRESHOLD, _MOST_MAPPED))


def check_fits(num_bytes: int) -> None:
    """Refuse a batch that the memory of this machine cannot hold: systems promise more than they have.

    Raises:
        MemoryError: it cannot.
    """
    total = _total_bytes()
    if total is not None and num_bytes > total:
        raise MemoryError(
            f"frames_per_batch: a batch takes {num_bytes / 1e9:,.1f} GB, and this machine has {total / 1e9:,.1f} GB of "
            "memory. Collect fewer frames a batch; a ReplayBuffer with a LazyMemmapStorage keeps many of them."
        )


@functools.cache
def _total_bytes() -> int | None:
    """Memory of this machine; None: the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


class Borrowed:
    """Says whether anything still reads memory that was borrowed.

    Whatever is made of the view that :meth:`borrow` returns keeps it alive: tensors (``torch.frombuffer``), views of
    them, arrays that share their memory. The owner writes the memory itself, which does not count.

    Args:
        memory: to be borrowed.

    Example:
        >>> import torch
        >>> memory = Borrowed(memoryview(bytearray(64)))
        >>> row = torch.frombuffer(memory.borrow(), dtype=torch.float32)[:4]
        >>> memory.borrowed
        True
        >>> del row
        >>> memory.borrowed
        False
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._view: weakref.ref[memoryview] | None = None

    def borrow(self) -> memoryview:
        """The memory for a borrower; the same view while it is borrowed."""
        view = None if self._view is None else self._view()
        if view is None:
            view = self._memory[:]
            self._view = weakref.ref(view)
        return view

    @property
    def borrowed(self) -> bool:
        """Whether something still reads the memory."""
        return self._view is not None and self._view() is not None


class EntryMemory(NamedTuple):
    """Memory for one entry of a batch.

    Attributes:
        tensor: for the borrower. The memory is borrowed until nothing reads the tensor, its views or its arrays.
        array: the same memory, for its owner to write; it does not count as borrowed. None: NumPy lacks the dtype.
    """

    tensor: torch.Tensor
    array: NDArray[Any] | None

    @classmethod
    def over(cls, tensor: torch.Tensor, base: torch.Tensor | None = None) -> EntryMemory:
        """A tensor, and the array of ``base`` (None: of the tensor), which has the same memory."""
        return cls(tensor, (tensor if base is None else base).numpy() if in_numpy(tensor.dtype) else None)


class Slab:
    """Memory for one tensor at a time.

    The tensor, its views, the arrays that share its memory: as long as any of them lives, the memory is borrowed.

    Args:
        shape: of the tensor.
        dtype: of its elements.

    Example:
        >>> slab = Slab((2, 3), torch.float32)
        >>> row = slab.borrow().tensor[0]
        >>> slab.borrowed
        True
        >>> del row
        >>> slab.borrowed
        False
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.field = Field("", tuple(shape), dtype)
        memory = memoryview(cast(Any, torch.empty(self.field.num_bytes, dtype=torch.uint8, device="cpu").numpy()))
        self._borrowed = Borrowed(memory)
        self._base = EntryMemory.over(self.field.tensor(memory))

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.field.num_bytes

    @property
    def borrowed(self) -> bool:
        """Whether anything still reads the memory."""
        return self._borrowed.borrowed

    def borrow(self) -> EntryMemory:
        """The memory; what it holds is left over from before.

        Raises:
            RuntimeError: something still reads it.
        """
        if self.borrowed:
            raise RuntimeError(
                "This slab is borrowed. Wait until the last tensor over it is gone, or take another one."
            )
        return EntryMemory(self.field.tensor(self._borrowed.borrow()), self._base.array)


class MemoryPool:
    """Slabs by place, each used again when nothing reads it.

    As many slabs live as were borrowed at once, and one more: memory does not grow with time, only with what the
    borrower holds.

    Example:
        >>> pool = MemoryPool()
        >>> first, second = (pool.take("obs", (4,), torch.float32).tensor for _ in range(2))
        >>> first.data_ptr() == second.data_ptr()
        False
        >>> address = first.data_ptr()
        >>> del first
        >>> pool.take("obs", (4,), torch.float32).tensor.data_ptr() == address
        True
    """

    def __init__(self) -> None:
        self._slabs: dict[Hashable, list[Slab]] = {}

    def reserve(self, fields: Mapping[Any, Any], env: tuple[int, ...], steps: int) -> None:
        """Prepare for a batch, before the first :meth:`take` of it.

        Args:
            fields: shape, dtype and device of each entry of a frame ``[*env]``.
            env: the environment's batch size.
            steps: T.

        Raises:
            MemoryError: the batch is larger than the memory of this machine.
        """
        in_memory = [field for field in fields.values() if field.device.type == "cpu"]
        check_fits(steps * sum(math.prod(field.shape) * field.dtype.itemsize for field in in_memory))

    def take(self, place: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> EntryMemory:
        """Memory that nothing reads, allocated where there is none; slabs of another shape or dtype are dropped."""
        slabs = self._slabs.get(place, [])
        if slabs and slabs[0].field[1:3] != (shape, dtype):  # all of a place are alike
            slabs = []
        if len(slabs) <= 2:  # as a rule, and none is one too many
            for slab in slabs:
                if not slab.borrowed:
                    return slab.borrow()
        free = [slab for slab in slabs if not slab.borrowed]
        if not free:
            free = [Slab(shape, dtype)]
            slabs.append(free[0])
        self._slabs[place] = [slab for slab in slabs if slab not in free[2:]]
        return free[0].borrow()

    def clear(self) -> None:
        """Drop all slabs; those that are borrowed live as long as something reads them."""
        self._slabs.clear()

    @property
    def num_slabs(self) -> int:
        """Number of slabs, borrowed or not."""
        return sum(map(len, self._slabs.values()))

    @property
    def num_bytes(self) -> int:
        """Size of all slabs, borrowed or not."""
        return sum(slab.num_bytes for slabs in list(self._slabs.values()) for slab in slabs)  # a thread may be adding

    @property
    def num_bytes_borrowed(self) -> int:
        """Size of the slabs that are borrowed."""
        return sum(slab.num_bytes for slabs in self._slabs.values() for slab in slabs if slab.borrowed)
