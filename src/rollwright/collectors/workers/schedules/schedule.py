"""Schedule: when workers are asked for rollouts, and in which order what they collected is delivered.

Workers collect only what they were asked for, so nothing is collected that nobody takes: a consumer that is slow makes
them wait.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from rollwright._interrupts import uninterrupted
from rollwright.collectors.core import never
from rollwright.collectors.delivery.rows import Frames, Piece, concatenate, pad
from rollwright.collectors.rollout.state import td_from, td_state
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.group import WorkerGroup
from rollwright.collectors.workers.member import Member
from rollwright.collectors.workers.memory.blocks import BlockLayout
from rollwright.collectors.workers.memory.packing import open_parcel
from rollwright.collectors.workers.memory.store import Block, BlockStore
from rollwright.collectors.workers.schedules.joining import Result, batch_of, restored
from rollwright.collectors.workers.schedules.staleness import Staleness
from rollwright.data.replay_buffers import SampleToInsertRatio
from rollwright.errors import WorkerError

__all__ = ["Schedule"]


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
        told: whether an error was raised.
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
        self._pending: list[tuple[Any, Sequence[Result]]] = []  # what is about to be delivered, and what it is made of
        self.frames = 0
        self.frames_stale = self.num_copied = self.num_messages = self.batches = 0
        self.limiter: SampleToInsertRatio | None = None
        self.errors: deque[WorkerError] = deque()
        self.told = False
        self.waiting_for: str | None = None

    # What is delivered ------------------------------------------------------------------------

    def ready(self, give_up: Callable[[], bool] = never) -> bool:
        """Whether there is something to deliver; it may take rollouts to know."""
        self._drop_stale_rest()
        if self._pending:
            return True
        if self._trajs_per_batch is None or self.stored:
            return self._more()
        while len(self._trajectories) < self._trajs_per_batch:
            if not self._more() or not self._take(give_up):
                return False
        return True

    def next(self, give_up: Callable[[], bool] = never, shaped: Callable[[Any], Any] = lambda made: made) -> Any:
        """What is delivered next (with a replay buffer: None), only after :meth:`ready`.

        Args:
            give_up: asked again and again, whether to come back without anything.
            shaped: what is done with it, before it counts as delivered. If it is interrupted, the batch is delivered
                by the next call; if it raises, see :meth:`_refused`.

        Raises:
            WorkerError: a worker has failed.
        """
        while True:
            if not self._pending:
                if self._trajs_per_batch is not None and not self.stored:
                    self._put_together(self._trajs_per_batch)
                elif not self._take(give_up):
                    return None
            pending = made, results = self._pending[-1]
            try:
                found = shaped(made)
            except Exception:
                self._refused(results)
                raise
            with self._group.lock:
                if self._pending and self._pending[-1] is pending:
                    self._pending.pop()
                    self._release(results)
                    self.batches += 1
                    return found
            if not self.ready(give_up):  # another thread has begun anew meanwhile
                return None

    def _deliver(self, results: Sequence[Result]) -> None:
        """Make a batch, and put it where an interrupt does not lose it."""
        made = self._made_of(results)
        if self._trajs_per_batch is not None and not self.stored:
            self._trajectories.extend(made)
            self._release(results)
        else:
            self._pending.append((made, results))
        self._staleness.delivered()

    @abstractmethod
    def _refused(self, results: Sequence[Result]) -> None:
        """A batch could not be shaped."""

    def _drop_stale_rest(self) -> None:
        """Let go of a batch that an interrupt has kept here until it was too stale."""
        with self._group.lock:
            if self._pending and self._staleness.too_stale(self._pending[-1][1], self._staleness.versions()):
                _, results = self._pending.pop()
                self._drop(results)

    def _put_together(self, count: int) -> None:
        """Make a batch of trajectories."""
        with uninterrupted:
            taken = [self._trajectories.popleft() for _ in range(count)]
            pieces = [[Piece(Frames.of(td, len(td)), 0, len(td))] for td in taken]
            made = pad(pieces) if self._padded else concatenate([piece for [piece] in pieces])
            self._pending.append((made, ()))

    @abstractmethod
    def _more(self) -> bool:
        """Whether anything is still to come."""

    @abstractmethod
    def _take(self, give_up: Callable[[], bool]) -> bool:
        """Wait for what comes next, and :meth:`_deliver` it; False if that was given up."""

    @abstractmethod
    def _made_of(self, results: Sequence[Result]) -> Any:
        """The batch that is made of rollouts."""

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

    def _order(self, worker: Member, block: Block | None) -> int:
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

    def _frames_of(self, worker: Member) -> int:
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
            return self._group.wait(done, None, lambda: what, abandon=give_up)
        finally:
            self._taken_at, self.waiting_for = time.monotonic(), None

    def is_awaited(self) -> bool:
        """Whether another thread takes batches: one that waits, or has just got one."""
        if self._taker in (None, threading.get_ident()):
            return False
        return self._taken_at is None or time.monotonic() - self._taken_at < _BREAK_S

    def _drop(self, results: Sequence[Result]) -> None:
        """Throw rollouts away that are too stale."""
        self._lose(results)
        self.frames_stale += sum(result.found.frames for result in results)

    def _lose(self, results: Sequence[Result]) -> None:
        """Let rollouts go that are not delivered: no trajectory goes on across the hole."""
        self._release(results)
        self._anew.update(result.worker for result in results)
        self.frames -= sum(result.found.frames for result in results)

    def oldest_versions(self) -> list[tuple[int, int]]:
        """Worker and version of rollouts that have arrived, and were not delivered."""
        return [(result.worker, result.found.oldest_version) for result in self._undelivered()]

    def raise_error(self) -> None:
        """Raise what went wrong in a worker: each error once, but that of a worker that is gone again and again."""
        if self.errors:
            self.told = True
            raise self.errors.popleft()

    def forgive(self) -> None:
        """What raised is another now: if one error of it was raised, so much for the others."""
        if self.told:
            self.errors.clear()  # of workers that are gone, raise_if_short() still knows

    def _is_short(self) -> bool:
        """Whether waiting is in vain: a worker is gone for good."""
        return any(worker.error is not None for worker in self._group.workers)

    def raise_if_short(self) -> None:
        """Raise if a worker is gone for good."""
        for worker in self._group.workers:
            if worker.error is not None:
                raise worker.error

    # What workers say -----------------------------------------------------------------------------

    def collected(self, worker: Member, found: say.Collected, block: Block | None) -> None:
        """See :class:`~rollwright.collectors.workers.member.Listener`."""
        self.num_messages += 1
        self.frames += found.frames
        self.frames_stale += found.dropped_frames
        self.store.read_by(worker.index, found.held)
        rest = None if found.rest is None else open_parcel(found.rest, worker.spec.parcels)
        part, device = self._part(worker, block), self._devices[worker.index]
        self._arrived(Result(worker.index, worker.num_collected, found, block, part, rest, device))

    @abstractmethod
    def _arrived(self, result: Result) -> None:
        """Keep a rollout until it is delivered."""

    def _part(self, worker: Member, block: Block | None) -> int:
        """Which part of a block is a worker's."""
        return 0

    @abstractmethod
    def needs(self, worker: Member, need: say.Need) -> say.Grant:
        """See :class:`~rollwright.collectors.workers.member.Listener`."""

    def _grant_alone(self, worker: Member, need: say.Need) -> say.Grant:
        layout = BlockLayout(need.form, (need.form.steps,), "alone")
        block = self.store.take(layout)
        self._use(worker, need.run, block)
        return say.Grant(need.run, layout, block.number, block.offset, 0)

    def _use(self, worker: Member, run: int, block: Block) -> None:
        old = worker.runs.get(run)
        if old is not None:
            old.runs.discard(run)
        worker.runs[run] = block
        block.runs.add(run)

    def failed(self, worker: Member, error: WorkerError) -> None:
        """See :class:`~rollwright.collectors.workers.member.Listener`."""
        self.errors.append(error)

    @abstractmethod
    def lost(self, worker: Member) -> None:
        """See :class:`~rollwright.collectors.workers.member.Listener`."""

    # State ------------------------------------------------------------------------------------

    def forget(self, shares: Mapping[int, int]) -> None:
        """Drop what was not delivered: all has begun anew.

        Args:
            shares: how many rollouts each worker had collected when it began anew; later ones stay.
        """
        with self._group.lock, uninterrupted:
            old = [result for result in self._undelivered() if result.number <= shares[result.worker]]
            self._give_up(old)
            self._release(old)
            if not self.stored:  # what is in the buffer stays there
                self.frames -= sum(result.found.frames for result in old)
            self._trajectories.clear()
            self._pending.clear()

    @abstractmethod
    def _give_up(self, old: Sequence[Result]) -> None:
        """Drop rollouts that were not delivered."""

    def state_dict(self, shares: Mapping[int, int]) -> dict[str, Any]:
        """What has arrived and was not delivered.

        Args:
            shares: how many rollouts of each worker belong to the state.
        """
        undelivered = self._undelivered()
        late = [result for result in undelivered if result.number > shares[result.worker]]
        waiting = [] if self.stored else [result for result in undelivered if result not in late]
        return {
            "frames": self.frames - sum(result.found.frames for result in late),
            "waiting": [{"worker": result.worker, "held": _saved(batch_of(result))} for result in waiting],
            "trajectories": [td_state(td) for td in self._trajectories],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.frames = int(state_dict["frames"])
        for saved in state_dict["waiting"]:
            self._arrived(restored(saved["worker"], _loaded(saved["held"]), self._devices[saved["worker"]]))
        self._trajectories.extend(cast(Any, td_from(td)) for td in state_dict["trajectories"])

    def _undelivered(self) -> list[Result]:
        """Rollouts that have arrived, those included of which a batch was made."""
        return [result for _, results in self._pending for result in results] + self._waiting()

    @abstractmethod
    def _waiting(self) -> list[Result]:
        """Rollouts that have arrived, and were not delivered yet."""

    @property
    @abstractmethod
    def num_undelivered(self) -> int:
        """Rollouts that have arrived, and were not delivered yet."""


def _saved(held: Any) -> Any:
    return [td_state(td) for td in held] if isinstance(held, list) else td_state(held)


def _loaded(saved: Any) -> Any:
    return [td_from(td) for td in saved] if isinstance(saved, list) else td_from(saved)


def _device(worker: Member) -> torch.device | None:
    device = worker.ready.device if worker.ready is not None else None
    return None if device is None else torch.device(device)
