"""A readers-writer lock between threads and, over a file, between processes; it is released when its holder dies."""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable

from rollwright._interrupts import uninterrupted
from rollwright._processes.segment import Segment

__all__ = ["RowLock"]

_LONGEST_NAP_S, _LONGEST_WAIT_S = 1e-3, 0.1
_by_file: weakref.WeakValueDictionary[tuple[int, int], RowLock] = weakref.WeakValueDictionary()


class RowLock:
    """Many read, or one writes.

    Between processes it is a record lock on a file of its own (POSIX ``fcntl``), which the system releases when its
    holder ends, killed or not. Such a lock belongs to a process, so all who lock one file in a process share one
    object: see :meth:`over`.

    Args:
        file: the file to lock; None: between threads only.
        timeout_s: how long to wait.

    Example:
        >>> lock = RowLock()
        >>> with lock.reading(), lock.reading():
        ...     pass
        >>> with lock.writing():
        ...     pass
    """

    def __init__(self, file: Segment | None = None, *, timeout_s: float = 60.0) -> None:
        self._file, self._timeout_s = file, timeout_s
        self._changed = threading.Condition(threading.Lock())
        self._readers: dict[int, int] = {}  # how often each thread reads
        self._waiting, self._writer = 0, False
        self._others: list[Segment] = []
        if file is not None:
            os.register_at_fork(after_in_child=_afresh(weakref.ref(self)))

    def extend_over(self, file: Segment) -> None:
        """Hold off other processes too, over a file that none has yet. For use while writing."""
        status = os.fstat(file.fd)
        _by_file[status.st_dev, status.st_ino] = self
        self._file = file
        self._lock_file(fcntl.LOCK_EX)  # which the end of writing lets go of
        os.register_at_fork(after_in_child=_afresh(weakref.ref(self)))

    @classmethod
    def over(cls, file: Segment) -> RowLock:
        """The lock of this process over a file."""
        status = os.fstat(file.fd)
        place = (status.st_dev, status.st_ino)
        lock = _by_file.get(place)
        if lock is None:
            lock = _by_file[place] = cls(file)
        elif lock._file is not file:
            lock._others.append(file)  # closing any descriptor of a file lets go of the process's locks on it
        return lock

    def reading(self) -> _Held:
        """Hold off writers inside a ``with`` block.

        Raises:
            TimeoutError: a writer did not let go in time.
        """
        return _Held(self._begin_reading, self._end_reading)

    def writing(self) -> _Held:
        """Hold off everyone inside a ``with`` block.

        Raises:
            TimeoutError: the others did not let go in time.
        """
        return _Held(self._begin_writing, self._end_writing)

    def _begin_reading(self) -> None:
        me = threading.get_ident()
        with self._changed:
            if self._writer or (self._waiting and me not in self._readers):  # writers go first
                self._await(lambda: not self._writer and not self._waiting, "a writer")
            if not self._readers:
                self._lock_file(fcntl.LOCK_SH)
            self._readers[me] = self._readers.get(me, 0) + 1

    def _end_reading(self) -> None:
        me = threading.get_ident()
        with self._changed:
            self._readers[me] -= 1
            if not self._readers[me]:
                del self._readers[me]
            if not self._readers:
                self._unlock_file()
                self._changed.notify_all()

    def _begin_writing(self) -> None:
        with self._changed:
            if self._writer or self._readers:
                self._waiting += 1
                try:
                    self._await(lambda: not self._writer and not self._readers, "readers or a writer")
                finally:
                    self._waiting -= 1
                    self._changed.notify_all()
            self._lock_file(fcntl.LOCK_EX)
            self._writer = True

    def _end_writing(self) -> None:
        with self._changed:
            self._writer = False
            self._unlock_file()
            self._changed.notify_all()

    def _await(self, free: Callable[[], bool], whom: str) -> None:
        until = time.monotonic() + self._timeout_s
        while not self._changed.wait_for(free, min(_LONGEST_WAIT_S, self._timeout_s)):
            uninterrupted.deliver()
            if time.monotonic() >= until:
                raise TimeoutError(f"waited {self._timeout_s:g} s for {whom} of the replay buffer in another thread")

    # Between processes ------------------------------------------------------------------------

    def _lock_file(self, how: int) -> None:
        if self._file is not None and not self._try(how, 0):
            self._poll(how)

    def _poll(self, how: int) -> None:
        until, nap = time.monotonic() + self._timeout_s, 20e-6
        while not self._try(how, 0):
            if time.monotonic() > until:
                raise TimeoutError(f"waited {self._timeout_s:g} s for a process that holds the replay buffer's lock")
            uninterrupted.deliver()
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)

    def _unlock_file(self) -> None:
        if self._file is not None:
            fcntl.lockf(self._file.fd, fcntl.LOCK_UN, 1, 0)

    def _try(self, how: int, byte: int) -> bool:
        assert self._file is not None
        try:
            fcntl.lockf(self._file.fd, how | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def sign(self, slot: int) -> None:
        """Show that this process lives and holds ``slot``, until :meth:`resign` or its end."""
        if self._file is not None and not self._try(fcntl.LOCK_EX, 1 + slot):
            raise RuntimeError(f"slot {slot} of the replay buffer's ledger is held by another process")

    def resign(self, slot: int) -> None:
        """Take the sign back."""
        if self._file is not None:
            fcntl.lockf(self._file.fd, fcntl.LOCK_UN, 1, 1 + slot)

    def is_signed(self, slot: int) -> bool:
        """Whether another process holds ``slot``, and lives."""
        if self._file is None or not self._try(fcntl.LOCK_EX, 1 + slot):
            return self._file is not None
        self.resign(slot)
        return False


class _Held:
    """Runs a call before a ``with`` block, and one after it, and holds off Ctrl-C in between."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        uninterrupted.__enter__()
        try:
            self._begin()
        except BaseException:
            uninterrupted.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self._end()
        finally:
            uninterrupted.__exit__()


def _afresh(lock: weakref.ref[RowLock]) -> Callable[[], None]:
    """In a forked child nobody holds the lock: the threads that did are not there."""

    def reset() -> None:
        mine = lock()
        if mine is not None:
            mine._changed = threading.Condition(threading.Lock())
            mine._readers, mine._waiting, mine._writer = {}, 0, False

    return reset
