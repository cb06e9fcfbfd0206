"""Normal distributions for actions: independent, squashed by tanh; and a squashed value without noise."""
# torch.distributions has few types
# mypy: disable-error-code="attr-defined, no-any-return, no-untyped-call, type-arg"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict.nn.distributions import Delta
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints

from rollwright.modules.distributions.bounds import REAL, ClampedTanh, Number, as_scale, bounds, rescaled

__all__ = ["IndependentNormal", "TanhDelta", "TanhNormal"]

_Scale = Number | Callable[[Tensor], Tensor]


class IndependentNormal(D.Independent):
    """Normal distributions whose last dimensions are one event. Parameters are not validated.

    Args:
        loc: means ``[*batch, *event]``.
        scale: standard deviations that broadcast with ``loc``; a number; or a function of ``loc``.
        upscale: ``upscale * tanh(loc / upscale)`` is the mean that :meth:`update` sets with ``tanh_loc``.
        tanh_loc: see ``upscale``.
        event_dim: dimensions of an event, from the right.

    Example:
        >>> dist = IndependentNormal(torch.zeros(3, 2), 1.0)
        >>> dist.batch_shape, dist.log_prob(dist.sample()).shape
        (torch.Size([3]), torch.Size([3]))
    """

    num_params: int = 2

    def __init__(
        self,
        loc: Tensor,
        scale: _Scale,
        upscale: float = 5.0,
        tanh_loc: bool = False,
        event_dim: int = 1,
        **kwargs: Any,
    ) -> None:
        self.tanh_loc, self.upscale = tanh_loc, upscale
        self._event_dim, self._options = event_dim, {"validate_args": False, **kwargs}
        super().__init__(
            D.Normal(loc, as_scale(scale, loc), **self._options), event_dim, self._options["validate_args"]
        )

    def update(self, loc: Tensor, scale: _Scale) -> None:
        """Replace the parameters."""
        if self.tanh_loc:
            loc = self.upscale * (loc / self.upscale).tanh()
        base = D.Normal(loc, as_scale(scale, loc), **self._options)
        super().__init__(base, self._event_dim, self._options["validate_args"])

    @property
    def mode(self) -> Tensor:
        """The mean."""
        return self.base_dist.mean

    @property
    def deterministic_sample(self) -> Tensor:
        """The mean."""
        return self.mean


