"""The table of distributions: how each is sampled and scored on arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule
from tensordict.nn.distributions import Delta
from torch import distributions as D

from rollwright._keys import as_tuple
from rollwright._tensors import as_tensor
from rollwright.modules.distributions import IndependentNormal, MaskedCategorical, OneHotCategorical, TanhNormal
from rollwright.policies.draws.basic import CategoricalDraw, DeltaDraw, MaskedDraw, NormalDraw
from rollwright.policies.draws.built import scores_its_draw
from rollwright.policies.draws.squashed import TanhNormalDraw
from rollwright.policies.nodes import Draw
from rollwright.policies.traced.code import makes_constants

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
        kind: its distribution.
        settings: further arguments of that.
        names: the parameters that it passes.
        reads: their slots.
        exploration_type: how it picks a value.
        batch: the batch size of its entries.
        positive: slots of scales that cannot be zero or less.
    """

    module: ProbabilisticTensorDictModule
    kind: Any
    settings: dict[str, Any]
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
    kind: Any = module.distribution_class
    settings = dict(module.distribution_kwargs or {})
    if isinstance(kind, partial) and not kind.args:
        kind, settings = kind.func, {**kind.keywords, **settings}
    if not draws_one(module):
        return None
    names = [as_tuple(key)[-1] for key in module.dist_keys]
    return draw_of(Sampling(module, kind, settings, names, reads, exploration_type, batch, positive))


def draw_of(given: Sampling) -> Draw | None:
    """The node that samples a distribution, without its writes; None if the table has none."""
    kind, settings, names = given.kind, given.settings, given.names
    make = _find(kind)
    if make is None and names == ["loc", "scale"] and not settings:
        make = _made_by(kind)
    if make is None or given.exploration_type not in EXPLORATION_TYPES:
        return None
    return None if settings and make not in _WITH_SETTINGS else make(given)


def draws_one(module: ProbabilisticTensorDictModule) -> bool:
    """Whether a module draws one value, from the global generator."""
    return len(module.dist_sample_keys) == 1 and getattr(module, "_generator", None) is None


def _find(kind: Any) -> Callable[[Sampling], Draw | None] | None:
    try:
        found = DISTRIBUTIONS.get(kind)
    except TypeError:  # what has no hash
        return None
    if found is None and isinstance(kind, type):
        found = _OF_TORCHRL.get(f"{kind.__module__}.{kind.__qualname__}")
    return found


