"""Shapes, devices and indices behind a spec's shape operations; the domains that specs have."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

DeviceLike = torch.device | str | int | None
ShapeLike = Iterable[int] | int | None


def as_size(shape: ShapeLike) -> torch.Size:
    """A ``torch.Size`` from None (no dimension), one size, or an iterable of sizes."""
    if shape is None:
        return torch.Size(())
    if isinstance(shape, int):
        return torch.Size((shape,))
    return torch.Size([int(size) for size in shape])


def as_device(device: DeviceLike) -> torch.device | None:
    """A ``torch.device`` with an index for CUDA, so that equal devices compare equal."""
    if device is None:
        return None
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return device


def known_device(name: str, device: DeviceLike) -> torch.device | None:
    """The device that an argument ``name`` says, on this machine or another one.

    Raises:
        ValueError: it is none.
    """
    try:
        return as_device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name}: expected a device such as 'cpu' or 'cuda:0', got {device!r}: {error}") from error


def usable_device(name: str, device: DeviceLike) -> torch.device | None:
    """The device that an argument ``name`` says, which this machine must have.

    Raises:
        ValueError: it is none, or a CUDA device where torch sees none.
    """
    found = known_device(name, device)
    if found is not None and found.type == "cuda" and not torch.cuda.is_available():
        given = str(device) if isinstance(device, torch.device) else device
        raise ValueError(f"{name}: got {given!r}, and torch sees no CUDA device. Pass 'cpu', or install CUDA's torch.")
    return found


def star_size(shape: tuple[Any, ...]) -> torch.Size:
    """The size meant by ``f(3, 4)``, ``f((3, 4))`` or ``f(torch.Size([3, 4]))``."""
    return as_size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)


def full_index(idx: Any, extra_ndim: int) -> tuple[Any, ...]:
    """The same index for a tensor with ``extra_ndim`` more dimensions at its end."""
    items = idx if isinstance(idx, tuple) else (idx,)
    items = tuple(list(item) if isinstance(item, range) else item for item in items)
    if any(item is Ellipsis for item in items):
        items += (slice(None),) * extra_ndim
    return items


def index_shape(batch: Sequence[int], idx: Any) -> torch.Size:
    """The shape that a tensor of shape ``batch`` has after indexing.

    Raises:
        IndexError: the index does not fit.
    """
    try:
        # An expanded scalar takes no memory, whatever its shape.
        return torch.zeros((), device="cpu").expand(tuple(batch))[full_index(idx, 0)].shape
    except (IndexError, RuntimeError, TypeError) as error:
        raise IndexError(
            f"index: expected one that fits the batch dimensions {list(batch)}, got {idx!r} ({error}). "
            "Dimensions that belong to one value (such as the last one of OneHot) cannot be indexed."
        ) from error


def index_leading(tensor: Tensor, idx: Any, ndim: int) -> Tensor:
    """Index the first ``ndim`` dimensions of a tensor and leave the others alone."""
    return tensor[full_index(idx, tensor.ndim - ndim)]


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
