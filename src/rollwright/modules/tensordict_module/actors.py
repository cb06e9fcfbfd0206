"""Actors: a network, and the distribution or the rule that picks an action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    dispatch,
)
from tensordict.nn.distributions import Delta
from torch import nn

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.data.specs import Composite
from rollwright.modules.tensordict_module.qvalue import QValueModule, action_space_of
from rollwright.modules.tensordict_module.safe import (
    SafeModule,
    SafeProbabilisticModule,
    SafeProbabilisticTensorDictSequential,
    SafeSequential,
    own_spec,
)

__all__ = ["Actor", "ActorValueOperator", "ProbabilisticActor", "QValueActor", "TanhModule", "ValueOperator"]


class Actor(SafeModule):
    """A network that gives the action.

    Args:
        module: from the entries ``in_keys`` to the action.
        in_keys: default ``["observation"]``.
        out_keys: default ``["action"]``.
        spec: of the action.
        options: of :class:`SafeModule`.

    Example:
        >>> Actor(nn.Tanh())(observation=torch.zeros(2))
        tensor([0., 0.])
    """

    def __init__(
        self,
        module: nn.Module,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        *,
        spec: Any = None,
        **options: Any,
    ) -> None:
        keys = ["action"] if out_keys is None else list(out_keys)
        spec = own_spec(spec)
        if "action" in keys and spec is not None and not isinstance(spec, Composite):
            spec = Composite({"action": spec})
        super().__init__(module, ["observation"] if in_keys is None else in_keys, keys, spec=spec, **options)

    def get_dist(self, tensordict: TensorDictBase) -> Delta:
        """All probability on the action."""
        return Delta(self(tensordict).get(self.out_keys[0]))


class ProbabilisticActor(SafeProbabilisticTensorDictSequential):
    """A module that gives parameters of a distribution, and the draw of an action from it.

    Args:
        module: writes the parameters.
        in_keys: the parameters, as entries of the distribution's arguments' names, or ``{argument: entry}``.
        out_keys: default ``["action"]``; those of the parts for a ``CompositeDistribution``.
        spec: of the action.
        options: of :class:`SafeProbabilisticModule`: ``distribution_class``, ``distribution_kwargs``,
            ``return_log_prob``, ...

    Raises:
        KeyError: a ``CompositeDistribution`` without ``distribution_map``.

    Example:
        >>> from tensordict.nn import NormalParamExtractor
        >>> from rollwright.modules import TanhNormal
        >>> network = nn.Sequential(nn.Linear(3, 4), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(network, ["observation"], ["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=TanhNormal,
        ...     return_log_prob=True,
        ... )
        >>> actor.out_keys
        ['loc', 'scale', 'action', 'action_log_prob']
    """

    def __init__(
        self,
        module: Any,
        in_keys: Any,
        out_keys: Sequence[NestedKey] | None = None,
        *,
        spec: Any = None,
        **options: Any,
    ) -> None:
        if out_keys is None:
            out_keys = ["action"]
            if options.get("distribution_class") is CompositeDistribution:
                settings = options.get("distribution_kwargs") or {}
                if "distribution_map" not in settings:
                    raise KeyError(
                        "distribution_kwargs: a CompositeDistribution needs {'distribution_map': {name: class}}."
                    )
                names = settings.get("name_map")
                out_keys = list(settings["distribution_map"]) if names is None else list(names.values())
        spec = own_spec(spec)
        if len(out_keys) == 1 and spec is not None and not isinstance(spec, Composite):
            spec = Composite({out_keys[0]: spec})
        super().__init__(module, SafeProbabilisticModule(in_keys=in_keys, out_keys=out_keys, spec=spec, **options))


class ValueOperator(TensorDictModule):
    """A network that gives the value of a state, or of an action in it.

    Args:
        module: from the entries ``in_keys`` to the value.
        in_keys: default ``["observation"]``.
        out_keys: default ``["state_value"]``, or ``["state_action_value"]`` if ``"action"`` is read.

    Example:
        >>> ValueOperator(nn.Linear(3, 1)).out_keys
        ['state_value']
    """

    def __init__(
        self,
        module: nn.Module,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        reads: Any = ["observation"] if in_keys is None else list(in_keys)
        writes: Any = out_keys
        if out_keys is None:
            writes = ["state_action_value"] if "action" in reads else ["state_value"]
        super().__init__(module=module, in_keys=reads, out_keys=writes)


class QValueActor(SafeSequential):
    """A network that gives the values of all actions, and the choice of the best.

    Args:
        module: a network, or a TensorDict module that writes ``action_value_key``.
        in_keys: of a network; default ``["observation"]``.
        spec: of the action.
        safe: see :class:`QValueModule`.
        action_space: see :class:`QValueModule`.
        action_value_key: default ``"action_value"``.
        action_key: default ``"action"``.
        chosen_action_value_key: default ``"chosen_action_value"``.
        action_mask_key: of actions that are allowed.
        strict_shape: see :class:`QValueModule`.

    Raises:
        KeyError: the TensorDict module does not write the values.

    Example:
        >>> actor = QValueActor(nn.Identity(), action_space="categorical")
        >>> action, values, chosen = actor(observation=torch.tensor([1.0, 3.0]))
        >>> action, chosen
        (tensor(1), tensor([3.]))
    """

    def __init__(
        self,
        module: Any,
        *,
        in_keys: Sequence[NestedKey] | None = None,
        spec: Any = None,
        safe: bool = False,
        action_space: str | None = None,
        action_value_key: NestedKey | None = None,
        action_key: NestedKey | None = None,
        chosen_action_value_key: NestedKey | None = None,
        action_mask_key: NestedKey | None = None,
        strict_shape: Any = True,
    ) -> None:
        space, spec = action_space_of(action_space, spec)
        values: NestedKey = "action_value" if action_value_key is None else action_value_key
        chosen: NestedKey = "chosen_action_value" if chosen_action_value_key is None else chosen_action_value_key
        if not isinstance(module, TensorDictModuleBase):
            reads: Any = ["observation"] if in_keys is None else list(in_keys)
            module = TensorDictModule(module, reads, [values])
        elif values not in module.out_keys:
            raise KeyError(f"action_value_key: {values!r} is not among the out_keys {module.out_keys} of the module.")
        super().__init__(
            module,
            QValueModule(
                action_space=space,
                action_value_key=values,
                action_mask_key=action_mask_key,
                out_keys=["action" if action_key is None else action_key, values, chosen],
                spec=spec,
                safe=safe,
                strict_shape=strict_shape,
            ),
        )
        self.action_space = space


class ActorValueOperator(SafeSequential):
    """A common network, an actor and a value.

    Args:
        common_operator: writes what both read.
        policy_operator: writes the action.
        value_operator: writes the value.

    Example:
        >>> common = TensorDictModule(nn.Linear(3, 4), ["observation"], ["hidden"])
        >>> actor, value = Actor(nn.Linear(4, 1), ["hidden"]), ValueOperator(nn.Linear(4, 1), ["hidden"])
        >>> both = ActorValueOperator(common, actor, value)
        >>> both.get_policy_operator().out_keys, both.get_value_operator().out_keys
        (['hidden', 'action'], ['hidden', 'state_value'])
    """

    def __init__(self, common_operator: Any, policy_operator: Any, value_operator: Any) -> None:
        super().__init__(common_operator, policy_operator, value_operator)

    def get_policy_operator(self) -> TensorDictSequential:
        """The common network and the actor."""
        parts: Any = self.module
        if isinstance(parts[1], ProbabilisticTensorDictSequential):
            return SafeProbabilisticTensorDictSequential(parts[0], *parts[1].module)
        return SafeSequential(parts[0], parts[1])

    def get_value_operator(self) -> SafeSequential:
        """The common network and the value."""
        parts: Any = self.module
        return SafeSequential(parts[0], parts[2])

    def get_policy_head(self) -> Any:
        """The actor, without the common network."""
        return self.module[1]

    def get_value_head(self) -> Any:
        """The value, without the common network."""
        return self.module[2]


class TanhModule(TensorDictModuleBase):
    """Squashes entries by tanh to the bounds of their specs.

    Args:
        in_keys: entries that it reads.
        out_keys: where the results go; default: in place of them.
        spec: a ``Bounded`` of the only entry, or a Composite; where there is one, it gives the bounds.
        low: least values; default -1.
        high: greatest values; default 1.
        clamp: keep results off the bounds, by the resolution of their dtype.

    Raises:
        ValueError: bounds differ from those of the spec, or high is less than low; or keys do not match.

    Example:
        >>> TanhModule(in_keys=["action"], low=-2.0, high=2.0)(action=torch.zeros(2))
        tensor([0., 0.])
    """

    in_keys: Any
    out_keys: Any

    def __init__(
        self,
        in_keys: Sequence[NestedKey],
        out_keys: Sequence[NestedKey] | None = None,
        *,
        spec: Any = None,
        low: Any = None,
        high: Any = None,
        clamp: bool = False,
    ) -> None:
        super().__init__()
        self.in_keys = [in_keys] if isinstance(in_keys, str) else list(in_keys)
        self.out_keys = self.in_keys if out_keys is None else list(out_keys)
        if len(self.in_keys) != len(self.out_keys):
            raise ValueError(f"out_keys: expected one for each of {self.in_keys}, got {self.out_keys}.")
        self.clamp = clamp
        own = own_spec(spec)
        if own is not None and not isinstance(own, Composite):
            own = Composite(dict.fromkeys(self.out_keys, own))
        self._spec = Composite() if own is None else own
        for key in self.out_keys:
            lowest, highest = self._bounds(key, low, high)
            self.register_buffer(f"{_name(key)}_low", lowest)
            self.register_buffer(f"{_name(key)}_high", highest)

    def _bounds(self, key: NestedKey, low: Any, high: Any) -> tuple[torch.Tensor, torch.Tensor]:
        known: Any = self._spec[key].space if unravel(key) in self._spec.leaves() else None
        found = []
        for name, bound, default in (("low", low, -1.0), ("high", high, 1.0)):
            of_spec = getattr(known, name, default)
            value = torch.as_tensor(of_spec if bound is None else bound, dtype=torch.get_default_dtype())
            if known is not None and bool((value != of_spec).any()):
                raise ValueError(f"{name}: expected that of the spec of {key!r}, {of_spec}, got {bound}. Leave it out.")
            found.append(value.clone())
        if bool((found[1] < found[0]).any()):
            raise ValueError(f"high: expected values not less than low, got low={low} and high={high}.")
        return found[0], found[1]

    @property
    def spec(self) -> Composite:
        """Specs of the entries that have one."""
        return self._spec

    @dispatch  # type: ignore[untyped-decorator, unused-ignore]
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # type: ignore[override]
        """Write ``low + (high - low) * (tanh(x) + 1) / 2``."""
        for source, target in zip(self.in_keys, self.out_keys, strict=True):
            tensordict.set(target, self.squashed(target, tensordict.get(source)))
        return tensordict

    def squashed(self, key: NestedKey, x: torch.Tensor) -> torch.Tensor:
        """What is written as an entry, given what is read for it."""
        low, high = getattr(self, f"{_name(key)}_low"), getattr(self, f"{_name(key)}_high")
        y = x.tanh()
        if self.clamp:
            limit = 1 - torch.finfo(y.dtype).resolution
            y = y.clamp(-limit, limit)
        squashed: torch.Tensor = low + (high - low) * (y + 1) / 2
        return squashed


def _name(key: NestedKey) -> str:
    return "_".join(as_tuple(key))
