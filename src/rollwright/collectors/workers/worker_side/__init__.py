"""What a worker process collects with."""

__all__: list[str] = []
