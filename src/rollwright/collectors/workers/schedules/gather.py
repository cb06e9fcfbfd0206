"""Gather: batches of all workers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tensordict import TensorDictBase

from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.member import Member
from rollwright.collectors.workers.memory.blocks import BatchForm, BlockLayout, Join
from rollwright.collectors.workers.memory.store import Block
from rollwright.collectors.workers.schedules.joining import Result, joined, mark_taken
from rollwright.collectors.workers.schedules.orders import Orders
from rollwright.collectors.workers.schedules.strategy import Strategy


class Gather(Strategy):
    """Each batch is of one rollout of every worker whose data is not over.

    Args:
        orders: asks workers.
        join: how rollouts are put together.
        least: how many workers are waited for; the others are interrupted then.
    """

    awaits = "rollouts of all workers"
    loses_what_fails = True
    in_step = True

    def __init__(self, orders: Orders, *, join: Join, least: int) -> None:
        self._orders, self._workers, self._join, self._least = orders, orders.group.workers, join, least
        self._steps = tuple(_steps(worker) for worker in self._workers)
        self._layout: BlockLayout | None = None
        self._block: Block | None = None  # of this round
        self._fitting: set[int] = set()  # workers that know the layout
        self._results: dict[int, Result] = {}
        self._interrupted = False

    def ready(self) -> bool:
        """See :class:`Strategy`."""
        self.ask()
        if self._least <= len(self._results) < len(self._taking_part()) and not self._interrupted:
            self._interrupted = True
            for worker in self._workers:
                self._orders.group.interrupt(worker)
        return self.has_next()

    def has_next(self) -> bool:
        """See :class:`Strategy`."""
        return bool(self._results) and all(worker.index in self._results for worker in self._taking_part())

    def _taking_part(self) -> list[Member]:
        """The workers of this round: all, less those whose data is over, and who have no part in it."""
        return [w for w in self._workers if w.index not in self._orders.over or w.index in self._results]

    def is_hopeless(self) -> bool:
        """See :class:`Strategy`."""
        return self._orders.is_short

    def ask(self) -> None:
        """Ask every worker that has no part in this round yet."""
        orders = self._orders
        begins = not self._results and not orders.num_in_progress
        if (begins and orders.held) or orders.group.num_pauses:
            return
        taking_part = self._taking_part()
        if begins and not orders.may_begin(sum(map(orders.frames_of, taking_part))):
            return
        for worker in taking_part:
            if worker.index not in self._results and worker.available and not worker.runs:
                if self._layout is not None and self._block is None:
                    self._block = orders.store.take(self._layout)
                orders.ask(worker, self._block if worker.index in self._fitting else None)

    def next_rollouts(self) -> list[Result]:
        """See :class:`Strategy`."""
        return [self._results[worker.index] for worker in self._taking_part()]

    def remove(self, results: Collection[Result]) -> None:
        """See :class:`Strategy`."""
        self._results = {index: result for index, result in self._results.items() if result not in results}
        if not self._results:
            self._block, self._interrupted = None, False

    def add(self, result: Result) -> None:
        """See :class:`Strategy`."""
        self._results[result.worker] = result

    def waiting(self) -> list[Result]:
        """See :class:`Strategy`."""
        return list(self._results.values())

    def combine(self, results: Sequence[Result]) -> TensorDictBase:
        """See :class:`Strategy`."""
        batch = joined(results, self._join)
        if self._least < len(results):
            mark_taken(batch)
        return batch

    def grant(self, worker: Member, need: say.Need) -> say.Grant:
        """See :class:`Strategy`."""
        layout = BlockLayout(BatchForm(need.form.fields, need.form.env, 0), self._steps, self._join)
        if not self._can_join(worker, need.form):
            return self._orders.grant_alone(worker, need)
        if layout != self._layout:
            if self._block is not None and self._block.runs - {need.run}:
                return self._orders.grant_alone(worker, need)  # others write, in another form
            self._layout, self._block, self._fitting = layout, None, set()
        if self._block is None:
            self._block = self._orders.store.take(layout)
        self._fitting.add(worker.index)
        return self._orders.grant(worker, need, layout, self._block, worker.index)

    def part_of(self, worker: Member, block: Block | None) -> int:
        """See :class:`Strategy`."""
        return 0 if block is None or block.layout.join == "alone" else worker.index

    def _can_join(self, worker: Member, form: BatchForm) -> bool:
        same = len(set(self._steps)) == 1
        env = tuple(worker.ready.batch_size) if worker.ready is not None else ()
        alike = all(other.ready is None or tuple(other.ready.batch_size) == env for other in self._workers)
        by_time = self._join == "time" or (self._join == "first" and not env)
        return alike and form.env == env and form.steps == self._steps[worker.index] and (same or by_time)

    def lost(self, worker: Member) -> None:
        """See :class:`Strategy`."""
        self._fitting.discard(worker.index)


def _steps(worker: Member) -> int:
    return worker.ready.frames_per_batch // worker.ready.num_envs if worker.ready is not None else 0
