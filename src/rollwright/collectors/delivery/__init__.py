"""Delivery of rollouts: as batches, as whole trajectories, or into a replay buffer."""

__all__: list[str] = []
