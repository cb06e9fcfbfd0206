"""RemoteTransport: workers in groups on other machines, which join the collector over sockets."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from rollwright._interrupts import uninterrupted
from rollwright._options import check_fields, seconds, whole
from rollwright._processes.channel import Channel, ChannelClosed
from rollwright._processes.child import Child
from rollwright._processes.connection import Connection, ExceptionInfo, end_all
from rollwright._processes.forks import on_fork
from rollwright._processes.network.channel import BackgroundReader
from rollwright._processes.network.handshake import HandshakeRefused, IncomingHandshake, Listener, parse_address
from rollwright.collectors.workers.remote import frames
from rollwright.collectors.workers.remote.connection import GroupConnection
from rollwright.collectors.workers.remote.group import join
from rollwright.collectors.workers.transports import Transport, unsendable
from rollwright.collectors.workers.worker import WorkerSpec
from rollwright.weight_update.subscribing import Copies

if TYPE_CHECKING:
    from rollwright.collectors.workers.options import WorkerOptions


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Options of backends whose workers run in groups, each on some machine.

    Attributes:
        num_workers_per_collector: workers in each group: ``num_collectors`` counts the groups. What a group's workers
            collect crosses the network by one connection, and weights cross it once for all of them.
        host_timeout: seconds without a sign of life after which a group counts as lost, with its workers. A shorter
            silence costs time only.
    """

    num_workers_per_collector: Annotated[int, whole(1)] = 1
    host_timeout: Annotated[float, seconds(positive=True)] = 30.0

    def __post_init__(self) -> None:
        check_fields(self)


class Host(Protocol):
    """A process that was started to run a remote group."""

    def how_it_ended(self) -> str | None:
        """A phrase; None: it runs, as far as is known. To be asked now and then: it does not wait."""

    def end(self, timeout_s: float) -> None:
        """Make it end, if it has not ended by itself within a while."""


class GoneHost:
    """In place of a host that nothing can be started for.

    Args:
        how: why, as a phrase.
    """

    def __init__(self, how: str) -> None:
        self._how = how

    def how_it_ended(self) -> str:
        """A phrase."""
        return self._how

    def end(self, timeout_s: float) -> None:
        """There is nothing to end."""


class Launcher(Protocol):
    """Starts hosts. Nothing here waits. It may have a ``close()``, which is called after the end of all hosts."""

    def launch(self, group: int, address: tuple[str, int], secret: bytes) -> Host | None:
        """Start the process of a group, which joins the collector at an address.

        Returns:
            The host; None: somebody else starts it.
        """


class LocalLauncher:
    """Starts groups in processes of this machine that share nothing with the collector."""

    def launch(self, group: int, address: tuple[str, int], secret: bytes) -> Host:
        """Start the process of a group, which joins the collector at an address."""
        return _LocalHost(Child(_join, address, secret, group, name=f"rollwright-host-{group}"))


class Manual:
    """Leaves it to the user to start groups: ``rollwright join HOST:PORT``."""

    def launch(self, group: int, address: tuple[str, int], secret: bytes) -> None:
        """Start the process of a group, which joins the collector at an address."""


class _LocalHost:
    def __init__(self, child: Child) -> None:
        self._child = child

    def how_it_ended(self) -> str | None:
        if self._child.alive:
            return None
        with contextlib.suppress(ChannelClosed):
            message = self._child.take()
            if isinstance(message, ExceptionInfo):
                return f"has failed: {message.error('it', 0)}"
        return self._child.how_it_ended()

    def end(self, timeout_s: float) -> None:
        self._child.channel.close()
        end_all([self._child], timeout_s)


def _join(channel: Channel, address: tuple[str, int], secret: bytes, group: int) -> None:
    join(address, secret, group=group, name=f"{socket.gethostname()} (group {group})")


_log = logging.getLogger("rollwright")
_BEAT_S = 0.5
_LEAST_SECRET = 16
_MOST_NAMED = 3  # refusals, where nothing has joined
_END_S = 2.0