class TanhNormal(D.TransformedDistribution):
    """A normal distribution squashed by tanh to an interval. Parameters are not validated.

    Its values are ``mid + half * tanh(x)``, where x is normal, ``mid = (low + high) / 2``, ``half = (high - low) / 2``.

    Args:
        loc: means of x, ``[*batch, *event]``.
        scale: standard deviations of x, that broadcast with ``loc``; a number; or a function of ``loc``.
        upscale: with ``tanh_loc``, the mean of x is ``upscale * tanh(loc / upscale)``.
        low: least values, ``[*event]`` or a number.
        high: greatest values.
        event_dims: dimensions of an event, from the right; None: 1, or 0 where ``loc`` has none.
        tanh_loc: see ``upscale``.
        safe_tanh: keep values off the bounds, so that each has a finite log-prob.

    Raises:
        RuntimeError: ``high`` is not greater than ``low``.

    Example:
        >>> dist = TanhNormal(torch.zeros(3, 2), torch.ones(3, 2), low=-2.0, high=2.0)
        >>> value, log_prob = dist.rsample_and_log_prob()
        >>> bool((value.abs() <= 2).all()), log_prob.shape, dist.deterministic_sample[0]
        (True, torch.Size([3]), tensor([0., 0.]))
    """

    arg_constraints = REAL
    num_params = 2

    def __init__(
        self,
        loc: Tensor,
        scale: _Scale,
        upscale: Number = 5.0,
        low: Number = -1.0,
        high: Number = 1.0,
        event_dims: int | None = None,
        tanh_loc: bool = False,
        safe_tanh: bool = True,
    ) -> None:
        if not isinstance(loc, Tensor):
            loc = torch.as_tensor(loc, dtype=torch.get_default_dtype())
        self.low, self.high = bounds(low, high, loc)
        self.device, self.tanh_loc = loc.device, tanh_loc
        self.upscale = upscale.to(loc.device) if isinstance(upscale, Tensor) else upscale
        self._event_dims = min(1, loc.ndim) if event_dims is None else event_dims
        self._stretch = rescaled(low, high, loc)
        self._squash = ClampedTanh() if safe_tanh else D.TanhTransform()
        self.update(loc, scale)

    @property
    def min(self) -> Tensor:
        """Least values."""
        return self.low

    @property
    def max(self) -> Tensor:
        """Greatest values."""
        return self.high

    def update(self, loc: Tensor, scale: _Scale) -> None:
        """Replace the parameters."""
        if self.tanh_loc:
            loc = (loc / self.upscale).tanh() * self.upscale
            if self._stretch is not None:
                loc = loc + (self.high - self.low) / 2 + self.low
        self.loc, self.scale = loc, as_scale(scale, loc)
        base: D.Distribution = D.Normal(self.loc, self.scale, validate_args=False)
        if self._event_dims:
            base = D.Independent(base, self._event_dims, validate_args=False)
        change = self._squash if self._stretch is None else D.ComposeTransform([self._squash, self._stretch])
        super().__init__(base, change, validate_args=False)

    @property
    def support(self) -> Any:
        """Not that of the bounds, so that losses do not refuse values on them."""
        return constraints.real

    @property
    def root_dist(self) -> D.Normal:
        """The normal distribution."""
        base: Any = self.base_dist
        return base.base_dist if isinstance(base, D.Independent) else base

    @property
    def mode(self) -> Tensor:
        """There is no formula.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"mode: {type(self).__name__} has no formula for it. Use ExplorationType.DETERMINISTIC, which gives "
            "deterministic_sample, or get_mode(), which searches for it."
        )

    @property
    def mean(self) -> Tensor:
        """There is no formula.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"mean: {type(self).__name__} has no formula for it. Estimate it by dist.sample((n,)).mean(0)."
        )

    @property
    def deterministic_sample(self) -> Tensor:
        """The squashed mean of the normal distribution."""
        return self._of(self.root_dist.mean)

    @torch.enable_grad()
    def get_mode(self) -> Tensor:
        """The value of greatest density, by gradient ascent from the average of 1000 samples."""
        fixed = type(self)(
            self.loc.detach(), self.scale.detach(), low=self.low, high=self.high, event_dims=self._event_dims
        )
        value = fixed.sample((1000,)).mean(0).requires_grad_()
        optimizer = torch.optim.Adam([value], lr=1e-2)
        for _ in range(200):
            before = value.detach().clone()
            optimizer.zero_grad()
            (-fixed.log_prob(value).mean()).backward()
            optimizer.step()
            with torch.no_grad():
                value.copy_(torch.where(value.isnan(), before, value.clamp(self.low, self.high)))
            if float((value.detach() - before).norm()) < 1e-3:
                break
        return value.detach()

    def rsample_and_log_prob(self, sample_shape: Any = ()) -> tuple[Tensor, Tensor]:
        """A sample and its log-prob, which is that of the value before tanh: exact where tanh saturates."""
        return self._scored(self.base_dist.rsample(torch.Size(sample_shape)))

    def sample_and_log_prob(self, sample_shape: Any = ()) -> tuple[Tensor, Tensor]:
        """As :meth:`rsample_and_log_prob`, without a gradient through the sample."""
        return self._scored(self.base_dist.sample(torch.Size(sample_shape)))

    def _of(self, x: Tensor) -> Tensor:
        y = self._squash(x)
        return y if self._stretch is None else self._stretch(y)

    def _scored(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self._squash(x)
        slope = self._squash.log_abs_det_jacobian(x, y)
        if self._stretch is not None:
            slope = slope + self._stretch.log_abs_det_jacobian(y, y)
            y = self._stretch(y)
        if self._event_dims:
            slope = slope.sum(tuple(range(-self._event_dims, 0)))
        return y, self.base_dist.log_prob(x) - slope


class TanhDelta(D.TransformedDistribution):
    """All probability on one value, squashed by tanh to an interval.

    Args:
        param: the value before tanh, ``[*batch, *event]``.
        low: least values, ``[*event]`` or a number.
        high: greatest values.
        event_dims: dimensions of an event, from the right.
        atol: see :class:`~tensordict.nn.distributions.Delta`.
        rtol: same.
        safe: keep values off the bounds.

    Raises:
        ValueError: ``high`` is not greater than ``low``.

    Example:
        >>> TanhDelta(torch.zeros(2)).sample()
        tensor([0., 0.])
    """

    arg_constraints = {"loc": constraints.real}  # noqa: RUF012

    def __init__(
        self,
        param: Tensor,
        low: Number = -1.0,
        high: Number = 1.0,
        event_dims: int = 1,
        atol: float = 1e-6,
        rtol: float = 1e-6,
        safe: bool = True,
    ) -> None:
        self.low, self.high = bounds(low, high, param, ValueError)
        stretch = rescaled(low, high, param)
        self.non_trivial = stretch is not None
        cut = param.ndim - event_dims
        base = Delta(self._shifted(param), atol, rtol, batch_shape=param.shape[:cut], event_shape=param.shape[cut:])
        squash = ClampedTanh() if safe else D.TanhTransform()
        super().__init__(base, [squash, *([] if stretch is None else [stretch])], validate_args=False)

    def _shifted(self, param: Tensor) -> Tensor:
        return param + (self.high - self.low) / 2 + self.low if self.non_trivial else param

    @property
    def min(self) -> Tensor:
        """Least values."""
        return self.low

    @property
    def max(self) -> Tensor:
        """Greatest values."""
        return self.high

    def update(self, net_output: Tensor) -> None:
        """Replace the value before tanh."""
        self.base_dist.update(self._shifted(net_output))

    @property
    def mode(self) -> Tensor:
        """The squashed value."""
        value = self.base_dist.param
        for transform in self.transforms:
            value = transform(value)
        return value

    @property
    def deterministic_sample(self) -> Tensor:
        """The squashed value."""
        return self.mode

    @property
    def mean(self) -> Tensor:
        """There is no formula.

        Raises:
            AttributeError: always.
        """
        raise AttributeError("mean: TanhDelta has no formula for it. Use mode.")
