"""Delivery of rollouts: as batches, as whole trajectories, or into a replay buffer."""
