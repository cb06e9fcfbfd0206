"""Carrier: what moves the pieces of messages beside the socket of a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class CarrierFailed(ConnectionError):
    """Pieces of a message can no longer be moved; the message says by what, and why."""


class Carrier(Protocol):
    """One of two ends that move raw memory between them, in order. Nothing here waits.

    A line sends its messages over a socket, and large pieces of them over its carrier. Both ends of a line have one,
    which may take a while to be connected: until then the pieces are sent over the socket, too.

    Attributes:
        min_bytes: pieces of fewer bytes are sent over the socket.
        num_bytes_done: sent and received so far; it grows while large memory is on its way.
    """

    min_bytes: int
    num_bytes_done: int

    def fileno(self) -> int:
        """Ready to be read when something was sent or received, or has failed; until :meth:`read`."""

    def read(self) -> None:
        """Take note of what was sent and received.

        Raises:
            CarrierFailed: it could not be connected; or what was to be sent or received cannot be.
        """

    @property
    def is_connected(self) -> bool:
        """Whether the other end is reached."""

    def send(self, pieces: Sequence[memoryview]) -> None:
        """Send memory, which must not change before :attr:`num_bytes_unsent` is 0."""

    @property
    def num_bytes_unsent(self) -> int:
        """What was to be sent, and is not sent yet."""

    def receive(self, pieces: Sequence[memoryview]) -> None:
        """Write what the other end sends next into this memory."""

    @property
    def is_receiving(self) -> bool:
        """Whether something was to be received, and is not there yet."""

    def divert(self, is_meant: Callable[[int], bool]) -> None:
        """Write pieces of what is being received elsewhere, as far as they are to come: their memory is taken away.

        Args:
            is_meant: takes the number of a piece in the last :meth:`receive`; whether it is one of those.

        What is being written at this moment is waited for, for half a second at most; then everything is given up.
        """

    def close(self) -> None:
        """Give up what is to be sent and received: no memory is written or read any more. May be called again."""


class CarrierOffer(Protocol):
    """What the other end of a line needs for its carrier; it is pickled."""

    def open(self, hosts: tuple[str, str]) -> Carrier:
        """Connect the other end; nothing waits.

        Args:
            hosts: addresses of that end's machine and of the collector's, as the line has them.
        """


class Carriers(Protocol):
    """Makes the carriers of a collector's lines. Nothing here waits but :meth:`close`."""

    def open(self, group: int, hosts: tuple[str, str]) -> tuple[Carrier, CarrierOffer]:
        """A carrier to a group that has joined, and what that needs for its own.

        Args:
            group: its index.
            hosts: addresses of this end's machine and of the group's, as the line has them.
        """

    def close(self) -> None:
        """End what is beside the carriers, which are closed."""
