"""MemoryPool: reusable process memory for the entries of batches."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, cast

import torch
from numpy.typing import NDArray

from rollwright._memory.allocator import check_fits
from rollwright._memory.layout import Field, in_numpy
from rollwright._memory.loan import Loan


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
        self._loan = Loan(memory)
        self._base = EntryMemory.over(self.field.tensor(memory))

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.field.num_bytes

    @property
    def borrowed(self) -> bool:
        """Whether anything still reads the memory."""
        return self._loan.borrowed

    def borrow(self) -> EntryMemory:
        """The memory; what it holds is left over from before.

        Raises:
            RuntimeError: something still reads it.
        """
        if self.borrowed:
            raise RuntimeError(
                "This slab is borrowed. Wait until the last tensor over it is gone, or take another one."
            )
        return EntryMemory(self.field.tensor(self._loan.borrow()), self._base.array)


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
    def num_bytes(self) -> int:
        """Size of all slabs, borrowed or not."""
        return sum(slab.num_bytes for slabs in list(self._slabs.values()) for slab in slabs)  # a thread may be adding

    @property
    def num_bytes_borrowed(self) -> int:
        """Size of the slabs that are borrowed."""
        return sum(slab.num_bytes for slabs in self._slabs.values() for slab in slabs if slab.borrowed)
