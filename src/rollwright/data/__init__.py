"""Data of frames: specs, the layout of trajectories, replay buffers, datasets."""

from typing import TYPE_CHECKING

from rollwright._missing import missing_name
from rollwright.data.compact import restore_next
from rollwright.data.layout import join_trajectories, split_trajectories, trajectories
from rollwright.data.llm.history import History
from rollwright.data.postprocs import DensifyReward, MultiStep, RewardToGo, gae
from rollwright.data.replay_buffers import *
from rollwright.data.specs import *
from rollwright.data.tensor_specs import CategoricalBox, ContinuousBox

__all__ = [
    "Binary",
    "Bounded",
    "BoundedContinuous",
    "BoundedDiscrete",
    "Categorical",
    "CategoricalBox",
    "Composite",
    "ConditionalUpdateResult",
    "ConsumingSampler",
    "ContinuousBox",
    "DensifyReward",
    "HERReplayBuffer",
    "HindsightStrategy",
    "History",
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "MultiCategorical",
    "MultiOneHot",
    "MultiStep",
    "NextStateReconstructor",
    "NonTensor",
    "OneHot",
    "PolicyAgeFilter",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RaggedStorage",
    "RandomSampler",
    "RayReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "RewardToGo",
    "RoundRobinWriter",
    "SampleToInsertRatio",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "Stacked",
    "StackedComposite",
    "StalenessAwareSampler",
    "Storage",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorSpec",
    "TensorStorage",
    "Unbounded",
    "UnboundedContinuous",
    "UnboundedDiscrete",
    "Writer",
    "from_gym_space",
    "from_torchrl",
    "gae",
    "join_trajectories",
    "restore_next",
    "split_trajectories",
    "stack",
    "to_gym_space",
    "to_gym_value",
    "to_torchrl",
    "trajectories",
]

if not TYPE_CHECKING:  # so that type checkers refuse names that are not above

    def __getattr__(name: str) -> object:
        raise missing_name(__name__, name)
