"""WorkerGroup: N workers, the messages to and from them, their replacement; and the lock of those who wait for them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from rollwright._interrupts import uninterrupted
from rollwright._processes.channel import ByValue
from rollwright._processes.connection import ExitReason, Heartbeats
from rollwright._processes.forks import not_here, on_fork
from rollwright._processes.pool import Answer, Pool
from rollwright._warnings import warn_user
from rollwright.collectors.workers import messages
from rollwright.collectors.workers.counters import Count, WorkerState
from rollwright.collectors.workers.handles import Restarts, Watchdog, WorkerHandle
from rollwright.collectors.workers.memory import Block
from rollwright.errors import WorkerError

if TYPE_CHECKING:
    from rollwright.collectors.workers.schedule import Schedule
    from rollwright.collectors.workers.transports import Transport
    from rollwright.collectors.workers.worker import WorkerSpec

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


_STUCK_S = 60.0  # without a step, before a call times out


class WorkerGroup:
    """Starts workers, sends them messages, takes in what they send, replaces those that fail, and ends them.

    Whoever waits for something takes in what all workers send meanwhile, one thread at a time.

    Args:
        specs: of the workers.
        transport: starts workers, and reaches them.
        restarts: what is done about workers that fail.
        watch: finds those that are stuck.
        forget: takes the index of each worker that is gone.
        prepare: changes the spec of a worker before it is started.

    Attributes:
        workers: in order of their indices.
        listener: takes in what they collect.
        lock: see :class:`SharedPool`.
        forced: what was done to workers that did not end by themselves.
        num_pauses: how many callers are :meth:`pausing`.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        *,
        transport: Transport,
        restarts: Restarts,
        watch: Watchdog,
        forget: Callable[[int], None],
        prepare: Callable[[WorkerSpec], WorkerSpec] | None = None,
    ) -> None:
        self._pool = Pool(len(specs), self._received, lost=self._lost, flushed=self._flushed)
        self.lock = self._shared = SharedPool(self._pool, self._tend, restarts.next_in)
        self.workers = [WorkerHandle(spec, self._pool) for spec in specs]
        self.listener: Schedule | None = None
        self._transport, self._forget, self._prepare = transport, forget, prepare
        if transport.fileno() >= 0:
            self._pool.watch(transport.fileno(), transport.read, push=transport.push)
        self.restarts, self.watch = restarts, watch
        self._warned: dict[tuple[type[Warning], str], bool] = {}  # noted by workers, and whether it was passed on
        self.forced: list[str] = []
        self.num_pauses = 0
        self.check_home, self.look, self.wake = self._shared.check_home, self._shared.look, self._shared.wake

    # Starting ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all workers, at once.

        Raises:
            WorkerError: one could not make its environment or its policy; the others are ended.
        """
        try:
            for worker in self.workers:
                self._launch(worker)
            self.wait(
                lambda: all(worker.ready is not None for worker in self.workers),
                self.watch.start_timeout_s,
                lambda: "environments and policies to be made: " + _doing(w for w in self.workers if not w.ready),
            )
        except BaseException:
            self.end(0.0)
            self.forced.clear()  # the others were not asked to end, and nothing is wrong with them
            raise
        notes = {note for worker in self.workers if worker.ready for note in worker.ready.warnings.value}
        for kind, text in sorted(notes, key=str):
            warn_user(text, kind)

    def _launch(self, worker: WorkerHandle) -> None:
        worker.counters.state = WorkerState.STARTING
        worker.counters.counts[Count.OLDEST] = -1
        self.watch.heartbeats.begin(worker.index)
        if self._prepare is not None:
            worker.spec = self._prepare(worker.spec)
            worker.place.follow(worker.spec.options)
        worker.started(self._transport.connect(worker.spec))

    # Waiting ----------------------------------------------------------------------------------

    def wait(
        self,
        until: Callable[[], bool],
        timeout_s: float | None,
        what: Callable[[], str],
        *,
        abandon: Callable[[], bool] | None = None,
    ) -> bool:
        """Take in what workers send until a condition holds, see :meth:`SharedPool.wait`.

        Args:
            until: the condition.
            timeout_s: how long; None: as long as the workers take, which are watched.
            what: is waited for, for the message.
            abandon: asked at every turn, whether to wait no longer.

        Raises:
            TimeoutError: it takes too long.
            WorkerError: a worker could not be started.
        """
        self._warn()  # of what others have found out meanwhile: there may be nothing to wait for
        return self._shared.wait(until, timeout_s, what, abandon=abandon, report=self._warn)

    def _warn(self) -> None:
        """Warn of what has happened; of what several workers have noted, once."""
        for note in [note for note, done in self._warned.items() if not done]:
            self._warned[note] = True
            warn_user(note[1], note[0])
        while self.restarts.notes:
            warn_user(self.restarts.notes.pop(0), RuntimeWarning)

    # Sending ----------------------------------------------------------------------------------

    def order(self, worker: WorkerHandle, run: int, block: Block | None, *, reset: bool = False) -> None:
        """Ask a worker for a rollout."""
        with self.lock:
            worker.runs[run] = block
            if block is not None:
                block.runs.add(run)
            self.watch.heartbeats.begin(worker.index)
            offset, number = (None, -1) if block is None else (block.offset, block.number)
            worker.send(messages.Collect(run, offset, number, reset))

    def interrupt(self, worker: WorkerHandle) -> None:
        """End the rollouts that a worker was asked for after the current step."""
        with self.lock:
            for run in worker.runs:
                worker.send(messages.Interrupt(run), attention=True)

    def call(
        self,
        path: str,
        args: Sequence[tuple[Sequence[Any], dict[str, Any]] | None],
        *,
        workers: Sequence[int] | None = None,
        between_batches: bool = False,
        cut: bool = False,
        again: bool = False,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call what a path leads to in workers; in order of workers, what came of it.

        Args:
            path: from a worker's collector.
            args: positional and named arguments for each; None: read what is there.
            workers: which; None: all.
            between_batches: not in the middle of a rollout.
            cut: end the current rollout for it.
            again: if a worker ends before it has answered, and another takes its place, ask that one, once: for what
                may be done twice.
            timeout_s: how long; None: a minute beyond the last step of a worker that is at work.

        Raises:
            WorkerError: it raised in a worker, or a worker is gone, or ended before it had answered.
            TimeoutError: a worker does not answer.
        """
        chosen = [self.workers[i] for i in (range(len(self.workers)) if workers is None else workers)]
        asked, answers = list(zip(chosen, args, strict=True)), {}
        for may_fail in (True, False) if again else (False,):
            ready = [worker for worker, _ in asked]
            self._check_ready(ready)
            for worker in ready:
                worker.called = path
            payloads = [None if given is None else ByValue(given) for _, given in asked]
            requests = [
                partial(messages.Call, path=path, arguments=payload, between_batches=between_batches, cut=cut)
                for payload in payloads
            ]
            found = self._ask(ready, requests, path, timeout_s, all_of_them=not may_fail)
            for index, (answer, num_collected) in found.items():
                if isinstance(answer, messages.Raised):
                    raise answer.failure.error(self.workers[index].name, index)
                answers[index], self.workers[index].num_at_answer = answer.value.value, num_collected
            asked = [(worker, given) for worker, given in asked if worker.index not in answers]
            if not asked:
                break
        return [answers[worker.index] for worker in chosen]

    def _check_ready(self, workers: Iterable[WorkerHandle]) -> None:
        for worker in workers:
            if worker.error is not None:
                raise worker.error
        missing = [worker for worker in workers if not worker.available]
        if missing:
            self.wait(
                lambda: all(worker.available or worker.error is not None for worker in missing),
                self.watch.start_timeout_s,
                lambda: _doing(missing),
            )
            self._check_ready(missing)

    def _ask(
        self,
        workers: Sequence[WorkerHandle],
        requests: Sequence[Callable[[int], Any]],
        what: str,
        timeout_s: float | None,
        *,
        all_of_them: bool,
    ) -> dict[int, tuple[Any, int]]:
        """Send each worker a message, made from a ticket, and wait for the answers.

        Returns:
            By index, but for those that are gone: the answer, and how many rollouts of the worker had arrived before.

        Raises:
            WorkerError: one is gone for good; or, where all of them are to answer, one was replaced.
            TimeoutError: one does not answer.
        """
        calls = self._pool.calls
        with self.lock:
            ticket = calls.open()
            call = calls[ticket]
        try:
            with self.lock:
                asked = {worker.index: worker.connection for worker in workers}
                for worker, request in zip(workers, requests, strict=True):
                    calls.ask(ticket, worker.index)
                    worker.send(request(ticket), attention=True)
            self._await_answers(call.due, what, timeout_s)
        finally:
            with self.lock:
                calls.close(ticket)
        there = [w for w in workers if w.index in call.answers and w.connection is asked[w.index] is not None]
        gone = [worker for worker in workers if worker not in there]
        if gone and (all_of_them or any(worker.error is not None for worker in gone)):
            raise gone[0].error or self.restarts.last_error(gone[0].index)
        return {worker.index: call.answers[worker.index] for worker in there}

    def _await_answers(self, due: dict[int, Any], what: str, timeout_s: float | None) -> None:
        """Wait until none is due, as long as workers that are at work take steps."""
        heartbeats, began = Heartbeats(), time.monotonic()

        def is_late() -> bool:
            if timeout_s is not None:
                return time.monotonic() - began > timeout_s
            asked = [self.workers[index] for index in due]
            beats = [(worker, worker.counters.counts[Count.BEAT]) for worker in asked]
            late = [  # each is looked at
                worker
                for worker, beat in beats
                if heartbeats.is_silent(worker.index, beat, _STUCK_S, worker.remote_clock())
            ]
            return bool(late)

        if not self.wait(lambda: not due, None, lambda: what, abandon=is_late):
            limit_s = _STUCK_S if timeout_s is None else timeout_s
            raise TimeoutError(f"waited {limit_s:g} s for {what}: {_doing(self.workers[index] for index in due)}")

    def change_options(self, **changes: Any) -> None:
        """Change options of workers that will be started in place of others."""
        for worker in self.workers:
            worker.spec = dataclasses.replace(worker.spec, options=worker.spec.options.override(**changes))

    @contextmanager
    def pausing(self, timeout_s: float = _STUCK_S) -> Iterator[None]:
        """Let all workers rest between two steps inside the ``with`` block; those that are started meanwhile do not.

        Raises:
            TimeoutError: a step does not end in time.
            WorkerError: a worker is gone, and is not replaced.
        """
        try:
            self.num_pauses += 1
            workers = [worker for worker in self.workers if worker.available]
            self._ask(workers, [messages.Pause] * len(workers), "a step to end", timeout_s, all_of_them=False)
            yield
        finally:
            with uninterrupted:
                self.num_pauses -= 1
                if not self.num_pauses:
                    with self.lock:
                        for worker in self.workers:
                            worker.send(messages.Resume(), attention=True)
                self.wake()

    # What workers send ------------------------------------------------------------------------

    def _received(self, index: int, message: Any) -> Answer | None:
        """Take in a message; what is returned is the answer to a call."""
        worker, listener = self.workers[index], self.listener
        match message:
            case messages.Collected() if message.run not in worker.runs:
                self._replace(worker, worker.failed(f"has answered order {message.run}, which it was not given"))
            case messages.Collected():
                with self.lock:
                    worker.place.move(message.place)
                    worker.num_collected += 1
                    worker.of_path = message.of_path or {}
                    block = worker.runs.pop(message.run)
                    if listener is not None:
                        listener.collected(worker, message, block)
            case _ if self._shared.closed:
                pass
            case messages.MemoryRequest() if listener is not None:
                try:
                    answer: messages.MemoryGrant | messages.MemoryRefusal = listener.needs(worker, message)
                except Exception as why:  # no memory, most likely; the worker would wait for ever
                    answer = messages.MemoryRefusal(f"{type(why).__name__}: {why}")
                worker.send(answer)
            case messages.Failed():
                _release(worker, message.run)
                error = message.failure.error(worker.name, worker.index)
                if self.restarts.wanted:
                    self._replace(worker, error)
                elif listener is not None:
                    listener.failed(worker, error)
            case messages.Returned() | messages.Raised() | messages.Paused():
                return Answer(message.serial, (message, worker.num_collected))
            case messages.Noted() if worker.ready is not None:
                worker.ready = dataclasses.replace(worker.ready, how=message.how)
                for note in message.warnings.value:
                    self._warned.setdefault(note, False)
            case messages.Position():
                worker.place.move(message.place)
            case messages.Publishes():
                worker.place.announce(message)
            case messages.Ready():
                worker.ready = message
                self.restarts.began(worker.index)
        return None

    def _flushed(self, index: int) -> None:
        self.workers[index].counters.call_attention()  # it may have read all that was there before

    def published(self, version: int, workers: Iterable[int]) -> None:
        """Weights of a version were published to some workers."""
        for index in workers:
            self.workers[index].counters.counts[Count.PUBLISHED] = version
        self._transport.published()

    # Failures ---------------------------------------------------------------------------------

    def _lost(self, index: int, loss: ExitReason) -> None:
        """The process of a worker is gone."""
        worker = self.workers[index]
        if loss.failure is not None:
            error = loss.failure.error(worker.name, worker.index)
        else:
            error = worker.failed(f"{loss.how} while {worker.counters.state.name.lower().replace('_', ' ')}")
        self._replace(worker, error)

    def _replace(self, worker: WorkerHandle, error: WorkerError) -> None:
        """A worker is of no use any more: have another started in its place, if that is asked for."""
        self._pool.drop(worker.index, str(error))
        worker.ready = None
        for run in list(worker.runs):
            _release(worker, run)
        worker.counters.counts[Count.OLDEST] = -1
        self._forget(worker.index)
        if self._shared.closed:
            return
        if self.listener is None:  # nothing is made yet that could do without it
            worker.error = error
            raise error
        again = self.restarts.plan(worker.index, error, goes_on=worker.place.is_known)
        if not again:
            worker.error = self.restarts.verdict(worker.index, error)
        self.listener.lost(worker)
        if not again:
            self.listener.failed(worker, worker.error or error)

    def _tend(self) -> None:
        """Start those whose time has come, and find those that are stuck."""
        self._transport.tend()
        for index in self.restarts.due():
            worker = self.workers[index]
            seed, place = worker.spec.seed + len(self.workers), worker.place.of_dead()
            worker.spec = dataclasses.replace(worker.spec, seed=seed, place=place)
            try:
                self._launch(worker)
            except (OSError, TypeError, ValueError, RuntimeError) as why:
                self._replace(worker, worker.failed(f"could not be started again: {type(why).__name__}: {why}"))
        for worker in self.workers:
            error = self.watch.failure(worker)
            if error is not None:
                self._replace(worker, error)

    # Looking ----------------------------------------------------------------------------------

    def doing(self) -> str:
        """What the workers do, as a phrase."""
        return _doing(self.workers)

    @property
    def num_alive(self) -> int:
        """Workers whose process runs."""
        return sum(worker.alive for worker in self.workers)

    def oldest_versions(self) -> list[tuple[int, int]]:
        """Workers, and versions that acted first in their rollouts in progress, for use in a condition of :meth:`wait`.

        What workers have sent before is taken in; a rollout that has not begun counts as one of the newest version.
        """
        firsts = [worker.counters.counts[Count.OLDEST] for worker in self.workers]
        for worker in self.workers:
            self._pool.read(worker.index)
        in_progress = [worker for worker in self.workers if worker.runs]
        published = [(worker.index, worker.counters.counts[Count.PUBLISHED]) for worker in in_progress]
        return published + [(worker.index, firsts[worker.index]) for worker in in_progress if firsts[worker.index] >= 0]

    # The end ----------------------------------------------------------------------------------

    def end(self, timeout_s: float, *, close_env: bool = True) -> WorkerError | None:
        """Ask all workers to end; make those that do not. What was done to them is in :attr:`forced`.

        Args:
            timeout_s: for all of them together to end by themselves.
            close_env: whether they close their environments.

        Returns:
            What one of them raised at its end, if one did.
        """
        self._shared.close()
        until = time.monotonic() + timeout_s
        for worker in self.workers:
            if worker.connection is not None:
                worker.send(messages.Stop(close_env), attention=True)
        ended = self._pool.end(lambda: until)
        for index, (how, _) in ended.items():
            worker = self.workers[index]
            if how != "ended":
                self.forced.append(f"{worker.doing()}, and was {how} after {timeout_s:g} s")
            worker.counters.state = WorkerState.ENDED
        self.wake()
        failures = [(self.workers[index], end.failure) for index, end in ended.items()]
        return next((failure.error(worker.name, worker.index) for worker, failure in failures if failure), None)


def _release(worker: WorkerHandle, run: int) -> None:
    """A rollout will not be written."""
    block = worker.runs.pop(run, None)
    if block is not None:
        block.runs.discard(run)


def _doing(workers: Iterable[WorkerHandle]) -> str:
    return ", ".join(worker.doing() for worker in workers)
