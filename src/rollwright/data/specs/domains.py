"""Bounded and Unbounded by the kind of their numbers: the names that programs of the field check and construct."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any, ClassVar, TypeVar, cast

import torch

from rollwright.data.specs.base import TensorSpec
from rollwright.data.specs.numeric import Bounded, Unbounded
from rollwright.data.specs.shapes import DeviceLike, ShapeLike

S = TypeVar("S", bound=TensorSpec)


class _OfDomain(ABCMeta):
    """Lets ``isinstance`` ask for the kind of numbers: these classes have no instances of their own."""

    def __instancecheck__(cls, instance: object) -> bool:
        kind, domain = cast("tuple[type[TensorSpec], str]", cls.wanted)  # type: ignore[attr-defined]
        return isinstance(instance, kind) and instance.domain == domain


def _checked(spec: S, name: str, domain: str, other: str) -> S:
    if spec.domain != domain:
        raise ValueError(f"dtype: expected one of {name}, whose numbers are {domain}, got {spec.dtype}. Use {other}.")
    return spec


class UnboundedContinuous(Unbounded, metaclass=_OfDomain):
    """:class:`Unbounded` of floating-point numbers.

    Args:
        shape: shape of a sample.
        device: device of the tensors.
        dtype: a floating-point or complex dtype; default: torch's default dtype.

    Raises:
        ValueError: another dtype.

    Example:
        >>> UnboundedContinuous((2,))
        Unbounded(shape=[2], dtype=float32, device=cpu)
        >>> isinstance(Unbounded((2,)), UnboundedContinuous), isinstance(Unbounded((2,)), UnboundedDiscrete)
        (True, False)
    """

    wanted: ClassVar[tuple[type[TensorSpec], str]] = (Unbounded, "continuous")

    def __new__(cls, shape: ShapeLike = (1,), device: DeviceLike = None, dtype: torch.dtype | None = None) -> Any:
        """An :class:`Unbounded`."""
        return _checked(Unbounded(shape, device, dtype), cls.__name__, "continuous", "UnboundedDiscrete")


class UnboundedDiscrete(Unbounded, metaclass=_OfDomain):
    """:class:`Unbounded` of whole numbers, or of flags.

    Args:
        shape: shape of a sample.
        device: device of the tensors.
        dtype: an integer dtype, or ``torch.bool``.

    Raises:
        ValueError: another dtype.

    Example:
        >>> UnboundedDiscrete((2,))
        Unbounded(shape=[2], dtype=int64, device=cpu)
    """

    wanted: ClassVar[tuple[type[TensorSpec], str]] = (Unbounded, "discrete")

    def __new__(
        cls, shape: ShapeLike = (1,), device: DeviceLike = None, dtype: torch.dtype | None = torch.int64
    ) -> Any:
        """An :class:`Unbounded`."""
        return _checked(Unbounded(shape, device, dtype), cls.__name__, "discrete", "UnboundedContinuous")


class BoundedContinuous(Bounded, metaclass=_OfDomain):
    """:class:`Bounded` of floating-point numbers; arguments and errors are those of that class.

    Example:
        >>> BoundedContinuous(-1.0, 1.0, (2,))
        Bounded(low=-1.0, high=1.0, shape=[2], dtype=float32, device=cpu)
    """

    wanted: ClassVar[tuple[type[TensorSpec], str]] = (Bounded, "continuous")

    def __new__(
        cls,
        low: Any,
        high: Any,
        shape: ShapeLike = None,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """A :class:`Bounded`."""
        return _checked(Bounded(low, high, shape, device, dtype), cls.__name__, "continuous", "BoundedDiscrete")


class BoundedDiscrete(Bounded, metaclass=_OfDomain):
    """:class:`Bounded` of whole numbers; arguments and errors are those of that class.

    Example:
        >>> BoundedDiscrete(0, 5, (2,))
        Bounded(low=0, high=5, shape=[2], dtype=int64, device=cpu)
    """

    wanted: ClassVar[tuple[type[TensorSpec], str]] = (Bounded, "discrete")

    def __new__(
        cls,
        low: Any,
        high: Any,
        shape: ShapeLike = None,
        device: DeviceLike = None,
        dtype: torch.dtype | None = torch.int64,
    ) -> Any:
        """A :class:`Bounded`."""
        return _checked(Bounded(low, high, shape, device, dtype), cls.__name__, "discrete", "BoundedContinuous")
