"""Transforms in environments on arrays: a chain of array forms, and those that are called on TensorDicts in it."""

__all__: list[str] = []
