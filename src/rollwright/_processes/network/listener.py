"""Listener: accepts connections, and hands on those whose other side has proved that it knows the secret."""

from __future__ import annotations

import contextlib
import select
import socket
import time
import weakref
from collections.abc import Callable
from typing import Any

from rollwright._processes.files import is_file_limit, raise_file_limit
from rollwright._processes.network.handshake import IncomingHandshake

_MOST_PENDING = 64
_LEAST_S = 1.0  # that each has to prove what it must, though others wait
_FULL_S = 1.0  # until it accepts again, where this process has too many open files
_BACKLOG = 1024  # connections that the system keeps until they are accepted; its own limit may be lower


class Listener:
    """Listens, and greets whoever connects, a limited number at a time; the others wait in the system's backlog.

    Where all of those being greeted are silent, the oldest has to leave. Nothing here waits, and there is no thread.

    Args:
        address: host and port; port 0: any that is free.
        secret: of the run.
        proved: takes each connection whose other side has proved that it knows the secret, and what it says of itself;
            from then on it belongs to whoever called. What it raises as one of the errors below is a refusal.
        refused: takes the peer's address and why a connection was closed.

    Raises:
        OSError: the address cannot be listened at.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        proved: Callable[[IncomingHandshake, dict[str, Any]], None],
        refused: Callable[[str, str], None] = lambda peer, why: None,
    ) -> None:
        raise_file_limit()
        self._secret, self._proved, self._refused = secret, proved, refused
        self._socket = socket.create_server(address, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._pending: dict[int, IncomingHandshake] = {}  # by file descriptor, the oldest first
        self._poll = select.epoll()
        self._accepts, self._full_until = True, 0.0
        self._poll.register(self._socket.fileno(), select.EPOLLIN)
        for close in (self._socket.close, self._poll.close):
            weakref.finalize(self, close).atexit = False

    def fileno(self) -> int:
        """Ready when :meth:`read` has something to do, but for what only time brings; -1: closed."""
        return -1 if self._poll.closed else self._poll.fileno()

    def read(self) -> None:
        """Greet who connects, and take in what those say. Call it now and then, too, for those who say nothing."""
        if self._poll.closed:
            return
        ready = [fd for fd, _ in self._poll.poll(0)]
        for fd in ready:
            if fd in self._pending:
                self._greet(fd)
        for fd, greeting in list(self._pending.items()):
            if time.monotonic() > greeting.expires_at:
                self._drop(fd, "said nothing in time")
        self._accept()

    def _accept(self) -> None:
        """Take in who waits, as far as there is room."""
        try:
            while not self._poll.closed and self._has_room():
                end, _ = self._socket.accept()
                self._pending[end.fileno()] = IncomingHandshake(end, self._secret)
                self._poll.register(end.fileno(), select.EPOLLIN)
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            if not is_file_limit(error):
                raise
            self._full_until = time.monotonic() + _FULL_S
            self._has_room()
            self._refused("a connection", "waits, since this process has too many open files (raise ulimit -n)")

    def _has_room(self) -> bool:
        if len(self._pending) >= _MOST_PENDING:
            fd, oldest = next(iter(self._pending.items()))
            if time.monotonic() - oldest.began_at > _LEAST_S and self._is_anyone_waiting():
                self._drop(fd, "said nothing while others waited")
        has_room = len(self._pending) < _MOST_PENDING and time.monotonic() > self._full_until
        if has_room is not self._accepts:  # a socket that is ready and not read would keep whoever polls busy
            self._accepts = has_room
            self._poll.modify(self._socket.fileno(), select.EPOLLIN if has_room else 0)
        return has_room

    def _is_anyone_waiting(self) -> bool:
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _greet(self, fd: int) -> None:
        greeting = self._pending[fd]
        try:
            about = greeting.read()
            if about is None:
                return
            del self._pending[fd]
            self._poll.unregister(fd)
            self._proved(greeting, about)
        except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
            self._pending.setdefault(fd, greeting)
            self._drop(fd, str(error))

    def _drop(self, fd: int, why: str) -> None:
        greeting = self._pending.pop(fd)
        with contextlib.suppress(OSError):
            self._poll.unregister(fd)
        self._refused(greeting.peer, why)
        greeting.end.close()

    def close(self) -> None:
        """Hang up on all that have not proved anything. May be called again."""
        for greeting in self._pending.values():
            greeting.end.close()
        self._pending.clear()
        self._socket.close()
        self._poll.close()
