"""Draws from categorical, masked, normal and Delta distributions, on tensors and in NumPy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributions.utils import probs_to_logits

from rollwright.errors import NotNative
from rollwright.modules.distributions.discrete import score_masked
from rollwright.policies.draws.noise import Noise
from rollwright.policies.emitter import Array, Emitter
from rollwright.policies.nodes import Draw, Step, Values

_HALF_LOG_TAU = math.log(math.sqrt(2 * math.pi))
_FEW_CHOICES = 8  # outcomes of one draw up to which Python beats NumPy


@dataclass(frozen=True)
class CategoricalDraw(Draw):
    """``Categorical`` or ``OneHotCategorical`` of torch; reads its parameter, writes a member and perhaps its log-prob.

    Attributes:
        parameter: what the distribution is built from.
        one_hot: write ``[*batch, n]`` in the parameter's dtype instead of the index.
        random: draw; if False, take the mode.
        integer: one-hot vectors are int64.
    """

    parameter: Literal["logits", "probs"]
    one_hot: bool
    random: bool
    integer: bool = False

    nan_shows = "parameter"

    def step(self) -> Step:
        """The function that does it on tensors."""
        draw = race if self.parameter == "logits" else _multinomial
        return self._step(draw if self.random else _most_likely)

    def step_with(self, noise: int) -> Step:
        """See :class:`Draw`; the noise is exponential, of the parameter's shape."""
        return self._step(None, noise)

    def _step(self, pick: Callable[[Tensor], Tensor] | None, noise: int = 0) -> Step:
        (source,), action, scored = self.reads, self.writes[0], self.writes[1:]
        of_logits, one_hot, dtype = self.parameter == "logits", self.one_hot, torch.int64 if self.integer else None

        def run(values: Values) -> None:
            given = values[source]
            if of_logits:
                normal = normalised(given)
                p = normal.softmax(-1)
            else:
                p = given / given.sum(-1, True)
            index = torch.div(p, values[noise]).argmax(-1, True) if pick is None else pick(p)
            values[action] = torch.zeros_like(p, dtype=dtype).scatter_(-1, index, 1) if one_hot else index.squeeze(-1)
            for slot in scored:
                log_probs = normal if of_logits else probs_to_logits(p)
                values[slot] = log_probs.gather(-1, index).squeeze(-1)

        return run

    def noise(self, reads: Sequence[Tensor]) -> Noise | None:
        """The noise of one step, where it can be drawn before; None where there is none, or it cannot."""
        if not self.random or self.parameter != "logits":
            return None
        return Noise("exponential", tuple(reads[0].shape), reads[0].dtype, reads[0].device)

    def emit(self, emitter: Emitter, *reads: Array) -> Sequence[Array]:
        """Append the calls that do it in NumPy; the results."""
        (logits,), scores = reads, len(self.writes) == 2
        if self.random:
            emitter.draw("gumbel", logits)
        if self.parameter != "logits":
            raise NotNative("a Categorical of probabilities")
        index = emitter.new(logits.shape[:-1], np.int64)
        if logits.ndim == 1 and len(logits) <= _FEW_CHOICES:
            score = emitter.new((), logits.dtype) if scores else None
            emitter.calls.append(_one_choice(emitter, logits, index, score, self.random))
            return [*self._as_action(emitter, logits, index), *([] if score is None else [score])]
        if self.random:
            # exp(logits) / noise is largest where logits - log(noise) is; the noise comes as -log(noise).
            raced, plus = np.empty_like(logits), np.add
            emitter.calls.append(lambda: plus(logits, next(emitter.noise), raced))
            emitter.put(raced.argmax, -1, index)
        else:
            emitter.put(logits.argmax, -1, index)
        action = self._as_action(emitter, logits, index)
        return [*action, _normalised_at(emitter, logits, index)] if scores else action

    def _as_action(self, emitter: Emitter, logits: Array, index: Array) -> list[Array]:
        if not self.one_hot:
            return [index]
        like = np.empty(logits.shape, np.int64) if self.integer else logits
        return [emitter.to(np.equal, np.arange(logits.shape[-1]), index[..., None], like=like)]


def normalised(logits: Tensor) -> Tensor:
    """``logits - logits.logsumexp(-1, True)``, in fewer operations: torch's also tests whether the largest is finite.

    Bits are the same, but where a logit is infinite and above zero: then all are NaN.
    """
    top = logits.amax(-1, True)
    return logits - (logits - top).exp_().sum(-1, True).log_().add_(top)


def _most_likely(p: Tensor) -> Tensor:
    return p.argmax(-1, True)


