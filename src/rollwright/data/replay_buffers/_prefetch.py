"""Prefetcher: results that threads prepare before they are needed, delivered in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Generic, TypeVar

import torch

from rollwright._processes.forks import on_fork

T = TypeVar("T")


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
                    thread_name_prefix="rollwright-prefetch",
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
