"""What runs in the process of a replay service: its server, the buffer behind it, and what outlives a kill."""

__all__: list[str] = []