def _multinomial(p: Tensor) -> Tensor:
    """Draws with torch's checks, which probabilities from a policy need (logits cannot be negative)."""
    return torch.multinomial(p.reshape(-1, p.shape[-1]), 1, True).reshape(*p.shape[:-1], 1)


def race(p: Tensor) -> Tensor:
    """What ``torch.multinomial(p, 1, True)`` draws, without its checks.

    Each outcome waits a time that is exponential with rate ``p``; the first one wins.

    Args:
        p: probabilities ``[*batch, n]``.

    Returns:
        int64 ``[*batch, 1]``.
    """
    if not p.is_contiguous() or not _race_is_exact(p.dtype, p.device):
        return _multinomial(p)
    return torch.div(p, torch.empty_like(p).exponential_()).argmax(-1, True)


@functools.cache
def _race_is_exact(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the race draws what ``multinomial`` draws, and as many random numbers, in this version of torch."""
    own, theirs = torch.Generator(device).manual_seed(0), torch.Generator(device).manual_seed(0)
    for n in (2, 7, 64):
        p = torch.linspace(0.1, 0.9, 40 * n, dtype=torch.float64, device="cpu").reshape(40, n).softmax(-1)
        p = p.to(device, dtype)
        won = torch.div(p, torch.empty_like(p).exponential_(generator=own)).argmax(-1)
        drawn = torch.multinomial(p, 1, True, generator=theirs).squeeze(-1)
        if not torch.equal(won, drawn) or not torch.equal(own.get_state(), theirs.get_state()):
            return False
    return True


def _one_choice(emitter: Emitter, logits: Array, index: Array, score: Array | None, random: bool) -> Callable[[], None]:
    """One draw of few outcomes, in plain Python: numbers are cheaper than arrays of one."""
    exp, log, place = math.exp, math.log, ()

    def choose() -> None:
        values = logits.tolist()
        raced = list(map(add, values, next(emitter.noise).tolist())) if random else values
        chosen = raced.index(max(raced))
        index[place] = chosen
        if score is not None:
            top = max(values)
            score[place] = values[chosen] - top - log(sum([exp(value - top) for value in values]))

    return choose


def _normalised_at(emitter: Emitter, logits: Array, index: Array) -> Array:
    """The normalised logit at ``index``."""
    place = index
    if index.ndim:
        starts = np.arange(index.size).reshape(index.shape) * logits.shape[-1]
        place = emitter.to(np.add, index, starts, like=index)
    chosen = emitter.new(index.shape, logits.dtype)
    emitter.put(logits.reshape(-1).take, place, None, chosen, "clip")
    return emitter.to(np.subtract, chosen, emitter.log_sum(logits)[..., 0], like=chosen)


@dataclass(frozen=True)
class NormalDraw(Draw):
    """``Normal`` of torch; reads loc and scale, writes a value and perhaps its log-prob, element by element.

    Attributes:
        random: draw; if False, take the mean.
        event_dims: dimensions, from the right, over which log-probs are summed.
        tested: whether the distribution refuses parameters that are no numbers.
    """

    random: bool
    event_dims: int = 0
    tested: bool = True

    @property
    def nan_shows(self) -> Any:  # type: ignore[override]
        """See :class:`Draw`."""
        return "value" if self.tested else None

    @property
    def fresh(self) -> bool:  # type: ignore[override]
        """The mean is the parameter itself."""
        return self.random

    def step(self) -> Step:
        """The function that does it on tensors."""
        return self._step(draw_normal if self.random else mean_of_normal)

    def step_with(self, noise: int) -> Step:
        """See :class:`Draw`; the noise is standard normal."""
        return self._step(None, noise)

    def _step(self, pick: Callable[[Tensor, Tensor], Tensor] | None, noise: int = 0) -> Step:
        (loc_at, scale_at), action, scored = self.reads, self.writes[0], self.writes[1:]
        event_dims = self.event_dims

        def run(values: Values) -> None:
            loc, scale = values[loc_at], values[scale_at]
            if loc.shape != scale.shape:
                loc, scale = torch.broadcast_tensors(loc, scale)
            values[action] = value = loc + values[noise] * scale if pick is None else pick(loc, scale)
            for slot in scored:
                score = score_normal(value - loc, scale)
                values[slot] = sum_last(score, event_dims) if event_dims else score

        return run

    def noise(self, reads: Sequence[Tensor]) -> Noise | None:
        """The noise of one step, where it can be drawn before; None where there is none, or it cannot."""
        return noise_of_normal(reads) if self.random else None

    def emit(self, emitter: Emitter, *reads: Array) -> Sequence[Array]:
        """Append the calls that do it in NumPy; the results."""
        loc, scale = reads
        z, value = emit_normal(emitter, loc, scale, random=self.random)
        if len(self.writes) == 1:
            return [value]
        return [value, emit_sum(emitter, emit_score(emitter, z, scale), self.event_dims)]


def noise_of_normal(reads: Sequence[Tensor]) -> Noise:
    """What a normal draw with these parameters takes."""
    shape = torch.broadcast_shapes(*[value.shape for value in reads])
    return Noise("normal", tuple(shape), reads[0].dtype, reads[0].device)


def emit_normal(emitter: Emitter, loc: Array, scale: Array, *, random: bool) -> tuple[Array, Array]:
    """Calls for ``loc + z * scale``; the standard normal ``z``, zero if nothing is drawn, and the value."""
    z = np.zeros(np.broadcast_shapes(loc.shape, scale.shape), loc.dtype)
    value: Any = np.empty_like(z)
    if random:
        emitter.draw("normal", z)
        copy = np.copyto
        emitter.calls.append(lambda: copy(z, next(emitter.noise)))
    emitter.put(np.multiply, z, scale, value)
    emitter.put(np.add, loc, value, value)
    return z, value


def emit_score(emitter: Emitter, z: Array, scale: Array) -> Array:
    """Calls for the log-prob of ``loc + z * scale``; the result, element by element."""
    score = emitter.to(np.multiply, z, z, like=z)
    emitter.put(np.multiply, score, -0.5, score)
    emitter.put(np.subtract, score, emitter.to(np.log, scale, like=scale), score)
    emitter.put(np.subtract, score, _HALF_LOG_TAU, score)
    return score


def emit_sum(emitter: Emitter, x: Array, dims: int) -> Array:
    """Calls for a sum over the last dimensions; the result."""
    if not dims:
        return x
    total = emitter.new(x.shape[: x.ndim - dims], x.dtype)
    emitter.put(np.add.reduce, x.reshape(*total.shape, -1), -1, None, total)
    return total


def sum_last(x: Tensor, dims: int) -> Tensor:
    """The sum over the last dimensions."""
    return x.sum(-1) if dims == 1 else x.reshape(*x.shape[: x.ndim - dims], -1).sum(-1)


def score_normal(distance: Tensor, scale: Tensor) -> Tensor:
    """The log-prob of a value at that distance from loc; few new tensors, and torch's order of operations."""
    if distance.dtype != scale.dtype:
        return -(distance**2) / (2 * scale**2) - scale.log() - _HALF_LOG_TAU
    score = distance.mul_(distance).neg_().div_((scale * scale).mul_(2))
    return score.sub_(scale.log()).sub_(_HALF_LOG_TAU)


def draw_normal(loc: Tensor, scale: Tensor) -> Tensor:
    """What ``Normal.rsample`` draws, for parameters of one shape."""
    value = torch.empty(loc.shape, dtype=loc.dtype, device=loc.device).normal_()
    return value.mul_(scale).add_(loc) if loc.dtype == scale.dtype else loc + value * scale


def mean_of_normal(loc: Tensor, scale: Tensor) -> Tensor:
    """What is taken where nothing is drawn."""
    return loc


@dataclass(frozen=True)
class DeltaDraw(Draw):
    """``Delta`` of tensordict: its parameter."""

    fresh = False

    def step(self) -> Step:
        """Share the tensor."""
        (source,), (target,) = self.reads, self.writes

        def run(values: Values) -> None:
            values[target] = values[source]

        return run

    def emit(self, emitter: Emitter, *reads: Array) -> Sequence[Array]:
        """Share the array."""
        return reads


@dataclass(frozen=True)
class MaskedDraw(Draw):
    """``MaskedCategorical``; reads logits and a mask, writes an outcome and perhaps its log-prob.

    Attributes:
        neg_inf: the logit of outcomes that are not allowed.
        cross_entropy: how log-probs are computed.
    """

    neg_inf: float
    cross_entropy: bool

    nan_shows = None
    in_torch = True
    draws = True

    def step(self) -> Step:
        """The function that does it on tensors."""
        (logits_at, mask_at), action, scored = self.reads, self.writes[0], self.writes[1:]
        neg_inf, cross = self.neg_inf, self.cross_entropy

        def run(values: Values) -> None:
            logits = values[logits_at].masked_fill(~values[mask_at], neg_inf)
            normal = normalised(logits)
            p = normal.softmax(-1)
            if bool(torch.isnan(p).any()):
                torch.multinomial(p.reshape(-1, p.shape[-1]), 1, True)  # says what is wrong
            values[action] = index = race(p).squeeze(-1)
            for slot in scored:
                values[slot] = score_masked(normal, index, neg_inf, cross)

        return run
