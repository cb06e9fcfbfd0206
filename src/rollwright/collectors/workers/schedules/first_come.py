"""FirstCome: batches of one worker each, in the order in which they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.member import Member
from rollwright.collectors.workers.memory.blocks import BlockLayout
from rollwright.collectors.workers.schedules.joining import Result, batch_of
from rollwright.collectors.workers.schedules.orders import Orders
from rollwright.collectors.workers.schedules.staleness import Staleness
from rollwright.collectors.workers.schedules.strategy import Strategy

_AHEAD = 2  # rollouts that a worker may be ahead of the consumer: in progress, or finished and not taken yet


class FirstCome(Strategy):
    """Each batch is of one rollout of one worker, in the order in which they arrive.

    A batch that could not be made stays the next one: its worker has gone on from its end.

    Args:
        orders: asks workers.
        staleness: how old batches may be.
        stored: whether workers write into a replay buffer.
    """

    awaits = "a rollout of any worker"
    loses_what_fails = False
    in_step = False

    def __init__(self, orders: Orders, staleness: Staleness, *, stored: bool) -> None:
        self._orders, self._workers, self._staleness = orders, orders.group.workers, staleness
        self._stored = stored
        self._layouts: dict[int, BlockLayout | None] = {}  # None: its rollouts lie in no block
        self._arrivals: deque[Result] = deque()

    def ready(self) -> bool:
        """See :class:`Strategy`."""
        self.ask()
        if self._arrivals and self._staleness.waits:  # the one that began first is the next
            first = min(self._arrivals, key=lambda result: result.found.run)
            if any(run < first.found.run for worker in self._workers for run in worker.runs):
                return False
            self._arrivals.remove(first)
            self._arrivals.appendleft(first)
        return self.has_next()

    def has_next(self) -> bool:
        """See :class:`Strategy`."""
        return bool(self._arrivals)

    def is_hopeless(self) -> bool:
        """See :class:`Strategy`."""
        return self._orders.is_short and not self._orders.num_in_progress

    def ask(self) -> None:
        """Ask all workers for as much as they may be ahead."""
        orders = self._orders
        if orders.is_short or orders.on_hold:
            return
        waiting = [result.worker for result in self._arrivals]
        for ahead in range(1, 2 if self._staleness.drops else _AHEAD + 1):
            for worker in self._workers:
                in_progress = len(worker.runs) + waiting.count(worker.index)
                if (
                    in_progress >= ahead
                    or not worker.available
                    or worker.index in orders.over
                    or orders.frames_asked >= orders.total_frames
                ):
                    continue
                if in_progress and worker.index not in self._layouts and not self._stored:
                    continue  # it is asked for the next one with a block for it
                if len(waiting) + orders.num_in_progress >= self._staleness.most_ahead:
                    return
                if orders.may_begin(orders.frames_of(worker) * (1 + orders.num_in_progress)):
                    layout = self._layouts.get(worker.index)
                    orders.ask(worker, None if layout is None else orders.store.take(layout))

    def next_rollouts(self) -> list[Result]:
        """See :class:`Strategy`."""
        return [self._arrivals[0]]

    def remove(self, results: Collection[Result]) -> None:
        """See :class:`Strategy`."""
        self._arrivals = deque(result for result in self._arrivals if result not in results)

    def delivered(self) -> None:
        """See :class:`Strategy`: the worker goes on while the consumer has the batch."""
        if not self._staleness.waits:
            self.ask()

    def add(self, result: Result) -> None:
        """See :class:`Strategy`."""
        self._layouts.setdefault(result.worker, None)
        self._arrivals.append(result)

    def waiting(self) -> list[Result]:
        """See :class:`Strategy`."""
        return list(self._arrivals)

    def combine(self, results: Sequence[Result]) -> Any:
        """See :class:`Strategy`."""
        [result] = results
        return batch_of(result)

    def grant(self, worker: Member, need: say.Need) -> say.Grant:
        """See :class:`Strategy`."""
        grant = self._orders.grant_alone(worker, need)
        self._layouts[worker.index] = grant.layout
        return grant

    def lost(self, worker: Member) -> None:
        """See :class:`Strategy`."""
        self._layouts.pop(worker.index, None)
