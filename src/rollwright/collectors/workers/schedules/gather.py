"""Gather: batches of all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rollwright._interrupts import uninterrupted
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.group import WorkerGroup
from rollwright.collectors.workers.member import Member
from rollwright.collectors.workers.memory.blocks import BatchForm, BlockLayout, Join
from rollwright.collectors.workers.memory.store import Block, BlockStore
from rollwright.collectors.workers.schedules.joining import Result, joined, mark_taken
from rollwright.collectors.workers.schedules.schedule import Schedule

__all__ = ["Gather"]


class Gather(Schedule):
    """Each batch is of one rollout of every worker.

    Args:
        group: the workers.
        store: memory of batches.
        join: how rollouts are put together.
        least: how many workers are waited for; the others are interrupted then.
        **options: see :class:`Schedule`.
    """

    def __init__(self, group: WorkerGroup, store: BlockStore, *, join: Join, least: int, **options: Any) -> None:
        super().__init__(group, store, **options)
        self._join = join
        self._steps = tuple(_steps(worker) for worker in group.workers)
        self._least = least
        self._layout: BlockLayout | None = None
        self._block: Block | None = None  # of this round
        self._fitting: set[int] = set()  # workers that know the layout
        self._results: dict[int, Result] = {}
        self._interrupted = False

    def _more(self) -> bool:
        return bool(self._results) or self.frames < self.total_frames

    def _take(self, give_up: Callable[[], bool]) -> bool:
        workers = self._group.workers

        def complete() -> bool:
            self._ask()
            if len(self._results) >= self._least and not self._interrupted and len(self._results) < len(workers):
                self._interrupted = True
                for worker in workers:
                    self._group.interrupt(worker)
            return len(self._results) == len(workers)

        while True:
            if not self._wait(complete, "rollouts of all workers", give_up):
                return False
            self.raise_error()
            if len(self._results) < len(workers):
                self.raise_if_short()
            with self._group.lock, uninterrupted:
                versions = self._staleness.versions()  # while they are here, whoever publishes waits for them
                results = [self._results[worker.index] for worker in workers]
                self._results, self._interrupted, self._block = {}, False, None
                if not self._staleness.too_stale(results, versions):
                    try:
                        self._deliver(results)
                    except BaseException:
                        self._lose(results)
                        raise
                    return True
                self._drop(results)

    def _made_of(self, results: Sequence[Result]) -> Any:
        """See :class:`Schedule`."""
        if self.stored:
            return None
        if self._trajs_per_batch is not None:
            return [trajectory for result in results for trajectory in result.rest]
        batch = joined(results, self._join)
        if self._least < len(results):
            mark_taken(batch)
        return self._lent(batch)

    def _refused(self, results: Sequence[Result]) -> None:
        """See :class:`Schedule`: it is lost, and its workers, which rest, begin anew."""
        with self._group.lock:
            self._pending.clear()
            self._lose(results)

    def _ask(self) -> None:
        """Ask every worker that has no part in this round yet."""
        begins = not self._results and not any(worker.runs for worker in self._group.workers)
        if (begins and self.held) or self._group.num_pauses:
            return
        if begins and not self._may_begin(sum(map(self._frames_of, self._group.workers))):
            return
        for worker in self._group.workers:
            if worker.index not in self._results and worker.there and not worker.runs:
                if self._layout is not None and self._block is None:
                    self._block = self.store.take(self._layout)
                self._order(worker, self._block if worker.index in self._fitting else None)

    def needs(self, worker: Member, need: say.Need) -> say.Grant:
        """See :class:`~rollwright.collectors.workers.member.Listener`."""
        layout = BlockLayout(need.form._replace(steps=0), self._steps, self._join)
        if not self._can_join(worker, need.form):
            return self._grant_alone(worker, need)
        if layout != self._layout:
            if self._block is not None and self._block.runs - {need.run}:
                return self._grant_alone(worker, need)  # others write, in another form
            self._layout, self._block, self._fitting = layout, None, set()
        if self._block is None:
            self._block = self.store.take(layout)
        self._use(worker, need.run, self._block)
        self._fitting.add(worker.index)
        return say.Grant(need.run, layout, self._block.number, self._block.offset, worker.index)

    def _part(self, worker: Member, block: Block | None) -> int:
        return 0 if block is None or block.layout.join == "alone" else worker.index

    def _can_join(self, worker: Member, form: BatchForm) -> bool:
        same = len(set(self._steps)) == 1
        env = tuple(worker.ready.batch_size) if worker.ready is not None else ()
        alike = all(other.ready is None or tuple(other.ready.batch_size) == env for other in self._group.workers)
        by_time = self._join == "time" or (self._join == "first" and not env)
        return alike and form.env == env and form.steps == self._steps[worker.index] and (same or by_time)

    def _arrived(self, result: Result) -> None:
        self._results[result.worker] = result

    def lost(self, worker: Member) -> None:
        """See :class:`~rollwright.collectors.workers.member.Listener`."""
        self._fitting.discard(worker.index)

    def _waiting(self) -> list[Result]:
        return list(self._results.values())

    def _give_up(self, old: Sequence[Result]) -> None:
        self._results = {index: result for index, result in self._results.items() if result not in old}
        if not self._results:
            self._block = None

    @property
    def num_undelivered(self) -> int:
        """See :class:`Schedule`."""
        return len(self._results)


def _steps(worker: Member) -> int:
    return worker.ready.frames_per_batch // worker.ready.num_envs if worker.ready is not None else 0
