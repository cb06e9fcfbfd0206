"""NetworkChannel: authenticated messages with large pieces between two machines; and who reads meanwhile."""

from __future__ import annotations

import contextlib
import hmac
import pickle
import select
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollwright._interrupts import uninterrupted
from rollwright._processes.channel import ChannelClosed
from rollwright._processes.forks import on_fork

Pieces = Sequence[memoryview]

_WORD, _CODE = 8, 32
_HASHED_AT_ONCE = 1 << 20  # bytes that are hashed before they are sent; the other end hashes them meanwhile
_MOST_AT_ONCE = 256  # pieces that one call of the system takes
_READ_AT_ONCE = 1 << 28  # bytes that one read takes in before others have their turn
_IDLE_S, _PROBE_S = 5, 5  # of the system's own probes of a silent connection
_RTO_MAX_MS, _RETRY_MS = 44, 1000  # Linux 6.15 and later: the longest time between two tries to send


class MessageForged(ConnectionError):
    """What has arrived is not what the other end has sent; the message names both."""


class Keys(NamedTuple):
    """Keys of one connection, which both ends have and nobody else; one end has them the other way round.

    Attributes:
        sent: of what this end sends.
        received: of what it receives.
    """

    sent: bytes
    received: bytes


class NetworkChannel:
    """One end of a connection that carries pickled messages, each with pieces of raw memory, in order.

    There is no thread behind it, and nothing here waits. A piece is sent from where it lies, and must not change before
    :attr:`behind` is False; it is received into the memory that :meth:`read` is given for it.

    With keys, each part of a message is followed by a code: HMAC-SHA256 of all that was sent before.
    Nothing is allocated, unpickled or handed on before its code was checked.

    Args:
        end: a connected socket.
        keys: of this connection; None: nothing is authenticated.

    Attributes:
        heard_at: when anything arrived last, by ``time.monotonic()``.

    Example:
        >>> mine, theirs = (NetworkChannel(end) for end in socket.socketpair())
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

    def __init__(self, end: socket.socket, keys: Keys | None = None) -> None:
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
        self.heard_at = time.monotonic()
        self._message: Any = None
        self._missing: deque[memoryview] = deque()
        self._numbers: list[int] = []  # of the pieces that are received
        self._hashes = None if keys is None else tuple(hmac.new(key, digestmod="sha256") for key in keys)
        self._codes: deque[memoryview] = deque()  # among what is unsent, to be filled in
        self._num_ready = 0  # of the unsent, those that were hashed or filled in
        self._code = bytearray()  # that is received after a part
        self._expect_head()
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
            if sys.platform == "linux":  # tries double otherwise: after a cut of 13 s, the next comes at 25 s
                self._socket.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, _RETRY_MS)

    def close(self) -> None:
        """Close the connection: the other end reads what was sent, and then ``ChannelClosed``. May be called again."""
        self._poll.close()
        self._socket.close()
        self._drop_unsent()

    def cut(self) -> None:
        """Break the connection for both ends, from any thread; whoever reads gets ``ChannelClosed``, and closes it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    # Sending ----------------------------------------------------------------------------------

    def post(self, message: Any, pieces: Pieces = ()) -> None:
        """Send a message as far as there is room now; the rest goes in :meth:`read`.

        Raises:
            ChannelClosed: the other end is gone.
        """
        body = pickle.dumps(message, 5)
        sizes = [piece.nbytes for piece in pieces]
        head = b"".join(word.to_bytes(_WORD, "little") for word in (len(body), len(pieces), *sizes))
        own = [piece.cast("B") for piece in pieces if piece.nbytes]
        with uninterrupted, self._sending:
            for part in ([memoryview(head[: 2 * _WORD])], [memoryview(head[2 * _WORD :] + body)], own):
                self._queue(part)
            self._push()

    def _queue(self, part: list[memoryview]) -> None:
        """Have a part of a message sent, and its code after it."""
        if part and self._hashes is not None:
            step = _HASHED_AT_ONCE
            part = [memory[at : at + step] for memory in part for at in range(0, len(memory), step)]
            part.append(memoryview(bytearray(_CODE)))
            self._codes.append(part[-1])
        self._unsent.extend(part)

    @property
    def behind(self) -> bool:
        """Whether something was posted that is not on its way yet."""
        return bool(self._unsent)

    def _push(self) -> None:
        try:
            while self._unsent:
                if not self._num_ready:
                    self._make_ready()
                first = [self._unsent[i] for i in range(min(self._num_ready, _MOST_AT_ONCE))]
                self._sent(self._socket.sendmsg(first))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._drop_unsent()
            raise ChannelClosed("the other end is gone") from error
        if self._waits_for_room is not bool(self._unsent):
            self._waits_for_room = bool(self._unsent)
            self._poll.modify(self._socket.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._waits_for_room else 0))

    def _drop_unsent(self) -> None:
        self._unsent.clear()
        self._codes.clear()
        self._num_ready = 0

    def _make_ready(self) -> None:
        """Hash what is sent next, and fill in its codes."""
        if self._hashes is None:
            self._num_ready = len(self._unsent)
            return
        num_bytes = 0
        for memory in self._unsent:
            if self._codes and memory is self._codes[0]:
                self._codes.popleft()[:] = self._hashes[0].digest()
            else:
                self._hashes[0].update(memory)
            self._num_ready += 1
            num_bytes += len(memory)
            if num_bytes >= _HASHED_AT_ONCE:
                return

    def _sent(self, count: int) -> None:
        while count:
            first = self._unsent[0]
            if count < len(first):
                self._unsent[0] = first[count:]
                return
            count -= len(first)
            self._unsent.popleft()
            self._num_ready -= 1

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
            MessageForged: something was changed, repeated, reordered or left out on the way.
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
        message = self._message
        if message is None:
            return
        numbers = self._numbers
        code = [self._missing.pop()] if self._code and self._missing else []
        missing = zip(numbers[len(numbers) - len(self._missing) :], self._missing, strict=True)
        self._missing = deque(
            memoryview(bytearray(len(view))) if is_meant(message, number) else view for number, view in missing
        )
        self._missing.extend(code)

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
        self.heard_at = time.monotonic()
        left = count
        while left:
            first = self._missing[0]
            if self._hashes is not None and len(self._missing) > 1:  # the last is the code
                self._hashes[1].update(first[:left])
            if left < len(first):
                self._missing[0] = first[left:]
                break
            left -= len(first)
            self._missing.popleft()
        return count

    def _expect_head(self) -> None:
        self._head = bytearray(2 * _WORD)
        self._stage = 0  # of the message: size, sizes of the pieces and body, pieces
        self._expect([self._head])

    def _expect(self, part: Sequence[bytearray | memoryview]) -> None:
        """Receive a part of a message, and its code after it."""
        self._missing = deque(memoryview(memory) for memory in part if len(memory))
        if self._missing and self._hashes is not None:
            self._code = bytearray(_CODE)
            self._missing.append(memoryview(self._code))

    def _check(self) -> None:
        """Compare the code of the part that was received, if it has one."""
        if self._code and self._hashes is not None:
            if not hmac.compare_digest(self._code, self._hashes[1].digest()):
                raise MessageForged(
                    f"what has arrived from {self.peer} is not what was sent there: it was changed, repeated, "
                    "reordered or left out on the way"
                )
            self._code = bytearray()

    def _advance(
        self, place: Callable[[Any, Sequence[int]], Sequence[memoryview]], received: Callable[[Any, Pieces], None]
    ) -> bool:
        """A stage of a message is complete; False if this end was closed by whoever received it."""
        self._check()
        if self._stage == 0:
            size, count = _words(self._head)
            self._sizes, self._body = bytearray(count * _WORD), bytearray(size)
            self._expect([self._sizes, self._body])
            self._stage = 1
        elif self._stage == 1:
            message, sizes = pickle.loads(self._body), _words(self._sizes)
            self._pieces = list(place(message, sizes)) if sizes else []
            self._message = message
            self._numbers = [number for number, size in enumerate(sizes) if size]
            self._expect([self._pieces[number].cast("B") for number in self._numbers])
            self._stage = 2
        else:
            message, pieces = self._message, self._pieces
            self._message, self._pieces = None, []
            self._expect_head()
            received(message, pieces)
        return not self._poll.closed


