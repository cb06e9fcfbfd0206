"""A readers-writer lock between threads and, over a file, between processes; it is released when its holder dies."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from rollwright._interrupts import uninterrupted
from rollwright._memory import Segment
from rollwright._processes.files import FileLocks
from rollwright._processes.forks import on_fork

_LONGEST_WAIT_S = 0.1
_FIRST_NAP_S, _LONGEST_NAP_S, _LONGEST_NAP_AT_GATE_S = 20e-6, 1e-3, 0.2e-3
_MAIN, _FIRST_SLOT = 0, 1
_GATE, _READERS = 1 << 20, (1 << 20) + 1  # bytes, behind those of all slots
_by_file: weakref.WeakValueDictionary[tuple[int, int], RowLock] = weakref.WeakValueDictionary()


class RowLock:
    """Many read, or one writes.

    Between processes it consists of locks on bytes of a file of its own (:class:`FileLocks`), which the system
    releases when their holder ends, killed or not. All who lock one file in a process share one object: see
    :meth:`over`.

    Writers and readers take turns. A writer that finds the lock taken closes the *gate* and raises a hint
    (an int64 in memory that the processes share, see :meth:`hint_at`). Readers that come later wait until it is
    through, those of its own process included; it waits for those that are inside. The next writer lets the readers
    pass that wait at the gate. So each waits for one turn of the others. Nobody who finds the lock free looks at the
    gate: it costs two calls to the system.

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
        self._locks = None if file is None else FileLocks(file)
        self._timeout_s = timeout_s
        self._hint = memoryview(bytearray(8)).cast("q")
        self.reset_after_fork()
        on_fork(self)

    def reset_after_fork(self) -> None:
        """Begin with nothing held."""
        self._changed = threading.Condition(threading.Lock())
        self._readers: dict[int, int] = {}  # how often each thread reads
        self._waiting, self._writer = 0, False

    def extend_over(self, file: Segment) -> None:
        """Hold off other processes too, over a file that none has yet. For use while writing."""
        status = os.fstat(file.fd)
        _by_file[status.st_dev, status.st_ino] = self
        self._locks = FileLocks(file)
        self._lock_file(exclusive=True)  # which the end of writing lets go of

    @classmethod
    def over(cls, file: Segment) -> RowLock:
        """The lock of this process over a file."""
        status = os.fstat(file.fd)
        place = (status.st_dev, status.st_ino)
        lock = _by_file.get(place)
        if lock is None:
            lock = _by_file[place] = cls(file)
        else:
            lock.keep_open(file)
        return lock

    def keep_open(self, file: Segment) -> None:
        """Let no descriptor of the locked file be closed before this lock is gone: that would release it."""
        if self._locks is not None:
            self._locks.keep_open(file)

    def hint_at(self, memory: memoryview) -> None:
        """Keep in an int64 whether a writer of any process waits at the gate. One that was killed leaves it raised."""
        self._hint = memory

    def reading(self) -> _Locked:
        """Hold off writers inside a ``with`` block.

        Raises:
            TimeoutError: a writer did not let go in time.
        """
        return _Locked(self._begin_reading, self._end_reading)

    @property
    def is_read_here(self) -> bool:
        """Whether this thread is inside :meth:`reading`."""
        return threading.get_ident() in self._readers

    def writing(self) -> _Locked:
        """Hold off everyone inside a ``with`` block.

        Raises:
            TimeoutError: the others did not let go in time.
        """
        return _Locked(self._begin_writing, self._end_writing)

    def _begin_reading(self) -> None:
        me = threading.get_ident()
        with self._changed:
            readers = self._readers
            if self._writer or (me not in readers and (self._waiting or (readers and self._hint[0]))):
                self._await(
                    lambda: not (self._writer or self._waiting or (self._readers and self._hint[0])), "a writer"
                )
            if not readers:
                self._lock_file(exclusive=False)
            readers[me] = readers.get(me, 0) + 1

    def _end_reading(self) -> None:
        me = threading.get_ident()
        with self._changed:
            times = self._readers.pop(me, 0)  # 0: in a child that was forked meanwhile
            if times > 1:
                self._readers[me] = times - 1
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
            self._lock_file(exclusive=True)
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

    def _lock_file(self, *, exclusive: bool) -> None:
        locks = self._locks
        if locks is None or (not self._hint[0] and locks.take(_MAIN, exclusive=exclusive)):
            return
        until = time.monotonic() + self._timeout_s
        if exclusive:
            self._write_next(locks, until)
        else:
            self._read_next(locks, until)

    def _write_next(self, locks: FileLocks, until: float) -> None:
        """Lock the file for writing, after the readers that wait at the gate, before those that come later."""
        self._poll(lambda: not locks.is_taken(_READERS) and locks.take(_GATE, exclusive=True), until)
        try:
            self._hint[0] = 1
            self._poll(lambda: locks.take(_MAIN, exclusive=True), until, _LONGEST_NAP_AT_GATE_S)
        finally:
            self._hint[0] = 0
            locks.release(_GATE)

    def _read_next(self, locks: FileLocks, until: float) -> None:
        """Lock the file for reading, after the writer that waits at the gate, before those that come later."""
        with self._held(locks, _READERS):
            self._poll(lambda: locks.take(_GATE, exclusive=False), until)
        try:
            self._hint[0] = 0  # no writer is there: it was killed, or has gone on
            self._poll(lambda: locks.take(_MAIN, exclusive=False), until, _LONGEST_NAP_AT_GATE_S)
        finally:
            locks.release(_GATE)

    @staticmethod
    @contextlib.contextmanager
    def _held(locks: FileLocks, byte: int) -> Iterator[None]:
        locks.take(byte, exclusive=False)
        try:
            yield
        finally:
            locks.release(byte)

    def _poll(self, take: Callable[[], bool], until: float, longest_nap_s: float = _LONGEST_NAP_S) -> None:
        nap = _FIRST_NAP_S
        while not take():
            if time.monotonic() > until:
                raise TimeoutError(f"waited {self._timeout_s:g} s for a process that holds the replay buffer's lock")
            uninterrupted.deliver()
            time.sleep(nap)
            nap = min(2 * nap, longest_nap_s)

    def _unlock_file(self) -> None:
        if self._locks is not None:
            self._locks.release(_MAIN)

    def hold_slot(self, slot: int) -> None:
        """Show that this process lives and holds ``slot``, until :meth:`release_slot` or its end."""
        if self._locks is not None and not self._locks.take(_FIRST_SLOT + slot, exclusive=True):
            raise RuntimeError(f"slot {slot} of the replay buffer's ledger is held by another process")

    def release_slot(self, slot: int) -> None:
        """Release a slot that was held by :meth:`hold_slot`."""
        if self._locks is not None:
            self._locks.release(_FIRST_SLOT + slot)

    def is_slot_held(self, slot: int) -> bool:
        """Whether another process holds ``slot``, and lives. For use while writing."""
        return self._locks is not None and self._locks.is_taken(_FIRST_SLOT + slot)

    def is_known_held(self, slot: int) -> bool:
        """As :meth:`is_slot_held`, at any time; False where that cannot be known."""
        return self._locks is not None and self._locks.lasting and self._locks.is_taken(_FIRST_SLOT + slot)


class _Locked:
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
