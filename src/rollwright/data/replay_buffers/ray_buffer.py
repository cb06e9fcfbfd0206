"""A replay buffer in an actor of Ray, at the path that programs of the field import."""

from rollwright.data.replay_buffers.service.ray import RayReplayBuffer

__all__ = ["RayReplayBuffer"]
