"""Replay buffers, at the path that programs of the field import."""

from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.ensemble import ReplayBufferEnsemble
from rollwright.data.replay_buffers.kinds import (
    PrioritizedReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

__all__ = [
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "ReplayBufferEnsemble",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
]
