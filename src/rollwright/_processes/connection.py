"""Connection: the interface of a pool to one process, on this machine or another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from rollwright._processes.failures import ExceptionInfo

NOTHING: Final = object()
"""What :meth:`Connection.take` returns where no message has arrived."""

_TERMINATE_S = 1.0


class ExitReason(NamedTuple):
    """The reason why a process no longer answers.

    Attributes:
        how: a phrase, such as ``"was killed by SIGKILL"``.
        failure: what it raised, where it could send it.
    """

    how: str
    failure: ExceptionInfo | None = None


class Connection(Protocol):
    """A process to talk to: on this machine (:class:`~rollwright._processes.child.Child`), or on another.

    Messages are objects that can be pickled; they arrive in order. The last message of a process that has raised is a
    :class:`~rollwright._processes.failures.ExceptionInfo`. A process ends when its connection is closed.
    """

    @property
    def name(self) -> str:
        """For messages to users."""

    @property
    def pid(self) -> int | None:
        """Number of the process on its machine; None: not known."""

    @property
    def host(self) -> str | None:
        """Name of the machine that it runs on; None: this one."""

    def clock(self) -> float:
        """Of its machine, in seconds, when that was last heard of: it stands still while the machine is silent."""

    def filenos(self) -> tuple[int, ...]:
        """File descriptors to wait for until they can be read.

        The first is ready as long as :meth:`take` returns a message or raises, so at the end of the process, too.
        Others are ready when it has ended.
        """

    def post(self, message: Any) -> None:
        """Send a message without waiting; what there is no room for waits for :meth:`flush`.

        What belongs to others may be kept, in order to send it together, until the pool is to push or to wait.

        Raises:
            ChannelClosed: the process is gone.
        """

    @property
    def behind(self) -> bool:
        """Whether something was posted that there was no room for."""

    def flush(self) -> None:
        """Send what there was no room for, as far as there is now; the first descriptor can be written to then.

        Raises:
            ChannelClosed: the process is gone.
        """

    def take(self) -> Any:
        """The next message that has arrived, without waiting; :data:`NOTHING` if there is none.

        Raises:
            ChannelClosed: the process is gone, and all that it had sent was taken.
        """

    def close(self) -> None:
        """Close the connection, which the process takes for a request to end. May be called again."""

    def stopped_s(self) -> float:
        """For how long the process is known not to run, though it lives; to be asked now and then."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended; whether it has."""

    def terminate(self) -> None:
        """Make the process end, with time to clean up."""

    def kill(self) -> None:
        """Make the process end at once."""

    def how_it_ended(self) -> str:
        """A phrase for messages."""


def end_all(connections: Sequence[Connection], timeout_s: float) -> list[str]:
    """Wait until processes have ended, all in the time of one, and make those end that do not.

    Args:
        connections: to them; the caller has asked them to end.
        timeout_s: for them to end by themselves; then they are terminated, and killed a second later.

    Returns:
        ``"ended"``, ``"terminated"`` or ``"killed"`` for each.
    """
    hows = ["ended"] * len(connections)
    for index in _not_ended(connections, timeout_s):
        hows[index] = "terminated"
        connections[index].terminate()
    for index in _not_ended(connections, _TERMINATE_S):
        hows[index] = "killed"
        connections[index].kill()
    _not_ended(connections, _TERMINATE_S)
    for connection in connections:
        connection.close()
    return hows


def _not_ended(connections: Sequence[Connection], timeout_s: float) -> list[int]:
    """Indices of those that have not ended after a while."""
    until = time.monotonic() + timeout_s
    return [i for i, connection in enumerate(connections) if not connection.wait(until - time.monotonic())]
