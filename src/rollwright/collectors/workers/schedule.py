"""Schedule: when workers are asked for rollouts, and in which order what they collected is delivered.

Workers collect only what they were asked for, so nothing is collected that nobody takes: a consumer that is slow makes
them wait.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from tensordict import TensorDictBase

from rollwright._interrupts import uninterrupted
from rollwright.collectors.core import never
from rollwright.collectors.delivery.rows import HeldBatch, RowRange, concatenate, pad
from rollwright.collectors.rollout.state import td_from, td_state
from rollwright.collectors.workers import messages
from rollwright.collectors.workers.group import WorkerGroup
from rollwright.collectors.workers.handles import WorkerHandle
from rollwright.collectors.workers.memory import Block, BlockStore, unpack
from rollwright.collectors.workers.strategies import PendingRollouts, Result, Staleness, Strategy, batch_of, restored
from rollwright.data.transcript import ReceivedTranscripts
from rollwright.errors import WorkerError

_BREAK_S = 0.5  # after which a consumer is taken to have stopped


class Pending(NamedTuple):
    """What is about to be delivered.

    Attributes:
        made: it.
        results: what it is made of; where it has been shaped, without their data.
        shaped: whether it has been shaped, and an interrupt kept it from the consumer.
    """

    made: Any
    results: Sequence[Result]
    shaped: bool = False


def _oldest_of(result: Result) -> Sequence[int | None]:
    """Versions of the oldest tokens of the trajectories of a rollout; None: they are not known."""
    return result.found.oldest_tokens or [None] * len(result.rest or ())


class Schedule:
    """Takes in what workers collect, and delivers it.

    Args:
        group: the workers.
        rollouts: what they were asked for.
        strategy: decides what is asked for, and what the next batch is made of.
        staleness: how old batches may be.
        trajs_per_batch: how many complete trajectories are delivered at a time; None: batches are.
        padded: whether trajectories are delivered padded.
        stored: whether workers write into a replay buffer, and nothing but counts arrives.
        may_end: whether the data of a worker may be over; then, a batch is ready when it is here.

    Attributes:
        raised: whether an error was raised.
        errors: what went wrong in workers, and was not raised yet.
    """

    def __init__(
        self,
        rollouts: PendingRollouts,
        strategy: Strategy,
        staleness: Staleness,
        *,
        trajs_per_batch: int | None,
        padded: bool,
        stored: bool,
        may_end: bool = False,
    ) -> None:
        self.rollouts, self.strategy, self._staleness = rollouts, strategy, staleness
        self._group: WorkerGroup = rollouts.group
        self.store: BlockStore = rollouts.store
        self._trajs_per_batch, self._padded, self.stored = trajs_per_batch, padded, stored
        self._may_end = may_end
        self._devices = [_device(worker) for worker in self._group.workers]
        self._received = [ReceivedTranscripts() for _ in self._group.workers]
        self._taker: int | None = None  # thread that has asked for a batch last
        self._taken_at: float | None = None
        self._trajectories: deque[TensorDictBase] = deque()
        self._oldest: deque[int | None] = deque()  # versions of the oldest tokens of these, where they are known
        self.filtered: Counter[str] = Counter()  # trajectories (or groups) that were too old, by reason
        self._pending: list[Pending] = []
        self._handed: list[Result] = []  # what the last batch that was delivered was made of, without their data
        self.frames_stale = self.num_copied = self.batches = 0
        self.errors: deque[WorkerError] = deque()
        self.raised = False

    @property
    def frames(self) -> int:
        """Collected so far, as far as they have arrived."""
        return self.rollouts.frames

    # What is delivered ------------------------------------------------------------------------

    def ready(self, stop: Callable[[], bool] = never) -> bool:
        """Whether there is something to deliver; it may take rollouts to know."""
        self._drop_stale_rest()
        if self._pending:
            return True
        if self._trajs_per_batch is None or self.stored:
            return self._more() and (not self._may_end or self._take(stop))
        while self._num_in_time() < self._trajs_per_batch:
            if not self._more() or not self._take(stop):
                return False
        return True

    def next(
        self,
        stop: Callable[[], bool] = never,
        shaped: Callable[[Any], Any] = lambda made: made,
        into: list[Any] | None = None,
    ) -> Any:
        """What is delivered next (with a replay buffer: None), only after :meth:`ready`.

        Args:
            stop: asked again and again, whether to return without anything.
            shaped: what is done with it, before it counts as delivered. If it is interrupted, the batch is delivered
                by the next call; if it raises, its rollouts may be lost.
            into: gets it, too, before Ctrl-C is handled; who is interrupted then has to :meth:`put_back` it.

        Raises:
            WorkerError: a worker has failed.
        """
        while True:
            if not self._pending:
                if self._trajs_per_batch is not None and not self.stored:
                    self._put_together(self._trajs_per_batch)
                elif not self._take(stop):
                    return None
            pending = self._pending[-1]
            results, taken = pending.results, False
            try:
                found = pending.made if pending.shaped else shaped(pending.made)
            except Exception:
                if self.strategy.loses_what_fails:
                    with self._group.lock:
                        self._pending[:] = [each for each in self._pending if each is not pending]
                        self._lose(results)
                raise
            with self._group.lock:
                if self._pending and self._pending[-1] is pending:
                    self._pending.pop()
                    self._release(results)
                    self._handed = [replace(result, block=None, rest=None) for result in results]
                    self.batches += 1
                    taken = True
                    if into is not None:
                        into.append(found)
            if taken:
                return found
            if not self.ready(stop):  # another thread has reset the workers meanwhile
                return None

    def put_back(self, found: Any) -> None:
        """Keep for a later call what :meth:`next` gave last, and an interrupt kept from the consumer."""
        if found is None:  # it is in a buffer or a queue
            return
        with self._group.lock:
            self._pending.insert(0, Pending(found, self._handed, shaped=True))
            self.batches -= 1

    def _deliver(self, results: Sequence[Result]) -> None:
        """Make a batch, and put it where an interrupt does not lose it."""
        made = self._made_of(results)
        if self._trajs_per_batch is not None and not self.stored:
            self._trajectories.extend(made)
            self._oldest.extend(each for result in results for each in _oldest_of(result))
            self._release(results)
        else:
            self._pending.append(Pending(made, results))
        self._staleness.delivered()

    def _drop_stale_rest(self) -> None:
        """Let go of a batch that an interrupt has kept here until it was too stale."""
        with self._group.lock:
            if self._pending and self._staleness.too_stale(self._pending[-1].results, self._staleness.versions()):
                self._drop(self._pending.pop().results)

    def _put_together(self, count: int) -> None:
        """Make a batch of trajectories."""
        with uninterrupted:
            taken = [self._trajectories.popleft() for _ in range(count)]
            self._oldest = deque(list(self._oldest)[count:])
            pieces = [[RowRange(HeldBatch.of(td, len(td)), 0, len(td))] for td in taken]
            made = pad(pieces) if self._padded else concatenate([piece for [piece] in pieces])
            self._pending.append(Pending(made, ()))

    def _num_in_time(self) -> int:
        """Trajectories that can be delivered, without those whose oldest token is too old, where these are dropped."""
        limit = self._staleness.limit
        with self._group.lock:
            if limit is not None and self._staleness.drops and any(each is not None for each in self._oldest):
                first = max(self._staleness.versions()) - limit
                pairs = list(zip(self._trajectories, self._oldest, strict=True))
                kept = [(td, oldest) for td, oldest in pairs if oldest is None or oldest >= first]
                if len(kept) < len(pairs):
                    self.filtered[f"older than max_policy_lag={limit}"] += len(pairs) - len(kept)
                self._trajectories, self._oldest = deque(td for td, _ in kept), deque(oldest for _, oldest in kept)
            return len(self._trajectories)

    def _more(self) -> bool:
        """Whether anything is still to come."""
        return bool(self.strategy.results) or (self.rollouts.frames < self.rollouts.total_frames and not self.is_over)

    @property
    def is_over(self) -> bool:
        """Whether the data of all workers is over."""
        return len(self.rollouts.over) == len(self._group.workers)

    def _take(self, stop: Callable[[], bool]) -> bool:
        """Wait for what comes next, and :meth:`_deliver` it; False if ``stop`` held first."""
        strategy = self.strategy
        while True:
            if not self._wait(stop):
                return False
            self.raise_error()
            if not strategy.has_next():
                self.raise_if_short()
                if not self._more() and not self.rollouts.num_in_progress:
                    return False
                continue
            with self._group.lock:
                versions = self._staleness.versions()  # while the rollouts are here, whoever publishes waits for them
                results = strategy.next_rollouts()
                by_token = self._staleness.drops and any(result.found.oldest_tokens for result in results)
                if not by_token and self._staleness.too_stale(results, versions):
                    strategy.remove(results)
                    self._drop(results)
                    continue
                try:
                    self._deliver(results)
                except BaseException:
                    if strategy.loses_what_fails:
                        strategy.remove(results)
                        self._lose(results)
                    raise
                strategy.remove(results)
                strategy.delivered()
                return True

    def _made_of(self, results: Sequence[Result]) -> Any:
        """The batch that is made of rollouts."""
        if self.stored:
            return None
        if self._trajs_per_batch is not None:
            return [trajectory for result in results for trajectory in result.rest]
        batch = self.strategy.combine(results)
        if self.store.num_borrowed > self.store.most:  # the consumer holds very many
            self.num_copied += 1
            return batch.clone()
        return batch

    def _release(self, results: Sequence[Result]) -> None:
        """Results are delivered: what keeps their memory from now on are the consumer's tensors."""
        for result in results:
            if result.block is not None:
                result.block.runs.discard(result.found.run)

    # Waiting ----------------------------------------------------------------------------------

    def _wait(self, stop: Callable[[], bool]) -> bool:
        def done() -> bool:
            self.rollouts.waiting_for = self.strategy.awaits
            if self.strategy.ready() or self.errors or self.strategy.is_hopeless():
                return True
            return self.is_over and not self.rollouts.num_in_progress

        self._taker, self._taken_at = threading.get_ident(), None
        try:
            return self._group.wait(done, None, lambda: self.strategy.awaits, abandon=stop)
        finally:
            self._taken_at, self.rollouts.waiting_for = time.monotonic(), None

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
        self.rollouts.restarting.update(result.worker for result in results)
        self.rollouts.frames -= sum(result.found.frames for result in results)

    def oldest_versions(self) -> list[tuple[int, int]]:
        """Worker and version of rollouts that have arrived, and were not delivered."""
        return [(result.worker, result.found.oldest_version) for result in self._undelivered()]

    def raise_error(self) -> None:
        """Raise what went wrong in a worker: each error once, but that of a worker that is gone again and again."""
        if self.errors:
            self.raised = True
            raise self.errors.popleft()

    def forgive(self) -> None:
        """What raised is another now: if one error of it was raised, so much for the others."""
        if self.raised:
            self.errors.clear()  # of workers that are gone, raise_if_short() still knows

    def raise_if_short(self) -> None:
        """Raise if a worker is gone for good."""
        for worker in self._group.workers:
            if worker.error is not None:
                raise worker.error

    @contextmanager
    def holding(self) -> Iterator[None]:
        """No rollout begins inside the ``with`` block."""
        self.rollouts.held += 1
        try:
            yield
        finally:
            self.rollouts.held -= 1
            self._group.wake()

    # What workers send -------------------------------------------------------------------------

    def collected(self, worker: WorkerHandle, found: messages.Collected, block: Block | None) -> None:
        """Take in a rollout, and the block that it was asked to lie in."""
        self.rollouts.num_messages += 1
        self.rollouts.frames += found.frames
        self.frames_stale += found.dropped_frames
        self.store.read_by(worker.index, found.held)
        if found.is_over:
            self.rollouts.over.add(worker.index)
            return
        rest = None if found.rest is None else unpack(found.rest, worker.spec.packing, self._received[worker.index])
        part, device = self.strategy.part_of(worker, block), self._devices[worker.index]
        self.strategy.add(Result(worker.index, worker.num_collected, found, block, part, rest, device))

    def needs(self, worker: WorkerHandle, request: messages.MemoryRequest) -> messages.MemoryGrant:
        """Give memory for a rollout; what this raises is raised in the worker."""
        return self.strategy.grant(worker, request)

    def failed(self, worker: WorkerHandle, error: WorkerError) -> None:
        """Take in an error to be raised."""
        self.errors.append(error)

    def lost(self, worker: WorkerHandle) -> None:
        """A worker is gone, and with it what it was asked for; another may be started in its place."""
        self.strategy.lost(worker)

    # State ------------------------------------------------------------------------------------

    def forget(self, shares: Mapping[int, int]) -> None:
        """Drop what was not delivered: the workers were reset.

        Args:
            shares: how many rollouts each worker had collected when it was reset; later ones stay.
        """
        with self._group.lock:
            old = [result for result in self._undelivered() if result.number <= shares[result.worker]]
            self.strategy.remove(old)
            self._release(old)
            if not self.stored:  # what is in the buffer stays there
                self.rollouts.frames -= sum(result.found.frames for result in old)
            self._trajectories.clear()
            self._oldest.clear()
            self._pending.clear()
            self.rollouts.over.clear()

    def state_dict(self, shares: Mapping[int, int]) -> dict[str, Any]:
        """What has arrived and was not delivered.

        Args:
            shares: how many rollouts of each worker belong to the state.
        """
        undelivered = self._undelivered()
        late = [result for result in undelivered if result.number > shares[result.worker]]
        shaped = [pending for pending in self._pending if pending.shaped]
        kept = [pending for pending in shaped if not any(result in late for result in pending.results)]
        known = [*late, *(result for pending in shaped for result in pending.results)]
        waiting = [] if self.stored else [result for result in undelivered if result not in known]
        return {
            "frames": self.rollouts.frames - sum(result.found.frames for result in late),
            "waiting": [{"worker": result.worker, "held": _saved(batch_of(result))} for result in waiting],
            "kept": [td_state(pending.made) for pending in kept],
            "trajectories": [td_state(td) for td in self._trajectories],
            "oldest": list(self._oldest),
            "filtered": dict(self.filtered),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        self.rollouts.frames = int(state_dict["frames"])
        for saved in state_dict["waiting"]:
            self.strategy.add(restored(saved["worker"], _loaded(saved["held"]), self._devices[saved["worker"]]))
        self._trajectories.extend(cast(Any, td_from(td)) for td in state_dict["trajectories"])
        self._oldest.extend(state_dict.get("oldest", [None] * len(self._trajectories)))
        self.filtered = Counter(state_dict.get("filtered", {}))
        self._pending.extend(Pending(td_from(td), (), shaped=True) for td in state_dict.get("kept", ()))

    def _undelivered(self) -> list[Result]:
        """Rollouts that have arrived, those included of which a batch was made."""
        return [result for pending in self._pending for result in pending.results] + self.strategy.results

    @property
    def has_undelivered(self) -> bool:
        """Whether anything has arrived, or a batch was made, that was not delivered."""
        return bool(self._pending or self._trajectories or self.strategy.results)

    @property
    def trajectories_held(self) -> list[TensorDictBase]:
        """Complete trajectories that no batch was made of yet."""
        return list(self._trajectories.copy())

    @property
    def num_undelivered(self) -> int:
        """Rollouts that have arrived, and of which no batch was made yet."""
        return len(self.strategy.results)


def check_undelivered(state_dict: Mapping[str, Any]) -> None:
    """Raise what :meth:`Schedule.load_state_dict` would raise of a damaged state; nothing is changed."""
    _ = int(state_dict["frames"]), [_loaded(saved["held"]) for saved in state_dict["waiting"]]
    _ = [td_from(td) for td in (*state_dict["trajectories"], *state_dict.get("kept", ()))]


def _saved(held: Any) -> Any:
    return [td_state(td) for td in held] if isinstance(held, list) else td_state(held)


def _loaded(saved: Any) -> Any:
    return [td_from(td) for td in saved] if isinstance(saved, list) else td_from(saved)


def _device(worker: WorkerHandle) -> torch.device | None:
    device = worker.ready.device if worker.ready is not None else None
    return None if device is None else torch.device(device)
