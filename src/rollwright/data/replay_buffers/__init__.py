"""Replay buffers: a storage, a writer that fills it, a sampler that reads it."""

from typing import TYPE_CHECKING

from rollwright._missing import missing_name
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.conditional import ConditionalUpdateResult
from rollwright.data.replay_buffers.ensemble import ReplayBufferEnsemble
from rollwright.data.replay_buffers.hindsight import HERReplayBuffer, HindsightStrategy
from rollwright.data.replay_buffers.kinds import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from rollwright.data.replay_buffers.limiter import SampleToInsertRatio
from rollwright.data.replay_buffers.samplers import *
from rollwright.data.replay_buffers.service.ray import RayReplayBuffer
from rollwright.data.replay_buffers.storages import *
from rollwright.data.replay_buffers.transforms import NextStateReconstructor, PolicyAgeFilter
from rollwright.data.replay_buffers.writers import (
    ImmutableDatasetWriter,
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)

__all__ = [
    "ConditionalUpdateResult",
    "ConsumingSampler",
    "Draw",
    "HERReplayBuffer",
    "HindsightStrategy",
    "ImmutableDatasetWriter",
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "NextStateReconstructor",
    "PolicyAgeFilter",
    "PrioritizedReplayBuffer",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RaggedStorage",
    "RandomSampler",
    "RayReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "RoundRobinWriter",
    "SampleToInsertRatio",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StalenessAwareSampler",
    "Storage",
    "TensorDictMaxValueWriter",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
    "TensorDictRoundRobinWriter",
    "TensorStorage",
    "Writer",
]

if not TYPE_CHECKING:  # so that type checkers refuse names that are not above

    def __getattr__(name: str) -> object:
        raise missing_name(__name__, name)
