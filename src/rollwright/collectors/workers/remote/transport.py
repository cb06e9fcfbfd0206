"""RemoteTransport: workers in groups on other machines, which join the collector over sockets."""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from rollwright._interrupts import uninterrupted
from rollwright._processes.channel import ChannelClosed
from rollwright._processes.connection import Connection
from rollwright._processes.forks import on_fork
from rollwright._processes.network.carrier import Carriers
from rollwright._processes.network.handshake import HandshakeRefused, IncomingHandshake
from rollwright._processes.network.line import Line
from rollwright._processes.network.reader import BackgroundReader
from rollwright.collectors.workers.remote import frames
from rollwright.collectors.workers.remote.launchers import Host, Launcher
from rollwright.collectors.workers.remote.link import Link
from rollwright.collectors.workers.transports.local import unsendable
from rollwright.collectors.workers.worker import WorkerSpec
from rollwright.weight_update.forwarding import Copies

__all__ = ["RemoteTransport"]

_BEAT_S = 0.5
_MOST_PENDING = 64
_END_S = 2.0


class RemoteTransport:
    """See :class:`~rollwright.collectors.workers.transports.transport.Transport`.

    Args:
        num_workers: of the collector.
        per_group: how many of them are in each group, in order.
        launcher: starts the groups.
        secret: that whoever joins must know.
        address: host and port to listen at; port 0: any that is free.
        host_timeout: seconds without a sign after which a group counts as lost.
        start_timeout: seconds for a group to join.
        step_timeout: of a worker's step: signs of life come often enough to see it; None: no limit.
        num_threads: of each worker; None: the cores of its machine, shared out.
        carriers: make what moves large memory beside the lines, given the address; None: the lines do.

    Attributes:
        address: where it listens.
        refused: why connections were refused, the last ones.
    """

    def __init__(
        self,
        num_workers: int,
        per_group: int,
        launcher: Launcher,
        *,
        secret: bytes,
        address: tuple[str, int] = ("127.0.0.1", 0),
        host_timeout: float = 30.0,
        start_timeout: float = 120.0,
        step_timeout: float | None = None,
        num_threads: int | None = None,
        carriers: Callable[[tuple[str, int]], Carriers] | None = None,
    ) -> None:
        self._per_group, self._launcher, self._secret = per_group, launcher, secret
        self._timeouts = {"host_timeout": host_timeout, "start_timeout": start_timeout}
        beat_s = min(_BEAT_S, host_timeout / 4, _BEAT_S if step_timeout is None else step_timeout / 4)
        self._begin = frames.Begin(
            num_workers, min(per_group, num_workers), beat_s, host_timeout, num_threads, tuple(sys.path)
        )
        self._poll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._links: dict[int, Link] = {}
        self._hosts: dict[int, Host] = {}
        self._former: list[Host] = []
        self._num_groups = -(-num_workers // per_group)
        self._pending: dict[int, IncomingHandshake] = {}
        self._early: dict[int, dict[str, Any]] = {}  # of those pending: they know the secret, and wait for a group
        self.refused: list[str] = []
        self._socket = socket.create_server(address, backlog=_MOST_PENDING)
        self._socket.setblocking(False)
        for close in (self._socket.close, self._poll.close):
            weakref.finalize(self, close).atexit = False
        self._lock = threading.RLock()
        on_fork(self)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._watch(self._socket.fileno(), self._accept)
        self._carriers = None if carriers is None else carriers(self.address)
        self._reader = BackgroundReader(self._poll.fileno(), self._take_in)

    def reset_after_fork(self) -> None:
        """In a forked child: the groups are those of its parent."""
        self._lock = threading.RLock()
        self._socket.close()
        for greeting in self._pending.values():
            greeting.end.close()
        self._readers.clear()
        self._poll.close()

    # Waiting ------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """See :class:`Transport`."""
        return -1 if self._poll.closed else self._poll.fileno()

    def read(self) -> None:
        """See :class:`Transport`."""
        self._reader.program_reads()
        self._take_in()

    def _take_in(self) -> None:
        with uninterrupted, self._lock:
            for fd, _ in self._poll.poll(0) if not self._poll.closed else ():
                if fd in self._readers:
                    self._readers[fd]()

    def push(self) -> None:
        """See :class:`Transport`."""
        with uninterrupted, self._lock:
            for link in self._links.values():
                link.push()

    def tend(self) -> None:
        """See :class:`Transport`."""
        with self._lock:
            self._tend()

    def _tend(self) -> None:
        now = time.monotonic()
        for fd, greeting in list(self._pending.items()):
            if now > greeting.expires_at and fd not in self._early:
                self._drop(fd, f"{_peer(greeting.end)} said nothing in time")
        for group, link in self._links.items():
            if link.lost is None:
                link.check()
                host = self._hosts.get(group)
                how = None if host is None else host.how_it_ended()
                if how is not None:
                    link.lose(how)

    def _watch(self, fd: int, read: Callable[[], None]) -> None:
        self._poll.register(fd, select.EPOLLIN)
        self._readers[fd] = read

    def _unwatch(self, fd: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(fd)
        self._readers.pop(fd, None)

    # Workers ------------------------------------------------------------------------------------------

    def connect(self, spec: WorkerSpec) -> Connection:
        """See :class:`Transport`."""
        group = spec.index // self._per_group
        with self._lock:
            link = self._links.get(group)
            if link is None or link.lost is not None:
                link = self._start(group)
        try:
            return link.launch(spec)
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise unsendable(spec, error) from error

    def _start(self, group: int) -> Link:
        """Have a group started."""
        if (before := self._hosts.pop(group, None)) is not None:
            self._former.append(before)
        if_lost = getattr(self._launcher, "if_lost", "")
        link = self._links[group] = Link(group, **self._timeouts, if_lost=if_lost)
        host = self._launcher.launch(group, self.address, self._secret)
        if host is not None:
            self._hosts[group] = host
            link.name = getattr(host, "name", link.name)
        early, self._early = self._early, {}
        for fd, about in early.items():
            self._admit(fd, about)
        return link

    def published(self) -> None:
        """See :class:`Transport`."""
        copies: Copies = {}
        for link in self._links.values():
            with contextlib.suppress(ChannelClosed):
                link.publish(copies)

    # Groups that join ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            while True:
                end, _ = self._socket.accept()
                if len(self._pending) >= _MOST_PENDING:
                    end.close()
                    continue
                greeting = IncomingHandshake(end, self._secret)
                fd = end.fileno()
                self._pending[fd] = greeting
                self._watch(fd, partial(self._greet, fd))

    def _greet(self, fd: int) -> None:
        greeting = self._pending[fd]
        if self._early.pop(fd, None) is not None:
            self._drop(fd, f"{_peer(greeting.end)} has hung up")
            return
        try:
            about = greeting.read()
            if about is not None:
                self._admit(fd, about)
        except (HandshakeRefused, ValueError, TypeError, AttributeError) as error:
            self._drop(fd, f"{_peer(greeting.end)}: {error}")

    def _admit(self, fd: int, about: dict[str, Any]) -> None:
        """Let in who has proved that it may, now or when the group is wanted."""
        greeting, wanted = self._pending[fd], about.get("group")
        free = [link for link in self._links.values() if link.lost is None and not link.is_joined]
        chosen = next((link for link in free if wanted in (None, link.index)), None)
        if chosen is None:
            for link in self._links.values():
                link.read()  # the end of one may have arrived, too
            if sum(link.lost is None for link in self._links.values()) + len(self._early) < self._num_groups:
                self._early[fd] = about  # the program is about to want the others, or one in place of a lost one
                return
            why = "all of its groups have been joined" if wanted is None else "that group was joined"
            try:
                greeting.refuse(why, for_now=True)  # the end of a host may be about to be seen
            except HandshakeRefused as error:
                self._drop(fd, f"{_peer(greeting.end)}: {error}")
            return
        del self._pending[fd]
        self._unwatch(fd)
        line, begin = Line(greeting.accept()), self._begin
        self._watch(line.fileno(), chosen.read)
        with contextlib.suppress(ChannelClosed, OSError):  # it has gone again, which the link finds out
            if self._carriers is not None:
                carrier, offer = self._carriers.open(chosen.index, line.hosts)
                line.use(carrier)
                begin = begin._replace(carrier=offer)
            chosen.join(line, str(about.get("name")), begin)

    def _drop(self, fd: int, why: str) -> None:
        greeting = self._pending.pop(fd)
        self._early.pop(fd, None)
        self._unwatch(fd)
        greeting.end.close()
        self.refused = [*self.refused[-9:], why]

    # The end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """See :class:`Transport`."""
        self._reader.stop()
        for link in self._links.values():
            link.close()
        for fd in list(self._pending):
            self._drop(fd, "the collector was shut down")
        self._socket.close()
        for host in (*self._hosts.values(), *self._former):
            host.end(_END_S)
        self._hosts.clear()
        self._former.clear()
        if self._carriers is not None:
            self._carriers.close()
        self._poll.close()


def _peer(end: socket.socket) -> str:
    with contextlib.suppress(OSError):
        return str(end.getpeername()[0])
    return "a connection"
