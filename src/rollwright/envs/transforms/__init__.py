"""Transforms: changes to what environments return and to what they are given."""

from typing import TYPE_CHECKING

from rollwright._missing import missing_name
from rollwright.data.postprocs import Reward2GoTransform
from rollwright.data.replay_buffers.transforms import NextStateReconstructor, PolicyAgeFilter
from rollwright.envs.transforms.actions import ActionMask, ActionScaling, CategoricalAction
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.bookkeeping import InitTracker, RewardSum, StepCounter, TargetReturn
from rollwright.envs.transforms.compose import Compose
from rollwright.envs.transforms.entries import (
    CatTensors,
    ExcludeTransform,
    FlattenObservation,
    RenameTransform,
    SelectTransform,
    SqueezeTransform,
    UnsqueezeTransform,
)
from rollwright.envs.transforms.episodes import (
    EndOfLifeTransform,
    FrameSkipTransform,
    NoopResetEnv,
    RandomTruncationTransform,
)
from rollwright.envs.transforms.forms import register_array_form
from rollwright.envs.transforms.frames import CatFrames, TimeMaxPool
from rollwright.envs.transforms.images import CenterCrop, GrayScale, Resize, ToTensorImage, VideoRecorder
from rollwright.envs.transforms.primer import TensorDictPrimer
from rollwright.envs.transforms.transformed_env import TransformedEnv
from rollwright.envs.transforms.values import (
    BinarizeReward,
    ClipTransform,
    DoubleToFloat,
    ObservationNorm,
    RewardClipping,
    RewardScaling,
    SignTransform,
)
from rollwright.envs.transforms.vecnorm import VecNorm, VecNormV2

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
