"""Converts a graph of TensorDict modules into the nodes of a policy on arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictModuleWrapper,
    TensorDictSequential,
    composite_lp_aggregate,
)
from torch import nn

from rollwright._keys import NestedKey, as_tuple, is_private, unravel
from rollwright.errors import NotNative
from rollwright.policies.distributions import Sampling, draw_of, draws_one, find_draw
from rollwright.policies.draws.built import Built
from rollwright.policies.exploration import MODULES, Called, Projection, safe_keys
from rollwright.policies.layers import LayerCall, is_torchs, makes_positive_scale, registered, unroll
from rollwright.policies.nodes import Ask, Draw, Node, Outputs, Own
from rollwright.policies.recurrent.step import Recurrent, RecurrentStep, find_recurrent
from rollwright.policies.traced.call import FunctionCall
from rollwright.policies.watch import ModuleSnapshot, check_globals, is_special

_HARMLESS = {"__module__", "__doc__", "__init__", "__annotations__", "__repr__", "extra_repr", "__firstlineno__"}
_HARMLESS |= {"__static_attributes__", "__parameters__", "__orig_bases__"}

_MODULES_OF_SPECS = ("torchrl.modules.tensordict_module.", "rollwright.modules.tensordict_module.")
_KNOWS_SPECS = {
    "Actor",
    "ActorCriticOperator",
    "ActorCriticWrapper",
    "ActorValueOperator",
    "ProbabilisticActor",
    "QValueActor",
    "SafeModule",
    "SafeProbabilisticModule",
    "SafeProbabilisticTensorDictSequential",
    "SafeSequential",
    "ValueOperator",
    "_Gathered",
    "_WithSpec",
}


class Walk:
    """Goes through a policy in the order of its calls.

    Args:
        exploration_type: how distributions give a value.
        batch_shape: of the entries.
        available: entries of the root.

    Attributes:
        nodes: the steps.
        inputs: entries read from the root, with their slots.
        written: entries written, with the slots of their last values.
        checked: entries that turn NaN where the parameters of a distribution do.
        size: the number of slots.
        kept: entries that it reads as it wrote them in the step before, with their values in a first one.
        watch: what was read of the policy's modules.
    """

    def __init__(
        self, exploration_type: InteractionType, batch_shape: tuple[int, ...], available: Collection[NestedKey]
    ) -> None:
        self.nodes: list[Node] = []
        self.inputs: dict[NestedKey, int] = {}
        self.written: dict[NestedKey, int] = {}
        self.checked: list[NestedKey] = []
        self.kept: dict[NestedKey, np.ndarray] = {}
        self.watch = ModuleSnapshot()
        self._type = exploration_type
        self._batch = tuple(batch_shape)
        self._available = {unravel(key) for key in available}
        self._fresh: list[bool] = []
        self._tested: list[tuple[NestedKey, int | None]] = []  # what is NaN where a distribution's parameters are
        self._positive: set[int] = set()  # slots of scales that cannot be zero or less

    @property
    def size(self) -> int:
        """How many slots there are."""
        return len(self._fresh)

    def run(self, policy: TensorDictModuleBase) -> None:
        """Take ``policy`` apart.

        Raises:
            NotNative: a part of it is not known, or does more than its type does.
        """
        check_globals()
        self._module(policy)
        for key, slot in self._tested:
            if slot is None or self.written.get(key) != slot or is_private(key):
                raise NotNative(f"a batch would not show whether {key!r} is a number")
            self.checked.append(key)
        for slot in {slot for slot in self.written.values() if not self._fresh[slot]}:
            self.nodes.append(Own((slot,), (slot,)))

    # Slots ------------------------------------------------------------------------------------

    def _slot(self, fresh: bool) -> int:
        self._fresh.append(fresh)
        return len(self._fresh) - 1

    def _read(self, keys: Iterable[NestedKey]) -> tuple[int, ...]:
        return tuple(self._read_one(unravel(key)) for key in keys)

    def _read_one(self, key: NestedKey) -> int:
        if key in self.written:
            return self.written[key]
        if key not in self._available and key not in self.inputs:
            raise NotNative(f"it reads {key!r}, which is no tensor of the environment")
        if key not in self.inputs:
            self.inputs[key] = self._slot(fresh=False)
        return self.inputs[key]

    def _write(self, keys: Iterable[NestedKey], fresh: bool) -> tuple[int, ...]:
        slots = []
        for key in map(unravel, keys):
            slots.append(self._slot(fresh))
            if key != "_":
                self._check_nesting(key)
                self.written[key] = slots[-1]
        return tuple(slots)

    def _check_nesting(self, key: NestedKey) -> None:
        path, others = as_tuple(key), {*self._available, *self.written}
        for other in [as_tuple(one) for one in others if len(path) > 1 or type(one) is tuple]:
            short = min(len(path), len(other))
            if len(path) != len(other) and path[:short] == other[:short]:
                raise NotNative(f"{key!r} would replace a nest of entries, or an entry by a nest")

    # Modules ----------------------------------------------------------------------------------

    def _module(self, module: Any) -> None:
        visits: tuple[tuple[type, Callable[[Any], None]], ...] = (
            (ProbabilisticTensorDictSequential, self._probabilistic_sequence),
            (TensorDictSequential, self._sequence),
            (TensorDictModule, self._tensordict_module),
            (ProbabilisticTensorDictModule, self._probabilistic),
            (TensorDictModuleWrapper, self._wrapper),
        )
        for base, visit in visits:
            if isinstance(module, base) and _adds_nothing(type(module), base):
                self._look_into(module)
                visit(module)
                self._project(module)
                return
        if (recurrent := find_recurrent(module)) is not None:
            self._recurrent(recurrent)
            return
        found = MODULES.get(type(module).__name__)
        if found is not None and type(module).__module__.startswith(_MODULES_OF_SPECS):
            self._look_into(module)
            call = found(module, self._type, self._batch)
            if call is not None:
                self._keep(call.keeps, call.in_keys)
                reads = self._read(call.in_keys)
                self.nodes.append(Called(reads, self._write(call.out_keys, False), call))
            self._project(module)
            return
        name = type(module).__name__
        raise NotNative(
            f"{name} is no module that can be taken apart: put what it does with tensors into a TensorDictModule"
        )

    def _keep(self, kept: Mapping[NestedKey, np.ndarray], in_keys: Collection[NestedKey]) -> None:
        """Add entries that a module reads as it wrote them in the step before."""
        known = {*self._available, *self.written, *kept}
        if missing := [key for key in in_keys if kept and unravel(key) not in known]:
            raise NotNative(f"it reads {missing[0]!r}: append InitTracker() to the environment")
        for key, value in kept.items():
            if key not in self.written and key not in self.inputs:
                self.inputs[key] = self._slot(fresh=False)
                self.kept[key] = value

    def _look_into(self, module: Any) -> None:
        special = is_special(module, hooks=safe_keys(module) is None)
        if special is not None:
            raise NotNative(special)
        self.watch.add(module)

    def _project(self, module: Any) -> None:
        """What ``safe=True`` does: bring outputs into their specs."""
        for key, spec in (safe_keys(module) or {}).items():
            if key in self.written:
                reads = (self.written[key],)
                self.nodes.append(Projection(reads, self._write([key], False), spec))

    def _wrapper(self, module: TensorDictModuleWrapper) -> None:
        self._module(module.td_module)

    def _sequence(self, sequence: TensorDictSequential) -> None:
        self._parts(sequence, list(_parts(sequence)))

    def _probabilistic_sequence(self, sequence: ProbabilisticTensorDictSequential) -> None:
        parts = list(_parts(sequence))
        if not sequence.return_composite:
            first: Any = getattr(sequence, "_det_part", None)
            if first is None or list(map(id, _parts(first))) != list(map(id, parts[:-1])):
                raise NotNative("a ProbabilisticTensorDictSequential runs other modules than it holds")
            self._look_into(first)
            self.watch.add(first.module)
        drawn = isinstance(parts[-1], ProbabilisticTensorDictModule | ProbabilisticTensorDictSequential)
        if drawn and not getattr(sequence, "_requires_sample", False):
            raise NotNative("an earlier module writes what the distribution would draw")
        self._parts(sequence, parts)

    def _parts(self, sequence: TensorDictSequential, parts: Sequence[Any]) -> None:
        if sequence.inplace not in (None, True):
            raise NotNative(f"{type(sequence).__name__} has inplace={sequence.inplace!r}")
        self.watch.add(sequence.module)
        before = {*self._available, *self.written}
        outer = dict(self.written)
        for part in parts:
            self._module(part)
        if sequence._select_before_return:
            kept = before.union(map(unravel, sequence.out_keys))
            self.written = {key: slot for key, slot in self.written.items() if key in kept or key in outer}

    def _tensordict_module(self, module: TensorDictModule) -> None:
        name = type(module.module).__name__
        if module.inplace is not True:
            raise NotNative(f"TensorDictModule({name}) has inplace={module.inplace!r}")
        if getattr(module, "_get_kwargs", None):
            raise NotNative(f"TensorDictModule({name}) has get_kwargs")
        keys = _unraveled(module.out_keys_source)
        reads = self._read(module.in_keys)
        outputs = Outputs(keys, self._batch, f"TensorDictModule({name})")
        names, constants = tuple(module._kwargs or ()), dict(module.method_kwargs)
        if module.method is not None or names or constants or len(reads) != 1:
            self._call(module.module, reads, self._write(keys, False), outputs, module.method, names, constants)
            return
        parts = unroll(module.module, self.watch) or [nn.Identity()]
        for part in parts[:-1]:
            between = (self._slot(False),)
            self._call(part, reads, between, None)
            reads = between
        writes = self._write(keys, False)
        self._call(parts[-1], reads, writes, outputs)
        if len(writes) == 2 and makes_positive_scale(parts[-1]):
            self._positive.add(writes[1])

    def _call(
        self,
        module: Any,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        outputs: Outputs | None,
        method: str | None = None,
        names: tuple[str, ...] = (),
        constants: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        layer = registered(module) if method is None else None
        if layer is not None and len(reads) == len(writes) == 1 and not names and not constants:
            self.nodes.append(LayerCall(reads, writes, module, layer))
        else:
            self.nodes.append(FunctionCall(reads, writes, module, method, names, constants, outputs, self.watch))
        if layer is not None or is_torchs(module):
            for part in module.modules():
                self.watch.add(part)

    def _recurrent(self, found: Recurrent) -> None:
        self._look_into(found.module)
        self._look_into(found.rnn)
        reads = self._read(found.in_keys)
        self.nodes.append(RecurrentStep(reads, self._write(found.out_keys, True), found, self._batch))

    # Distributions ----------------------------------------------------------------------------

    def _probabilistic(self, module: ProbabilisticTensorDictModule) -> None:
        if module.num_samples is not None:
            raise NotNative("a distribution has num_samples")
        if getattr(module, "_generator_key", None) is not None:
            raise NotNative("a distribution reads its generator from the data")
        if getattr(module, "_warn_default_out_key", False):
            raise NotNative("a distribution has no out_keys")
        if getattr(module, "_composite_lp_aggreate_at_init", None) != composite_lp_aggregate(nowarn=True):
            raise NotNative("composite_lp_aggregate has changed since the distribution was made")
        if module.distribution_class is CompositeDistribution:
            self._composite(module)
            return
        reads, batch = self._read(module.in_keys), self._batch
        draw = find_draw(module, reads, self._type, batch=batch, positive=self._positive)
        if draw is None:
            keys, in_keys = _unraveled(module.out_keys), _unraveled(module.in_keys)
            # Values of an unknown distribution may share the memory of its parameters.
            ask = Ask(reads, self._write(keys, False), module, in_keys, keys, batch)
            self.nodes.append(self._built(module, ask) or ask)
            return
        sampled: Any = module.dist_sample_keys[0]
        score: Any = module.log_prob_key if module.return_log_prob else None
        self._draw(draw, sampled, score, unravel(module.in_keys[0]))

    def _draw(self, draw: Draw, sampled: NestedKey, score: NestedKey | None, parameter: NestedKey) -> None:
        """Add a draw, and note which of its entries shows that a parameter is no number."""
        scores = [] if score is None else [score]
        writes = self._write([sampled], draw.fresh) + self._write(scores, True)
        if draw.nan_shows is not None:
            tested = unravel((scores or [parameter if draw.nan_shows == "parameter" else sampled])[0])
            self._tested.append((tested, self.written.get(tested)))
        self.nodes.append(replace(draw, writes=writes))

    def _composite(self, module: ProbabilisticTensorDictModule) -> None:
        """One draw after another, in the order of the distributions."""
        if composite_lp_aggregate(nowarn=True):
            raise NotNative("it sums the log-probs of a CompositeDistribution: call set_composite_lp_aggregate(False)")
        settings = dict(module.distribution_kwargs or {})
        kinds, others = settings.pop("distribution_map", {}), dict(settings.pop("extra_kwargs", None) or {})
        keys = {unravel(key): unravel(new) for key, new in dict(settings.pop("name_map", None) or {}).items()}
        if settings or len(module.in_keys) != 1 or getattr(module, "_generator", None) is not None:
            raise NotNative("it samples a CompositeDistribution with further arguments")
        known = [*self._available, *self.written]
        above = as_tuple(unravel(module.in_keys[0]))
        found: list[tuple[Draw, Any, NestedKey]] = []
        for name, kind in kinds.items():
            prefix = (*above, *as_tuple(unravel(name)))
            parameters = {as_tuple(key)[-1]: key for key in known if as_tuple(key)[:-1] == prefix}
            reads, options = self._read(parameters.values()), dict(others.get(name, {}))
            given = Sampling(module, kind, options, list(parameters), reads, self._type, self._batch, self._positive)
            draw = draw_of(given) if parameters else None
            if draw is None:
                raise NotNative(
                    f"it samples a CompositeDistribution with {getattr(kind, '__name__', kind)} for {name!r}"
                )
            found.append((draw, keys.get(unravel(name), unravel(name)), next(iter(parameters.values()))))
        if [target for _, target, _ in found] != list(_unraveled(module.dist_sample_keys)):
            raise NotNative("the out_keys of a CompositeDistribution are others than it writes")
        scores: list[Any] = list(module.log_prob_keys) if module.return_log_prob else [None] * len(found)
        for (draw, target, parameter), score in zip(found, scores, strict=True):
            self._draw(draw, target, score, parameter)

    def _built(self, module: ProbabilisticTensorDictModule, ask: Ask) -> Built | None:
        """The distribution built, sampled and scored on tensors; None where only a TensorDict will do."""
        scored = bool(module.return_log_prob)
        if not draws_one(module) or not hasattr(module, "_dist_sample") or len(ask.writes) != 1 + scored:
            return None
        names = tuple(as_tuple(key)[-1] for key in module.dist_keys)
        return Built(ask.reads, ask.writes, ask, names, dict(module.distribution_kwargs or {}), self._type, scored)


def _parts(sequence: TensorDictSequential) -> Iterable[Any]:
    module = sequence.module
    return module.values() if isinstance(module, nn.ModuleDict) else iter(module)


def _unraveled(keys: Iterable[Any]) -> tuple[NestedKey, ...]:
    return tuple(unravel(key) for key in keys)


def _adds_nothing(kind: type, base: type) -> bool:
    """Whether a subclass leaves alone all that its base does: at most a constructor and new names."""
    if kind is base:
        return True
    inherited = set(dir(base))
    between = [each for each in kind.__mro__[: kind.__mro__.index(base)] if not _only_knows_specs(each)]
    return all(name in _HARMLESS or name not in inherited for each in between for name in vars(each))


def _only_knows_specs(kind: type) -> bool:
    """Whether a class of ours or of TorchRL acts as the class of tensordict that it derives from."""
    return kind.__name__ in _KNOWS_SPECS and kind.__module__.startswith(_MODULES_OF_SPECS)
