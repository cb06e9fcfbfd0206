"""Shared memory between a collector and its workers."""

__all__: list[str] = []
