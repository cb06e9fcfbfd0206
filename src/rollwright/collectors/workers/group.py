"""WorkerGroup: N workers, what is said to them, and what becomes of those that fail."""

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
from typing import Any, Protocol

from rollwright._interrupts import uninterrupted
from rollwright._processes.channel import ByValue
from rollwright._processes.child import Child
from rollwright._processes.failures import Failure
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.blocks import Block
from rollwright.collectors.workers.restarts import Restarts
from rollwright.collectors.workers.words import State, Word, Words
from rollwright.collectors.workers.worker import WorkerSpec, serve
from rollwright.errors import WorkerError

__all__ = ["Listener", "Worker", "WorkerGroup"]

_START_S = 120.0  # for a worker to make its environment and its policy
_STUCK_S = 60.0  # without a step, before a call gives up
_NAP_S = 0.2


class Listener(Protocol):
    """Who is told what workers say of their rollouts."""

    def needs(self, worker: Worker, need: say.Need) -> say.Grant:
        """Give memory for a rollout."""

    def collected(self, worker: Worker, found: say.Collected, block: Block | None) -> None:
        """Take in a rollout, and the block that it was asked to lie in."""

    def failed(self, worker: Worker, error: WorkerError) -> None:
        """Take in an error to be raised."""

    def lost(self, worker: Worker) -> None:
        """A worker is gone, and with it what it was asked for; another may come in its place."""


