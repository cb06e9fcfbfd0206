"""Transforms: changes to what environments return and to what they are given."""

from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.bookkeeping import InitTracker, RewardSum, StepCounter
from rollwright.envs.transforms.compose import Compose
from rollwright.envs.transforms.frames import CatFrames
from rollwright.envs.transforms.masks import ActionMask
from rollwright.envs.transforms.primer import TensorDictPrimer
from rollwright.envs.transforms.scaling import DoubleToFloat, ObservationNorm, RewardScaling
from rollwright.envs.transforms.transformed_env import TransformedEnv
from rollwright.envs.transforms.vecnorm import VecNorm

__all__ = [
    "ActionMask",
    "CatFrames",
    "Compose",
    "DoubleToFloat",
    "InitTracker",
    "ObservationNorm",
    "RewardScaling",
    "RewardSum",
    "StepCounter",
    "TensorDictPrimer",
    "Transform",
    "TransformedEnv",
    "VecNorm",
]
