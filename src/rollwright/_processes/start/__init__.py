"""How processes start: the fork server, what it imports, and the other methods."""

__all__: list[str] = []
