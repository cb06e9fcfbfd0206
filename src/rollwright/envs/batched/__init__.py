"""Batches of environments: stepped together, or each in its own time; in this process, in threads or in others."""

__all__: list[str] = []
