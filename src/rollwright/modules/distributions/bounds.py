"""Bounds of actions: the hyperbolic tangent, and the interval that it is stretched to."""
# torch.distributions has few types
# mypy: disable-error-code="attr-defined, no-any-return, no-untyped-call, type-arg"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints

from rollwright._tensors import as_tensor

Number = Tensor | float


def tanh_limit(dtype: torch.dtype) -> float:
    """The largest value that :func:`clamped_tanh` gives: 1 less the resolution of the dtype."""
    return 1.0 - torch.finfo(dtype).resolution


class _Clamped(torch.autograd.Function):
    """Clamps the hyperbolic tangent without setting its gradient to zero at the limits."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        limit = tanh_limit(x.dtype)
        return x.tanh().clamp(-limit, limit)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class _Inverse(torch.autograd.Function):
    """Inverse of :class:`_Clamped`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor) -> Tensor:
        limit = tanh_limit(y.dtype)
        return y.clamp(-limit, limit).atanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        limit = tanh_limit(y.dtype)
        y = y.clamp(-limit, limit)
        return grad / (1 - y * y)


def clamped_tanh(x: Tensor) -> Tensor:
    """``tanh(x)``, kept off -1 and 1 so that it has an inverse; the gradient is ``1 - y ** 2`` everywhere.

    Example:
        >>> float(clamped_tanh(torch.tensor(100.0))) < 1
        True
    """
    return _Clamped.apply(x)


class ClampedTanh(D.TanhTransform):
    """:func:`clamped_tanh` as a transform of a distribution."""

    def _call(self, x: Tensor) -> Tensor:
        return clamped_tanh(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return _Inverse.apply(y)


def bounds(low: Number, high: Number, like: Tensor, error: type[Exception] = RuntimeError) -> tuple[Tensor, Tensor]:
    """Both bounds as tensors on the device of ``like``.

    Args:
        low: a number or tensor ``[*event]``.
        high: same.
        like: parameter of the distribution.
        error: what to raise.

    Raises:
        Exception: of class ``error``: ``high`` is not greater than ``low`` everywhere. Values of tensors are not tested
            while ``torch.compile`` traces, whose graph that would break.
    """
    lowest, highest = (torch.as_tensor(bound, device=like.device) for bound in (low, high))
    if not _holds(low, high, lambda low, high: high > low, unknown=True):
        raise error(f"high: expected values greater than low everywhere, got low={low} and high={high}.")
    return lowest, highest


def rescaled(low: Number, high: Number, like: Tensor) -> D.AffineTransform | None:
    """From [-1, 1] to [low, high]; None where that is the same."""
    if _holds(low, high, lambda low, high: (low == -1) & (high == 1), unknown=False):
        return None
    lowest, highest = (torch.as_tensor(bound, device=like.device) for bound in (low, high))
    return D.AffineTransform(loc=(highest + lowest) / 2, scale=(highest - lowest) / 2)


def _holds(low: Number, high: Number, test: Callable[[Any, Any], Any], *, unknown: bool) -> bool:
    """Whether a test holds everywhere; ``unknown`` where tensors would have to be read while torch traces."""
    if isinstance(low, (int, float)) and isinstance(high, (int, float)):
        return bool(test(low, high))
    if torch.compiler.is_compiling():
        return unknown
    return bool(as_tensor(test(as_tensor(low), as_tensor(high))).all())


def as_scale(scale: Number | Callable[[Tensor], Tensor], loc: Tensor) -> Tensor:
    """A scale as a tensor on the device of ``loc``; given as a number, a tensor, or a function of ``loc``."""
    if isinstance(scale, Tensor):
        return scale.to(loc.device)
    if callable(scale):
        return scale(loc)
    return torch.as_tensor(scale, device=loc.device, dtype=loc.dtype)


REAL = {"loc": constraints.real, "scale": constraints.greater_than(1e-6)}
