"""Transforms: changes to what environments return and to what they are given."""

from typing import TYPE_CHECKING

from rollwright._missing import missing_name
from rollwright.data.postprocs import Reward2GoTransform
from rollwright.data.replay_buffers.transforms import NextStateReconstructor, PolicyAgeFilter
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.bookkeeping import InitTracker, RewardSum, StepCounter
from rollwright.envs.transforms.compose import Compose
from rollwright.envs.transforms.entries.actions import ActionScaling
from rollwright.envs.transforms.entries.bounds import BinarizeReward, ClipTransform, RewardClipping, SignTransform
from rollwright.envs.transforms.entries.indices import CategoricalAction
from rollwright.envs.transforms.entries.joining import CatTensors
from rollwright.envs.transforms.entries.pixels import CenterCrop, GrayScale, Resize, ToTensorImage
from rollwright.envs.transforms.entries.renaming import RenameTransform
from rollwright.envs.transforms.entries.selection import ExcludeTransform, SelectTransform
from rollwright.envs.transforms.entries.shapes import FlattenObservation, SqueezeTransform, UnsqueezeTransform
from rollwright.envs.transforms.entries.vecnorm_v2 import VecNormV2
from rollwright.envs.transforms.episodes.lives import EndOfLifeTransform
from rollwright.envs.transforms.episodes.noops import NoopResetEnv
from rollwright.envs.transforms.episodes.pooling import TimeMaxPool
from rollwright.envs.transforms.episodes.skipping import FrameSkipTransform
from rollwright.envs.transforms.episodes.targets import TargetReturn
from rollwright.envs.transforms.episodes.truncation import RandomTruncationTransform
from rollwright.envs.transforms.forms.arrays import register_array_form
from rollwright.envs.transforms.frames import CatFrames
from rollwright.envs.transforms.masks import ActionMask
from rollwright.envs.transforms.primer import TensorDictPrimer
from rollwright.envs.transforms.recorder import VideoRecorder
from rollwright.envs.transforms.scaling import DoubleToFloat, ObservationNorm, RewardScaling
from rollwright.envs.transforms.transformed_env import TransformedEnv
from rollwright.envs.transforms.vecnorm import VecNorm

__all__ = [
    "ActionMask",
    "ActionScaling",
    "BinarizeReward",
    "CatFrames",
    "CatTensors",
    "CategoricalAction",
    "CenterCrop",
    "ClipTransform",
    "Compose",
    "DoubleToFloat",
    "EndOfLifeTransform",
    "ExcludeTransform",
    "FlattenObservation",
    "FrameSkipTransform",
    "GrayScale",
    "InitTracker",
    "NextStateReconstructor",
    "NoopResetEnv",
    "ObservationNorm",
    "PolicyAgeFilter",
    "RandomTruncationTransform",
    "RenameTransform",
    "Resize",
    "Reward2GoTransform",
    "RewardClipping",
    "RewardScaling",
    "RewardSum",
    "SelectTransform",
    "SignTransform",
    "SqueezeTransform",
    "StepCounter",
    "TargetReturn",
    "TensorDictPrimer",
    "TimeMaxPool",
    "ToTensorImage",
    "Transform",
    "TransformedEnv",
    "UnsqueezeTransform",
    "VecNorm",
    "VecNormV2",
    "VideoRecorder",
    "register_array_form",
]

if not TYPE_CHECKING:  # so that type checkers refuse names that are not above

    def __getattr__(name: str) -> object:
        raise missing_name(__name__, name)
