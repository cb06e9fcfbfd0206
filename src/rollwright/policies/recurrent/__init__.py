"""Recurrent modules as nodes of a policy on arrays."""

__all__: list[str] = []
