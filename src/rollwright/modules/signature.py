"""Plain modules as policies: wrapped by the names of their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from rollwright._keys import NestedKey, key_str
from rollwright.modules.functions import ActionForm, FunctionPolicy
from rollwright.modules.random_policy import RandomPolicy

if TYPE_CHECKING:
    from rollwright.envs.base import EnvBase

Call = Callable[[TensorDictBase], TensorDictBase | None]


class SignaturePolicy(TensorDictModuleBase):
    """A module whose ``forward`` takes entries of the environment by name, or the one entry that there is.

    Its outputs become ``action``, ``output1``, ``output2``…

    Args:
        module: called with the entries as keyword arguments; with one that is no argument's name, by position.
        in_keys: entries to read, which are also the names of the arguments.
        action_key: where the first output goes.
        by_position: pass the entries by position, whatever the arguments are called.
        form: turns the first output into an action; None: it is one.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        in_keys: Sequence[NestedKey],
        action_key: NestedKey,
        *,
        by_position: bool = False,
        form: ActionForm | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.in_keys = cast(Any, list(in_keys))
        self.out_keys = cast(Any, [action_key])
        self.by_position = by_position
        self.form = form

    def outputs(self, values: Sequence[Any], call: Callable[..., Any] | None = None) -> tuple[Any, ...]:
        """What the module, or ``call`` in its place, makes of the values of ``in_keys``."""
        made = self.returned(values, call)
        return made if self.form is None else (self.form(made[0]), *made[1:])

    def returned(self, values: Sequence[Any], call: Callable[..., Any] | None = None) -> tuple[Any, ...]:
        """As :meth:`outputs`, the first of them as the module returned it."""
        call = self.module if call is None else call
        named = {} if self.by_position else dict(zip(self.in_keys, values, strict=True))
        made = call(*([] if named else values), **named)
        return made if isinstance(made, tuple) else (made,)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Read, call, write; returns ``tensordict``."""
        outputs = self.outputs([tensordict.get(key) for key in self.in_keys])
        for i in range(len(self.out_keys), len(outputs)):
            self.out_keys.append(f"output{i}")
        for key, value in zip(self.out_keys, outputs, strict=True):
            tensordict.set(key, value)
        return tensordict


def speak_tensordict(policy: Any, env: EnvBase, *, strict: bool = True) -> Call:
    """``policy`` as a callable on TensorDicts: itself, or wrapped by the signature of its ``forward``.

    Args:
        policy: a callable on TensorDicts, or one whose arguments are entries of ``env``. Where the environment has one
            observation, the single argument of a function or module may have any name.
        env: whose entries count.
        strict: refuse a module whose arguments are no entries; if False, take it for one on TensorDicts.

    Raises:
        TypeError: arguments are no entries of the environment.
    """
    written = _before_compilation(policy)
    if isinstance(written, TensorDictModuleBase | RandomPolicy):
        return cast(Call, policy)
    is_module = isinstance(policy, nn.Module)
    parameters = _parameters(written.forward if is_module else policy)
    if parameters is None or _takes_tensordict(parameters):
        return cast(Call, policy)
    entries = {key for key in (*env.observation_keys, *env.state_keys) if isinstance(key, str)}
    names = [p.name for p in parameters if p.name in entries]
    required = _required(parameters)
    unknown = [p.name for p in required if p.name not in entries]
    if names and not unknown:
        _check_one_action(policy, env)
        form = None if is_module else ActionForm(env.full_action_spec[env.action_key])
        return SignaturePolicy(policy, names, env.action_key, form=form)
    observation = _one_observation(env)
    if len(required) == 1 and observation is not None and len(env.action_keys) == 1:
        if is_module and strict:
            return SignaturePolicy(policy, [observation], env.action_key, by_position=True)
        return FunctionPolicy(policy, required[0], observation, env)
    if is_module and not strict:
        return cast(Call, policy)
    near = get_close_matches(unknown[0], sorted(entries), 1, _NEAR) if unknown else []
    if not is_module and not near and len(required) < 2:  # a function of anything else is one of a TensorDict
        several = len(required) == 1 and observation is None and len(env.action_keys) == 1
        return FunctionPolicy(policy, required[0], None, env) if several else cast(Call, policy)
    what = f"{type(written).__name__}.forward" if is_module else getattr(policy, "__name__", type(policy).__name__)
    raise TypeError(
        f"policy: {what} takes ({', '.join(p.name for p in parameters)}), and the environment has the entries "
        f"({', '.join(sorted(entries))}).{f' Did you mean {near[0]!r}?' if near else ''} Name the arguments after "
        "entries, wrap it as TensorDictModule(module, in_keys=[...], out_keys=['action']), or pass trust_policy=True "
        "if it takes a TensorDict."
    )


def _before_compilation(policy: Any) -> Any:
    """The module that ``torch.compile`` was given, of what it returned; anything else as it is."""
    if not isinstance(policy, nn.Module):
        return policy
    children = dict(policy.named_children())
    return children["_orig_mod"] if list(children) == ["_orig_mod"] else policy


_NEAR = 0.8  # likeness of a name that is taken for a misspelt entry


def _check_one_action(policy: Any, env: EnvBase) -> None:
    if len(env.action_keys) != 1:
        raise TypeError(
            f"policy: {type(policy).__name__} is no TensorDict module, and the environment has several actions, "
            f"{key_str(env.action_keys)}. Wrap it as TensorDictModule(module, in_keys=[...], out_keys=[...])."
        )


def _one_observation(env: EnvBase) -> NestedKey | None:
    """The one observation of an environment; entries that transforms have added to it do not count, if it is left."""
    keys, inner = list(env.observation_keys), cast(Any, env)
    # That of a SerialEnv is a function, which calls those of its environments.
    while len(keys) > 1 and hasattr(getattr(inner, "base_env", None), "observation_keys"):
        inner = inner.base_env
        keys = [key for key in keys if key in inner.observation_keys]
    return keys[0] if len(keys) == 1 else None


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _parameters(call: Callable[..., Any]) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return None


def _required(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    return [p for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]


def _takes_tensordict(parameters: list[inspect.Parameter]) -> bool:
    required = _required(parameters)
    if len(required) != 1:
        return False
    hint = required[0].annotation
    hinted = (
        "TensorDict" in hint if isinstance(hint, str) else isinstance(hint, type) and issubclass(hint, TensorDictBase)
    )
    return hinted or required[0].name in ("tensordict", "td")
