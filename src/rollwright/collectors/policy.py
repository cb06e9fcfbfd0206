"""From what the user passes as a policy to one callable on TensorDicts."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule, TensorDictModuleBase
from torch import nn

from rollwright._keys import NestedKey, key_str, unravel
from rollwright.collectors.devices import module_device
from rollwright.collectors.options import CollectorOptions
from rollwright.envs.base import EnvBase
from rollwright.errors import PolicyKeyError
from rollwright.modules import RandomPolicy

__all__ = ["SignaturePolicy", "accelerate", "check_inputs", "make_policy", "place_policy", "wrap_policy"]

Call = Callable[[TensorDictBase], TensorDictBase | None]


class SignaturePolicy(TensorDictModuleBase):
    """A module whose ``forward`` takes entries of the environment by name.

    Its outputs become ``action``, ``output1``, ``output2``…

    Args:
        module: called with the entries as keyword arguments.
        in_keys: entries to read, which are also the names of the arguments.
        action_key: where the first output goes.
    """

    def __init__(self, module: Callable[..., Any], in_keys: list[str], action_key: NestedKey) -> None:
        super().__init__()
        self.module = module
        self.in_keys = list(in_keys)
        self.out_keys = cast(Any, [action_key])

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Read, call, write; returns ``tensordict``."""
        outputs = self.module(**{key: tensordict.get(key) for key in self.in_keys})
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        for i in range(len(self.out_keys), len(outputs)):
            self.out_keys.append(f"output{i}")
        for key, value in zip(self.out_keys, outputs, strict=True):
            tensordict.set(key, value)
        return tensordict


def make_policy(policy: Any, options: CollectorOptions, env: EnvBase) -> Any:
    """The policy object as the user means it: given, made by the factory, or random."""
    if options.policy_factory is not None:
        policy = options.policy_factory()
        if policy is None:
            raise TypeError("policy_factory: expected it to return a policy, got None.")
    if policy is None:
        return RandomPolicy(env.full_action_spec)
    if isinstance(policy, RandomPolicy):
        policy.set_action_spec_from_env(env)
    if not callable(policy):
        raise TypeError(
            f"policy: expected a callable on TensorDicts, a TensorDictModule, an nn.Module or None, got "
            f"{type(policy).__name__}: {policy!r}."
        )
    if isinstance(policy, type):
        raise TypeError(f"policy: got the class {policy.__name__}. Pass an instance, {policy.__name__}(...).")
    return policy


def place_policy(policy: Any, device: torch.device | None) -> tuple[Any, nn.Module | None]:
    """The policy on ``device``, and the original if that took a copy."""
    if device is None or not isinstance(policy, nn.Module) or module_device(policy) in (None, device):
        return policy, None
    with torch.no_grad():
        return copy.deepcopy(policy).to(device), policy


def wrap_policy(policy: Any, options: CollectorOptions, env: EnvBase) -> Call:
    """Wrap a module that does not speak TensorDict by the signature of its ``forward``.

    Raises:
        TypeError: ``forward`` takes arguments that are no entries of the environment.
    """
    if options.trust_policy or isinstance(policy, TensorDictModuleBase | RandomPolicy):
        return cast(Call, policy)
    is_module = isinstance(policy, nn.Module)
    parameters = _parameters(policy.forward if is_module else policy)
    if parameters is None or _takes_tensordict(parameters):
        return cast(Call, policy)
    entries = {key for key in (*env.observation_keys, *env.state_keys) if isinstance(key, str)}
    names = [p.name for p in parameters if p.name in entries]
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    unknown = [name for name in required if name not in entries]
    if unknown or not names:
        if not is_module:
            return cast(Call, policy)  # a function of anything else is a function of a TensorDict
        raise TypeError(
            f"policy: {type(policy).__name__}.forward takes ({', '.join(p.name for p in parameters)}), and the "
            f"environment has the entries ({', '.join(sorted(entries))}). Name the arguments after entries, wrap the "
            "module as TensorDictModule(module, in_keys=[...], out_keys=['action']), or pass trust_policy=True if it "
            "takes a TensorDict."
        )
    if len(env.action_keys) != 1:
        raise TypeError(
            f"policy: {type(policy).__name__} is no TensorDict module, and the environment has several actions, "
            f"{key_str(env.action_keys)}. Wrap it as TensorDictModule(module, in_keys=[...], out_keys=[...])."
        )
    return SignaturePolicy(policy, names, env.action_key)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(call: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return None


def _takes_tensordict(parameters: list[inspect.Parameter]) -> bool:
    required = [p for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    if len(required) != 1:
        return False
    hint = required[0].annotation
    hinted = (
        "TensorDict" in hint if isinstance(hint, str) else isinstance(hint, type) and issubclass(hint, TensorDictBase)
    )
    return hinted or required[0].name in ("tensordict", "td")


def check_inputs(policy: Any, available: TensorDictBase, env: EnvBase) -> None:
    """Test at construction that the environment has what the policy reads.

    Raises:
        PolicyKeyError: an in_key of a TensorDict module is no entry of the environment.
    """
    if not isinstance(policy, TensorDictModuleBase):
        return
    own = {unravel(key) for key in policy.out_keys}  # what it writes itself, it can do without at first
    missing = [key for key in policy.in_keys if key not in own and available.get(key, None) is None]
    if missing:
        raise PolicyKeyError(
            f"policy: {type(policy).__name__} reads {key_str(missing)}, which {env} does not provide; it has "
            f"{key_str(available.keys(True, True))}. Change in_keys, or append a transform (such as TensorDictPrimer "
            "or InitTracker) that writes the entry."
        )


def accelerate(call: Call, options: CollectorOptions) -> tuple[Call, bool]:
    """The policy compiled and captured as the options say, and whether its outputs are fresh at each call."""
    fresh = True
    if options.compile_policy:
        arguments = options.compile_policy if isinstance(options.compile_policy, Mapping) else {}
        call = CompiledPolicy(call, arguments)
        fresh = False
    if options.cudagraph_policy:
        arguments = options.cudagraph_policy if isinstance(options.cudagraph_policy, Mapping) else {}
        call = cast(Call, CudaGraphModule(cast(Any, call), **arguments))
        fresh = False
    return call, fresh


class CompiledPolicy:
    """A policy through ``torch.compile``, which goes on uncompiled (with a warning) where that fails."""

    def __init__(self, policy: Call, arguments: Mapping[str, Any]) -> None:
        self._plain = policy
        self._call = torch.compile(policy, **arguments)
        self._proven = False

    def __call__(self, td: TensorDictBase) -> TensorDictBase | None:
        if self._proven:
            return self._call(td)
        before = td.copy()
        try:
            chosen = self._call(td)
        except Exception as error:
            # A wrong policy fails again below, with its own error and without the compiler's frames.
            chosen = self._plain(td.update(before))
            self._call = self._plain
            warnings.warn(
                f"compile_policy: the policy could not be compiled and runs uncompiled. {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}",
                stacklevel=2,
            )
        self._proven = True
        return chosen
