"""Transforms of single entries: their values, their shapes, their names."""

__all__: list[str] = []
