"""Execution paths of conversations: turns of an engine, and rows of an environment on TensorDicts."""

__all__: list[str] = []
