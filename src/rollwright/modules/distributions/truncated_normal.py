"""TruncatedNormal: a normal distribution cut off at bounds."""
# torch.distributions has few types
# mypy: disable-error-code="attr-defined, no-any-return, no-untyped-call, type-arg"

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch import distributions as D

from rollwright.modules.distributions.bounds import REAL, Number, bounds

_EPS = 1e-6  # probabilities are kept this far from 0 and 1


def _density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _below(x: Tensor) -> Tensor:
    return (0.5 * (1 + (x / math.sqrt(2)).erf())).clamp(_EPS, 1 - _EPS)


class _Truncated(D.Distribution):
    """A truncated normal distribution of numbers: the base of :class:`TruncatedNormal`."""

    arg_constraints = REAL
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, low: Tensor, high: Tensor) -> None:
        self.loc, self.scale, self.low, self.high = torch.broadcast_tensors(loc, scale.clamp_min(_EPS), low, high)
        self._a, self._b = (self.low - self.loc) / self.scale, (self.high - self.loc) / self.scale
        self._below_a = _below(self._a)
        self._mass = (_below(self._b) - self._below_a).clamp(_EPS, 1 - _EPS)
        super().__init__(self.loc.shape, validate_args=False)

    @property
    def support(self) -> Any:
        return D.constraints.interval(self.low, self.high)

    @property
    def mean(self) -> Tensor:
        return self.loc + self.scale * (_density(self._a) - _density(self._b)) / self._mass

    @property
    def variance(self) -> Tensor:
        at_a, at_b = _density(self._a), _density(self._b)
        slope, shift = (at_b * self._b - at_a * self._a) / self._mass, (at_b - at_a) / self._mass
        return (1 - slope - shift**2) * self.scale**2

    def entropy(self) -> Tensor:
        slope = (_density(self._b) * self._b - _density(self._a) * self._a) / self._mass
        return 0.5 * math.log(2 * math.pi * math.e) + self._mass.log() - 0.5 * slope + self.scale.log()

    def cdf(self, value: Tensor) -> Tensor:
        return ((_below((value - self.loc) / self.scale) - self._below_a) / self._mass).clamp(0, 1)

    def icdf(self, value: Tensor) -> Tensor:
        p = (self._below_a + value * self._mass).clamp(_EPS, 1 - _EPS)
        sample = math.sqrt(2) * (2 * p - 1).erfinv() * self.scale + self.loc
        clipped = torch.minimum(torch.maximum(sample.detach(), self.low), self.high)
        return clipped + (sample - sample.detach())  # clipped, with the gradient of what was not

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(torch.Size(sample_shape))
        p = torch.empty(shape, device=self.loc.device, dtype=self.loc.dtype).uniform_(_EPS, 1 - _EPS)
        return self.icdf(p)

    def log_prob(self, value: Tensor) -> Tensor:
        x = (value - self.loc) / self.scale
        return -0.5 * x * x - 0.5 * math.log(2 * math.pi) - self._mass.log() - self.scale.log()


class TruncatedNormal(D.Independent):
    """A normal distribution cut off at bounds, whose last dimension is one event. Parameters are not validated.

    Args:
        loc: means before the cut, ``[*batch, n]``.
        scale: standard deviations before the cut.
        upscale: with ``tanh_loc``, the mean is ``upscale * tanh(loc / upscale)``.
        low: least values, ``[n]`` or a number.
        high: greatest values.
        tanh_loc: see ``upscale``.

    Raises:
        RuntimeError: ``high`` is not greater than ``low``.

    Example:
        >>> dist = TruncatedNormal(torch.zeros(2), torch.ones(2), low=0.0, high=1.0)
        >>> bool(((dist.sample() >= 0) & (dist.sample() <= 1)).all()), dist.log_prob(torch.tensor([0.5, 2.0]))
        (True, tensor(-inf))
    """

    num_params: int = 2
    base_dist: _Truncated
    arg_constraints = REAL

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        upscale: Number = 5.0,
        low: Number = -1.0,
        high: Number = 1.0,
        tanh_loc: bool = False,
    ) -> None:
        self.low, self.high = (bound.to(loc.dtype) for bound in bounds(low, high, loc))
        self.device, self.tanh_loc = loc.device, tanh_loc
        self.upscale = torch.as_tensor(upscale, device=loc.device)
        self.update(loc, scale)

    def update(self, loc: Tensor, scale: Tensor) -> None:
        """Replace the parameters."""
        if self.tanh_loc:
            loc = (loc / self.upscale).tanh() * self.upscale
        self.loc, self.scale = loc, scale
        super().__init__(_Truncated(loc, scale, self.low, self.high), 1, validate_args=False)

    @property
    def min(self) -> Tensor:
        """Least values."""
        return self.low

    @property
    def max(self) -> Tensor:
        """Greatest values."""
        return self.high

    @property
    def mode(self) -> Tensor:
        """The mean before the cut, or the bound that is nearest to it."""
        return self._inside(self.base_dist.loc)

    @property
    def deterministic_sample(self) -> Tensor:
        """The mean."""
        return self.mean

    def log_prob(self, value: Tensor) -> Tensor:
        """Density ``[*batch]``; ``-inf`` outside of the bounds."""
        outside = ((value < self.low) | (value > self.high)).any(-1)
        return super().log_prob(self._inside(value)).masked_fill(outside, -torch.inf)

    def _inside(self, value: Tensor) -> Tensor:
        return torch.maximum(torch.minimum(value, self.high - _EPS), self.low + _EPS)
