"""Environments of other libraries where one of this library is expected."""

from __future__ import annotations

from typing import Any

from rollwright._foreign import is_torchrl_env
from rollwright.envs.base import EnvBase
from rollwright.envs.libs.torchrl import TorchRLWrapper

__all__ = ["as_env", "is_around", "is_env"]


def is_env(thing: Any) -> bool:
    """Whether an object is an environment, of this library or of one whose environments it takes."""
    return isinstance(thing, EnvBase) or is_torchrl_env(thing)


def as_env(thing: Any) -> Any:
    """An environment of another library as one of this library; anything else as it is."""
    return TorchRLWrapper(thing) if is_torchrl_env(thing) else thing


def is_around(env: Any, given: Any) -> bool:
    """Whether ``env`` is what was given, or what :func:`as_env` has made of it."""
    return env is given or (isinstance(env, TorchRLWrapper) and env.torchrl_env is given)
