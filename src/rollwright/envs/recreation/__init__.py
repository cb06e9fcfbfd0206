"""Environments that are recreated when they fail."""

__all__: list[str] = []