def _words(content: bytes | bytearray) -> list[int]:
    return [int.from_bytes(content[i : i + _WORD], "little") for i in range(0, len(content), _WORD)]


_ABSENT_S = 0.05
_JOIN_S = 2.0


class BackgroundReader:
    """Reads when the program has not done so for a while, so that the other end is not kept waiting.

    The thread holds no reference to what it reads, and ends with it, or with the program.

    Args:
        fd: a file descriptor to wait for until there is something to read.
        read: a bound method, which any thread may call.
        always: read now and then though there is nothing to read.

    Example:
        >>> import socket
        >>> class Inbox:
        ...     def __init__(self):
        ...         self.mine, self.theirs = socket.socketpair()
        ...         self.arrived = threading.Event()
        ...     def read(self):
        ...         if self.mine.recv(1):
        ...             self.arrived.set()
        >>> inbox = Inbox()
        >>> reader = BackgroundReader(inbox.mine.fileno(), inbox.read)
        >>> inbox.theirs.send(b"1"), inbox.arrived.wait(10)
        (1, True)
        >>> reader.stop()
        >>> inbox.mine.close(), inbox.theirs.close()
        (None, None)
    """

    def __init__(self, fd: int, read: Callable[[], None], *, always: bool = False) -> None:
        self._stopped, self._read_at = threading.Event(), [time.monotonic()]
        self._failed: list[Exception] = []
        args = (fd, weakref.WeakMethod(read), self._stopped, self._read_at, self._failed, always)
        self._thread = threading.Thread(target=_read_meanwhile, args=args, name="rollwright-reader", daemon=True)
        self._thread.start()

    def program_reads(self) -> None:
        """The program reads for itself: the thread rests.

        Raises:
            Exception: what reading has raised in the thread, which has ended.
        """
        self._read_at[0] = time.monotonic()
        if self._failed:
            raise self._failed.pop()

    def stop(self) -> None:
        """End the thread, and wait for it. May be called again."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)


def _read_meanwhile(
    fd: int,
    method: weakref.WeakMethod[Callable[[], None]],
    stopped: threading.Event,
    read_at: list[float],
    failed: list[Exception],
    always: bool,
) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not stopped.is_set():
        absent_s = time.monotonic() - read_at[0]
        if absent_s < _ABSENT_S:
            stopped.wait(_ABSENT_S - absent_s)
        elif poll.poll(_ABSENT_S * 1e3) or always:
            read = method()
            if read is None or stopped.is_set():
                return
            try:
                read()
            except Exception as error:  # the program is to know, when it reads next
                failed.append(error)
                return
            del read
        elif method() is None:
            return
