"""Server: the connections of a replay service."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rollwright._processes.channel import ChannelClosed
from rollwright._processes.failures import ExceptionInfo
from rollwright._processes.network.handshake import IncomingHandshake, Listener
from rollwright._processes.network.line import Line, MessageForged
from rollwright.data.replay_buffers.service.messages import Beat, Counts, Request, WriterName
from rollwright.data.replay_buffers.service.packing import memory_for
from rollwright.data.replay_buffers.service.serving.keeper import Answer, Keeper

_NAP_S, _BUSY_S = 0.5, 0.01  # without anything to do; while samples wait


class _Guest:
    """A connection to a client."""

    def __init__(self, client: str, line: Line, *, is_owner: bool) -> None:
        self.client, self.line, self.is_owner = client, line, is_owner
        self.fd = line.fileno()


class Server:
    """Listens, lets those in who know the secret, and hands their requests to a keeper; one thread does all of it.

    Args:
        keeper: carries out requests.
        address: host and port to listen at.
        secret: of the run.
        beat_s: between two signs of life.
        silence_s: after which a client's machine counts as gone.

    Attributes:
        address: where it listens.

    Raises:
        OSError: the address cannot be listened at.
    """

    def __init__(
        self, keeper: Keeper, address: tuple[str, int], secret: bytes, *, beat_s: float, silence_s: float
    ) -> None:
        self._keeper, self._listener = keeper, Listener(address, secret, self._admit)
        self.address = self._listener.address
        self._beat_s, self._silence_s = beat_s, silence_s
        self._poll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._guests: dict[str, _Guest] = {}  # by client
        self._outbox: list[tuple[str, Answer]] = []
        self._sent_counts: Counts | None = None
        self._closed = threading.Event()
        self.watch(self._listener.fileno(), self._listener.read)
        threading.Thread(target=self._show_life, name="rollwright-beat", daemon=True).start()

    def watch(self, fd: int, read: Callable[[], None]) -> None:
        """Call ``read()`` whenever a file descriptor is ready."""
        self._poll.register(fd, select.EPOLLIN)
        self._readers[fd] = read

    def _unwatch(self, fd: int) -> None:
        self._readers.pop(fd, None)
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(fd)

    def run_once(self) -> None:
        """Wait for something to do, for half a second at most, and do it."""
        for fd, _ in self._poll.poll(_BUSY_S if self._keeper.num_waiting else _NAP_S):
            if fd in self._readers:
                self._readers[fd]()
        self._outbox += self._keeper.tend()
        self._send_replies()
        self._listener.read()  # those who say nothing
        self._keeper.forget(set(self._guests))

    def _show_life(self) -> None:
        """Show that the service is there, where a dump takes long."""
        while not self._closed.wait(self._beat_s):
            for guest in list(self._guests.values()):
                if not guest.line.behind:
                    with contextlib.suppress(ChannelClosed):  # the other thread finds out
                        guest.line.post(Beat())

    # Clients that connect -----------------------------------------------------------------------------

    def _admit(self, greeting: IncomingHandshake, about: dict[str, Any]) -> None:
        writer = None if about.get("writer") is None else WriterName(*about["writer"])
        client, is_owner = str(about["client"]), bool(about.get("owner"))
        if (refused := self._keeper.refusal(writer)) is not None:
            greeting.refuse(refused)
        if client in self._guests:  # over a connection that has broken, as this end does not know yet
            self._lose(self._guests[client])
        line = greeting.accept()
        line.give_up_after(self._silence_s)
        guest = self._guests[client] = _Guest(client, line, is_owner=is_owner)
        self._keeper.met(client, writer)
        self.watch(guest.fd, partial(self._read, guest))
        self._post(guest, self._counts())

    def _lose(self, guest: _Guest) -> None:
        self._unwatch(guest.fd)
        guest.line.close()
        if self._guests.get(guest.client) is guest:
            del self._guests[guest.client]

    # Requests and replies -----------------------------------------------------------------------------

    def _read(self, guest: _Guest) -> None:
        try:
            guest.line.read(lambda message, sizes: memory_for(sizes), partial(self._received, guest))
        except ChannelClosed:
            self._lose(guest)
        except MessageForged as error:
            with contextlib.suppress(ChannelClosed):
                guest.line.post(ExceptionInfo.of(error))
            self._lose(guest)

    def _received(self, guest: _Guest, request: Request, pieces: Sequence[memoryview]) -> None:
        answer = self._keeper.take(guest.client, request, pieces)
        if answer is not None:
            self._outbox.append((guest.client, answer))

    def _counts(self) -> Counts:
        return Counts(self._keeper.buffer.write_count, len(self._keeper.buffer), self._keeper.dump_failure)

    def _send_replies(self) -> None:
        """Send what was done; the owner hears of writes before they are acknowledged."""
        reported = None if self._sent_counts is None else self._sent_counts.dump_failure
        if not self._outbox and self._keeper.dump_failure == reported:
            return
        outbox, self._outbox = self._outbox, []
        counts = self._counts()
        if counts != self._sent_counts:
            self._sent_counts = counts
            for guest in list(self._guests.values()):
                if guest.is_owner:
                    self._post(guest, counts)
        for client, (reply, pieces) in outbox:
            if client in self._guests:  # or it asks again when it is back
                self._post(self._guests[client], reply, pieces)

    def _post(self, guest: _Guest, message: Any, pieces: Sequence[memoryview] = ()) -> None:
        try:
            guest.line.post(message, pieces)
        except ChannelClosed:
            self._lose(guest)

    def close(self) -> None:
        """Hang up."""
        self._closed.set()
        for guest in list(self._guests.values()):
            self._lose(guest)
        self._listener.close()
        self._poll.close()
