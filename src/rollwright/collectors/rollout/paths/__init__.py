"""Execution paths: how the steps of a rollout are taken, on TensorDicts or on arrays."""

__all__: list[str] = []
