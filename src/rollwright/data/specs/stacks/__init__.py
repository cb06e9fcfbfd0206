"""Specs along a new dimension: one spec where they agree, a lazy stack where they do not."""

__all__: list[str] = []
