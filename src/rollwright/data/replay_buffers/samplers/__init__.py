"""Samplers: which elements of a storage to draw, uniformly, by priority, or as slices of trajectories."""

from rollwright.data.replay_buffers.samplers.prioritized import PrioritizedSampler
from rollwright.data.replay_buffers.samplers.sampler import Draw, Sampler
from rollwright.data.replay_buffers.samplers.slices import (
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
)
from rollwright.data.replay_buffers.samplers.staleness import StalenessAwareSampler
from rollwright.data.replay_buffers.samplers.uniform import ConsumingSampler, RandomSampler, SamplerWithoutReplacement

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
