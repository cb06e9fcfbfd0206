"""Recognises objects of other libraries, none of which is imported for it."""

from __future__ import annotations

from typing import Any

__all__ = [
    "class_path",
    "foreign_transform",
    "is_brax_env",
    "is_dm_env",
    "is_gymnax_env",
    "is_pettingzoo_env",
    "is_torchrl_buffer",
    "is_torchrl_env",
    "is_torchrl_scheme",
    "is_torchrl_spec",
    "is_torchrl_transform",
    "is_vmas_env",
    "kind_in",
    "library_of_env",
    "overrides",
]

_HOOKS = ("transform_observation_spec", "transform_input_spec")


def class_path(thing: Any) -> str:
    """Module and name of the class of an object, for messages."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def foreign_transform(thing: Any) -> str | None:
    """The name of an object that is a transform of another library; None for ours, and for anything else.

    A function is called and no more. Such a transform does something at resets, to specs, or in the inverse, and if it
    was called it would do a part of it, or nothing, without an error.

    Args:
        thing: what is neither one of our transforms nor a type.
    """
    if isinstance(thing, type) or not any(callable(getattr(type(thing), hook, None)) for hook in _HOOKS):
        return None
    return class_path(thing)


def kind_in(library: str, thing: Any) -> list[str]:
    """Names of the classes of a library that an object is an instance of, the most derived first.

    Args:
        library: its top-level package, such as ``"torchrl"``; it is not imported.
        thing: any object; a class is an instance of none.
    """
    bases = type(thing).__mro__
    return [base.__name__ for base in bases if base.__module__.partition(".")[0] == library]


def is_brax_env(thing: Any) -> bool:
    """Whether an object is an environment of Brax, or one of MuJoCo Playground, which are used as these."""
    return "Env" in kind_in("brax", thing) or "MjxEnv" in kind_in("mujoco_playground", thing)


def is_gymnax_env(thing: Any) -> bool:
    """Whether an object is an environment of gymnax."""
    return "Environment" in kind_in("gymnax", thing)


def is_dm_env(thing: Any) -> bool:
    """Whether an object is an environment of dm_env, such as those of dm_control."""
    return "Environment" in kind_in("dm_env", thing)


def is_torchrl_env(thing: Any) -> bool:
    """Whether an object is an environment of TorchRL."""
    return "EnvBase" in kind_in("torchrl", thing)


def is_torchrl_scheme(thing: Any) -> bool:
    """Whether an object is TorchRL's way of sending weights."""
    return "WeightSyncScheme" in kind_in("torchrl", thing)


def is_torchrl_spec(thing: Any) -> bool:
    """Whether an object is a spec of TorchRL."""
    return "TensorSpec" in kind_in("torchrl", thing)


def is_torchrl_transform(thing: Any) -> bool:
    """Whether an object is a transform of TorchRL, or of a user's class derived from one."""
    return "Transform" in kind_in("torchrl", thing)


def overrides(transform: Any, *methods: str) -> bool:
    """Whether a transform of TorchRL, or one in a chain of them, has one of some methods of its own.

    Args:
        transform: the transform.
        methods: names of methods that all of TorchRL's transforms have.
    """
    kind = type(transform)
    known = [base for base in kind.__mro__ if base.__module__.startswith("torchrl.")]
    base = next(base for base in known if base.__name__ in ("Compose", "Transform"))
    if any(getattr(kind, name, None) is not getattr(base, name, None) for name in methods):
        return True
    return base.__name__ == "Compose" and any(overrides(part, *methods) for part in transform)


def is_torchrl_buffer(thing: Any) -> bool:
    """Whether an object is a replay buffer of TorchRL."""
    return "ReplayBuffer" in kind_in("torchrl", thing)


def is_pettingzoo_env(thing: Any) -> bool:
    """Whether an object is an environment of PettingZoo, of either kind."""
    return any(name in ("ParallelEnv", "AECEnv") for name in kind_in("pettingzoo", thing))


def is_vmas_env(thing: Any) -> bool:
    """Whether an object is an environment of VMAS."""
    return "Environment" in kind_in("vmas", thing)


def library_of_env(thing: Any) -> str:
    """The library whose environment an object is: ``"dm_env"``, ``"pettingzoo"``, ``"torchrl"``; else ``""``."""
    tests = {"dm_env": is_dm_env, "pettingzoo": is_pettingzoo_env, "torchrl": is_torchrl_env}
    return next((library for library, test in tests.items() if test(thing)), "")
