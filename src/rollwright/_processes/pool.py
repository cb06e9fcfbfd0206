"""Pool: connections to several processes, with messages, calls that wait for answers, losses, and shutdown."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from rollwright._interrupts import uninterrupted
from rollwright._processes.channel import ChannelClosed
from rollwright._processes.connection import NOTHING, Connection, ExceptionInfo, ExitReason, end_all

_NAP_S = 0.2
_EXIT_S = 1.0  # for a process to end that has closed its connection

Ready = list[tuple[int, int]]


class PendingCall:
    """A request to several processes, and their answers so far.

    Attributes:
        due: by place of the process: what was noted when it was asked; only of those that have not answered.
        answers: by place.
        losses: by place, of those that will not answer: why, and what was noted when they were asked.
    """

    __slots__ = ("answers", "due", "losses")

    def __init__(self) -> None:
        self.due: dict[int, Any] = {}
        self.answers: dict[int, Any] = {}
        self.losses: dict[int, tuple[ExitReason, Any]] = {}


class PendingCalls:
    """Calls by ticket, from the first message to the last answer.

    Example:
        >>> calls = PendingCalls()
        >>> ticket = calls.open()
        >>> calls.ask(ticket, 0)
        >>> calls.ask(ticket, 1)
        >>> calls.answer(ticket, 0, "yes")
        >>> calls.lose(1, ExitReason("was killed by SIGKILL"))
        >>> call = calls.close(ticket)
        >>> call.answers, call.losses[1][0].how
        ({0: 'yes'}, 'was killed by SIGKILL')
    """

    def __init__(self) -> None:
        self._open: dict[int, PendingCall] = {}
        self._last = 0

    def open(self, ticket: int | None = None) -> int:
        """Begin a call; its ticket, higher than all before, unless one is given."""
        if ticket is None:
            ticket = self._last = self._last + 1
        self._open[ticket] = PendingCall()
        return ticket

    def ask(self, ticket: int, place: int, note: Any = None) -> None:
        """A process is to answer."""
        self._open[ticket].due[place] = note

    def withdraw(self, ticket: int, place: int) -> None:
        """A process was not asked, after all."""
        self._open[ticket].due.pop(place, None)

    def answer(self, ticket: int, place: int, value: Any) -> None:
        """A process has answered; an answer that nobody waits for any more is dropped."""
        call = self._open.get(ticket)
        if call is not None and place in call.due:
            del call.due[place]
            call.answers[place] = value

    def lose(self, place: int, loss: ExitReason) -> None:
        """A process will not answer any more."""
        for call in self._open.values():
            if place in call.due:
                call.losses[place] = loss, call.due.pop(place)

    def __getitem__(self, ticket: int) -> PendingCall:
        return self._open[ticket]

    def tickets(self) -> list[int]:
        """Those that are open."""
        return list(self._open)

    def owes(self, place: int) -> bool:
        """Whether a process owes an answer."""
        return any(place in call.due for call in self._open.values())

    def close(self, ticket: int) -> PendingCall:
        """The call, whose answers are dropped from here on."""
        return self._open.pop(ticket)


class Answer(NamedTuple):
    """An answer to a call, see :class:`PendingCalls`."""

    ticket: int
    value: Any


class Ended(NamedTuple):
    """The end of a process that was asked to end.

    Attributes:
        how: ``"ended"``, ``"terminated"`` or ``"killed"``.
        failure: what it raised at its end.
    """

    how: str
    failure: ExceptionInfo | None


class _Watched(NamedTuple):
    place: int
    is_end: bool  # ready when the process has ended; otherwise, when a message has arrived


class Pool:
    """Places for processes, each with a connection, until it is lost; another may be added in its place.

    Nothing here waits but :meth:`select`, :meth:`run_once`, :meth:`flush` and :meth:`end`; they are used by one thread
    at a time. No message is taken by halves: Ctrl-C is held off until its handler has returned.

    Args:
        num_places: how many.
        received: takes each message, with the place of its sender; returns an :class:`Answer` if it is one.
        lost: takes the place of a process that has gone, and why; all that it owed is settled by then.
        flushed: takes the place of a process that can read more of what it was sent.
        only_answers: processes send nothing but answers, one to each call.

    Attributes:
        by_place: the connections; None: it was lost, or there never was one.
        calls: that processes were asked.
        num_messages: sent and received so far.
    """

    def __init__(
        self,
        num_places: int,
        received: Callable[[int, Any], Answer | None],
        *,
        lost: Callable[[int, ExitReason], None] | None = None,
        flushed: Callable[[int], None] | None = None,
        only_answers: bool = False,
    ) -> None:
        self._received, self._lost, self._flushed = received, lost, flushed
        self._only_answers = only_answers
        self.by_place: list[Connection | None] = [None] * num_places
        self._losses = [ExitReason("has ended")] * num_places
        self._failures: dict[int, ExceptionInfo | None] | None = None  # at the end: of those that have closed
        self._poll = select.poll()
        self._watched: dict[int, _Watched] = {}  # by file descriptor
        self._others: dict[int, Callable[[], None]] = {}
        self._pushes: list[Callable[[], None]] = []
        self.calls = PendingCalls()
        self.num_messages = 0

    def add(self, place: int, connection: Connection) -> None:
        """Let a connection be the one of a place."""
        self.by_place[place] = connection
        for index, fd in enumerate(connection.filenos()):
            self._poll.register(fd, select.POLLIN)
            self._watched[fd] = _Watched(place, index > 0)

    def watch(self, fd: int, ready: Callable[[], None], *, push: Callable[[], None] | None = None) -> None:
        """Let :meth:`select` wait for a file descriptor, too.

        Args:
            fd: the file descriptor.
            ready: called when it can be read.
            push: called by :meth:`push`.
        """
        self._poll.register(fd, select.POLLIN)
        self._others[fd] = ready
        if push is not None:
            self._pushes.append(push)

    def push(self) -> None:
        """Send what connections have kept in order to send it together; :meth:`select` does, before it waits."""
        for push in self._pushes:
            push()

    @property
    def connections(self) -> dict[int, Connection]:
        """Those that were not lost, by place."""
        return {place: connection for place, connection in enumerate(self.by_place) if connection is not None}

    # Messages ---------------------------------------------------------------------------------

    def send(self, place: int, message: Any) -> None:
        """Send a message, without waiting: what there is no room for goes in :meth:`run_once`.

        If the process is gone, what it was asked is settled, now or in :meth:`run_once`.
        """
        connection = self.by_place[place]
        if connection is None:
            self.calls.lose(place, self._losses[place])
            return
        try:
            connection.post(message)
            self.num_messages += 1
        except ChannelClosed:
            if connection.filenos()[0] < 0:  # closed on this side, as in a forked process: it cannot be waited for
                self._take_in(place, connection, ended=True)

    def select(self, timeout_s: float) -> Ready:
        """Wait until something is ready, or the time is over, for :meth:`dispatch`."""
        self.push()
        for connection in self.by_place:
            if connection is not None and connection.behind and (fd := connection.filenos()[0]) in self._watched:
                self._poll.register(fd, select.POLLIN | select.POLLOUT)
        return self._poll.poll(max(0.0, timeout_s) * 1e3)

    def dispatch(self, ready: Ready) -> None:
        """Take in all that is ready."""
        with uninterrupted:
            for fd, events in ready:
                if fd in self._others:
                    self._others[fd]()
                watched = self._watched.get(fd)
                connection = None if watched is None else self.by_place[watched.place]
                if watched is None or connection is None:
                    continue  # it was lost a moment ago
                if events & select.POLLOUT:
                    self._poll.register(fd, select.POLLIN)
                    with contextlib.suppress(ChannelClosed):  # seen below
                        connection.flush()
                    if self._flushed is not None:
                        self._flushed(watched.place)
                self._take_in(watched.place, connection, ended=watched.is_end)

    def run_once(self, timeout_s: float) -> bool:
        """Wait until something is ready, and take it in; False if the time is over before."""
        ready = self.select(timeout_s)
        self.dispatch(ready)
        return bool(ready)

    def read(self, place: int) -> None:
        """Take in what has arrived from one process."""
        connection = self.by_place[place]
        if connection is not None:
            with uninterrupted:
                self._take_in(place, connection, ended=False)

    def _take_in(self, place: int, connection: Connection, *, ended: bool) -> None:
        try:
            while self.by_place[place] is connection:  # a handler may have dropped it
                message = connection.take()
                if message is NOTHING:
                    break
                self.num_messages += 1
                if isinstance(message, ExceptionInfo):
                    self._lose(place, ExitReason("has failed", message))
                    return
                answer = self._received(place, message)
                if answer is not None:
                    self.calls.answer(answer.ticket, place, answer.value)
                    if self._only_answers and not ended and not self.calls.owes(place):
                        return  # there is nothing more to come
        except ChannelClosed:
            ended = True
        if ended and self.by_place[place] is connection:
            self._lose(place, None)

    def flush(self, timeout_s: float) -> None:
        """Wait until all messages are written; drop a process that does not read it in time."""
        until = time.monotonic() + timeout_s
        while self._behind() and (rest := until - time.monotonic()) > 0:
            self.run_once(rest)
        for place in self._behind():
            self.drop(place, "did not read what it was sent")

    def _behind(self) -> list[int]:
        return [place for place, connection in enumerate(self.by_place) if connection and connection.behind]

    # Losses -----------------------------------------------------------------------------------

    def drop(self, place: int, how: str) -> None:
        """Kill a process that is of no use, and settle what it was asked. Nothing is handed to ``lost``."""
        with uninterrupted:
            connection = self._forget(place)
            if connection is not None:
                connection.kill()
                end_all([connection], 1.0)
                self._losses[place] = ExitReason(how)
            self.calls.lose(place, self._losses[place])

    def stopped(self, limit_s: float) -> list[int]:
        """Places of processes that are known not to run for longer than this; to be asked now and then."""
        return [place for place, connection in self.connections.items() if connection.stopped_s() > limit_s]

    def _lose(self, place: int, loss: ExitReason | None) -> None:
        """A process has gone; without a loss, look how."""
        if self._failures is not None:  # it was asked to
            self._unwatch(place)
            self._failures[place] = None if loss is None else loss.failure
            return
        connection = self._forget(place)
        assert connection is not None
        end_all([connection], _EXIT_S)
        loss = self._losses[place] = loss or ExitReason(connection.how_it_ended())
        self.calls.lose(place, loss)
        if self._lost is not None:
            self._lost(place, loss)

    def _forget(self, place: int) -> Connection | None:
        self._unwatch(place)
        connection, self.by_place[place] = self.by_place[place], None
        return connection

    def _unwatch(self, place: int) -> None:
        for fd in [fd for fd, watched in self._watched.items() if watched.place == place]:
            self._poll.unregister(fd)
            del self._watched[fd]

    # The end ----------------------------------------------------------------------------------

    def end(self, until: Callable[[], float], *, hang_up: bool = False) -> dict[int, Ended]:
        """Wait until all processes have ended, and make those end that do not.

        What they send meanwhile is taken in. After an interrupt it may be called again, and goes on.

        Args:
            until: by ``time.monotonic()``, when they are made to end that have not closed their connection; asked again
                and again.
            hang_up: close all connections at once, which asks processes to end; otherwise the caller has asked them.

        Returns:
            By place: how it came to that.
        """
        self._failures = {} if self._failures is None else self._failures
        if hang_up:
            for place, connection in self.connections.items():
                self._unwatch(place)
                connection.close()
        left_s = until() - time.monotonic()
        while self._watched:
            self.run_once(min(left_s, _NAP_S))
            if left_s <= 0:
                break
            left_s = until() - time.monotonic()
        ending = self.connections
        for connection in ending.values():
            while (left_s := until() - time.monotonic()) > 0 and not connection.wait(min(left_s, _NAP_S)):
                pass
        closed = {place: connection for place, connection in ending.items() if place in self._failures}
        open_ = {place: connection for place, connection in ending.items() if place not in closed}
        unread = [place for place, connection in open_.items() if connection.behind]
        for place in unread:  # it cannot know that it is to end
            open_[place].kill()
        hows = dict(zip(open_, end_all(list(open_.values()), 0.0), strict=True)) | dict.fromkeys(unread, "killed")
        hows.update(zip(closed, end_all(list(closed.values()), max(_EXIT_S, left_s)), strict=True))
        found = {place: Ended(hows[place], self._failures.get(place)) for place in ending}
        self.forget_all()
        self._failures = None
        return found

    def forget_all(self) -> None:
        """Have nothing more to do with any process."""
        for place in self.connections:
            self._forget(place)
