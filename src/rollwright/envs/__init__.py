"""Environments: the base class, gymnasium and EnvPool, batches of them, transforms."""

from rollwright.envs import priming as priming  # registers policy=
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.envs.batched.parallel import ParallelEnv
from rollwright.envs.creator import EnvCreator, env_creator
from rollwright.envs.libs import (
    EnvPoolEnv,
    GymEnv,
    GymWrapper,
    default_info_dict_reader,
    gym_backend,
    set_gym_backend,
)
from rollwright.envs.serial import SerialEnv
from rollwright.envs.transforms import (
    ActionMask,
    CatFrames,
    Compose,
    DoubleToFloat,
    InitTracker,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    Transform,
    TransformedEnv,
    VecNorm,
)
from rollwright.envs.utils import (
    ExplorationType,
    check_env_specs,
    exploration_type,
    set_exploration_type,
    step_mdp,
)

__all__ = [
    "ActionMask",
    "AsyncEnvPool",
    "CatFrames",
    "Compose",
    "DoubleToFloat",
    "EnvBase",
    "EnvCreator",
    "EnvPoolEnv",
    "ExplorationType",
    "GymEnv",
    "GymWrapper",
    "InitTracker",
    "ObservationNorm",
    "ParallelEnv",
    "RewardScaling",
    "RewardSum",
    "SerialEnv",
    "StepCounter",
    "TensorDictPrimer",
    "Transform",
    "TransformedEnv",
    "VecNorm",
    "check_env_specs",
    "default_info_dict_reader",
    "env_creator",
    "exploration_type",
    "gym_backend",
    "set_exploration_type",
    "set_gym_backend",
    "step_mdp",
]
