"""TanhNormalDraw: a normal value that is squashed by tanh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from rollwright.policies.draws.basic import (
    draw_normal,
    emit_normal,
    emit_score,
    emit_sum,
    mean_of_normal,
    noise_of_normal,
    score_normal,
    sum_last,
)
from rollwright.policies.draws.noise import Noise
from rollwright.policies.emitter import Array, Emitter
from rollwright.policies.nodes import Draw, Step, Values

_LOG_2 = math.log(2.0)


@dataclass(frozen=True)
class TanhNormalDraw(Draw):
    """``TanhNormal``; reads loc and scale, writes a value and perhaps its log-prob.

    Attributes:
        random: draw; if False, squash the mean, without a log-prob.
        stretch: factor and offset after tanh, or None.
        event_dims: dimensions, from the right, over which log-probs are summed.
        clamped: values are kept off the bounds.
        inverted: log-probs are those of the value, found by the inverse of tanh; if False, of the normal value that was
            drawn, which is exact where tanh saturates.
    """

    random: bool
    stretch: tuple[Tensor, Tensor] | None
    event_dims: int
    clamped: bool
    inverted: bool

    nan_shows = None

    def step(self) -> Step:
        """The function that does it on tensors."""
        return self._step(draw_normal if self.random else mean_of_normal)

    def step_with(self, noise: int) -> Step:
        """See :class:`Draw`; the noise is standard normal."""
        return self._step(None, noise)

    def _step(self, pick: Callable[[Tensor, Tensor], Tensor] | None, noise: int = 0) -> Step:
        (loc_at, scale_at), action, scored = self.reads, self.writes[0], self.writes[1:]
        stretch, dims, inverted = self.stretch, self.event_dims, self.inverted
        log_factor = None if stretch is None else stretch[0].abs().log()
        limits: dict[torch.dtype, float] = {}

        def clamp(y: Tensor) -> Tensor:
            if y.dtype not in limits:
                limits[y.dtype] = 1.0 - torch.finfo(y.dtype).resolution
            return y.clamp_(-limits[y.dtype], limits[y.dtype])

        off_bounds = clamp if self.clamped else _as_is

        def run(values: Values) -> None:
            loc, scale = values[loc_at], values[scale_at]
            if loc.shape != scale.shape:
                loc, scale = torch.broadcast_tensors(loc, scale)
            x = loc + values[noise] * scale if pick is None else pick(loc, scale)
            y = off_bounds(x.tanh())
            values[action] = value = y if stretch is None else stretch[1] + stretch[0] * y
            for slot in scored:
                if inverted:
                    x = (value if stretch is None else off_bounds((value - stretch[1]) / stretch[0])).atanh()
                slope = torch.rsub(x, _LOG_2).sub_(softplus(-2.0 * x)).mul_(2.0)  # the operator costs twice that
                if log_factor is not None:
                    slope = slope + log_factor
                score = score_normal(x - loc, scale)
                if dims:
                    score, slope = sum_last(score, dims), sum_last(slope, dims)
                values[slot] = score - slope

        return run

    def noise(self, reads: Sequence[Tensor]) -> Noise | None:
        """The noise of one step, where it can be drawn before; None where there is none, or it cannot."""
        return noise_of_normal(reads) if self.random else None

    def emit(self, emitter: Emitter, *reads: Array) -> Sequence[Array]:
        """Append the calls that do it in NumPy; the results."""
        loc, scale = reads
        z, x = emit_normal(emitter, loc, scale, random=self.random)
        value = emitter.to(np.tanh, x, like=x)
        if self.clamped:
            limit = 1.0 - float(np.finfo(loc.dtype).resolution)
            emitter.put(np.maximum, value, -limit, out=value)
            emitter.put(np.minimum, value, limit, out=value)
        if self.inverted and len(self.writes) == 2:
            x = emitter.to(np.arctanh, value, like=x)
            z = emitter.to(np.subtract, x, loc, like=x)
            emitter.put(np.divide, z, scale, z)
        if self.stretch is not None:
            factor, offset = (each.numpy().astype(loc.dtype) for each in self.stretch)
            emitter.put(np.multiply, value, factor, value)
            emitter.put(np.add, value, offset, value)
        if len(self.writes) == 1:
            return [value]
        score = emit_score(emitter, z, scale)
        slope = emitter.to(np.multiply, x, -2.0, like=x)  # log of the slope of tanh: 2 (log 2 - x - softplus(-2 x))
        emitter.put(np.logaddexp, slope, 0, slope)
        emitter.put(np.add, slope, x, slope)
        emitter.put(np.multiply, slope, 2.0, slope)
        emitter.put(np.add, score, slope, score)
        constant = -2.0 * _LOG_2 * np.ones_like(z)
        if self.stretch is not None:
            constant -= np.log(np.abs(self.stretch[0].numpy()))
        emitter.put(np.add, score, constant.astype(loc.dtype), score)
        return [value, emit_sum(emitter, score, self.event_dims)]


def _as_is(y: Tensor) -> Tensor:
    return y
