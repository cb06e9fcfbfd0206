"""Memory fences: the order of loads and stores in memory that processes share."""

from __future__ import annotations

import threading


def fence() -> None:
    """Keep loads and stores before this call before those after it, for all processes that see the memory."""
    # Stores and loads before a release stay before it, those after an acquire stay after it, and these two keep their
    # order; x86 needs no such thing, other processors do. A new lock each time: no interrupt can leave it half done.
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
