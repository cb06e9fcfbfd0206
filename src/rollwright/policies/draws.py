"""Known distributions, sampled and scored on tensors without building an object."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributions.utils import probs_to_logits

from rollwright.policies.nodes import Node, Step, Values

__all__ = ["CategoricalDraw", "NormalDraw"]

_HALF_LOG_TAU = math.log(math.sqrt(2 * math.pi))


@dataclass(frozen=True)
class CategoricalDraw(Node):
    """``Categorical`` or ``OneHotCategorical`` of torch; reads its parameter, writes a member and perhaps its log-prob.

    Attributes:
        parameter: what the distribution is built from.
        one_hot: write ``[*batch, n]`` in the parameter's dtype instead of the index.
        random: draw; if False, take the mode.
    """

    parameter: Literal["logits", "probs"]
    one_hot: bool
    random: bool

    def step(self, noise: int | None = None) -> Step:
        """As for every node.

        Args:
            noise: the slot of exponential noise of the parameter's shape to draw with; None draws its own.
        """
        (source,), action, scored = self.reads, self.writes[0], self.writes[1:]
        normalise = _from_logits if self.parameter == "logits" else _from_probs
        pick = (race if self.parameter == "logits" else _multinomial) if self.random else _most_likely
        one_hot, score = self.one_hot, _score_logits if self.parameter == "logits" else _score_probs

        def run(values: Values) -> None:
            normal, p = normalise(values[source])
            index = pick(p) if noise is None else torch.div(p, values[noise]).argmax(-1, True)
            values[action] = torch.zeros_like(p).scatter_(-1, index, 1) if one_hot else index.squeeze(-1)
            for slot in scored:
                values[slot] = score(normal, index)

        return run


def _from_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised logits, and the probabilities."""
    normal = logits - logits.logsumexp(-1, True)
    return normal, normal.softmax(-1)


def _from_probs(probs: Tensor) -> tuple[Tensor, Tensor]:
    p = probs / probs.sum(-1, True)
    return p, p


def _score_logits(normal: Tensor, index: Tensor) -> Tensor:
    return normal.gather(-1, index).squeeze(-1)


def _score_probs(p: Tensor, index: Tensor) -> Tensor:
    return _score_logits(probs_to_logits(p), index)


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
        p = torch.linspace(0.1, 0.9, 40 * n, dtype=torch.float64).reshape(40, n).softmax(-1).to(device, dtype)
        won = torch.div(p, torch.empty_like(p).exponential_(generator=own)).argmax(-1)
        drawn = torch.multinomial(p, 1, True, generator=theirs).squeeze(-1)
        if not torch.equal(won, drawn) or not torch.equal(own.get_state(), theirs.get_state()):
            return False
    return True


@dataclass(frozen=True)
class NormalDraw(Node):
    """``Normal`` of torch; reads loc and scale, writes a value and perhaps its log-prob, element by element.

    Attributes:
        random: draw; if False, take the mean.
    """

    random: bool

    def step(self, noise: int | None = None) -> Step:
        """As for every node.

        Args:
            noise: the slot of standard normal noise to draw with; None draws its own.
        """
        (loc_at, scale_at), action, scored = self.reads, self.writes[0], self.writes[1:]
        pick: Callable[[Tensor, Tensor], Tensor] = _draw_normal if self.random else _loc

        def run(values: Values) -> None:
            loc, scale = values[loc_at], values[scale_at]
            if loc.shape != scale.shape:
                loc, scale = torch.broadcast_tensors(loc, scale)
            values[action] = value = pick(loc, scale) if noise is None else loc + values[noise] * scale
            for slot in scored:
                values[slot] = _score_normal(value - loc, scale)

        return run


def _score_normal(distance: Tensor, scale: Tensor) -> Tensor:
    """The log-prob of a value at that distance from loc; few new tensors, and torch's order of operations."""
    if distance.dtype != scale.dtype:
        return -(distance**2) / (2 * scale**2) - scale.log() - _HALF_LOG_TAU
    score = distance.mul_(distance).neg_().div_((scale * scale).mul_(2))
    return score.sub_(scale.log()).sub_(_HALF_LOG_TAU)


def _draw_normal(loc: Tensor, scale: Tensor) -> Tensor:
    value = torch.empty(loc.shape, dtype=loc.dtype, device=loc.device).normal_()
    return value.mul_(scale).add_(loc) if loc.dtype == scale.dtype else loc + value * scale


def _loc(loc: Tensor, scale: Tensor) -> Tensor:
    return loc
