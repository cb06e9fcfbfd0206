"""Workers: processes that collect, their supervision, and the delivery of their batches."""
