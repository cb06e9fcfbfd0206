"""Calls of workers between two rollouts, and the thread that keeps them collecting into a replay buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rollwright._processes.threads import DaemonThread
from rollwright.collectors.core import never
from rollwright.collectors.delivery.thread import BufferFiller, log_end
from rollwright.collectors.workers.group import WorkerGroup
from rollwright.collectors.workers.schedules.schedule import Schedule

Arguments = tuple[Sequence[Any], dict[str, Any]]  # positional ones, and named ones
_SAMPLES = {"list_of_args": "(3,)", "list_of_kwargs": "{'key': 3}"}


class WorkerCalls:
    """Calls what a path leads to, from the collector of each worker.

    Args:
        group: the workers.
        num_workers: how many.
        stored: whether rollouts are written into a replay buffer: then one in progress may be cut short for a call.
        check: raises if the collector was shut down, or failed.
    """

    def __init__(self, group: WorkerGroup, num_workers: int, *, stored: bool, check: Callable[[], None]) -> None:
        self._group, self._num, self._stored, self._check = group, num_workers, stored, check
        self._pausers: list[int] = []  # threads inside pause()

    def between(
        self, path: str, calls: Sequence[Arguments], workers: Sequence[int] | None = None, *, again: bool = True
    ) -> list[Any]:
        """Call something in workers, not in the middle of a rollout; ``again``: if one dies of it, in the next one."""
        self._check()
        return self._group.call(path, calls, workers=workers, between_batches=True, cut=self._stored, again=again)

    def any_time(self, path: str, calls: Sequence[Arguments], workers: Sequence[int] | None = None) -> list[Any]:
        """Call something in workers between two rollouts; inside a pause of this thread, where they rest."""
        if not self.pauses_here:
            return self.between(path, calls, workers, again=False)
        self._check()
        return self._group.call(path, calls, workers=workers)

    def in_all(self, path: str, *args: Any, **kwargs: Any) -> list[Any]:
        """:meth:`any_time`, in all workers, with the same arguments."""
        return self.any_time(path, [(args, kwargs)] * self._num)

    def map(
        self,
        path: str,
        list_of_args: Sequence[Sequence[Any]] | None,
        list_of_kwargs: Sequence[Mapping[str, Any]] | None,
    ) -> list[Any]:
        """:meth:`any_time`, in all workers, with arguments for each.

        Raises:
            TypeError, ValueError: there are not as many, or they are no arguments.
        """
        self._check_list("list_of_args", list_of_args, (list, tuple))
        self._check_list("list_of_kwargs", list_of_kwargs, (Mapping,))
        args = [()] * self._num if list_of_args is None else list_of_args
        kwargs = [{}] * self._num if list_of_kwargs is None else list_of_kwargs
        return self.any_time(path, [(tuple(a), dict(k)) for a, k in zip(args, kwargs, strict=True)])

    def _check_list(self, name: str, given: Any, kinds: tuple[type, ...]) -> None:
        if given is None:
            return
        if not (isinstance(given, Sequence) and all(isinstance(one, kinds) for one in given)):
            raise TypeError(
                f"{name}: expected a list with a {'tuple' if name == 'list_of_args' else 'dictionary'} for each of "
                f"{self._num} workers, got {given!r}. Pass for example [{_SAMPLES[name]}] * {self._num}."
            )
        if len(given) != self._num:
            raise ValueError(f"{name}: expected an entry for each of {self._num} workers, got {len(given)}.")

    def read(self, path: str) -> list[Any]:
        """What a path leads to in each worker, read between two steps."""
        return self._group.call(path, [None] * self._num, again=True)

    # Pauses -----------------------------------------------------------------------------------

    @property
    def pauses_here(self) -> bool:
        """Whether this thread is inside :meth:`pausing`."""
        return threading.get_ident() in self._pausers

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Keep all workers between two steps inside the ``with`` block."""
        self._check()
        here = threading.get_ident()  # another thread may be the one that collects a block that was never left
        self._pausers.append(here)
        try:
            with self._group.pausing():
                yield
        finally:
            self._pausers.remove(here)


