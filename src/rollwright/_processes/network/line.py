"""Line: messages and raw memory between two machines, over one TCP connection."""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rollwright._interrupts import uninterrupted
from rollwright._processes.channel import ChannelClosed
from rollwright._processes.forks import on_fork

__all__ = ["Line", "Pieces"]

Pieces = Sequence[memoryview]

_WORD = 8
_MOST_AT_ONCE = 256  # pieces that one call of the system takes
_READ_AT_ONCE = 1 << 28  # bytes that one read takes in before others have their turn
_IDLE_S, _PROBE_S = 5, 5  # of the system's own probes of a silent connection


class Line:
    """One end of a connection that carries pickled messages, each with pieces of raw memory, in order.

    There is no thread behind it, and nothing here waits. A piece is sent from where it lies, and must not change before
    :attr:`behind` is False; it is received into the memory that :meth:`read` is given for it.

    Args:
        end: a connected socket.

    Example:
        >>> mine, theirs = (Line(end) for end in socket.socketpair())
        >>> mine.post("three numbers", [memoryview(bytes([1, 2, 3]))])
        >>> memory = bytearray(3)
        >>> theirs.read(lambda message, sizes: [memoryview(memory)], lambda message, pieces: print(message))
        three numbers
        >>> list(memory)
        [1, 2, 3]
        >>> mine.close()
        >>> theirs.read(lambda message, sizes: [], print)
        Traceback (most recent call last):
        ...
        rollwright._processes.channel.ChannelClosed: the other end is gone
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll = select.epoll()
        self._poll.register(end.fileno(), select.EPOLLIN)
        for close in (end.close, self._poll.close):
            weakref.finalize(self, close).atexit = False
        self._unsent: deque[memoryview] = deque()
        self._waits_for_room = False
        self.num_bytes_behind = 0
        self._message: Any = None
        self._missing: deque[memoryview] = deque()
        self._expect_size()
        self._sending = threading.RLock()
        on_fork(self)

    def reset_after_fork(self) -> None:
        """The connection is the parent's; it ends with that, whatever becomes of this process."""
        self._sending = threading.RLock()
        self.close()

    def fileno(self) -> int:
        """Ready to be read when :meth:`read` has something to do, which may be to send; -1: closed."""
        return -1 if self._poll.closed else self._poll.fileno()

    @property
    def peer(self) -> str:
        """Address of the other end."""
        with contextlib.suppress(OSError):
            name = self._socket.getpeername()
            return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "this machine"
        return "unknown"

    def give_up_after(self, silence_s: float) -> None:
        """Have the system count the other end as gone when it acknowledges nothing for so long."""
        options = {
            "TCP_KEEPIDLE": _IDLE_S,
            "TCP_KEEPINTVL": _PROBE_S,
            "TCP_KEEPCNT": max(1, round((silence_s - _IDLE_S) / _PROBE_S)),
            "TCP_USER_TIMEOUT": round(silence_s * 1e3),
        }
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in options.items():
                if hasattr(socket, name):
                    self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def close(self) -> None:
        """Hang up: the other end reads what was sent, and then ``ChannelClosed``. May be called again."""
        self._poll.close()
        self._socket.close()
        self._unsent.clear()

    # Sending ----------------------------------------------------------------------------------

    def post(self, message: Any, pieces: Pieces = ()) -> None:
        """Send a message as far as there is room now; the rest goes in :meth:`read`.

        Raises:
            ChannelClosed: the other end is gone.
        """
        body = pickle.dumps(message, 5)
        words = (len(body), len(pieces), *(piece.nbytes for piece in pieces))
        head = b"".join(word.to_bytes(_WORD, "little") for word in words)
        with uninterrupted, self._sending:
            self._unsent.append(memoryview(head + body))
            self._unsent.extend(piece.cast("B") for piece in pieces if piece.nbytes)
            self.num_bytes_behind += len(head) + len(body) + sum(piece.nbytes for piece in pieces)
            self._push()

    @property
    def behind(self) -> bool:
        """Whether something was posted that is not on its way yet."""
        return bool(self._unsent)

    def _push(self) -> None:
        try:
            while self._unsent:
                first = [self._unsent[i] for i in range(min(len(self._unsent), _MOST_AT_ONCE))]
                self._sent(self._socket.sendmsg(first))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._unsent.clear()
            raise ChannelClosed("the other end is gone") from error
        if self._waits_for_room is not bool(self._unsent):
            self._waits_for_room = bool(self._unsent)
            self._poll.modify(self._socket.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._waits_for_room else 0))

    def _sent(self, count: int) -> None:
        self.num_bytes_behind -= count
        while count:
            first = self._unsent[0]
            if count < len(first):
                self._unsent[0] = first[count:]
                return
            count -= len(first)
            self._unsent.popleft()

    # Receiving --------------------------------------------------------------------------------

    def read(
        self, place: Callable[[Any, Sequence[int]], Sequence[memoryview]], received: Callable[[Any, Pieces], None]
    ) -> None:
        """Send what waits for room, and take in what has arrived, without waiting.

        Args:
            place: takes a message and the sizes of its pieces in bytes; returns the memory for each.
            received: takes each message, and its pieces.

        Raises:
            ChannelClosed: the other end is gone, and all that it had sent was taken in.
        """
        if self._unsent:
            with uninterrupted, self._sending:
                self._push()
        left = _READ_AT_ONCE
        with uninterrupted:
            while left > 0:
                if not self._missing and not self._advance(place, received):
                    return
                while self._missing:
                    count = self._receive()
                    if count is None:
                        return
                    left -= count

    def divert(self, is_meant: Callable[[Any, int], bool]) -> None:
        """Put pieces of the message that is being received elsewhere, as far as they are to come: their place is gone.

        Args:
            is_meant: takes the message and the number of a piece; whether it is one of those.
        """
        if self._message is None:
            return
        numbers = [number for number, piece in enumerate(self._pieces) if piece.nbytes]
        missing = zip(numbers[len(numbers) - len(self._missing) :], self._missing, strict=True)
        self._missing = deque(
            memoryview(bytearray(len(view))) if is_meant(self._message, number) else view for number, view in missing
        )

    def _receive(self) -> int | None:
        """Read into what is missing; None: nothing has arrived."""
        try:
            if len(self._missing) == 1:
                count = self._socket.recv_into(self._missing[0])
            else:
                views = [self._missing[i] for i in range(min(len(self._missing), _MOST_AT_ONCE))]
                count = self._socket.recvmsg_into(views)[0]
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            raise ChannelClosed("the other end is gone") from error
        if not count:
            raise ChannelClosed("the other end is gone")
        left = count
        while left:
            first = self._missing[0]
            if left < len(first):
                self._missing[0] = first[left:]
                break
            left -= len(first)
            self._missing.popleft()
        return count

    def _expect_size(self) -> None:
        self._head = bytearray(2 * _WORD)
        self._stage = 0  # of the message: size, sizes of the pieces and body, pieces
        self._missing = deque([memoryview(self._head)])

    def _advance(
        self, place: Callable[[Any, Sequence[int]], Sequence[memoryview]], received: Callable[[Any, Pieces], None]
    ) -> bool:
        """A stage of a message is complete; False if this end was closed by whoever received it."""
        if self._stage == 0:
            size, count = _words(self._head)
            self._sizes, self._body = bytearray(count * _WORD), bytearray(size)
            self._missing = deque(memoryview(part) for part in (self._sizes, self._body) if part)
            self._stage = 1
        elif self._stage == 1:
            message, sizes = pickle.loads(self._body), _words(self._sizes)
            self._pieces = list(place(message, sizes)) if sizes else []
            self._message = message
            self._missing = deque(piece.cast("B") for piece in self._pieces if piece.nbytes)
            self._stage = 2
        else:
            message, pieces = self._message, self._pieces
            self._message, self._pieces = None, []
            self._expect_size()
            received(message, pieces)
        return not self._poll.closed


def _words(content: bytes | bytearray) -> list[int]:
    return [int.from_bytes(content[i : i + _WORD], "little") for i in range(0, len(content), _WORD)]