class Worker:
    """What is known of one worker here.

    Attributes:
        index: its number.
        spec: what it is made of.
        child: its process.
        words: numbers that it writes.
        ready: what it told of itself; None while it starts.
        runs: rollouts that it was asked for and has not answered, in order, with their blocks.
        error: why it is gone for good.
        num_collected: rollouts of it that have arrived.
        num_told: likewise, when it answered a call last.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.index, self.spec = spec.index, spec
        self.words = Words(spec.words, spec.index)
        self.child: Child | None = None
        self.ready: say.Ready | None = None
        self.runs: dict[int, Block | None] = {}
        self.error: WorkerError | None = None
        self.sending = threading.Lock()
        self.num_collected = self.num_told = 0
        self.beat, self.beat_at = 0, 0.0

    @property
    def there(self) -> bool:
        """Whether it can be told something."""
        return self.ready is not None and self.child is not None

    @property
    def threads(self) -> int | None:
        """That torch uses in it."""
        return None if self.ready is None else self.ready.threads

    @property
    def name(self) -> str:
        """For messages."""
        return f"worker {self.index}"

    def send(self, message: Any, *, attention: bool = False) -> bool:
        """Tell it something; False if it is gone, which will be heard of."""
        child = self.child
        if child is None:
            return False
        try:
            with self.sending:
                if attention:
                    self.words.call_attention()
                child.channel.send(message)
                if attention:
                    self.words.call_attention()
        except (EOFError, TimeoutError):
            return False
        return True

    def doing(self) -> str:
        """A phrase for messages."""
        if self.error is not None:
            return f"{self.name} has failed"
        return f"{self.name} is {self.words.state.name.lower().replace('_', ' ')}"


class WorkerGroup:
    """Starts workers, listens to them, watches over them, ends them.

    Whoever waits for something reads what the workers say meanwhile (one thread at a time), for all.

    Args:
        specs: of the workers.
        start_method: of the processes.
        num_threads: that torch uses in each.
        restarts: what is done about workers that fail.
        step_timeout_s: a worker that takes longer for one step has failed; None: no limit.
        forget: told which worker is gone.
    """

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        *,
        start_method: str | None,
        num_threads: Sequence[int],
        restarts: Restarts,
        step_timeout_s: float | None,
        forget: Callable[[int], None],
    ) -> None:
        self.workers = [Worker(spec) for spec in specs]
        self.listener: Listener | None = None
        self._start_method, self._num_threads = start_method, num_threads
        self.restarts, self._step_timeout_s, self._forget_reader = restarts, step_timeout_s, forget
        self._changed = threading.Condition(threading.RLock())
        self._reading = False
        self._poll = select.poll()
        self._by_fd: dict[int, Worker] = {}
        self._waking, self._waker = os.pipe()
        for fd in (self._waking, self._waker):
            os.set_blocking(fd, False)
            weakref.finalize(self, os.close, fd).atexit = False
        self._poll.register(self._waking, select.POLLIN)
        self._serial = itertools.count()
        self._answers: dict[tuple[int, int], Any] = {}
        self.closed = False
        self.forced: list[str] = []
        self.num_pauses = 0

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
                _START_S,
                lambda: "environments and policies to be made: " + self._doing(w for w in self.workers if not w.ready),
            )
        except BaseException:
            self.end(0.0)
            raise
        said = {note for worker in self.workers if worker.ready for note in worker.ready.warnings.value}
        for kind, text in sorted(said, key=str):
            warnings.warn(text, kind, stacklevel=5)

    def _launch(self, worker: Worker) -> None:
        try:
            self._start_child(worker)
        except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError) as error:
            raise _unsendable(worker.spec, error) from error

    def _start_child(self, worker: Worker) -> None:
        worker.words.state = State.STARTING
        worker.words.whole[Word.OLDEST] = -1
        worker.beat_at = time.monotonic()
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
        """Listen until a condition holds.

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
        with self._changed:
            while not until():
                if give_up is not None and give_up():
                    return False
                if self.closed:
                    raise RuntimeError(f"the collector was shut down by another thread, which waited for {what()}")
                left = _NAP_S if end is None else min(_NAP_S, end - time.monotonic())
                if left <= 0:
                    raise TimeoutError(f"waited {timeout_s:g} s for {what()}")
                if self._reading:
                    self._changed.wait(left)
                else:
                    self._read(left)
                    self._tell()
        return True

    def _tell(self) -> None:
        """Warn of what has happened."""
        notes = self.restarts.notes
        while notes:
            warnings.warn(notes.pop(0), RuntimeWarning, stacklevel=3)

    def look(self) -> None:
        """Take in what workers have said, without waiting."""
        with self._changed:
            if not self._reading and not self.closed:
                self._read(0.0)

    def wake(self) -> None:
        """Let whoever waits look again: something has changed that workers do not tell of."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._waker, b"1")

    def _read(self, timeout_s: float) -> None:
        """Read what workers say, once; others may go on meanwhile."""
        self._reading = True
        try:
            waits = self.restarts.next_in()
            self._changed.release()
            try:
                ready = self._poll.poll(min(timeout_s, waits) * 1e3)
            finally:
                self._changed.acquire()
        finally:
            self._reading = False
            self._changed.notify_all()
        with uninterrupted:
            if any(fd == self._waking for fd, _ in ready):
                with contextlib.suppress(BlockingIOError):
                    os.read(self._waking, 1 << 12)
            for worker in {id(w): w for fd, _ in ready if (w := self._by_fd.get(fd)) is not None}.values():
                self._hear(worker)
            self._watch()
            self._changed.notify_all()

    def _hear(self, worker: Worker) -> None:
        """Take in all that a worker has said; see whether it has ended."""
        child = worker.child
        while child is not None and child is worker.child:
            try:
                if not child.channel.poll():
                    return
                message = child.channel.recv(0.0)
            except EOFError:
                self._gone(worker, None)
                return
            except TimeoutError:
                return
            self._take(worker, message)

    def _hear_out(self, worker: Worker, child: Child, until: float) -> WorkerError | None:
        """Listen to a worker that is to end, until it has; what it raised, if it did."""
        error = None
        with contextlib.suppress(EOFError):
            while child.channel.poll(until - time.monotonic()):
                message = child.channel.recv(0.0)
                if isinstance(message, say.Collected):
                    with self._changed:
                        self._take(worker, message)
                elif isinstance(message, Failure):
                    error = message.error(worker.name, worker.index)
        child.wait(until - time.monotonic())
        return error

    def _take(self, worker: Worker, message: Any) -> None:
        listener = self.listener
        match message:
            case say.Collected():
                worker.num_collected += 1
                block = worker.runs.pop(message.run, None)
                if block is not None:
                    block.kept = block.kept or message.held
                if listener is not None:
                    listener.collected(worker, message, block)
            case say.Need() if listener is not None:
                worker.send(listener.needs(worker, message))
            case say.Failed():
                self._release(worker, message.run)
                error = message.failure.error(worker.name, worker.index)
                if self.restarts.wanted:
                    self._replace(worker, error)
                elif listener is not None:
                    listener.failed(worker, error)
            case say.Returned() | say.Raised() | say.Paused():
                self._answers[worker.index, message.serial] = message
                worker.num_told = worker.num_collected
            case say.Ready():
                worker.ready = message
            case Failure():
                self._gone(worker, message)

    def _gone(self, worker: Worker, failure: Failure | None) -> None:
        """A worker's process has ended, or is about to."""
        child = worker.child
        assert child is not None
        child.wait(1.0)
        if failure is not None:
            error = failure.error(worker.name, worker.index)
        else:
            during = worker.words.state.name.lower().replace("_", " ")
            error = WorkerError(f"{worker.name} {child.how_it_ended()} while {during}.")
            error.worker = worker.index
        self._replace(worker, error)

    def _release(self, worker: Worker, run: int) -> None:
        block = worker.runs.pop(run, None)
        if block is not None:
            block.runs.discard(run)

    def _replace(self, worker: Worker, error: WorkerError) -> None:
        """A worker is of no use any more: start another in its place, if that is asked for."""
        child, worker.child, worker.ready = worker.child, None, None
        if child is not None:
            self._forget(child)
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

    def _forget(self, child: Child) -> None:
        for fd in (child.channel.fileno(), child.sentinel):
            if self._by_fd.pop(fd, None) is not None:
                self._poll.unregister(fd)

    def _watch(self) -> None:
        """Start those whose time has come, and see whether one is stuck."""
        for index in self.restarts.due():
            worker = self.workers[index]
            worker.spec = dataclasses.replace(worker.spec, seed=worker.spec.seed + len(self.workers))
            self._launch(worker)
        limit = self._step_timeout_s
        if limit is None:
            return
        now = time.monotonic()
        for worker in self.workers:
            beat = worker.words.whole[Word.BEAT]
            if beat != worker.beat or worker.words.state is not State.COLLECTING or not worker.there:
                worker.beat, worker.beat_at = beat, now
            elif now - worker.beat_at > limit and worker.child is not None:
                error = WorkerError(
                    f"{worker.name} has taken longer than env_step_timeout={limit:g} s for one step (number "
                    f"{beat + 1:,} of its life). Make the environment's step bounded, or raise the limit."
                )
                error.worker = worker.index
                self._replace(worker, error)

    def oldest_versions(self) -> list[int]:
        """Versions that acted first in the rollouts under way, for use in a condition of :meth:`wait`.

        What workers have told before is taken in; a rollout that has not begun counts as one of the newest version.
        """
        firsts = [worker.words.whole[Word.OLDEST] for worker in self.workers]
        for worker in self.workers:
            self._hear(worker)
        return [first for first, worker in zip(firsts, self.workers, strict=True) if first >= 0 and worker.runs]

    # Telling ----------------------------------------------------------------------------------

    def order(self, worker: Worker, run: int, block: Block | None, *, anew: bool = False) -> None:
        """Ask a worker for a rollout."""
        with self._changed, uninterrupted:
            worker.runs[run] = block
            if block is not None:
                block.runs.add(run)
            worker.beat_at = time.monotonic()
            worker.send(say.Collect(run, None if block is None else block.offset, anew))

    def interrupt(self, worker: Worker) -> None:
        """End the rollouts that a worker was asked for after the step under way."""
        for run in worker.runs:
            worker.send(say.Interrupt(run), attention=True)

    def call(
        self,
        path: str,
        args: Sequence[tuple[Sequence[Any], dict[str, Any]] | None],
        *,
        workers: Sequence[int] | None = None,
        between_batches: bool = False,
        cut: bool = False,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call what a path leads to in workers; in order of workers, what came of it.

        Args:
            path: from a worker's collector.
            args: positional and named arguments for each; None: read what is there.
            workers: which; None: all.
            between_batches: not in the middle of a rollout.
            cut: end the rollout under way for it.
            timeout_s: how long; None: a minute beyond the last step of a worker that is at work.

        Raises:
            WorkerError: it raised in a worker, or a worker is gone.
            TimeoutError: a worker does not answer.
        """
        chosen = [self.workers[i] for i in (range(len(self.workers)) if workers is None else workers)]
        self._check_there(chosen)
        serial = next(self._serial)
        for worker, given in zip(chosen, args, strict=True):
            payload = None if given is None else ByValue(given)
            worker.send(say.Call(serial, path, payload, between_batches, cut), attention=True)
        answers = self._collect_answers(chosen, serial, path, timeout_s)
        for worker, answer in zip(chosen, answers, strict=True):
            if isinstance(answer, say.Raised):
                raise answer.failure.error(worker.name, worker.index)
        return [answer.value.value for answer in answers]

    def _check_there(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            if worker.error is not None:
                raise worker.error
        missing = [worker for worker in workers if not worker.there]
        if missing:
            self.wait(
                lambda: all(worker.there or worker.error is not None for worker in missing),
                _START_S,
                lambda: f"{self._doing(missing)}",
            )
            self._check_there(missing)

    def _collect_answers(
        self,
        workers: Sequence[Worker],
        serial: int,
        what: str,
        timeout_s: float | None,
        *,
        all_of_them: bool = True,
    ) -> list[Any]:
        """What workers answer; of those that others will replace, if need be."""
        patience = _STUCK_S if timeout_s is None else timeout_s
        beats: dict[int, tuple[int, float]] = {}

        def settled(worker: Worker) -> bool:
            return (worker.index, serial) in self._answers or worker.error is not None or not worker.there

        def stuck() -> bool:
            now = time.monotonic()
            for worker in workers:
                beat = worker.words.whole[Word.BEAT]
                last, since = beats.get(worker.index, (-1, now))
                beats[worker.index] = (beat, now if beat != last and timeout_s is None else since)
            return any(not settled(w) and now - beats[w.index][1] > patience for w in workers)

        if not self.wait(lambda: all(map(settled, workers)), None, lambda: what, give_up=stuck):
            late = self._doing(worker for worker in workers if not settled(worker))
            raise TimeoutError(f"waited {patience:g} s for {what}: {late}")
        gone = [worker for worker in workers if (worker.index, serial) not in self._answers]
        if gone and (all_of_them or any(worker.error is not None for worker in gone)):
            for worker in workers:
                self._answers.pop((worker.index, serial), None)
            raise gone[0].error or self.restarts.last_error(gone[0].index)
        return [self._answers.pop((worker.index, serial), None) for worker in workers]

    def change_options(self, **changes: Any) -> None:
        """Change options of workers that will be started in place of others."""
        for worker in self.workers:
            worker.spec = dataclasses.replace(worker.spec, options=worker.spec.options.override(**changes))

    @contextmanager
    def pausing(self, timeout_s: float = _STUCK_S) -> Iterator[None]:
        """Let all workers rest between two steps inside the ``with`` block; those that come meanwhile are told nothing.

        Raises:
            TimeoutError: a step does not end in time.
            WorkerError: a worker is gone, and is not replaced.
        """
        self.num_pauses += 1
        try:
            workers, serial = [worker for worker in self.workers if worker.there], next(self._serial)
            for worker in workers:
                worker.send(say.Pause(serial), attention=True)
            self._collect_answers(workers, serial, "a step to end", timeout_s, all_of_them=False)
            yield
        finally:
            self.num_pauses -= 1
            if not self.num_pauses:
                for worker in self.workers:
                    worker.send(say.Resume(), attention=True)
            self.wake()

    # Looking ----------------------------------------------------------------------------------

    def doing(self) -> str:
        """What the workers do, as a phrase."""
        return self._doing(self.workers)

    def _doing(self, workers: Iterable[Worker]) -> str:
        return ", ".join(worker.doing() for worker in workers)

    @property
    def num_alive(self) -> int:
        """Workers whose process runs."""
        return sum(worker.child is not None and worker.child.alive for worker in self.workers)

    # The end ----------------------------------------------------------------------------------

    def end(self, timeout_s: float, *, close_env: bool = True) -> WorkerError | None:
        """Ask all workers to end; make those that do not. What was done to them is in :attr:`forced`.

        Args:
            timeout_s: for all of them together to end by themselves.
            close_env: whether they close their environments.

        Returns:
            What one of them raised at its end, if one did.
        """
        self.closed = True
        self.wake()
        with self._changed:  # whoever reads what workers say stops
            self._changed.wait_for(lambda: not self._reading, _NAP_S)
            self._reading = True
        children = [(worker, worker.child) for worker in self.workers if worker.child is not None]
        for worker, _ in children:
            worker.send(say.Stop(close_env), attention=True)
        until = time.monotonic() + timeout_s
        asleep = [(worker, child) for worker, child in children if child is not None]
        errors = [self._hear_out(worker, child, until) for worker, child in asleep]
        for worker, child in asleep:
            doing = worker.doing()
            self._forget(child)
            how = child.end(0.0)
            if how != "ended":
                self.forced.append(f"{doing}, and was {how} after {timeout_s:g} s")
            worker.child = None
            worker.words.state = State.ENDED
        with self._changed:
            self._changed.notify_all()
        self.wake()
        return next((error for error in errors if error is not None), None)


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
