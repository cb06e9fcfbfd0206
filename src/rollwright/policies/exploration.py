"""Nodes of modules that pick, change or squash actions: ours, and those of TorchRL with the same fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict.nn import InteractionType

from rollwright._keys import NestedKey, unravel
from rollwright.errors import NotNative
from rollwright.modules import (
    AdditiveGaussianModule,
    EGreedyModule,
    OrnsteinUhlenbeckProcessModule,
    QValueModule,
    TanhModule,
)
from rollwright.modules.tensordict_module.exploration import Spread, flags_of
from rollwright.policies.nodes import Node, Step, Values

_HOOKS = {
    ("rollwright.modules.tensordict_module.safe", "project_outputs"),
    ("torchrl.modules.tensordict_module.common", "_forward_hook_safe_action"),
}


class Call(NamedTuple):
    """What a module does, on tensors.

    Attributes:
        function: from a tensor per key to a tensor per key.
        in_keys: what it reads.
        out_keys: what it writes.
        owner: named in messages.
        compiles: whether torch may compile it.
        keeps: entries that it reads as it wrote them, with their values where it has not.
    """

    function: Callable[..., Sequence[Any]]
    in_keys: Sequence[NestedKey]
    out_keys: Sequence[NestedKey]
    owner: str
    compiles: bool
    keeps: Mapping[NestedKey, np.ndarray] = MappingProxyType({})


@dataclass(frozen=True)
class Called(Node):
    """A call of such a module.

    Attributes:
        call: what it does.
    """

    call: Call

    @property
    def in_torch(self) -> bool:  # type: ignore[override]
        """See :class:`Node`; what it keeps has the shape of the action after its first call alone."""
        return not self.call.keeps

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Whether it draws random numbers when it is run there."""
        return not self.call.compiles

    @property
    def label(self) -> str:
        """The module."""
        return self.call.owner

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        """Whether ``torch.compile`` may take it together with other steps."""
        return self.call.compiles

    @property
    def transient(self) -> bool:  # type: ignore[override]
        """See :class:`Node`; specs, from which the others draw, may keep tensors."""
        return self.call.compiles

    def step(self) -> Step:
        """Call it."""
        function, reads, writes = self.call.function, self.reads, self.writes

        def run(values: Values) -> None:
            for slot, value in zip(writes, function(*[values[slot] for slot in reads]), strict=True):
                values[slot] = value

        return run


@dataclass(frozen=True)
class Projection(Node):
    """An output brought into its spec.

    Attributes:
        spec: of the output.
    """

    spec: Any

    compiles = False
    in_torch = True

    def step(self) -> Step:
        """Project."""
        (source,), (target,), project = self.reads, self.writes, self.spec.project

        def run(values: Values) -> None:
            values[target] = project(values[source])

        return run


def safe_keys(module: Any) -> Mapping[NestedKey, Any] | None:
    """The specs onto which a module with ``safe=True`` projects its outputs; None where it has no or other hooks."""
    fields = vars(module)
    hooks = list(fields.get("_forward_hooks", {}).values())
    names = [(getattr(hook, "__module__", None), getattr(hook, "__qualname__", None)) for hook in hooks]
    if len(names) != 1 or names[0] not in _HOOKS:
        return None
    if any(fields.get(name) for name in ("_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")):
        return None
    return {unravel(key): module.spec[key] for key in module.spec.keys(True, True) if module.spec[key] is not None}


# The modules --------------------------------------------------------------------------------------


def _best(module: Any, kind: InteractionType, batch: tuple[int, ...]) -> Call:
    strict, owner = module.strict_shape, type(module).__name__
    ours: Any = module
    if type(module) is not QValueModule:
        known = _known_spec(module.spec, module.out_keys[0])
        ours = QValueModule(
            module.action_space,
            module.in_keys[0],
            module.action_mask_key,
            module.out_keys,
            module.var_nums,
            strict_shape=False,
        )
        if known is not None and strict is not False:
            shape = known.shape[len(module.spec.shape) :] if isinstance(module.out_keys[0], str) else None
            wanted = {"categorical": 0}.get(module.action_space, 1)
            if shape is None or len(shape) != wanted:
                raise NotNative(f"{owner} gives actions another shape than its spec has")
    return Call(ours.on_tensors, module.in_keys, module.out_keys, owner, True)


