"""Rollout: one environment, one policy, one batch, and the loop that fills it."""

__all__: list[str] = []
