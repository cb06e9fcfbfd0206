"""Transforms: changes to what environments return and to what they are given."""

from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.bookkeeping import InitTracker, RewardSum, StepCounter
from rollwright.envs.transforms.compose import Compose
from rollwright.envs.transforms.entries.bounds import BinarizeReward, ClipTransform, RewardClipping, SignTransform
from rollwright.envs.transforms.entries.joining import CatTensors
from rollwright.envs.transforms.entries.pixels import CenterCrop, GrayScale, Resize, ToTensorImage
from rollwright.envs.transforms.entries.renaming import RenameTransform
from rollwright.envs.transforms.entries.selection import ExcludeTransform, SelectTransform
from rollwright.envs.transforms.entries.shapes import FlattenObservation, SqueezeTransform, UnsqueezeTransform
from rollwright.envs.transforms.frames import CatFrames
from rollwright.envs.transforms.masks import ActionMask
from rollwright.envs.transforms.primer import TensorDictPrimer
from rollwright.envs.transforms.scaling import DoubleToFloat, ObservationNorm, RewardScaling
from rollwright.envs.transforms.transformed_env import TransformedEnv
from rollwright.envs.transforms.vecnorm import VecNorm

__all__ = [
    "ActionMask",
    "BinarizeReward",
    "CatFrames",
    "CatTensors",
    "CenterCrop",
    "ClipTransform",
    "Compose",
    "DoubleToFloat",
    "ExcludeTransform",
    "FlattenObservation",
    "GrayScale",
    "InitTracker",
    "ObservationNorm",
    "RenameTransform",
    "Resize",
    "RewardClipping",
    "RewardScaling",
    "RewardSum",
    "SelectTransform",
    "SignTransform",
    "SqueezeTransform",
    "StepCounter",
    "TensorDictPrimer",
    "ToTensorImage",
    "Transform",
    "TransformedEnv",
    "UnsqueezeTransform",
    "VecNorm",
]
