"""Processes that host environments: their messages and the memory that they share."""

__all__: list[str] = []
