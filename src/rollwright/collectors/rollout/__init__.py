"""One environment, one policy, one batch: the loop, and what it is made of."""

__all__: list[str] = []
