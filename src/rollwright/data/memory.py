"""Memory with an owner: lent out as tensors, taken back when the last of them is gone, never written while lent."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray

__all__ = ["MemoryPool", "Slab", "in_numpy"]


class Slab:
    """A piece of memory that is lent out as one tensor at a time.

    The tensor of a loan, its views, the arrays that share its memory: as long as any of them lives, the loan does.

    Args:
        shape: of the tensor.
        dtype: of its elements.

    Attributes:
        in_numpy: whether NumPy has the dtype; if not, its array is one of bytes.

    Example:
        >>> slab = Slab((2, 3), torch.float32)
        >>> tensor = slab.lend()
        >>> row = tensor[0]
        >>> del tensor
        >>> slab.lent
        True
        >>> del row
        >>> slab.lent
        False
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.num_bytes = math.prod(shape) * dtype.itemsize
        self.in_numpy = in_numpy(dtype)
        memory = torch.empty(shape, dtype=dtype) if self.in_numpy else torch.empty(self.num_bytes, dtype=torch.uint8)
        self._memory: NDArray[Any] = memory.numpy()
        self._loan: weakref.ref[NDArray[Any]] | None = None

    @property
    def lent(self) -> bool:
        """Whether anything still reads the memory."""
        return self._loan is not None and self._loan() is not None

    def lend(self) -> torch.Tensor:
        """The memory as a tensor; what it holds is left over from before.

        Raises:
            RuntimeError: the memory is lent out.
        """
        if self.lent:
            raise RuntimeError(
                "This slab is lent out. Wait until the last tensor over it is gone, or take another one."
            )
        # The tensor's storage keeps this array alive, and nothing else does: when it dies, so has all that reads it.
        loan = self._memory.view()
        self._loan = weakref.ref(loan)
        tensor = torch.from_numpy(loan)
        return tensor if self.in_numpy else tensor.view(self.dtype).view(self.shape)

    @property
    def array(self) -> NDArray[Any]:
        """The memory for its owner to write, which does not count as a loan; bytes where not :attr:`in_numpy`."""
        return self._memory


@functools.cache
def in_numpy(dtype: torch.dtype) -> bool:
    """Whether NumPy has the dtype (it has no bfloat16, for one)."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True


class MemoryPool:
    """Slabs by place; those that come back are lent again.

    As many slabs live as loans were open at once, and one more: memory does not grow with time, only with what the
    borrower holds.

    Example:
        >>> pool = MemoryPool()
        >>> first, second = pool.take("obs", (4,), torch.float32), pool.take("obs", (4,), torch.float32)
        >>> first is second  # nobody has borrowed it yet
        True
        >>> held = first.lend()
        >>> pool.take("obs", (4,), torch.float32) is first
        False
    """

    def __init__(self) -> None:
        self._slabs: dict[Hashable, list[Slab]] = {}

    def reserve(self, fields: Mapping[Any, Any], env: tuple[int, ...], steps: int) -> None:
        """Told, before the first :meth:`take` of a batch, what it will hold; nothing to do where entries are apart.

        Args:
            fields: shape, dtype and device of each entry of a frame ``[*env]``.
            env: the environment's batch size.
            steps: T.
        """

    def take(self, place: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> Slab:
        """A slab that is not lent out, made where there is none; slabs of another shape or dtype are let go."""
        slabs = [slab for slab in self._slabs.get(place, ()) if slab.shape == shape and slab.dtype == dtype]
        free = [slab for slab in slabs if not slab.lent]
        if not free:
            free = [Slab(shape, dtype)]
            slabs.append(free[0])
        self._slabs[place] = [slab for slab in slabs if slab not in free[2:]]
        return free[0]

    def clear(self) -> None:
        """Let all slabs go; those that are lent live as long as their loans."""
        self._slabs.clear()

    @property
    def num_bytes(self) -> int:
        """Size of all slabs, lent or not."""
        return sum(slab.num_bytes for slabs in list(self._slabs.values()) for slab in slabs)  # a thread may be adding

    @property
    def num_bytes_lent(self) -> int:
        """Size of the slabs that are lent out."""
        return sum(slab.num_bytes for slabs in self._slabs.values() for slab in slabs if slab.lent)