class RemoteTransport(Transport):
    """Starts workers in groups on other machines, and reaches each group by one connection.

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
    ) -> None:
        if len(secret) < _LEAST_SECRET:
            raise ValueError(
                f"secret: expected at least {_LEAST_SECRET} bytes that nobody can guess, got {len(secret)}. Pass for "
                "example secrets.token_hex(16).encode()."
            )
        self._per_group, self._launcher, self._secret = per_group, launcher, secret
        self._timeouts = {"host_timeout": host_timeout, "start_timeout": start_timeout}
        beat_s = min(_BEAT_S, host_timeout / 4, _BEAT_S if step_timeout is None else step_timeout / 4)
        self._begin = frames.Begin(
            num_workers, min(per_group, num_workers), beat_s, host_timeout, num_threads, tuple(sys.path)
        )
        self._poll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._connections: dict[int, GroupConnection] = {}
        self._hosts: dict[int, Host] = {}
        self._former: list[Host] = []
        self._num_groups = -(-num_workers // per_group)
        # By file descriptor, those that know the secret, and wait for a group:
        self._early: dict[int, tuple[IncomingHandshake, dict[str, Any]]] = {}
        self.refused: list[str] = []
        admit, refuse = weakref.WeakMethod(self._admit), weakref.WeakMethod(self._refuse)
        self._listener = Listener(
            address, secret, lambda *proved: _called(admit, *proved), lambda *refused: _called(refuse, *refused)
        )
        weakref.finalize(self, self._poll.close).atexit = False
        self._lock = threading.RLock()
        on_fork(self)
        self.address = self._listener.address
        self._watch(self._listener.fileno(), self._listener.read)
        self._reader = BackgroundReader(self._poll.fileno(), self._take_in, always=True)

    def reset_after_fork(self) -> None:
        """In a forked child: the groups are those of its parent."""
        self._lock = threading.RLock()
        self._listener.close()
        for greeting, _ in self._early.values():
            greeting.end.close()
        self._readers.clear()
        self._poll.close()

    # Waiting ------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """A file descriptor to wait for until :meth:`read` has something to do; -1: there is none."""
        return -1 if self._poll.closed else self._poll.fileno()

    def read(self) -> None:
        """Take in what has arrived for several workers, and send what there is room for."""
        self._reader.program_reads()
        self._take_in()

    def _take_in(self) -> None:
        with uninterrupted, self._lock:
            for fd, _ in self._poll.poll(0) if not self._poll.closed else ():
                if fd in self._readers:
                    self._readers[fd]()
            self._listener.read()  # those who say nothing

    def push(self) -> None:
        """Send what was posted to workers, as far as there is room; whoever has posted, or waits, sees to it."""
        with uninterrupted, self._lock:
            for connection in self._connections.values():
                connection.push()

    def tend(self) -> None:
        """Look after what needs no message, such as a silence; to be called now and then."""
        with self._lock:
            self._tend()

    def _tend(self) -> None:
        self._listener.read()
        named = list(dict.fromkeys(self.refused))[-_MOST_NAMED:]
        for group, connection in self._connections.items():
            if connection.lost is None:
                connection.check(f" (refused: {'; '.join(named)})" if named else "")
                host = self._hosts.get(group)
                how = None if host is None else host.how_it_ended()
                if how is not None:
                    connection.lose(how)

    def _watch(self, fd: int, read: Callable[[], None]) -> None:
        self._poll.register(fd, select.EPOLLIN)
        self._readers[fd] = read

    def _unwatch(self, fd: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(fd)
        self._readers.pop(fd, None)

    # Workers ------------------------------------------------------------------------------------------

    def connect(self, spec: WorkerSpec) -> Connection:
        """Start a worker, and return the connection to it."""
        group = spec.index // self._per_group
        with self._lock:
            connection = self._connections.get(group)
            if connection is None or connection.lost is not None:
                connection = self._start(group)
        try:
            return connection.launch(spec)
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise unsendable(spec, error) from error

    def _start(self, group: int) -> GroupConnection:
        """Have a group started."""
        if (before := self._hosts.pop(group, None)) is not None:
            self._former.append(before)
        connection = self._connections[group] = GroupConnection(group, **self._timeouts)
        host = self._launcher.launch(group, self.address, self._secret)
        if host is not None:
            self._hosts[group] = host
            connection.name = getattr(host, "name", connection.name)
        early, self._early = self._early, {}
        for fd, (greeting, about) in early.items():
            self._unwatch(fd)
            self._admit(greeting, about)
        return connection

    def published(self) -> None:
        """Weights were published in the memory that specs name."""
        copies: Copies = {}
        for connection in self._connections.values():
            with contextlib.suppress(ChannelClosed):
                connection.publish(copies)

    # Groups that join ---------------------------------------------------------------------------------

    def _admit(self, greeting: IncomingHandshake, about: dict[str, Any]) -> None:
        """Let in who has proved that it may, now or when the group is wanted."""
        fd, wanted = greeting.end.fileno(), about.get("group")
        free = [each for each in self._connections.values() if each.lost is None and not each.is_joined]
        chosen = next((each for each in free if wanted in (None, each.index)), None)
        if chosen is None:
            for each in self._connections.values():
                each.read()  # the end of one may have arrived, too
            if sum(each.lost is None for each in self._connections.values()) + len(self._early) < self._num_groups:
                # The program is about to want the others, or one in place of a lost one:
                self._early[fd] = greeting, about
                self._watch(fd, partial(self._forget, fd))
                return
            why = "all of its groups have been joined" if wanted is None else "that group was joined"
            try:
                greeting.refuse(why, for_now=True)  # the end of a host may be about to be seen
            except HandshakeRefused as error:
                self._drop(greeting, str(error))
            return
        line = greeting.accept()
        self._watch(line.fileno(), chosen.read)
        with contextlib.suppress(ChannelClosed, OSError):  # it has gone again, which the connection finds out
            chosen.join(line, str(about.get("name")), self._begin)

    def _forget(self, fd: int) -> None:
        greeting, _ = self._early.pop(fd)
        self._unwatch(fd)
        self._drop(greeting, "has hung up")

    def _drop(self, greeting: IncomingHandshake, why: str) -> None:
        self._refuse(greeting.peer, why)
        greeting.end.close()

    def _refuse(self, peer: str, why: str) -> None:
        self.refused = [*self.refused[-9:], f"{peer} {why}"]

    # The end ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End what is beside the workers, which have ended."""
        self._reader.stop()
        for connection in self._connections.values():
            connection.close()
        for greeting, _ in self._early.values():
            greeting.end.close()
        self._early.clear()
        self._listener.close()
        for host in (*self._hosts.values(), *self._former):
            host.end(_END_S)
        self._hosts.clear()
        self._former.clear()
        self._poll.close()
        close_launcher(self._launcher)


