"""Which positions of a ring of rows are reserved, written, published; between threads and processes."""

from rollwright.data.replay_buffers.ledger.counters import Reservation
from rollwright.data.replay_buffers.ledger.ledger import Ledger, Span

__all__ = ["Ledger", "Reservation", "Span"]
