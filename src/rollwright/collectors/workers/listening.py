"""Listening: starting workers, hearing what they say, and what becomes of those that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import select
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollwright._interrupts import uninterrupted
from rollwright._processes.channel import ByValue, ChannelClosed
from rollwright._processes.child import Child
from rollwright._processes.failures import Failure
from rollwright._processes.forks import not_here, on_fork
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.counters import State, Word
from rollwright.collectors.workers.member import Listener, Member
from rollwright.collectors.workers.restarts import Restarts
from rollwright.collectors.workers.watching import Watch, failure_of
from rollwright.collectors.workers.worker import WorkerSpec, serve
from rollwright.errors import WorkerError

__all__ = ["NAP_S", "Listening"]

NAP_S = 0.2


class Listening:
    """Starts workers, listens to them, watches over them.

    Whoever waits for something reads what the workers say meanwhile (one thread at a time), for all.

    Args:
        specs: of the workers.
        start_method: of the processes.
        num_threads: that torch uses in each.
        restarts: what is done about workers that fail.
        watch: tells which are stuck.
        forget: told which worker is gone.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        *,
        start_method: str | None,
        num_threads: Sequence[int],
        restarts: Restarts,
        watch: Watch,
        forget: Callable[[int], None],
    ) -> None:
        self.workers = [Member(spec) for spec in specs]
        self.listener: Listener | None = None
        self._start_method, self._num_threads = start_method, num_threads
        self.restarts, self._watcher, self._forget_reader = restarts, watch, forget
        self._home: int | None = None  # of a fork: the process that it was forked from
        self._begin()
        on_fork(self, Listening._leave_workers)
        self._poll = select.poll()
        self._by_fd: dict[int, Member] = {}
        self._waking, self._waker = os.pipe()
        for fd in (self._waking, self._waker):
            os.set_blocking(fd, False)
            weakref.finalize(self, os.close, fd).atexit = False
        self._poll.register(self._waking, select.POLLIN)
        self._serial = itertools.count()
        self._answers: dict[tuple[int, int], tuple[Any, int]] = {}  # and how many rollouts had arrived before
        self._awaited: set[int] = set()  # serials of calls
        self._warned: dict[tuple[type[Warning], str], bool] = {}  # noted by workers, and whether it was passed on
        self.closed = False
        self.forced: list[str] = []
        self.num_pauses = 0

    def _begin(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._reading = False

    def _leave_workers(self) -> None:
        """In a forked child: the workers are those of its parent."""
        self._begin()
        self._home, self.closed = self._home or os.getppid(), True
        for worker in self.workers:
            worker.child = None

    def check_home(self) -> None:
        """Refuse to do anything in a process that was forked from the one that has the workers."""
        if self._home is not None:
            raise not_here("the collector", self._home)

    # Starting ---------------------------------------------------------------------------------

    def _launch(self, worker: Member) -> None:
        try:
            self._start_child(worker)
        except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
            raise _unsendable(worker.spec, error) from error

    def _start_child(self, worker: Member) -> None:
        worker.words.state = State.STARTING
        worker.words.whole[Word.OLDEST] = -1
        worker.pulse_at = time.monotonic()
        child = Child(
            serve,
            worker.spec,
            name=f"rollwright-worker-{worker.index}",
            start_method=self._start_method,
            num_threads=self._num_threads[worker.index],
        )
        worker.child = child
        for fd in (child.channel.fileno(), child.sentinel):
            self._by_fd[fd] = worker
            self._poll.register(fd, select.POLLIN)

    # Listening --------------------------------------------------------------------------------

    def wait(
        self,
        until: Callable[[], bool],
        timeout_s: float | None,
        what: Callable[[], str],
        *,
        give_up: Callable[[], bool] | None = None,
    ) -> bool:
        """Listen until a condition holds. Ctrl-C comes through between two turns, of 0.2 s at most.

        Args:
            until: the condition.
            timeout_s: how long; None: as long as the workers take, which are watched.
            what: what is waited for, for the message.
            give_up: asked at every turn, whether to wait no longer.

        Returns:
            Whether the condition holds: False only if it was given up.

        Raises:
            TimeoutError: it takes too long.
            WorkerError: a worker could not be started.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self.lock:
                if until():
                    return True
                if give_up is not None and give_up():
                    return False
                if self.closed:
                    raise RuntimeError(f"the collector was shut down by another thread, which waited for {what()}")
                left = NAP_S if end is None else min(NAP_S, end - time.monotonic())
                if left <= 0:
                    raise TimeoutError(f"waited {timeout_s:g} s for {what()}")
                if self._reading:
                    self._changed.wait(left)
                else:
                    self._read(left)
                    self._tell()

    def _tell(self) -> None:
        """Warn of what has happened; of what several workers have noted, once."""
        for note in [note for note, told in self._warned.items() if not told]:
            self._warned[note] = True
            warnings.warn(note[1], note[0], stacklevel=3)
        notes = self.restarts.notes
        while notes:
            warnings.warn(notes.pop(0), RuntimeWarning, stacklevel=3)

    @property
    @contextmanager
    def lock(self) -> Iterator[None]:
        """Held by whoever reads what workers say, or changes what is known of them; Ctrl-C waits for its end."""
        self.check_home()
        with uninterrupted, self._changed:
            yield

    def look(self) -> None:
        """Take in what workers have said, without waiting."""
        with self.lock:
            if not self._reading and not self.closed:
                self._read(0.0)

    def wake(self) -> None:
        """Let whoever waits look again: something has changed that workers do not tell of."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._waker, b"1")

    def _read(self, timeout_s: float) -> None:
        """Read what workers say, once, holding the lock; while nothing is said, others may have it."""
        waits = self.restarts.next_in()
        for worker in self.workers:
            if worker.behind:
                self._poll.register(worker.line, select.POLLIN | select.POLLOUT)
        self._reading = True
        self._changed.release()
        try:
            ready = self._poll.poll(min(timeout_s, waits) * 1e3)
        finally:
            self._changed.acquire()
            self._reading = False
            self._changed.notify_all()
        if any(fd == self._waking for fd, _ in ready):
            with contextlib.suppress(BlockingIOError):
                os.read(self._waking, 1 << 12)
        for fd, events in ready:
            if events & select.POLLOUT and fd in self._by_fd:
                self._poll.register(fd, select.POLLIN)
                self._by_fd[fd].catch_up()
        for worker in {id(w): w for fd, _ in ready if (w := self._by_fd.get(fd)) is not None}.values():
            self._hear(worker)
        self._watch()
        self._changed.notify_all()

    def _hear(self, worker: Member) -> None:
        """Take in all that a worker has said; see whether it has ended."""
        child = worker.child
        while child is not None and child is worker.child:
            try:
                if not child.channel.poll():
                    return
                message = child.channel.recv(0.0)
            except ChannelClosed:
                self._gone(worker, None)
                return
            except TimeoutError:
                return
            self._take(worker, message)

    def _hear_out(self, ending: Sequence[tuple[Member, Child]], until: float) -> list[WorkerError]:
        """Listen to workers that are to end, until they have; what they raised."""
        errors: dict[int, WorkerError] = {}
        lines = {fd: (worker, child) for worker, child in ending if (fd := child.channel.fileno()) >= 0}
        left = until - time.monotonic()
        while lines:
            poll = select.poll()
            for fd, (worker, _) in lines.items():
                poll.register(fd, select.POLLIN | select.POLLOUT if worker.behind else select.POLLIN)
            for fd, events in poll.poll(max(0.0, min(NAP_S, left)) * 1e3):
                worker, child = lines[fd]
                if events & select.POLLOUT:
                    worker.catch_up()
                try:
                    while child.channel.poll():
                        message = child.channel.recv(0.0)
                        if isinstance(message, say.Collected):
                            with self.lock:
                                self._take(worker, message)
                        elif isinstance(message, Failure):
                            errors[worker.index] = message.error(worker.name, worker.index)
                except ChannelClosed:
                    del lines[fd]
            if left <= 0:
                break
            left = until - time.monotonic()
        for _, child in ending:
            child.wait(until - time.monotonic())
        return [errors[index] for index in sorted(errors)]

    def _take(self, worker: Member, message: Any) -> None:
        listener = self.listener
        match message:
            case say.Collected():
                worker.num_collected += 1
                block = worker.runs.pop(message.run, None)
                if listener is not None:
                    listener.collected(worker, message, block)
            case say.Need() if listener is not None:
                try:
                    answer: say.Grant | say.Refusal = listener.needs(worker, message)
                except Exception as why:  # no memory, most likely; the worker would wait for ever
                    answer = say.Refusal(f"{type(why).__name__}: {why}")
                worker.send(answer)
            case say.Failed():
                self._release(worker, message.run)
                error = message.failure.error(worker.name, worker.index)
                if self.restarts.wanted:
                    self._replace(worker, error)
                elif listener is not None:
                    listener.failed(worker, error)
            case say.Returned() | say.Raised() | say.Paused():
                if message.serial in self._awaited:  # whoever asked may have given up
                    self._answers[worker.index, message.serial] = message, worker.num_collected
            case say.Noted() if worker.ready is not None:
                worker.ready = dataclasses.replace(worker.ready, how=message.how)
                for note in message.warnings.value:
                    self._warned.setdefault(note, False)
            case say.Ready():
                worker.ready = message
                self.restarts.began(worker.index)
            case Failure():
                self._gone(worker, message)

    def _gone(self, worker: Member, failure: Failure | None) -> None:
        """A worker's process has ended, or is about to."""
        child = worker.child
        assert child is not None
        child.wait(1.0)
        if failure is not None:
            error = failure.error(worker.name, worker.index)
        else:
            during = worker.words.state.name.lower().replace("_", " ")
            error = failure_of(worker, f"{child.how_it_ended()} while {during}")
        self._replace(worker, error)

    def _release(self, worker: Member, run: int) -> None:
        block = worker.runs.pop(run, None)
        if block is not None:
            block.runs.discard(run)

    def _replace(self, worker: Member, error: WorkerError) -> None:
        """A worker is of no use any more: start another in its place, if that is asked for."""
        child, worker.child, worker.ready = worker.child, None, None
        if child is not None:
            self._forget(worker)
            child.kill()
            child.end(1.0)
        for run in list(worker.runs):
            self._release(worker, run)
        worker.words.whole[Word.OLDEST] = -1
        self._forget_reader(worker.index)
        for key in [key for key in self._answers if key[0] == worker.index]:
            del self._answers[key]
        if self.closed:
            return
        if self.listener is None:  # nothing is made yet that could do without it
            worker.error = error
            raise error
        again = self.restarts.plan(worker.index, error)
        if not again:
            worker.error = self.restarts.verdict(worker.index, error)
        self.listener.lost(worker)
        if not again:
            self.listener.failed(worker, worker.error or error)

    def _doing(self, workers: Iterable[Member]) -> str:
        return ", ".join(worker.doing() for worker in workers)

    def _forget(self, worker: Member) -> None:
        """Listen no more to a worker, whose channel may be closed already."""
        for fd in [fd for fd, listened_to in self._by_fd.items() if listened_to is worker]:
            del self._by_fd[fd]
            self._poll.unregister(fd)

    def _watch(self) -> None:
        """Start those whose time has come, and see whether one is stuck."""
        for index in self.restarts.due():
            worker = self.workers[index]
            worker.spec = dataclasses.replace(worker.spec, seed=worker.spec.seed + len(self.workers))
            try:
                self._launch(worker)
            except (OSError, TypeError, ValueError, RuntimeError) as why:
                self._replace(worker, failure_of(worker, f"could not be started again: {type(why).__name__}: {why}"))
        for worker in self.workers:
            error = self._watcher.failure(worker)
            if error is not None:
                self._replace(worker, error)

    def oldest_versions(self) -> list[tuple[int, int]]:
        """Workers, and versions that acted first in their rollouts under way, for use in a condition of :meth:`wait`.

        What workers have told before is taken in; a rollout that has not begun counts as one of the newest version.
        """
        firsts = [worker.words.whole[Word.OLDEST] for worker in self.workers]
        for worker in self.workers:
            self._hear(worker)
        under_way = [worker for worker in self.workers if worker.runs]
        published = [(worker.index, worker.words.whole[Word.PUBLISHED]) for worker in under_way]
        return published + [(worker.index, firsts[worker.index]) for worker in under_way if firsts[worker.index] >= 0]


def _unsendable(spec: WorkerSpec, error: Exception) -> Exception:
    """Why a worker could not be started: the part of its making that cannot be pickled, if that is it."""
    parts = {"create_env_fn": spec.create_env_fn, "init_fn": spec.init_fn}
    parts |= {field.name: getattr(spec.options, field.name) for field in dataclasses.fields(spec.options)}
    del parts["replay_buffer"]  # which can be sent only while a process starts
    for name, part in parts.items():
        try:
            pickle.dumps(ByValue(part))
        except Exception as why:  # an object may refuse in any way it likes
            return TypeError(f"{name}: cannot be sent to a worker process: {type(why).__name__}: {why}.")
    return error
