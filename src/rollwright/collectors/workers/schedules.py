"""Schedules: when workers are asked for rollouts, and in which order what they collected is delivered.

Workers collect only what they were asked for, so nothing is collected that nobody takes: a consumer that is slow makes
them wait.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from rollwright.collectors._pieces import Frames, Piece, concatenate, pad
from rollwright.collectors._resume import td_from, td_state
from rollwright.collectors.delivery import never
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.blocks import BatchForm, Block, BlockLayout, BlockStore, Join
from rollwright.collectors.workers.group import Worker, WorkerGroup
from rollwright.collectors.workers.joining import Result, batch_of, joined, restored
from rollwright.collectors.workers.parcels import open_parcel
from rollwright.collectors.workers.staleness import Staleness
from rollwright.data.replay_buffers import SampleToInsertRatio
from rollwright.errors import WorkerError

__all__ = ["FirstCome", "Gather", "Schedule"]


_BREAK_S = 0.5  # after which a consumer is taken to have stopped


class Schedule(ABC):
    """Asks workers for rollouts, and takes in what they collect.

    Args:
        group: the workers.
        store: memory of batches.
        total_frames: to collect in all; infinity for no end.
        trajs_per_batch: how many complete trajectories are delivered at a time; None: batches are.
        padded: whether trajectories are delivered padded.
        stored: whether workers write into a replay buffer, and nothing but counts arrives.
        staleness: how old batches may be.

    Attributes:
        frames: collected so far, as far as they have arrived here.
        limiter: of the replay buffer: asked before rollouts begin.
        held: how many keep rollouts from beginning.
        errors: what went wrong in workers, and was not raised yet.
    """

    def __init__(
        self,
        group: WorkerGroup,
        store: BlockStore,
        *,
        total_frames: float,
        trajs_per_batch: int | None,
        padded: bool,
        stored: bool,
        staleness: Staleness,
    ) -> None:
        self._group, self.store = group, store
        self._staleness = staleness
        self._anew: set[int] = set()  # workers whose trajectories have lost a rollout
        self._taker: int | None = None  # thread that has asked for a batch last
        self._taken_at: float | None = None
        self.held = 0
        self.total_frames = total_frames
        self._trajs_per_batch, self._padded, self.stored = trajs_per_batch, padded, stored
        self._devices = [_device(worker) for worker in group.workers]
        self._runs = itertools.count()
        self._trajectories: deque[TensorDictBase] = deque()
        self.frames = 0
        self.frames_stale = self.num_copied = self.num_messages = self.batches = 0
        self.limiter: SampleToInsertRatio | None = None
        self.errors: deque[WorkerError] = deque()
        self.waiting_for: str | None = None

    # What is delivered ------------------------------------------------------------------------

    def ready(self, give_up: Callable[[], bool] = never) -> bool:
        """Whether there is something to deliver; it may take rollouts to know."""
        if self._trajs_per_batch is None or self.stored:
            return self._more()
        while len(self._trajectories) < self._trajs_per_batch:
            if not self._more() or not self._advance(give_up):
                return False
        return True

    def next(self, give_up: Callable[[], bool] = never) -> Any:
        """What is delivered next (with a replay buffer: None), only after :meth:`ready`.

        Args:
            give_up: asked again and again, whether to come back without anything.

        Raises:
            WorkerError: a worker has failed.
        """
        if self._trajs_per_batch is None or self.stored:
            batch = self._take(give_up)
        else:
            taken = [self._trajectories.popleft() for _ in range(self._trajs_per_batch)]
            pieces = [[Piece(Frames.of(td, len(td)), 0, len(td))] for td in taken]
            batch = pad(pieces) if self._padded else concatenate([piece for [piece] in pieces])
        self.batches += 1
        return batch

    def _advance(self, give_up: Callable[[], bool]) -> bool:
        """Let another rollout of trajectories come in; False if that was given up."""
        found = self._take(give_up)
        if found is None:
            return False
        self._trajectories.extend(found)
        return True

    @abstractmethod
    def _more(self) -> bool:
        """Whether anything is still to come."""

    @abstractmethod
    def _take(self, give_up: Callable[[], bool]) -> Any:
        """Wait for what comes next."""

    def _release(self, results: Sequence[Result]) -> None:
        """Results are delivered: what keeps their memory from now on are the consumer's tensors."""
        for result in results:
            if result.block is not None:
                result.block.runs.discard(result.found.run)

    def _lent(self, batch: Any) -> Any:
        """A batch for the consumer; a copy where it holds very many."""
        if isinstance(batch, TensorDictBase) and self.store.num_lent > self.store.most:
            self.num_copied += 1
            return batch.clone()
        return batch

    # What is asked ----------------------------------------------------------------------------

    def _order(self, worker: Worker, block: Block | None) -> int:
        """Ask for a rollout; returns its number."""
        run = next(self._runs)
        self._group.order(worker, run, block, anew=worker.index in self._anew)
        self._anew.discard(worker.index)
        self.num_messages += 1
        return run

    @property
    def frames_asked(self) -> int:
        """Collected, or asked for."""
        return self.frames + sum(len(worker.runs) * self._frames_of(worker) for worker in self._group.workers)

    def _frames_of(self, worker: Worker) -> int:
        return worker.ready.frames_per_batch if worker.ready is not None else 0

    def _may_begin(self, frames: int) -> bool:
        """Whether the replay buffer may take so many more frames."""
        if self.limiter is None or self.limiter.may_insert(frames):
            return True
        self.waiting_for = self.limiter.wants(frames)
        return False

    def _wait(self, until: Callable[[], bool], what: str, give_up: Callable[[], bool]) -> bool:
        def done() -> bool:
            self.waiting_for = what
            return until() or bool(self.errors) or self._is_short()

        self._taker, self._taken_at = threading.get_ident(), None
        try:
            return self._group.wait(done, None, lambda: what, give_up=give_up)
        finally:
            self._taken_at, self.waiting_for = time.monotonic(), None

    def is_awaited(self) -> bool:
        """Whether another thread takes batches: one that waits, or has just got one."""
        if self._taker in (None, threading.get_ident()):
            return False
        return self._taken_at is None or time.monotonic() - self._taken_at < _BREAK_S

    def _drop(self, results: Sequence[Result]) -> None:
        """Throw rollouts away that are too stale."""
        self._release(results)
        for result in results:
            self._anew.add(result.worker)
            self.frames -= result.found.frames
            self.frames_stale += result.found.frames

    def oldest_versions(self) -> list[int]:
        """Of rollouts that have arrived, and were not delivered."""
        return [result.found.oldest_version for result in self._waiting()]

    def raise_error(self) -> None:
        """Raise what went wrong in a worker: each error once, but that of a worker that is gone again and again."""
        if self.errors:
            raise self.errors.popleft()

    def _is_short(self) -> bool:
        """Whether waiting is in vain: a worker is gone for good."""
        return any(worker.error is not None for worker in self._group.workers)

    def raise_if_short(self) -> None:
        """Raise if a worker is gone for good."""
        for worker in self._group.workers:
            if worker.error is not None:
                raise worker.error

    # What workers say -----------------------------------------------------------------------------

    def collected(self, worker: Worker, found: say.Collected, block: Block | None) -> None:
        """See :class:`~rollwright.collectors.workers.group.Listener`."""
        self.num_messages += 1
        self.frames += found.frames
        self.frames_stale += found.dropped_frames
        rest = None if found.rest is None else open_parcel(found.rest, worker.spec.parcels)
        part, device = self._part(worker, block), self._devices[worker.index]
        self._arrived(Result(worker.index, worker.num_collected, found, block, part, rest, device))

    @abstractmethod
    def _arrived(self, result: Result) -> None:
        """Keep a rollout until it is delivered."""

    def _part(self, worker: Worker, block: Block | None) -> int:
        """Which part of a block is a worker's."""
        return 0

    @abstractmethod
    def needs(self, worker: Worker, need: say.Need) -> say.Grant:
        """See :class:`~rollwright.collectors.workers.group.Listener`."""

    def _grant_alone(self, worker: Worker, need: say.Need) -> say.Grant:
        layout = BlockLayout(need.form, (need.form.steps,), "alone")
        block = self.store.take(layout)
        self._use(worker, need.run, block)
        return say.Grant(need.run, layout, block.offset, 0)

    def _use(self, worker: Worker, run: int, block: Block) -> None:
        old = worker.runs.get(run)
        if old is not None:
            old.runs.discard(run)
        worker.runs[run] = block
        block.runs.add(run)

    def failed(self, worker: Worker, error: WorkerError) -> None:
        """See :class:`~rollwright.collectors.workers.group.Listener`."""
        self.errors.append(error)

    @abstractmethod
    def lost(self, worker: Worker) -> None:
        """See :class:`~rollwright.collectors.workers.group.Listener`."""

    # State ------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what was not delivered: all begins anew."""
        self._release(self._undelivered())
        self._trajectories.clear()

    @abstractmethod
    def _undelivered(self) -> list[Result]:
        """Give up the rollouts that were not delivered."""

    def state_dict(self, shares: Mapping[int, int]) -> dict[str, Any]:
        """What has arrived and was not delivered.

        Args:
            shares: how many rollouts of each worker belong to the state.
        """
        late = [result for result in self._waiting() if result.number > shares[result.worker]]
        waiting = [] if self.stored else [result for result in self._waiting() if result not in late]
        return {
            "frames": self.frames - sum(result.found.frames for result in late),
            "waiting": [{"worker": result.worker, "held": _saved(batch_of(result))} for result in waiting],
            "trajectories": [td_state(td) for td in self._trajectories],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.forget()
        self.frames = int(state_dict["frames"])
        for saved in state_dict["waiting"]:
            self._arrived(restored(saved["worker"], _loaded(saved["held"]), self._devices[saved["worker"]]))
        self._trajectories.extend(cast(Any, td_from(td)) for td in state_dict["trajectories"])

    @abstractmethod
    def _waiting(self) -> list[Result]:
        """Rollouts that have arrived, and were not delivered yet."""

    @property
    @abstractmethod
    def num_undelivered(self) -> int:
        """Rollouts that have arrived, and were not delivered yet."""


class Gather(Schedule):
    """Each batch is of one rollout of every worker.

    Args:
        group: the workers.
        store: memory of batches.
        join: how rollouts are put together.
        threshold: share of the workers that may be waited for; the others are interrupted then.
        **options: see :class:`Schedule`.
    """

    def __init__(self, group: WorkerGroup, store: BlockStore, *, join: Join, threshold: float, **options: Any) -> None:
        super().__init__(group, store, **options)
        self._join = join
        self._steps = tuple(_steps(worker) for worker in group.workers)
        self._least = math.ceil(threshold * len(group.workers))
        self._layout: BlockLayout | None = None
        self._block: Block | None = None  # of this round
        self._fitting: set[int] = set()  # workers that know the layout
        self._results: dict[int, Result] = {}
        self._interrupted = False

    def _more(self) -> bool:
        return bool(self._results) or self.frames < self.total_frames

    def _take(self, give_up: Callable[[], bool]) -> Any:
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
                return None
            self.raise_error()
            if len(self._results) < len(workers):
                self.raise_if_short()
            version = self._staleness.version()  # while they are here, whoever publishes waits for them
            results = [self._results[worker.index] for worker in workers]
            self._results, self._interrupted, self._block = {}, False, None
            if not self._staleness.too_stale(results, version):
                break
            self._drop(results)
        self._staleness.delivered()
        if self.stored:
            return None
        if self._trajs_per_batch is not None:
            return [trajectory for result in results for trajectory in result.rest]
        batch = joined(results, self._join)
        self._release(results)
        return self._lent(batch)

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

    def needs(self, worker: Worker, need: say.Need) -> say.Grant:
        """See :class:`~rollwright.collectors.workers.group.Listener`."""
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
        return say.Grant(need.run, layout, self._block.offset, worker.index)

    def _part(self, worker: Worker, block: Block | None) -> int:
        return 0 if block is None or block.layout.join == "alone" else worker.index

    def _can_join(self, worker: Worker, form: BatchForm) -> bool:
        same = len(set(self._steps)) == 1
        env = tuple(worker.ready.batch_size) if worker.ready is not None else ()
        alike = all(other.ready is None or tuple(other.ready.batch_size) == env for other in self._group.workers)
        by_time = self._join == "time" or (self._join == "first" and not env)
        return alike and form.env == env and form.steps == self._steps[worker.index] and (same or by_time)

    def _arrived(self, result: Result) -> None:
        self._results[result.worker] = result

    def lost(self, worker: Worker) -> None:
        """See :class:`~rollwright.collectors.workers.group.Listener`."""
        self._fitting.discard(worker.index)

    def _waiting(self) -> list[Result]:
        return list(self._results.values())

    def _undelivered(self) -> list[Result]:
        found, self._results, self._block = self._waiting(), {}, None
        return found

    @property
    def num_undelivered(self) -> int:
        """See :class:`Schedule`."""
        return len(self._results)


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

    def _take(self, give_up: Callable[[], bool]) -> Any:
        while True:
            if not self._wait(self._next_is_there, "a rollout of any worker", give_up):
                return None
            self.raise_error()
            if not self._arrivals:
                self.raise_if_short()
            version = self._staleness.version()  # while it is here, whoever publishes waits for it
            result = self._arrivals.popleft()
            if not self._staleness.too_stale([result], version):
                break
            self._drop([result])
        self._staleness.delivered()
        if not self._staleness.waits:
            self._ask()  # the worker goes on while the consumer has the batch
        if self.stored:
            return None
        batch = batch_of(result)
        self._release([result])
        return batch if self._trajs_per_batch is not None else self._lent(batch)

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

    def needs(self, worker: Worker, need: say.Need) -> say.Grant:
        """See :class:`~rollwright.collectors.workers.group.Listener`."""
        grant = self._grant_alone(worker, need)
        self._layouts[worker.index] = grant.layout
        return grant

    def _arrived(self, result: Result) -> None:
        self._layouts.setdefault(result.worker, None)
        self._arrivals.append(result)

    def lost(self, worker: Worker) -> None:
        """See :class:`~rollwright.collectors.workers.group.Listener`."""
        self._layouts.pop(worker.index, None)

    def _waiting(self) -> list[Result]:
        return list(self._arrivals)

    def _undelivered(self) -> list[Result]:
        found = self._waiting()
        self._arrivals.clear()
        return found

    @property
    def num_undelivered(self) -> int:
        """See :class:`Schedule`."""
        return len(self._arrivals)


def _saved(held: Any) -> Any:
    return [td_state(td) for td in held] if isinstance(held, list) else td_state(held)


def _loaded(saved: Any) -> Any:
    return [td_from(td) for td in saved] if isinstance(saved, list) else td_from(saved)


def _steps(worker: Worker) -> int:
    return worker.ready.frames_per_batch // worker.ready.num_envs if worker.ready is not None else 0


def _device(worker: Worker) -> torch.device | None:
    device = worker.ready.device if worker.ready is not None else None
    return None if device is None else torch.device(device)
