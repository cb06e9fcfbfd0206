"""Processes: starting them, talking to them, hearing what went wrong in them, ending them."""

__all__: list[str] = []
