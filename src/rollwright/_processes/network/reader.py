"""BackgroundReader: a thread that reads what arrives while the program does something else."""

from __future__ import annotations

import select
import threading
import time
import weakref
from collections.abc import Callable

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
