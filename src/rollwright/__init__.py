"""rollwright collects experience for reinforcement learning.

The names that most programs need are here: ``from rollwright import Collector, GymEnv, ReplayBuffer``. Each is imported
when it is first used; ``import rollwright`` alone imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from rollwright._missing import missing_name

if TYPE_CHECKING:
    from rollwright.collectors import Collector, Evaluator, MultiCollector
    from rollwright.data import (
        LazyMemmapStorage,
        LazyTensorStorage,
        ReplayBuffer,
        SliceSampler,
        TensorDictPrioritizedReplayBuffer,
        TensorDictReplayBuffer,
    )
    from rollwright.envs import (
        AsyncEnvPool,
        EnvBase,
        ExplorationType,
        GymEnv,
        GymWrapper,
        ParallelEnv,
        SerialEnv,
        TransformedEnv,
    )

__version__ = "0.1.0"
__all__ = [
    "AsyncEnvPool",
    "Collector",
    "EnvBase",
    "Evaluator",
    "ExplorationType",
    "GymEnv",
    "GymWrapper",
    "LazyMemmapStorage",
    "LazyTensorStorage",
    "MultiCollector",
    "ParallelEnv",
    "ReplayBuffer",
    "SerialEnv",
    "SliceSampler",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TransformedEnv",
    "__version__",
]

_PACKAGES = ("rollwright.data", "rollwright.envs", "rollwright.collectors")  # in the order of their imports

if not TYPE_CHECKING:  # so that type checkers refuse names that are not above

    def __getattr__(name: str) -> object:
        for package in map(import_module, _PACKAGES) if name in __all__ else ():
            if name in package.__all__:
                globals()[name] = getattr(package, name)
                return globals()[name]
        raise missing_name(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