class _Thread(DaemonThread):
    """Calls ``deliver`` again and again; it takes a condition to stop."""

    def __init__(self, deliver: Callable[[Callable[[], bool]], bool]) -> None:
        super().__init__("rollwright-schedule")
        self._deliver = deliver

    def _work(self) -> None:
        while not self.stopping and self._deliver(lambda: self.stopping):
            pass

    def _finish(self) -> None:
        if not self.stopping:
            log_end(self)


class WorkersBackground(BufferFiller):
    """A thread that asks workers for rollouts, and the limiter of the replay buffer that they write.

    Args:
        group: the workers.
        schedule: of their rollouts.
        buffer: that they write; None: there is none.
        frames: in a batch.
        owner: name of the collector's class.
        before_batch: called before each batch.
        delivered: called after each batch.
        deliver: what is done in place of waiting for the next batch: it puts that into a queue; False: there is none.
    """

    def __init__(
        self,
        group: WorkerGroup,
        schedule: Schedule,
        buffer: Any,
        *,
        frames: int,
        owner: str,
        before_batch: Callable[[], None],
        delivered: Callable[[], None],
        deliver: Callable[[Callable[[], bool]], bool] | None = None,
    ) -> None:
        super().__init__(buffer, owner, "the group of workers")
        self._group, self._schedule = group, schedule
        self._frames, self._before_batch, self._delivered = frames, before_batch, delivered
        self._into_queue, self._takes_all = deliver, deliver is not None
        self._leave_limiter: tuple[Callable[[], None], ...] = ()
        self._limiter = limiter = getattr(buffer, "insert_limiter", None)
        if limiter is not None:
            limiter.check(frames=frames)
            schedule.rollouts.limiter = limiter
            self._leave_limiter = (limiter.on_change(group.wake), limiter.add_inserter(self._inserts))

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: there is no replay buffer, or it runs already.
        """
        self.check_start()
        self.begin(_Thread(self._deliver_one))

    def _deliver_one(self, stop: Callable[[], bool]) -> bool:
        schedule = self._schedule
        schedule.raise_error()
        if self._into_queue is not None:
            self._before_batch()
            came = self._into_queue(stop)
            if came:
                self._delivered()
            return came
        if not schedule.ready(stop):
            return False
        self._before_batch()
        self.await_room(lambda: self._looks_and_stops(stop))
        schedule.next(stop)
        self._delivered()
        return True

    def _looks_and_stops(self, stop: Callable[[], bool]) -> bool:
        """While the thread waits for samples: whether there is something else to see to."""
        self._group.look()
        return stop() or bool(self._schedule.errors)

    def await_room(self, stop: Callable[[], bool] = never) -> None:
        """Wait for the buffer's limiter, where no worker is at work."""
        limiter, frames = self._limiter, self._frames
        if limiter is None or any(worker.runs for worker in self._group.workers) or limiter.may_insert(frames):
            return
        self._schedule.rollouts.waiting_for = limiter.wants(frames)
        try:
            limiter.await_insert(frames, stop=stop, whom=self._owner)
        finally:
            self._schedule.rollouts.waiting_for = None

    def _inserts(self) -> str:
        """For who samples and waits: what the workers do."""
        self.raise_error()
        if not self.running:
            return f"{self._owner} is not running; it has collected {self._schedule.frames:,} frames"
        return f"the workers of {self._owner}: {self._group.doing()}"

    def leave_limiter(self) -> None:
        """Who samples need not wait for these workers."""
        for leave in self._leave_limiter:
            leave()

    def stop(self, timeout_s: float) -> None:
        """Ask the thread to end, and wait for that."""
        if self.thread is not None:
            self.thread.stop(timeout_s)
            self._group.wake()

    def raise_at_end(self) -> None:
        """Raise what went wrong in the thread, also in the thread itself."""
        if self.thread is not None:
            self.thread.raise_error()

    def drop_error(self) -> None:
        """Nobody is to hear of what went wrong in the thread, neither the collector's user nor the buffer's."""
        self._dropped = True

    def stats(self) -> dict[str, Any]:
        """What ``stats()`` of a collector reports on it."""
        if self.thread is None:
            return {}
        return {"background": {"running": self.running, "error": self.thread.error_text()}}
