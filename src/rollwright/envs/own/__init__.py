"""Environments that users write, on arrays (:mod:`.arrays`)."""

__all__: list[str] = []
