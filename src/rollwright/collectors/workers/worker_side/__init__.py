"""The collector inside a worker process."""

__all__: list[str] = []
