"""What becomes of rollouts: batches, whole trajectories, frames in a replay buffer."""

__all__: list[str] = []
