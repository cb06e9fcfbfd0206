"""SharedPool: a pool of processes that several threads wait for, while one of them reads."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollwright._interrupts import uninterrupted
from rollwright._processes.forks import not_here, on_fork
from rollwright._processes.pool import Pool

_NAP_S = 0.2


class SharedPool:
    """Waits for conditions that change with what a pool takes in.

    It is a lock, held by whoever reads, or changes what is known of the processes: Ctrl-C waits for the end of the
    ``with`` block, and what was sent meanwhile is pushed there.

    Args:
        pool: it is read with the lock held, which is free while nothing has arrived.
        tend: called with the lock held, after each turn in which nothing has arrived, and five times a second.
        next_in: seconds until it has something to do, whatever arrives.

    Attributes:
        closed: whether nobody may wait any more.
    """

    def __init__(self, pool: Pool, tend: Callable[[], None], next_in: Callable[[], float]) -> None:
        self._pool, self._tend, self._next_in = pool, tend, next_in
        self.closed = False
        self._home: int | None = None  # in a forked process: the one that has the pool
        self._begin()
        on_fork(self)
        self._waking, self._waker = os.pipe()
        for fd in (self._waking, self._waker):
            os.set_blocking(fd, False)
            weakref.finalize(self, os.close, fd).atexit = False
        pool.watch(self._waking, self._woken)

    def _begin(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._reading = False
        self._tended_at = 0.0
        self._depth = 0  # of with blocks, one in another

    def reset_after_fork(self) -> None:
        """In a forked child: the processes are those of its parent."""
        self._begin()
        self._home, self.closed = self._home or os.getppid(), True
        self._pool.forget_all()

    def check_home(self) -> None:
        """Refuse to do anything in a process that was forked from the one that has the workers."""
        if self._home is not None:
            raise not_here("the collector", self._home)

    def __enter__(self) -> None:
        if self._home is not None:
            self.check_home()
        uninterrupted.__enter__()
        self.changed.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        held = self._depth > 0  # not in a process that was forked meanwhile
        try:
            if held:
                self._depth -= 1
                if not self._depth:
                    self._pool.push()
        finally:
            if held:
                self.changed.release()
            uninterrupted.__exit__()

    def wait(
        self,
        until: Callable[[], bool],
        timeout_s: float | None,
        what: Callable[[], str],
        *,
        abandon: Callable[[], bool] | None = None,
        report: Callable[[], None],
    ) -> bool:
        """Read until a condition holds. Ctrl-C is handled between two turns, of 0.2 s at most.

        Args:
            until: the condition, asked with the lock held.
            timeout_s: how long; None: there is no limit.
            what: is waited for, for the message.
            abandon: asked at every turn, whether to wait no longer.
            report: called after each turn of this thread.

        Returns:
            Whether the condition holds: False only if the wait was abandoned.

        Raises:
            TimeoutError: it takes too long.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self:
                if until():
                    return True
                if abandon is not None and abandon():
                    return False
                if self.closed:
                    raise RuntimeError(f"the collector was shut down by another thread, which waited for {what()}")
                left = _NAP_S if end is None else min(_NAP_S, end - time.monotonic())
                if left <= 0:
                    raise TimeoutError(f"waited {timeout_s:g} s for {what()}")
                if self._reading:
                    self._pool.push()
                    with self._others_turn():
                        self.changed.wait(left)
                else:
                    self._read(left)
                    report()

    def look(self) -> None:
        """Take in what has arrived, without waiting."""
        with self:
            if not self._reading and not self.closed:
                self._read(0.0)

    def _read(self, timeout_s: float) -> None:
        """One turn, holding the lock; while nothing has arrived, others may have it."""
        timeout_s = min(timeout_s, self._next_in())
        self._reading = True
        with self._others_turn():
            self.changed.release()
            try:
                ready = self._pool.select(timeout_s)
            finally:
                self.changed.acquire()
                self._reading = False
                self.changed.notify_all()
        self._pool.dispatch(ready)
        now = time.monotonic()
        if not ready or now - self._tended_at >= _NAP_S:
            self._tended_at = now
            self._tend()
        self.changed.notify_all()

    @contextmanager
    def _others_turn(self) -> Iterator[None]:
        """The lock is let go of inside the ``with`` block, and taken again."""
        depth, self._depth = self._depth, 0
        try:
            yield
        finally:
            self._depth = depth

    def wake(self) -> None:
        """Let whoever waits ask its condition again: something has changed that nothing arrives of."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._waker, b"1")

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._waking, 1 << 12)

    def close(self) -> None:
        """Let nobody wait or read any more; the caller has the pool alone, without the lock."""
        self.closed = True
        self.wake()
        with self:
            self._pool.push()
            with self._others_turn():
                self.changed.wait_for(lambda: not self._reading, _NAP_S)
            self._reading = True
            self.changed.notify_all()
