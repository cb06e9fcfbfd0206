"""Collectors in processes of their own: what a worker does, how it is watched, and how its batches arrive."""

__all__: list[str] = []
