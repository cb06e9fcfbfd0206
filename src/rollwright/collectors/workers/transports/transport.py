"""Transport: how a collector starts its workers, and reaches them, on this machine or on others."""

from __future__ import annotations

from typing import Protocol

from rollwright._processes.connection import Connection
from rollwright.collectors.workers.worker import WorkerSpec


class Transport(Protocol):
    """Starts workers. Nothing here waits but :meth:`close`.

    A worker writes to the memory that its spec names, and reads published weights from there; a transport to another
    machine mirrors it.
    """

    def fileno(self) -> int:
        """A file descriptor to wait for until :meth:`read` has something to do; -1: there is none."""

    def read(self) -> None:
        """Take in what has arrived for several workers, and send what there is room for."""

    def push(self) -> None:
        """Send what was posted to workers, as far as there is room; whoever has posted, or waits, sees to it."""

    def tend(self) -> None:
        """Look after what needs no message, such as a silence; to be called now and then."""

    def connect(self, spec: WorkerSpec) -> Connection:
        """Start a worker, and return the connection to it.

        Raises:
            TypeError: a part of it cannot be pickled.
        """

    def published(self) -> None:
        """Weights were published in the memory that specs name."""

    def close(self) -> None:
        """End what is beside the workers, which have ended."""
