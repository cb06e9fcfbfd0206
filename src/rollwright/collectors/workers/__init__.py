"""Workers: processes that collect, their supervision, and the delivery of their batches."""

__all__: list[str] = []
