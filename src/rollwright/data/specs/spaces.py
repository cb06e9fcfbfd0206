"""The domains of specs: an interval for each element, a number of outcomes, several of these."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from rollwright.data.specs.shapes import DeviceLike


class Space(abc.ABC):
    """What ``spec.space`` can be: an :class:`IntervalSpace`, an :class:`OutcomeSpace` or :class:`OutcomeSpaces`."""

    @abc.abstractmethod
    def to(self, dest: torch.dtype | DeviceLike) -> Any:
        """The same domain with tensors of another dtype or on another device."""

    @abc.abstractmethod
    def clone(self) -> Any:
        """A copy whose tensors can be changed without changing these."""


class IntervalSpace(NamedTuple):
    """The domain of a numeric spec: the closed interval of each element.

    Example:
        >>> from rollwright.data import Bounded
        >>> low, high = Bounded(-1.0, 1.0, (2,)).space
        >>> low, high
        (tensor([-1., -1.]), tensor([1., 1.]))
    """

    low: Tensor
    high: Tensor

    def to(self, dest: torch.dtype | DeviceLike) -> IntervalSpace:
        """The same interval with bounds of another dtype or on another device."""
        return IntervalSpace(self.low.to(dest), self.high.to(dest))

    def clone(self) -> IntervalSpace:
        """A copy whose bounds can be changed without changing these."""
        return IntervalSpace(self.low.clone(), self.high.clone())

    def unbind(self, dim: int = 0) -> tuple[IntervalSpace, ...]:
        """One interval for each index along a dimension."""
        return tuple(map(IntervalSpace, self.low.unbind(dim), self.high.unbind(dim)))

    def __eq__(self, other: object) -> bool:
        """Whether the other is an interval of the same dtype, device, shape and bounds."""
        if not isinstance(other, IntervalSpace):
            return False
        pairs = ((self.low, other.low), (self.high, other.high))
        return all(a.dtype == b.dtype and a.device == b.device and torch.equal(a, b) for a, b in pairs)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((IntervalSpace, self.low.shape, self.low.dtype))


class OutcomeSpace(NamedTuple):
    """The domain of a discrete spec: outcomes ``0`` to ``n - 1``."""

    n: int

    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """The space itself, which has no tensors."""
        return self

    def clone(self) -> Self:
        """The space itself, which cannot be changed."""
        return self


class BitSpace(NamedTuple):
    """``n`` zeros and ones, each free of the others."""

    n: int

    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """The space itself, which has no tensors."""
        return self

    def clone(self) -> Self:
        """The space itself, which cannot be changed."""
        return self


class OutcomeSpaces(tuple["OutcomeSpace | OutcomeSpaces", ...]):
    """The domain of a spec of several choices: that of each.

    Example:
        >>> from rollwright.data import MultiCategorical
        >>> [choice.n for choice in MultiCategorical([3, 2]).space]
        [3, 2]
    """

    __slots__ = ()

    @classmethod
    def from_nvec(cls, nvec: Tensor) -> Any:
        """The domain for numbers of outcomes ``[choices]``; of more dimensions, one domain for each last index."""
        if not nvec.ndim:
            return OutcomeSpace(int(nvec))
        return cls(cls.from_nvec(each) for each in nvec.unbind(-1))

    @property
    def boxes(self) -> list[OutcomeSpace | OutcomeSpaces]:
        """That of each choice, under the name that programs of the field know."""
        return list(self)

    def to(self, dest: torch.dtype | DeviceLike) -> Self:
        """The space itself, which has no tensors."""
        return self

    def clone(self) -> Self:
        """The space itself, which cannot be changed."""
        return self


for _kind in (IntervalSpace, OutcomeSpace, BitSpace, OutcomeSpaces):
    Space.register(_kind)