def remote_transport(
    options: RemoteOptions,
    own: WorkerOptions,
    num_workers: int,
    launcher: Launcher,
    *,
    secret: bytes,
    address: str,
    advice: str = "",
) -> RemoteTransport:
    """Listen, and start groups as workers are asked for.

    Args:
        options: of the backend.
        own: of the collector.
        num_workers: of it.
        launcher: starts the groups; closed with the transport.
        secret: that whoever joins must know.
        address: ``"HOST:PORT"`` to listen at.
        advice: what to do where it cannot be listened at.

    Raises:
        OSError: the address cannot be listened at.
    """
    try:
        made = RemoteTransport(
            num_workers,
            options.num_workers_per_collector,
            launcher,
            secret=secret,
            address=parse_address("address", address),
            host_timeout=options.host_timeout,
            start_timeout=own.start_timeout,
            step_timeout=own.env_step_timeout,
            num_threads=own.num_sub_threads,
        )
    except BaseException as error:
        close_launcher(launcher)
        if not isinstance(error, OSError):
            raise
        why = f"backend_options['address']: cannot listen at {address}: {error.strerror}{advice}"
        raise OSError(error.errno, why) from error
    if getattr(options, "launcher", None) == "join":
        host, port = made.address
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        count = -(-num_workers // options.num_workers_per_collector)
        _log.warning("waits for %d hosts to join: run `rollwright join %s:%d` on each", count, shown, port)
    return made


def close_launcher(launcher: Launcher) -> None:
    """Close a launcher, where it has something to close."""
    close = getattr(launcher, "close", None)
    if close is not None:
        close()


def _called(method: weakref.WeakMethod[Callable[..., None]], *args: Any) -> None:
    bound = method()
    if bound is not None:
        bound(*args)
