"""Threads of a buffer: results that they prepare ahead, delivered in order, and how they wait for one another."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Generic, TypeVar

import torch

from rollwright._processes.forks import on_fork

T = TypeVar("T")
_FIRST_NAP_S, _LONGEST_NAP_S = 0.2e-3, 10e-3
_PREFETCHERS = "rollwright-prefetch"  # threads that draw only what was asked for
_NEVER_WRITE = (_PREFETCHERS, "rollwright-engines", "tqdm_monitor")  # names of threads that use no buffer by themselves


class Ticket:
    """Lets threads into a block one after the other, in the order in which their work was given out."""

    def __init__(self, before: threading.Event) -> None:
        self._before, self.over = before, threading.Event()

    def __enter__(self) -> None:
        self._before.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()


class Prefetcher(Generic[T]):
    """Prepares results in threads, ``count`` more than were asked for.

    Args:
        count: of results, and of threads.
        make: makes one; what has to happen in order it does inside ``with turn:``.

    Example:
        >>> numbers = iter(range(10))
        >>> def make(turn):
        ...     with turn:
        ...         return next(numbers)
        >>> prefetcher = Prefetcher(2, make)
        >>> prefetcher.next(), prefetcher.next()
        (0, 1)
        >>> prefetcher.shutdown()
    """

    def __init__(self, count: int, make: Callable[[Ticket], T]) -> None:
        self._count, self._make = count, make
        self.reset_after_fork()
        on_fork(self)  # a child has none of the threads; what they prepare is the parent's

    def reset_after_fork(self) -> None:
        """Begin with nothing prepared."""
        self._lock = threading.RLock()
        self._pool: ThreadPoolExecutor | None = None
        self._results: deque[tuple[Future[T], Ticket]] = deque()
        self._before = _set_event()

    def next(self) -> T:
        """The next result.

        Raises:
            Exception: what ``make`` raised. What was prepared behind it is dropped, and prepared again. What waited in
                vain when it was prepared ahead is made again now.
        """
        with self._lock:
            ahead = bool(self._results)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    self._count,
                    thread_name_prefix=_PREFETCHERS,
                    initializer=torch.set_num_threads,  # a new thread takes as many as there are cores
                    initargs=(torch.get_num_threads(),),
                )
            while len(self._results) <= self._count:
                turn = Ticket(self._before)
                self._before = turn.over
                self._results.append((self._pool.submit(self._run, turn), turn))
            result, _ = self._results.popleft()
        try:
            return result.result()
        except BaseException as error:
            self.drop()
            if ahead and isinstance(error, TimeoutError):
                return self.next()
            raise

    @property
    def num_ahead(self) -> int:
        """Number of results that were asked for ahead."""
        return len(self._results)

    def _run(self, turn: Ticket) -> T:
        try:
            return self._make(turn)
        finally:
            turn.over.set()

    def drop(self) -> None:
        """Forget what was prepared; waits for threads that are at it."""
        with self._lock:
            dropped, self._results = self._results, deque()
            started = []
            for result, turn in reversed(
                dropped
            ):  # from the end: what starts meanwhile has nothing cancelled before it
                if result.cancel():
                    turn.over.set()  # a thread that takes work later can be the first to start it, and waits for this
                else:
                    started.append(result)
            self._before = _set_event()
        wait(started)

    def shutdown(self) -> None:
        """End the threads; they start again with :meth:`next`."""
        self.drop()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


class ProgressCondition:
    """A condition on which threads wait until they may go on.

    Those who change something wake them, by :attr:`changed`; what other processes change is noticed within 10 ms.

    Attributes:
        changed: held while what is waited for changes.

    Example:
        >>> progress, drawn = ProgressCondition(), []
        >>> def draw():
        ...     with progress.changed:
        ...         drawn.append(3)
        ...         progress.changed.notify_all()
        >>> timer = threading.Timer(0.01, draw)
        >>> timer.start()
        >>> progress.wait(
        ...     lambda: len(drawn) > 0,
        ...     lambda: len(drawn),
        ...     timeout_s=10.0,
        ...     stop=lambda: False,
        ...     why=lambda: "inserting waits for a draw",
        ...     remedy=lambda: "Draw",
        ...     others=lambda: False,
        ... )
        True
    """

    def __init__(self) -> None:
        self.reset_after_fork()
        on_fork(self)

    def reset_after_fork(self) -> None:
        """Begin with nobody who waits."""
        self.changed = threading.Condition()
        self._reasons: dict[int, str] = {}  # by thread

    @property
    def reasons(self) -> list[str]:
        """A line for each thread that waits."""
        return list(self._reasons.values())

    def wake(self) -> None:
        """Let those who wait look again."""
        with self.changed:
            self.changed.notify_all()

    def wait(
        self,
        may: Callable[[], bool],
        progress: Callable[[], int],
        *,
        timeout_s: float,
        stop: Callable[[], bool],
        why: Callable[[], str],
        remedy: Callable[[], str],
        others: Callable[[], bool],
    ) -> bool:
        """Wait until ``may()``.

        Args:
            may: whether to go on.
            progress: a number that changes when the others do something.
            timeout_s: how long to wait without any progress.
            stop: asked first, at each turn, whether to stop waiting. The time that it takes does not count as waiting.
            why: who waits for what, for messages.
            remedy: what to do about that, for messages.
            others: whether somebody outside this process could help.

        Returns:
            Whether ``may()``; False: ``stop()``.

        Raises:
            TimeoutError: no progress for ``timeout_s``.
            RuntimeError: nobody else could make any: this thread is the only one.
        """
        me = threading.get_ident()
        seen, until, nap = progress(), time.monotonic() + timeout_s, _FIRST_NAP_S
        try:
            self._reasons[me] = why()
            while True:
                asked = time.monotonic()
                if stop():
                    return False
                if may():
                    return True
                now = time.monotonic()
                until += now - asked
                if _is_only_thread() and not others():
                    raise RuntimeError(f"{why()}, and this is the only thread: nobody else will do it. {remedy()}.")
                if progress() != seen:
                    seen, until, nap = progress(), now + timeout_s, _FIRST_NAP_S
                if now >= until:
                    raise TimeoutError(f"waited {timeout_s:g} s in vain: {why()}. {remedy()}.")
                with self.changed:
                    self.changed.wait(min(nap, until - now))
                nap = min(2 * nap, _LONGEST_NAP_S)
        finally:
            self._reasons.pop(me, None)


def _is_only_thread() -> bool:
    me = threading.current_thread()
    return all(thread is me or thread.name.startswith(_NEVER_WRITE) for thread in threading.enumerate())
