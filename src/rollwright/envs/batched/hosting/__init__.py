"""Processes that host environments: what they are sent, what they answer, and the memory that they share."""

__all__: list[str] = []