def _settings(given: Sampling, known: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of a distribution with their defaults; None where there are others."""
    return {**known, **given.settings} if given.settings.keys() <= known.keys() else None


def _categorical(given: Sampling) -> Draw | None:
    kind: Any = given.kind
    if given.names not in (["logits"], ["probs"]) or hasattr(kind, "deterministic_sample"):
        return None
    if given.exploration_type is InteractionType.MEAN:
        return None
    name: Any = given.names[0]
    return CategoricalDraw(given.reads, (), name, kind is D.OneHotCategorical, given.random)


def _one_hot(given: Sampling) -> Draw | None:
    if given.names not in (["logits"], ["probs"]) or not given.random:
        return None
    name: Any = given.names[0]
    return CategoricalDraw(given.reads, (), name, True, True, integer=True)


def _masked(given: Sampling) -> Draw | None:
    settings = _settings(given, {"neg_inf": float("-inf"), "use_cross_entropy": True})
    if settings is None or sorted(given.names) != ["logits", "mask"] or not given.random:
        return None
    if len(given.batch) > 1 and given.kind is not MaskedCategorical:
        return None  # theirs computes log-probs of several batch dimensions in another order
    slots = dict(zip(given.names, given.reads, strict=True))
    return MaskedDraw((slots["logits"], slots["mask"]), (), settings["neg_inf"], settings["use_cross_entropy"])


def _normal(given: Sampling, event_dims: int = 0) -> Draw | None:
    tested = _tests_are_on()
    if given.names != ["loc", "scale"] or hasattr(D.Normal, "deterministic_sample"):
        return None
    if tested and not given.module.return_log_prob and given.reads[1] not in given.positive:
        return None  # the distribution itself refuses a scale of zero or less; so does the log-prob, as NaN
    return NormalDraw(given.reads, (), given.random, event_dims, tested)


def _made_by(function: Any) -> Callable[[Sampling], Draw | None] | None:
    """How to draw from what a function makes, if that is an Independent of a Normal, whatever the parameters are."""
    if not makes_constants(function, {"Independent", "Normal"}):
        return None
    loc, scale = torch.zeros(2, 3, 4, device="cpu"), torch.ones(2, 3, 4, device="cpu")
    try:
        made = function(loc=loc, scale=scale)
    except Exception:  # it has other arguments, or wants other shapes
        return None
    if type(made) is not D.Independent or type(made.base_dist) is not D.Normal:
        return None
    base = made.base_dist
    pairs = ((base.loc, loc), (base.scale, scale))
    same = all(one.data_ptr() == other.data_ptr() and one.shape == other.shape for one, other in pairs)
    if not same or "_validate_args" in vars(base):  # tests are turned on or off by the function
        return None
    return partial(_normal, event_dims=made.reinterpreted_batch_ndims)


def _independent_normal(given: Sampling) -> Draw | None:
    settings = _settings(given, {"upscale": 5.0, "tanh_loc": False, "event_dim": 1})
    if given.names != ["loc", "scale"] or settings is None or _validates(given):
        return None
    return NormalDraw(given.reads, (), given.random, event_dims=settings["event_dim"], tested=False)


def _tanh_normal(given: Sampling) -> Draw | None:
    known = {"upscale": 5.0, "low": -1.0, "high": 1.0, "event_dims": None, "tanh_loc": False, "safe_tanh": True}
    settings = _settings(given, known)
    if given.names != ["loc", "scale"] or settings is None or settings["tanh_loc"] or _validates(given):
        return None
    scored = given.module.return_log_prob
    if given.exploration_type not in (InteractionType.RANDOM, InteractionType.DETERMINISTIC):
        return None  # there is neither a mean nor a mode
    if scored and not given.random:
        return None
    low, high = (as_tensor(settings[name]) for name in ("low", "high"))
    if low.device.type != "cpu" or high.device.type != "cpu" or not bool((high > low).all()):
        return None
    trivial = not bool((low != -1).any() or (high != 1).any())
    stretch = None if trivial else ((high - low) / 2, (high + low) / 2)
    dims = settings["event_dims"]
    return TanhNormalDraw(
        given.reads,
        (),
        given.random,
        stretch,
        1 if dims is None else dims,
        clamped=bool(settings["safe_tanh"]),
        inverted=not scores_its_draw(given.module),
    )


def _validates(given: Sampling) -> bool:
    """Whether a distribution of TorchRL tests its parameters: it does where a program has turned tests on again."""
    kind: Any = given.kind
    return kind.__module__.startswith("torchrl.") and _tests_are_on()


def _tests_are_on() -> bool:
    """Whether distributions test their parameters where no argument says whether."""
    return bool(D.Distribution._validate_args)


def _delta(given: Sampling) -> Draw | None:
    return None if given.names != ["param"] or given.module.return_log_prob else DeltaDraw(given.reads, ())


DISTRIBUTIONS: dict[Any, Callable[[Sampling], Draw | None]] = {
    D.Categorical: _categorical,
    D.OneHotCategorical: _categorical,
    D.Normal: _normal,
    Delta: _delta,
    IndependentNormal: _independent_normal,
    MaskedCategorical: _masked,
    OneHotCategorical: _one_hot,
    TanhNormal: _tanh_normal,
}
_WITH_SETTINGS = (_independent_normal, _masked, _tanh_normal)
_OF_TORCHRL: dict[str, Callable[[Sampling], Draw | None]] = {
    f"torchrl.modules.distributions.{name}": make
    for name, make in {
        "continuous.Delta": _delta,
        "continuous.IndependentNormal": _independent_normal,
        "continuous.TanhNormal": _tanh_normal,
        "discrete.MaskedCategorical": _masked,
        "discrete.OneHotCategorical": _one_hot,
    }.items()
}
