"""ServiceConnection: the requests of one process to a replay service, each carried out once."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollwright._interrupts import uninterrupted
from rollwright._processes.channel import ChannelClosed
from rollwright._processes.connection import ExceptionInfo
from rollwright._processes.forks import on_fork
from rollwright._processes.network.channel import MessageForged, NetworkChannel
from rollwright._processes.network.handshake import HandshakeRefused, connect_to
from rollwright._processes.threads import DaemonThread
from rollwright._warnings import warn_user
from rollwright.data.replay_buffers.service.messages import (
    Counts,
    Reply,
    Request,
    ReusedMemory,
    WriterName,
    pack,
    unpack,
)
from rollwright.errors import ServiceLostError, WorkerError

_LOOK_S = 0.2
_REFUSED_S = 2.0  # that nothing listens, before the service counts as gone
_AGAIN_S = 0.05
_LISTENS_S = 0.2


class Target(NamedTuple):
    """How to reach a replay service.

    Attributes:
        address: host and port.
        secret: of its run.
        host_timeout: seconds without a sign of it, after which it counts as lost.
        comes_back: whether it is started again when it dies.
    """

    address: tuple[str, int]
    secret: bytes
    host_timeout: float
    comes_back: bool

    @property
    def name(self) -> str:
        """For messages."""
        return f"the replay service at {self.address[0]}:{self.address[1]}"


@dataclass(eq=False)
class Expected:
    """A request that has no reply yet.

    Attributes:
        number: of the request.
        done: set when there is a reply, or an error.
        value: what came of it.
        error: what is to be raised.
    """

    number: int
    what: str
    body: bytes
    pieces: Sequence[memoryview]
    done: threading.Event
    value: Any = None
    error: Exception | None = None


class ServiceConnection:
    """Sends requests to a replay service, each once, and takes in the replies, in a thread.

    It connects when the first request is made, and again when the connection breaks; what has no reply is sent again
    then, with its number, by which the service knows what it has done already.

    Args:
        target: the service.
        writer: whose writes these are, where the writer may be given up.
        is_owner: whether the service reports what it holds.
        revive: called in the thread when a connection breaks or cannot be made; whether it has started the service
            again. It raises what is to be raised if the service is gone for good.

    Attributes:
        notes: warnings for whoever asks next.
        is_closed: whether :meth:`close` was called.
        counts: what the service holds, as it has last reported.
        num_connections: made so far.
    """

    def __init__(
        self,
        target: Target,
        writer: WriterName | None = None,
        *,
        is_owner: bool = False,
        revive: Callable[[], bool] | None = None,
    ) -> None:
        self.target, self._writer, self._is_owner, self._revive = target, writer, is_owner, revive
        self.client_id = uuid.uuid4().hex if writer is None else f"{writer.name}#{writer.generation}"
        self._begin()
        on_fork(self)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._expected: dict[int, Expected] = {}
        self._next_number = 1
        self._channel: NetworkChannel | None = None
        self._thread: _Reader | None = None
        self.is_closed = self._was_connected = False
        self._broken: Exception | None = None
        self._heard_at = 0.0
        self._memory = ReusedMemory()
        self.notes: list[str] = []
        self.counts: Counts | None = None
        self.num_connections = 0

    def reset_after_fork(self) -> None:
        """In a forked child: what was asked is the parent's; this process connects by itself."""
        self._begin()
        self.client_id = f"{self.client_id}/{os.getpid()}"
        self._is_owner, self._revive = False, None

    # Requests -----------------------------------------------------------------------------------------

    def ask(self, what: str, *args: Any, noted: Callable[[int], None] | None = None, **options: Any) -> Any:
        """Have the service do something, and wait for what comes of it.

        Args:
            what: see :class:`Request`.
            args: for it.
            noted: called with the number of the request, before it is sent.
            options: arguments by name.

        Raises:
            WorkerError: it raised there, also as an instance of the class of that exception.
            ConnectionError, TimeoutError: the service is gone, or does not answer.
        """
        return self.result(self.post(what, *args, noted=noted, **options))

    def post(self, what: str, *args: Any, noted: Callable[[int], None] | None = None, **options: Any) -> Expected:
        """Have the service do something, without waiting for it."""
        body, pieces = pack((args, options))
        with uninterrupted, self._lock:
            if self.is_closed:
                raise RuntimeError(f"{self.target.name} was shut down.")
            if self._broken is not None:
                raise self._broken
            number, self._next_number = self._next_number, self._next_number + 1
            if noted is not None:
                noted(number)
            expected = self._expected[number] = Expected(number, what, body, pieces, threading.Event())
            if self._channel is not None:
                self._send(expected)
            self._run()
        return expected

    def result(self, expected: Expected, meanwhile: Callable[[], Any] | None = None) -> Any:
        """Wait for what comes of a request.

        Args:
            expected: of :meth:`post`.
            meanwhile: called now and then while it takes long; what it raises ends the wait.
        """
        try:
            while not expected.done.wait(_LOOK_S):
                if meanwhile is not None:
                    meanwhile()
                self._look()
        except BaseException:
            self.abandon(expected)
            raise
        while self.notes:
            warn_user(self.notes.pop(0), RuntimeWarning)
        if expected.error is not None:
            raise expected.error
        return expected.value

    def _look(self) -> None:
        thread = self._thread
        if thread is not None and not thread.running:
            self.fail(RuntimeError(f"{self.target.name}: its connection has ended with this process."))

    def abandon(self, expected: Expected) -> None:
        """Nobody waits for a request any more; the memory of its arguments may change from now on."""
        with self._lock:
            if (
                self._expected.pop(expected.number, None) is not None
                and self._channel is not None
                and self._channel.behind
            ):
                self._channel.cut()  # what was sent of it is dropped there
                self._channel = None
        if not self.is_closed and not expected.done.is_set() and expected.what == "draw_batch":
            self.post("cancel", expected.number)

    def _send(self, expected: Expected) -> None:
        received = min(self._expected, default=expected.number)
        with contextlib.suppress(ChannelClosed):  # the thread finds out
            if self._channel is not None:
                self._channel.post(Request(expected.number, received, expected.what, expected.body), expected.pieces)

    def fail(self, error: Exception, *, for_good: bool = False) -> None:
        """Nothing that was asked will be answered; ``for_good``: nor what is asked later."""
        with self._lock:
            if for_good:
                self._broken = error
            expected, self._expected = self._expected, {}
            for each in expected.values():
                each.error = error
                each.done.set()

    def keep_connected(self) -> None:
        """Connect now, and look after the connection though nothing is asked."""
        with self._lock:
            self._run()

    def _run(self) -> None:
        if self._thread is None or not self._thread.running:
            self._thread = _Reader(self)
            self._thread.start()

    def close(self) -> None:
        """Close the connection; what waits for a reply raises."""
        with self._lock:
            self.is_closed = True
            thread, channel, self._channel = self._thread, self._channel, None
        if channel is not None:
            channel.cut()
        self.fail(RuntimeError(f"{self.target.name} was shut down."))
        if thread is not None:
            thread.stop(1.0)

    # The connection, in the thread --------------------------------------------------------------------

    def serve(self, stopping: Callable[[], bool]) -> None:
        """Connect, take in replies, and connect again when that breaks, until the service is gone."""
        broke_at = listened_at = time.monotonic()
        while not stopping() and not self.is_closed:
            why = self._serve_once(stopping)
            if why is None or stopping() or self.is_closed:
                return
            now = time.monotonic()
            if self._was_connected:
                broke_at = now
            if self._was_connected or not isinstance(why, ConnectionRefusedError):
                listened_at = now
            try:
                if _is_refused_for_good(why):
                    raise _gone(self.target, why)
                if self._revive is not None and self._revive():
                    broke_at = listened_at = time.monotonic()
                    continue
                is_dead = not self.target.comes_back and now - listened_at > _REFUSED_S
                if is_dead or now - broke_at > self.target.host_timeout:
                    raise _gone(self.target, why)
            except Exception as error:
                self.fail(error, for_good=self._revive is not None or isinstance(why, MessageForged))
                return
            if not self._was_connected:
                time.sleep(_AGAIN_S)

    def _serve_once(self, stopping: Callable[[], bool]) -> Exception | None:
        """Why the connection has broken, or could not be made; None: it was closed here."""
        self._was_connected = False
        try:
            self._connect()
            self._take_in(stopping)
        except (ChannelClosed, HandshakeRefused, OSError) as error:
            return error
        return None

    def _connect(self) -> None:
        about = {"client": self.client_id, "owner": self._is_owner, "writer": self._writer}
        target = self.target
        channel = connect_to(
            target.address,
            target.secret,
            about,
            target.host_timeout,
            listens_within_s=_LISTENS_S,
            role="replay service",
        )
        channel.give_up_after(target.host_timeout)
        with uninterrupted, self._lock:
            if self.is_closed:
                channel.close()
                return
            self._channel, self._was_connected = channel, True
            self.num_connections += 1
            for number in sorted(self._expected):
                self._send(self._expected[number])

    def _take_in(self, stopping: Callable[[], bool]) -> None:
        channel = self._channel
        if channel is None:
            return
        poll, self._heard_at = select.poll(), time.monotonic()
        try:
            poll.register(channel.fileno(), select.POLLIN)
            while not stopping() and not self.is_closed:
                if poll.poll(_LOOK_S * 1e3):
                    channel.read(lambda message, sizes: self._memory(sizes), self._received)
                elif time.monotonic() - self._heard_at > self.target.host_timeout:
                    silent = f"has given no sign for host_timeout={self.target.host_timeout:g} s"
                    self.fail(TimeoutError(f"{self.target.name} {silent}."))
                    return
                if channel.fileno() < 0:
                    raise ChannelClosed("the connection was closed")
        except MessageForged:
            raise
        except (OSError, ValueError) as error:  # another thread has closed the channel
            raise ChannelClosed(str(error)) from error
        finally:
            with self._lock:
                self._channel = None
            channel.close()

    def _received(self, message: Any, pieces: Sequence[memoryview]) -> None:
        self._heard_at = time.monotonic()
        match message:
            case Reply(number, body, failure):
                with self._lock:
                    expected = self._expected.pop(number, None)
                if expected is not None:
                    _settle(expected, self.target, body, failure, pieces)
            case ExceptionInfo():  # what it was sent is not what has arrived
                self.fail(message.error(self.target.name), for_good=True)
            case Counts():
                before, self.counts = self.counts, message
                if before is not None and before.dump_failure is None and message.dump_failure is not None:
                    self.notes.append(_unsaved(self.target, message.dump_failure))

    def cut(self) -> None:
        """Break the connection, as a network may: the next one takes its place."""
        with self._lock:
            if self._channel is not None:
                self._channel.cut()


