"""Environments: the base class, gymnasium and EnvPool, batches of them, transforms, conversations."""

from importlib import import_module
from typing import TYPE_CHECKING

from rollwright._missing import missing_name
from rollwright.envs import priming as priming  # registers policy=
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.async_pool import AsyncEnvPool
from rollwright.envs.batched.parallel import ParallelEnv
from rollwright.envs.factories import EnvCreator, env_creator
from rollwright.envs.libs import (
    BraxEnv,
    BraxWrapper,
    DMControlEnv,
    DMControlWrapper,
    EnvPoolEnv,
    GymEnv,
    GymnaxEnv,
    GymnaxWrapper,
    GymWrapper,
    PettingZooEnv,
    PettingZooWrapper,
    TorchRLWrapper,
    VmasEnv,
    VmasWrapper,
    default_info_dict_reader,
    gym_backend,
    set_gym_backend,
    to_torchrl,
)
from rollwright.envs.libs import torchrl_translation as torchrl_translation  # how TorchRLWrapper steps
from rollwright.envs.serial import SerialEnv
from rollwright.envs.transforms import (
    ActionMask,
    ActionScaling,
    BinarizeReward,
    CategoricalAction,
    CatFrames,
    CatTensors,
    CenterCrop,
    ClipTransform,
    Compose,
    DoubleToFloat,
    EndOfLifeTransform,
    ExcludeTransform,
    FlattenObservation,
    FrameSkipTransform,
    GrayScale,
    InitTracker,
    NoopResetEnv,
    ObservationNorm,
    RandomTruncationTransform,
    RenameTransform,
    Resize,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SelectTransform,
    SignTransform,
    SqueezeTransform,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TimeMaxPool,
    ToTensorImage,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
    VideoRecorder,
    register_array_form,
)
from rollwright.envs.utils import (
    ExplorationType,
    check_env_specs,
    exploration_type,
    make_composite_from_td,
    set_exploration_type,
    step_mdp,
)

if TYPE_CHECKING:
    from rollwright.envs.llm import ChatEnv, DatasetChatEnv, LLMEnv

__all__ = [
    "ActionMask",
    "ActionScaling",
    "AsyncEnvPool",
    "BinarizeReward",
    "BraxEnv",
    "BraxWrapper",
    "CatFrames",
    "CatTensors",
    "CategoricalAction",
    "CenterCrop",
    "ChatEnv",
    "ClipTransform",
    "Compose",
    "DMControlEnv",
    "DMControlWrapper",
    "DatasetChatEnv",
    "DoubleToFloat",
    "EndOfLifeTransform",
    "EnvBase",
    "EnvCreator",
    "EnvPoolEnv",
    "ExcludeTransform",
    "ExplorationType",
    "FlattenObservation",
    "FrameSkipTransform",
    "GrayScale",
    "GymEnv",
    "GymWrapper",
    "GymnaxEnv",
    "GymnaxWrapper",
    "InitTracker",
    "LLMEnv",
    "NoopResetEnv",
    "ObservationNorm",
    "ParallelEnv",
    "PettingZooEnv",
    "PettingZooWrapper",
    "RandomTruncationTransform",
    "RenameTransform",
    "Resize",
    "RewardClipping",
    "RewardScaling",
    "RewardSum",
    "SelectTransform",
    "SerialEnv",
    "SignTransform",
    "SqueezeTransform",
    "StepCounter",
    "TargetReturn",
    "TensorDictPrimer",
    "TimeMaxPool",
    "ToTensorImage",
    "TorchRLWrapper",
    "Transform",
    "TransformedEnv",
    "UnsqueezeTransform",
    "VecNorm",
    "VecNormV2",
    "VideoRecorder",
    "VmasEnv",
    "VmasWrapper",
    "check_env_specs",
    "default_info_dict_reader",
    "env_creator",
    "exploration_type",
    "gym_backend",
    "make_composite_from_td",
    "register_array_form",
    "set_exploration_type",
    "set_gym_backend",
    "step_mdp",
    "to_torchrl",
]

_CONVERSATIONS = ("ChatEnv", "DatasetChatEnv", "LLMEnv")  # imported when they are asked for

if not TYPE_CHECKING:  # so that type checkers refuse names that are not above

    def __getattr__(name: str) -> object:
        if name in _CONVERSATIONS:
            globals()[name] = getattr(import_module("rollwright.envs.llm"), name)
            return globals()[name]
        raise missing_name(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
