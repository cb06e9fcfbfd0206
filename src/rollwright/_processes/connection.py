"""Connection: the interface of a pool to one process; how processes end, errors that are sent, replacements."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import cloudpickle  # type: ignore[import-untyped]

from rollwright.errors import RemoteTraceback, WorkerError, text_of


@dataclass(frozen=True)
class ExceptionInfo:
    """An exception and its traceback, as text that can be sent.

    Attributes:
        kind: name of its class.
        text: its message.
        trace: the traceback, as Python prints it.
        pickled_kind: the class itself; None where it cannot be pickled.

    Example:
        >>> try:
        ...     raise KeyError("speed")
        ... except KeyError as error:
        ...     failure = ExceptionInfo.of(error)
        >>> raised = failure.error("worker 1")
        >>> str(raised), isinstance(raised, KeyError)
        ("worker 1: KeyError: 'speed'", True)
    """

    kind: str
    text: str
    trace: str
    pickled_kind: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> ExceptionInfo:
        """Take down an exception."""
        try:
            kind = cloudpickle.dumps(type(error))
        except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, RecursionError):
            kind = None
        trace = "".join(traceback.format_exception(error))
        return cls(type(error).__qualname__, text_of(error), trace, kind)

    def error(self, where: str, worker: int | None = None) -> WorkerError:
        """The exception to raise in another process.

        Args:
            where: what it happened in, the beginning of its message.
            worker: index of the worker.
        """
        error = _class_for(self._class())(f"{where}: {self.kind}: {self.text}")
        error.worker, error.remote_type = worker, self.kind
        error.__cause__ = RemoteTraceback(self.trace)
        return error

    def _class(self) -> Any:
        if self.pickled_kind is None:
            return None
        try:
            return pickle.loads(self.pickled_kind)
        except (pickle.UnpicklingError, AttributeError, ImportError, EOFError, TypeError, ValueError):
            return None


def _class_for(kind: Any) -> type[WorkerError]:
    """A class whose instances are caught as those of ``kind`` are, too."""
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(WorkerError, kind):
        return WorkerError
    try:
        made: Any = kind
        if not issubclass(kind, WorkerError):
            made = type(f"WorkerError({kind.__name__})", (WorkerError, kind), {"__init__": _plain, "__str__": _text})
        made("a trial")
    except Exception:  # a class of the user may refuse to be a base in any way it likes
        return WorkerError
    found: type[WorkerError] = made
    return found


def _plain(self: Exception, text: str) -> None:
    Exception.__init__(self, text)


def _text(self: Exception) -> str:
    return str(self.args[0])


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
    :class:`~rollwright._processes.connection.ExceptionInfo`. A process ends when its connection is closed.
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


class Heartbeats:
    """Watches a value of each process that changes as long as the process is not stuck.

    Time between two looks counts for half of a limit at most: this process may have been stopped, with those that it
    watches.

    Args:
        clock: seconds.

    Example:
        >>> now = 0.0
        >>> heartbeats = Heartbeats(lambda: now)
        >>> heartbeats.is_silent(0, "a value", 1.0)
        False
        >>> for now in (0.4, 0.8, 1.2):
        ...     silent = heartbeats.is_silent(0, "a value", 1.0)
        >>> silent
        True
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[int, tuple[Any, float, float]] = {}  # by place: value, since when, when it was looked at

    def begin(self, place: int) -> None:
        """The time of a process begins now."""
        self._last.pop(place, None)

    def is_silent(self, place: int, value: Any, limit_s: float | None, now: float | None = None) -> bool:
        """Whether a value has not changed for longer than the limit.

        Args:
            place: of the process.
            value: that it changes.
            limit_s: None: there is none at this time.
            now: by the clock of the process's machine, where that is another.
        """
        now = self._clock() if now is None else now
        last, since, looked_at = self._last.get(place, (value, now, now))
        if limit_s is None or value != last:
            since = now
        else:
            since += max(0.0, min(now - looked_at, now - since) - limit_s / 2)
        self._last[place] = value, since, now
        return limit_s is not None and now - since > limit_s


_LONGEST_S = 60.0
_HEALTHY = 10.0  # times the last delay


class RestartPolicy:
    """Decides on replacements, for each of several places.

    The first in a place comes after ``delay_s`` seconds, each further one after twice as long as the last, a minute at
    most. What was at work for more than ten times its last delay is taken to be healthy: if it fails after that, the
    delay is ``delay_s`` again.

    Args:
        most: replacements in one place.
        delay_s: before the first.
        in_a_row: ``most`` counts those without success in between; otherwise all.
        clock: seconds.

    Attributes:
        most: see above.
        counts: replacements of each place, as ``most`` counts them.

    Example:
        >>> policy = RestartPolicy(2, delay_s=0.1)
        >>> [policy.next_delay(0) for _ in range(3)]
        [0.1, 0.2, None]
    """

    def __init__(
        self,
        most: int,
        *,
        delay_s: float = 0.0,
        in_a_row: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most, self._delay_s, self._in_a_row, self._clock = most, delay_s, in_a_row, clock
        self.counts: dict[int, int] = {}
        self._delays: dict[int, float] = {}  # the last of each
        self._began: dict[int, float] = {}

    def began(self, place: int) -> None:
        """What is in a place is at work."""
        self._began[place] = self._clock()

    def succeeded(self, place: int) -> None:
        """What is in a place has done some work."""
        if self._in_a_row:
            self.counts.pop(place, None)

    def next_delay(self, place: int) -> float | None:
        """What was in a place has failed: seconds until it is replaced, which is counted; None: it is not."""
        count = self.counts.get(place, 0)
        if count >= self.most:
            return None
        self.counts[place] = count + 1
        last, began = self._delays.get(place), self._began.pop(place, None)
        healthy = last is None or (began is not None and self._clock() - began > _HEALTHY * last)
        self._delays[place] = self._delay_s if healthy or last is None else min(_LONGEST_S, 2 * last)
        return self._delays[place]
