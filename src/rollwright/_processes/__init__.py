"""Processes: start, messages, errors, end."""

__all__: list[str] = []
