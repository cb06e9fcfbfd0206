"""Samplers: which elements of a storage to draw, uniformly, by priority, or as slices of trajectories."""

from rollwright.data.replay_buffers.samplers.base import Draw, RandomSampler, Sampler, SamplerWithoutReplacement
from rollwright.data.replay_buffers.samplers.consuming import ConsumingSampler
from rollwright.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from rollwright.data.replay_buffers.samplers.prioritized_slices import PrioritizedSliceSampler
from rollwright.data.replay_buffers.samplers.slices import SliceSampler, SliceSamplerWithoutReplacement
from rollwright.data.replay_buffers.samplers.staleness import StalenessAwareSampler

__all__ = [
    "ConsumingSampler",
    "Draw",
    "PrioritizedSampler",
    "PrioritizedSliceSampler",
    "RandomSampler",
    "Sampler",
    "SamplerWithoutReplacement",
    "SliceSampler",
    "SliceSamplerWithoutReplacement",
    "StalenessAwareSampler",
]