def _known_spec(spec: Any, key: NestedKey) -> Any:
    return spec[key] if unravel(key) in {unravel(each) for each in spec.keys(True, True)} else None


def _epsilon_greedy(module: Any, kind: InteractionType, batch: tuple[int, ...]) -> Call | None:
    if kind is not InteractionType.RANDOM:
        return None
    key, size = module.action_key, torch.Size(batch)
    if isinstance(key, tuple) and len(key) > 1:
        raise NotNative("EGreedyModule changes an action in a nest of entries")
    replaced = EGreedyModule.on_tensors

    def call(action: Any, mask: Any = None) -> tuple[Any]:
        return (replaced(module, action, mask, size),)

    return Call(call, module.in_keys, [key], "EGreedyModule", False)


def _additive(module: Any, kind: InteractionType, batch: tuple[int, ...]) -> Call | None:
    if kind is not InteractionType.RANDOM:
        return None
    noisy = AdditiveGaussianModule.on_tensors
    return Call(
        lambda action: (noisy(module, action),),
        [module.action_key],
        [module.action_key],
        "AdditiveGaussianModule",
        False,
    )


def _tanh(module: Any, kind: InteractionType, batch: tuple[int, ...]) -> Call:
    keys = list(module.out_keys)

    def call(*inputs: Any) -> list[Any]:
        return [TanhModule.squashed(module, key, x) for key, x in zip(keys, inputs, strict=True)]

    return Call(call, module.in_keys, keys, "TanhModule", True)


def _ornstein_uhlenbeck(module: Any, kind: InteractionType, batch: tuple[int, ...]) -> Call | None:
    if kind is not InteractionType.RANDOM:
        return None
    ours = isinstance(module, OrnsteinUhlenbeckProcessModule)
    key, owner, size = module.action_key if ours else module.ou.key, type(module).__name__, torch.Size(batch)
    if isinstance(key, tuple) and len(key) > 1:
        raise NotNative(f"{owner} changes an action in a nest of entries")
    process: Any = module if ours else _Process(module)
    noisy = OrnsteinUhlenbeckProcessModule.on_tensors

    def call(action: Any, noise: Any, steps: Any, is_init: Any) -> tuple[Any, ...]:
        if noise.shape != action.shape:  # the first one
            noise = torch.zeros(action.shape, device="cpu")
        return noisy(process, action, noise, steps, flags_of(is_init, size))

    nothing, none_taken = np.empty(0, np.float32), np.zeros(batch, np.int64)
    keeps: dict[NestedKey, np.ndarray] = {"_ou_prev_noise": nothing, "_ou_steps": none_taken}
    written = [key, *keeps]
    return Call(call, [*written, module.is_init_key], written, owner, False, keeps)


class _Process:
    """The settings of a process of TorchRL, where ours has them."""

    def __init__(self, module: Any) -> None:
        process = module.ou
        self._module = module
        self.theta, self.mu, self.dt, self.x0 = process.theta, process.mu, process.dt, process.x0
        self.spread = Spread(process.c, process.sigma_min, process.m, process.dt)

    @property
    def eps(self) -> Any:
        """It falls in place."""
        return self._module.eps


MODULES: dict[str, Callable[[Any, InteractionType, tuple[int, ...]], Call | None]] = {
    "AdditiveGaussianModule": _additive,
    "EGreedyModule": _epsilon_greedy,
    "OrnsteinUhlenbeckProcessModule": _ornstein_uhlenbeck,
    "QValueModule": _best,
    "TanhModule": _tanh,
}
