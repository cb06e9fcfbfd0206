"""The table of distributions: how each is sampled and scored on arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from tensordict.nn import InteractionType, ProbabilisticTensorDictModule
from tensordict.nn.distributions import Delta
from torch import distributions as D

from rollwright._keys import as_tuple
from rollwright.policies.draws import CategoricalDraw, DeltaDraw, NormalDraw
from rollwright.policies.nodes import Draw

__all__ = ["DISTRIBUTIONS", "EXPLORATION_TYPES", "Sampling", "find_draw"]

EXPLORATION_TYPES = (
    InteractionType.RANDOM,
    InteractionType.MODE,
    InteractionType.MEAN,
    InteractionType.DETERMINISTIC,
)


class Sampling(NamedTuple):
    """A use of a distribution by a module.

    Attributes:
        module: the module.
        names: the parameters that it passes.
        reads: their slots.
        exploration_type: how it picks a value.
        batch: the batch size of its entries.
        positive: slots of scales that cannot be zero or less.
    """

    module: ProbabilisticTensorDictModule
    names: list[str]
    reads: tuple[int, ...]
    exploration_type: InteractionType
    batch: tuple[int, ...]
    positive: Collection[int]

    @property
    def random(self) -> bool:
        """Whether it draws."""
        return self.exploration_type is InteractionType.RANDOM


def find_draw(
    module: ProbabilisticTensorDictModule,
    reads: tuple[int, ...],
    exploration_type: InteractionType,
    *,
    batch: tuple[int, ...],
    positive: Collection[int],
) -> Draw | None:
    """The node that samples a module's distribution, without its writes; None if the table has none.

    Args:
        module: of one distribution.
        reads: slots of its parameters.
        exploration_type: how it picks a value.
        batch: the batch size of its entries.
        positive: slots of scales that cannot be zero or less.
    """
    make = DISTRIBUTIONS.get(module.distribution_class)
    if make is None or exploration_type not in EXPLORATION_TYPES:
        return None
    if (
        module.distribution_kwargs
        or len(module.dist_sample_keys) != 1
        or getattr(module, "_generator", None) is not None
    ):
        return None
    names = [as_tuple(key)[-1] for key in module.dist_keys]
    return make(Sampling(module, names, reads, exploration_type, batch, positive))


def _categorical(given: Sampling) -> Draw | None:
    kind: Any = given.module.distribution_class
    if given.names not in (["logits"], ["probs"]) or hasattr(kind, "deterministic_sample"):
        return None
    if given.exploration_type is InteractionType.MEAN:
        return None
    name: Any = given.names[0]
    return CategoricalDraw(given.reads, (), name, kind is D.OneHotCategorical, given.random)


def _normal(given: Sampling) -> Draw | None:
    if given.names != ["loc", "scale"] or hasattr(D.Normal, "deterministic_sample"):
        return None
    if not given.module.return_log_prob and given.reads[1] not in given.positive:
        return None  # the distribution itself refuses a scale of zero or less; so does the log-prob, as NaN
    return NormalDraw(given.reads, (), given.random)


def _delta(given: Sampling) -> Draw | None:
    return None if given.names != ["param"] or given.module.return_log_prob else DeltaDraw(given.reads, ())


DISTRIBUTIONS: dict[Any, Callable[[Sampling], Draw | None]] = {
    D.Categorical: _categorical,
    D.OneHotCategorical: _categorical,
    D.Normal: _normal,
    Delta: _delta,
}
