"""FirstCome: batches of one worker each, in the order in which they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rollwright._interrupts import uninterrupted
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.group import WorkerGroup
from rollwright.collectors.workers.member import Member
from rollwright.collectors.workers.memory.blocks import BlockLayout
from rollwright.collectors.workers.memory.store import BlockStore
from rollwright.collectors.workers.schedules.joining import Result, batch_of
from rollwright.collectors.workers.schedules.schedule import Schedule

__all__ = ["FirstCome"]


class FirstCome(Schedule):
    """Each batch is of one rollout of one worker, in the order in which they arrive.

    Args:
        group: the workers.
        store: memory of batches.
        ahead: rollouts that a worker may be ahead of the consumer: under way, or finished and not taken yet.
        **options: see :class:`Schedule`.
    """

    def __init__(self, group: WorkerGroup, store: BlockStore, *, ahead: int = 2, **options: Any) -> None:
        super().__init__(group, store, **options)
        self._ahead = ahead
        self._layouts: dict[int, BlockLayout | None] = {}  # None: its rollouts lie in no block
        self._arrivals: deque[Result] = deque()

    def _more(self) -> bool:
        return bool(self._arrivals) or self.frames < self.total_frames

    def _take(self, give_up: Callable[[], bool]) -> bool:
        while True:
            if not self._wait(self._next_is_there, "a rollout of any worker", give_up):
                return False
            self.raise_error()
            if not self._arrivals:
                self.raise_if_short()
            with self._group.lock, uninterrupted:
                versions = self._staleness.versions()  # while it is here, whoever publishes waits for it
                result = self._arrivals[0]
                if self._staleness.too_stale([result], versions):
                    self._drop([self._arrivals.popleft()])
                    continue
                self._deliver([result])  # if that raises, it stays: its worker has gone on from its end
                self._arrivals.popleft()
                if not self._staleness.waits:
                    self._ask()  # the worker goes on while the consumer has the batch
                return True

    def _made_of(self, results: Sequence[Result]) -> Any:
        """See :class:`Schedule`."""
        if self.stored:
            return None
        [result] = results
        batch = batch_of(result)
        return batch if self._trajs_per_batch is not None else self._lent(batch)

    def _refused(self, results: Sequence[Result]) -> None:
        """See :class:`Schedule`: it stays, for its worker has gone on from its end."""

    def _next_is_there(self) -> bool:
        self._ask()
        if self._arrivals and self._staleness.waits:  # the one that began first is the next
            first = min(self._arrivals, key=lambda result: result.found.run)
            if any(run < first.found.run for worker in self._group.workers for run in worker.runs):
                return False
            self._arrivals.remove(first)
            self._arrivals.appendleft(first)
        return bool(self._arrivals)

    def _is_short(self) -> bool:
        return super()._is_short() and not any(worker.runs for worker in self._group.workers)

    def _ask(self) -> None:
        """Ask all workers for as much as they may be ahead."""
        if super()._is_short() or self.held or self._group.num_pauses:
            return
        waiting = [result.worker for result in self._arrivals]
        for ahead in range(1, 2 if self._staleness.drops else self._ahead + 1):
            for worker in self._group.workers:
                under_way = len(worker.runs) + waiting.count(worker.index)
                if under_way >= ahead or not worker.there or self.frames_asked >= self.total_frames:
                    continue
                if under_way and worker.index not in self._layouts and not self.stored:
                    continue  # it will be told of the next one with a block for it
                if len(waiting) + sum(len(w.runs) for w in self._group.workers) >= self._staleness.most_ahead:
                    return
                if self._may_begin(self._frames_of(worker) * (1 + sum(len(w.runs) for w in self._group.workers))):
                    layout = self._layouts.get(worker.index)
                    self._order(worker, None if layout is None else self.store.take(layout))

    def needs(self, worker: Member, need: say.Need) -> say.Grant:
        """See :class:`~rollwright.collectors.workers.member.Listener`."""
        grant = self._grant_alone(worker, need)
        self._layouts[worker.index] = grant.layout
        return grant

    def _arrived(self, result: Result) -> None:
        self._layouts.setdefault(result.worker, None)
        self._arrivals.append(result)

    def lost(self, worker: Member) -> None:
        """See :class:`~rollwright.collectors.workers.member.Listener`."""
        self._layouts.pop(worker.index, None)

    def _waiting(self) -> list[Result]:
        return list(self._arrivals)

    def _give_up(self, old: Sequence[Result]) -> None:
        self._arrivals = deque(result for result in self._arrivals if result not in old)

    @property
    def num_undelivered(self) -> int:
        """See :class:`Schedule`."""
        return len(self._arrivals)
