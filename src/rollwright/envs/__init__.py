"""Environments: the base class, gymnasium and EnvPool, batches of them, transforms, conversations."""

from importlib import import_module
from typing import TYPE_CHECKING

from rollwright._missing import missing_name
from rollwright.envs import libs, transforms, utils
from rollwright.envs import priming as priming  # registers policy=
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.envs.batched.parallel import ParallelEnv
from rollwright.envs.factories import EnvCreator, env_creator
from rollwright.envs.libs import *  # noqa: F403 - all of its __all__
from rollwright.envs.libs import torchrl_translation as torchrl_translation  # how TorchRLWrapper steps
from rollwright.envs.serial import SerialEnv
from rollwright.envs.transforms import *  # noqa: F403 - all of its __all__
from rollwright.envs.utils import *  # noqa: F403 - all of its __all__

if TYPE_CHECKING:
    from rollwright.envs.llm import ChatEnv, DatasetChatEnv, LLMEnv

__all__ = [
    "AsyncEnvPool",
    "ChatEnv",
    "DatasetChatEnv",
    "EnvBase",
    "EnvCreator",
    "LLMEnv",
    "ParallelEnv",
    "SerialEnv",
    "env_creator",
]
__all__ += libs.__all__
__all__ += transforms.__all__
__all__ += utils.__all__
__all__.sort()

_CONVERSATIONS = ("ChatEnv", "DatasetChatEnv", "LLMEnv")  # imported when they are asked for

if not TYPE_CHECKING:  # so that type checkers refuse names that are not above

    def __getattr__(name: str) -> object:
        if name in _CONVERSATIONS:
            globals()[name] = getattr(import_module("rollwright.envs.llm"), name)
            return globals()[name]
        raise missing_name(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
