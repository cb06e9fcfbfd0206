"""Plain modules as policies: wrapped by the names of their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from rollwright._keys import NestedKey, key_str
from rollwright.modules.random_policy import RandomPolicy

if TYPE_CHECKING:
    from rollwright.envs.base import EnvBase

__all__ = ["Call", "SignaturePolicy", "speak_tensordict"]

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


def speak_tensordict(policy: Any, env: EnvBase, *, strict: bool = True) -> Call:
    """``policy`` as a callable on TensorDicts: itself, or wrapped by the signature of its ``forward``.

    Args:
        policy: a callable on TensorDicts, or a module whose arguments are entries of ``env``.
        env: whose entries count.
        strict: refuse a module whose arguments are no entries; if False, take it for one on TensorDicts.

    Raises:
        TypeError: a module's arguments are no entries of the environment.
    """
    if isinstance(policy, TensorDictModuleBase | RandomPolicy):
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
        if not is_module or not strict:
            return cast(Call, policy)  # a function of anything else is one of a TensorDict
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
