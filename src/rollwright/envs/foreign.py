"""Names and environments of other libraries where one of this library is expected."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import gymnasium
from gymnasium.vector import VectorEnv
from torch import nn

from rollwright._foreign import (
    class_path,
    is_brax_env,
    is_dm_env,
    is_pettingzoo_env,
    is_torchrl_env,
    is_vmas_env,
    kind_in,
)
from rollwright.envs.base import EnvBase
from rollwright.envs.libs.building import check_registered
from rollwright.envs.libs.dm_control import DMControlWrapper
from rollwright.envs.libs.gym import GymEnv, GymWrapper
from rollwright.envs.libs.jax_envs import BraxWrapper
from rollwright.envs.libs.pettingzoo import PettingZooWrapper
from rollwright.envs.libs.torchrl import TorchRLWrapper
from rollwright.envs.libs.vector import BatchedEnv, is_batched
from rollwright.envs.libs.vmas import VmasWrapper


class _Library(NamedTuple):
    """How environments of another library are taken.

    Attributes:
        recognise: whether an object is one of them.
        wrap: makes one of this library of it.
        wrapper: class of what ``wrap`` returns.
        inside: attribute of it that holds the object.
    """

    recognise: Callable[[Any], bool]
    wrap: Callable[[Any], EnvBase]
    wrapper: type[EnvBase]
    inside: str


def _is_gymnasium_env(thing: Any) -> bool:
    return isinstance(thing, (gymnasium.Env, VectorEnv)) or is_batched(thing)


def _wrap_pettingzoo(env: Any) -> EnvBase:
    takes_turns = "ParallelEnv" not in kind_in("pettingzoo", env)
    return PettingZooWrapper(env, use_mask=takes_turns)


_LIBRARIES = (
    _Library(is_torchrl_env, TorchRLWrapper, TorchRLWrapper, "torchrl_env"),
    _Library(_is_gymnasium_env, partial(GymWrapper, categorical_action_encoding=True), GymWrapper, "gym_env"),
    _Library(is_dm_env, partial(DMControlWrapper, categorical_action_encoding=True), DMControlWrapper, "dm_env"),
    _Library(is_pettingzoo_env, _wrap_pettingzoo, PettingZooWrapper, "pettingzoo_env"),
    _Library(is_vmas_env, VmasWrapper, VmasWrapper, "vmas_env"),
    _Library(is_brax_env, BraxWrapper, BraxWrapper, "inner"),
)
_REMEDIES = {  # by the library of an object that cannot be taken
    "gymnax": "Say how many: GymnaxWrapper(env, params, num_envs=1024), or GymnaxEnv(env_name, num_envs=1024).",
    "gym": (
        "It is of the gym package, which gymnasium has replaced: make it with gymnasium.make(name), or put it into "
        "GymV26CompatibilityV0 of the shimmy package."
    ),
}


def _library_of(thing: Any) -> _Library | None:
    return next((library for library in _LIBRARIES if library.recognise(thing)), None)


def is_env(thing: Any) -> bool:
    """Whether an object is an environment, of this library or of one whose environments it takes."""
    return isinstance(thing, EnvBase) or _library_of(thing) is not None


def as_env(thing: Any) -> Any:
    """An environment of another library as one of this library; anything else as it is.

    Discrete actions are integers, as gymnasium and dm_env have them.
    """
    library = None if isinstance(thing, EnvBase) else _library_of(thing)
    return thing if library is None else library.wrap(thing)


def as_maker(thing: Any, *, registered: bool = True) -> Any:
    """The name of a registered environment as a function that makes it; anything else as :func:`as_env` has it.

    Args:
        thing: what a user gave.
        registered: names have to be registered in this process; False: they may be in another alone.

    Raises:
        EnvError: gymnasium knows no environment of the name.
        MissingExtraError: the package that registers it is not installed.
    """
    if not isinstance(thing, str):
        return as_env(thing)
    if registered:
        check_registered(thing)
    return partial(GymEnv, thing, categorical_action_encoding=True)


def check_maker(name: str, maker: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    """Test that a function or class can be called with these arguments alone.

    Args:
        name: of the argument that it was given as.
        maker: a function, a class or anything else, which passes.
        kwargs: what it will be called with.

    Raises:
        TypeError: it needs others, or does not take these.
    """
    if is_env(maker) or not callable(maker):
        return
    if isinstance(maker, nn.Module):
        raise TypeError(
            f"{name}: expected a function that makes an environment, got {class_path(maker)}, a module, which makes "
            "none. Put a transform around an environment: TransformedEnv(env, transform)."
        )
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(**(kwargs or {}))
    except TypeError as error:
        called = getattr(maker, "__name__", type(maker).__name__)
        around = isinstance(maker, type) and issubclass(maker, gymnasium.Wrapper)
        example = f"lambda: {called}({_EXAMPLE}, ...)" if around else f"lambda: {called}(...)"
        raise TypeError(
            f"{name}: {called}{signature} cannot be called with {_listed(kwargs)}: {error}. Pass {example} with its "
            "arguments, or create_env_kwargs=."
        ) from None


_EXAMPLE = "gymnasium.make('CartPole-v1')"


def _listed(kwargs: Mapping[str, Any] | None) -> str:
    return f"the arguments {', '.join(kwargs)}" if kwargs else "no arguments"


def makers_in(given: Any) -> list[Any] | None:
    """What is in a list of environments, names or functions; None: what was given is one of these itself."""
    return list(given) if isinstance(given, Sequence) and not isinstance(given, str) else None


def is_around(env: Any, given: Any) -> bool:
    """Whether ``env`` is what was given, or what :func:`as_env` has made of it."""
    if env is given:
        return True
    for library in _LIBRARIES:
        if isinstance(env, library.wrapper):
            inside = getattr(env, library.inside)
            return given is (inside.env if isinstance(inside, BatchedEnv) and given is not inside else inside)
    return False


def remedy_for(thing: Any) -> str:
    """What to do about an object that cannot be taken where it was given.

    An environment among them is one that cannot be where it was given, such as an instance for several workers.
    """
    remedy = _REMEDIES.get(type(thing).__module__.partition(".")[0])
    if remedy is not None:
        return remedy
    if is_env(thing):
        return f"Pass a function that makes it, for example lambda: {_making(thing)}."
    if isinstance(thing, type):
        return f"Pass an instance, or a function that makes one, as lambda: {thing.__name__}(...)."
    if thing is None:
        return "A function has to return the environment that it makes."
    return (
        "Pass a name such as 'CartPole-v1', lambda: GymEnv('CartPole-v1'), or a subclass of EnvBase with your "
        "environment in it."
    )


def _making(env: Any) -> str:
    """Code that makes an environment, as far as it can be known."""
    for library in _LIBRARIES:
        if isinstance(env, library.wrapper):
            env = getattr(env, library.inside)
    spec = getattr(env, "spec", None) if _is_gymnasium_env(env) else None
    if spec is not None and type(env).__module__.startswith("gymnasium."):
        return f"gymnasium.make({spec.id!r})"
    return f"{class_path(env).rpartition('.')[2]}(...)"
