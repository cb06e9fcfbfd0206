"""WorkerGroup: N workers, what is said to them, and what becomes of those that fail."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rollwright._interrupts import uninterrupted
from rollwright._processes.channel import ByValue
from rollwright._processes.child import Child
from rollwright._processes.connection import end_all
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.counters import State, Word
from rollwright.collectors.workers.listening import NAP_S, Listening
from rollwright.collectors.workers.member import Member
from rollwright.collectors.workers.memory.store import Block
from rollwright.collectors.workers.watching import START_S
from rollwright.errors import WorkerError

__all__ = ["WorkerGroup"]

_STUCK_S = 60.0  # without a step, before a call gives up


class WorkerGroup(Listening):
    """Tells workers what to do, and ends them; see :class:`Listening` for what it is made of."""

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
                START_S,
                lambda: "environments and policies to be made: " + self._doing(w for w in self.workers if not w.ready),
            )
        except BaseException:
            self.end(0.0)
            self.forced.clear()  # the others were not asked to end, and nothing is wrong with them
            raise
        said = {note for worker in self.workers if worker.ready for note in worker.ready.warnings.value}
        for kind, text in sorted(said, key=str):
            warnings.warn(text, kind, stacklevel=5)

    # Telling ----------------------------------------------------------------------------------

    def order(self, worker: Member, run: int, block: Block | None, *, anew: bool = False) -> None:
        """Ask a worker for a rollout."""
        with self.lock:
            worker.runs[run] = block
            if block is not None:
                block.runs.add(run)
            worker.pulse_at = time.monotonic()
            offset, number = (None, -1) if block is None else (block.offset, block.number)
            worker.send(say.Collect(run, offset, number, anew))

    def interrupt(self, worker: Member) -> None:
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
        again: bool = False,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call what a path leads to in workers; in order of workers, what came of it.

        Args:
            path: from a worker's collector.
            args: positional and named arguments for each; None: read what is there.
            workers: which; None: all.
            between_batches: not in the middle of a rollout.
            cut: end the rollout under way for it.
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
            there = [worker for worker, _ in asked]
            self._check_there(there)
            with self._asking() as serial:
                children = [worker.child for worker in there]
                for worker, given in asked:
                    payload, worker.called = None if given is None else ByValue(given), path
                    worker.send(say.Call(serial, path, payload, between_batches, cut), attention=True)
                found = self._collect_answers(there, children, serial, path, timeout_s, all_of_them=not may_fail)
            for worker, (answer, num_told) in zip(there, found, strict=True):
                if isinstance(answer, say.Raised):
                    raise answer.failure.error(worker.name, worker.index)
                if answer is not None:
                    answers[worker.index], worker.num_told = answer.value.value, num_told
            asked = [(worker, given) for worker, given in asked if worker.index not in answers]
            if not asked:
                break
        return [answers[worker.index] for worker in chosen]

    @contextmanager
    def _asking(self) -> Iterator[int]:
        """The serial of a question whose answers are kept inside the ``with`` block, and not beyond it."""
        serial = next(self._serial)
        self._awaited.add(serial)
        try:
            yield serial
        finally:
            self._awaited.discard(serial)
            for worker in self.workers:
                self._answers.pop((worker.index, serial), None)

    def _check_there(self, workers: Iterable[Member]) -> None:
        for worker in workers:
            if worker.error is not None:
                raise worker.error
        missing = [worker for worker in workers if not worker.there]
        if missing:
            self.wait(
                lambda: all(worker.there or worker.error is not None for worker in missing),
                START_S,
                lambda: f"{self._doing(missing)}",
            )
            self._check_there(missing)

    def _collect_answers(
        self,
        workers: Sequence[Member],
        children: Sequence[Child | None],
        serial: int,
        what: str,
        timeout_s: float | None,
        *,
        all_of_them: bool = True,
    ) -> list[tuple[Any, int]]:
        """What workers answer whose processes were ``children`` when they were asked; None of those that have gone.

        Beside it, how many rollouts of each had arrived before it answered.
        """
        patience = _STUCK_S if timeout_s is None else timeout_s
        beats: dict[int, tuple[int, float]] = {}
        asked = {worker.index: child for worker, child in zip(workers, children, strict=True)}

        def settled(worker: Member) -> bool:
            gone = worker.error is not None or not worker.there or worker.child is not asked[worker.index]
            return gone or (worker.index, serial) in self._answers

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
            raise gone[0].error or self.restarts.last_error(gone[0].index)
        return [self._answers.get((worker.index, serial), (None, 0)) for worker in workers]

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
        try:
            self.num_pauses += 1
            workers = [worker for worker in self.workers if worker.there]
            with self._asking() as serial:
                children = [worker.child for worker in workers]
                for worker in workers:
                    worker.send(say.Pause(serial), attention=True)
                self._collect_answers(workers, children, serial, "a step to end", timeout_s, all_of_them=False)
            yield
        finally:
            with uninterrupted:
                self.num_pauses -= 1
                if not self.num_pauses:
                    for worker in self.workers:
                        worker.send(say.Resume(), attention=True)
                self.wake()

    # Looking ----------------------------------------------------------------------------------

    def doing(self) -> str:
        """What the workers do, as a phrase."""
        return self._doing(self.workers)

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
        with self.lock:  # whoever reads what workers say stops
            self._changed.wait_for(lambda: not self._reading, NAP_S)
            self._reading = True
        until = time.monotonic() + timeout_s
        children = [(worker, worker.child) for worker in self.workers if worker.child is not None]
        for worker, _ in children:
            worker.send(say.Stop(close_env), attention=True)
        asleep = [(worker, child) for worker, child in children if child is not None]
        errors = self._hear_out(asleep, until)
        doing = [worker.doing() for worker, _ in asleep]
        hows = end_all([child for _, child in asleep], 0.0)
        for (worker, _), what, how in zip(asleep, doing, hows, strict=True):
            self._forget(worker)
            if how != "ended":
                self.forced.append(f"{what}, and was {how} after {timeout_s:g} s")
            worker.child = None
            worker.words.state = State.ENDED
        with self.lock:
            self._changed.notify_all()
        self.wake()
        return next(iter(errors), None)