def _settle(
    expected: Expected, target: Target, body: bytes, failure: ExceptionInfo | None, pieces: Sequence[memoryview]
) -> None:
    try:
        if failure is not None:
            expected.error = failure.error(target.name)
        else:
            expected.value = unpack(body, pieces)
    except Exception as error:
        expected.error = error
    expected.done.set()


def _unsaved(target: Target, why: str) -> str:
    return (
        f"{target.name} could not save its buffer: {why}. What it holds is in memory, and the last dump is as it was. "
        "It tries again, after longer and longer pauses; until that succeeds, stats()['dump_failure'] says why, and "
        "shutdown() raises. Free space on the disk, or call dumps() with a folder on another one."
    )


def _is_refused_for_good(why: Exception) -> bool:
    if isinstance(why, MessageForged):
        return True
    return isinstance(why, HandshakeRefused) and any(word in str(why) for word in ("given up", "secret", "versions"))


def _gone(target: Target, why: Exception) -> WorkerError:
    if _is_refused_for_good(why):
        error = WorkerError(f"{target.name} cannot be used: {why}")
    else:
        how = "nothing listens there." if isinstance(why, ConnectionRefusedError) else str(why)
        lost = "It may have ended or been killed; what it had not acknowledged was not stored."
        error = ServiceLostError(f"{target.name} is gone: {how} {lost}")
    error.__cause__ = why
    return error


class _Reader(DaemonThread):
    """Takes in what the service sends."""

    def __init__(self, connection: ServiceConnection) -> None:
        super().__init__("rollwright-replay")
        self._connection = connection

    def _work(self) -> None:
        self._connection.serve(lambda: self.stopping)
