"""Transforms that change how episodes begin, go on and end."""

__all__: list[str] = []
