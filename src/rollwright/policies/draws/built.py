"""Built: a distribution that is built at each step, and sampled and scored without a TensorDict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict.nn import CompositeDistribution, InteractionType, probabilistic
from torch import Tensor
from torch import distributions as D

from rollwright._foreign import kind_in
from rollwright.policies.draws.basic import draw_normal, score_normal, sum_last
from rollwright.policies.nodes import Ask, Node, Step, Values

_NO_SAMPLES = torch.Size(())


def scores_its_draw(module: Any) -> bool:
    """Whether a module asks distributions that can for a sample and its log-prob at once."""
    joint = hasattr(probabilistic, "_get_joint_sample_and_log_prob")
    return joint or "SafeProbabilisticModule" in kind_in("torchrl", module)


@dataclass(frozen=True)
class Built(Node):
    """A distribution of any class, or a function that makes one.

    Attributes:
        plain: the module, called on a TensorDict: for what is no tensor, and for its errors.
        names: of the parameters, in the order of ``reads``.
        constants: further arguments.
        exploration_type: how a value is picked.
        scored: whether its log-prob is written.
    """

    plain: Ask
    names: tuple[str, ...]
    constants: Mapping[str, Any]
    exploration_type: InteractionType
    scored: bool

    known = False
    compiles = False
    in_torch = True
    draws = True

    @property
    def label(self) -> str:
        """The distribution."""
        return self.plain.label

    @property
    def calls(self) -> int:
        """None: it is named beside the calls."""
        return 0

    def step(self) -> Step:
        """Build, sample, score."""
        module: Any = self.plain.module
        kind, names, reads, constants = module.distribution_class, self.names, self.reads, dict(self.constants)
        action, scored = self.writes[0], self.writes[1:]
        pick = _pick(module, self.exploration_type, self.scored)
        plain = replace(self.plain, writes=self.writes).step()

        def run(values: Values) -> None:
            try:
                dist = kind(**{name: values[slot] for name, slot in zip(names, reads, strict=True)}, **constants)
            except TypeError:
                plain(values)  # says which keys do not match
                return
            if isinstance(dist, CompositeDistribution) or not isinstance(dist, D.Distribution):
                plain(values)
                return
            value, score = pick(dist)
            values[action] = value
            for slot in scored:
                values[slot] = score

        return run


def _pick(module: Any, kind: InteractionType, scored: bool) -> Callable[[Any], tuple[Any, Any]]:
    """Gives a value of a distribution, and its log-prob where that is written."""
    if kind is not InteractionType.RANDOM:

        def deterministic(dist: Any) -> tuple[Any, Any]:
            value = module._dist_sample(dist, interaction_type=kind)
            return value, dist.log_prob(value) if scored else None

        return deterministic
    joint = scored and scores_its_draw(module)

    def random(dist: Any) -> tuple[Any, Any]:
        if type(dist) is D.Independent and type(dist.base_dist) is D.Normal:
            return _independent_normal(dist, scored)
        if joint:
            both = getattr(dist, "rsample_and_log_prob" if dist.has_rsample else "sample_and_log_prob", None)
            if both is not None:
                return both(_NO_SAMPLES)  # type: ignore[no-any-return]
        value = (dist.rsample if dist.has_rsample else dist.sample)(_NO_SAMPLES)
        return value, dist.log_prob(value) if scored else None

    return random


def _independent_normal(dist: Any, scored: bool) -> tuple[Tensor, Tensor | None]:
    loc, scale, dims = dist.base_dist.loc, dist.base_dist.scale, dist.reinterpreted_batch_ndims
    value = draw_normal(loc, scale)
    if not scored:
        return value, None
    score = score_normal(value - loc, scale)
    return value, sum_last(score, dims) if dims else score
