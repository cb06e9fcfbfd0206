"""Strategies: which rollouts are asked for, and which of them make the next batch; and how these are joined."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright._keys import NestedKey, place
from rollwright.collectors.workers import messages
from rollwright.collectors.workers.group import WorkerGroup
from rollwright.collectors.workers.handles import WorkerHandle
from rollwright.collectors.workers.memory import BatchForm, Block, BlockLayout, BlockStore, Join
from rollwright.collectors.workers.messages import Collected
from rollwright.data.compact import join_tables, put_table
from rollwright.data.layout import MASK, TRAJ_IDS, blank_frame, is_dense, split_trajectories, stack_frames
from rollwright.data.replay_buffers import SampleToInsertRatio

B = TypeVar("B", bound=TensorDictBase)


@dataclass(eq=False)
class Result:
    """A rollout that has arrived.

    Attributes:
        worker: index.
        number: how many this worker has collected, with this one.
        found: what the worker sent.
        block: where its batch lies, if it lies in one.
        part: which part of the block is this worker's.
        rest: what does not lie there, opened.
        device: of the batch; None: no common one.
    """

    worker: int
    number: int
    found: Collected
    block: Block | None
    part: int
    rest: Any
    device: torch.device | None


def restored(worker: int, held: Any, device: torch.device | None) -> Result:
    """A rollout that was saved before it was delivered."""
    found = Collected(-1, 0, 0, False, None, (), {}, (), 0, 0, 0)
    return Result(worker, 0, found, None, 0, held, device)


def batch_of(result: Result) -> Any:
    """What one worker has collected: a batch ``[*env, T]`` over its memory, or a list of trajectories."""
    if not result.found.in_block:
        return _named(result.rest, result.found)
    block = cast(Block, result.block)
    tensors = {key: block.layout.part(tensor, result.part) for key, tensor in block.borrow().items()}
    form = block.layout.form
    size = torch.Size([*form.env, block.layout.steps[result.part]])
    return _built(tensors, size, result.found, result.rest or {}, result.device)


def joined(results: Sequence[Result], join: Join) -> TensorDictBase:
    """What all workers have collected, in one batch: over the memory that they wrote, where they wrote to one block."""
    extras = _joined_extras(results, join) if _share_a_block(results) else None
    if extras is None:
        return _named(_stacked([batch_of(result) for result in results], join), results[0].found)
    block = cast(Block, results[0].block)
    return _built(block.borrow(), block.layout.batch_size, results[0].found, extras, results[0].device)


def mark_taken(batch: TensorDictBase) -> None:
    """Write which frames were taken, where workers may have been interrupted."""
    ids = batch.get(TRAJ_IDS, None)
    if ids is not None:
        batch.set(MASK, ids >= 0)


def _built(
    tensors: Mapping[NestedKey, torch.Tensor],
    size: torch.Size,
    found: Collected,
    extras: Mapping[NestedKey, Any],
    device: torch.device | None,
) -> TensorDict:
    nested: dict[str, Any] = {}
    for key, tensor in tensors.items():
        if key in found.lacking:
            continue
        if type(key) is str:
            nested[key] = tensor
        else:
            place(nested, key, tensor)
    names: Any = [*[None] * (len(size) - 1), "time"]
    batch = _named(TensorDict(nested, batch_size=size, device=device, names=names), found)
    for key, value in extras.items():
        batch.set(key, value)
    for key, rest in found.nesting.items():
        batch.get(key).batch_size = torch.Size([*size, *rest])
    return batch


def _named(batch: B, found: Collected) -> B:
    """A batch, or several in one, whose last dimensions have the names that the worker's have."""
    if found.names is not None:
        batch.names = [*[None] * (batch.ndim - len(found.names)), *found.names]
    return batch


def _share_a_block(results: Sequence[Result]) -> bool:
    """Whether all lie in one block, with the same entries in it and beside it."""
    block, first = results[0].block, results[0].found
    return all(
        result.found.in_block
        and result.block is block
        and set(result.found.lacking) == set(first.lacking)
        and result.found.nesting == first.nesting
        and (result.rest or {}).keys() == (results[0].rest or {}).keys()
        for result in results
    )


def _joined_extras(results: Sequence[Result], join: Join) -> dict[NestedKey, Any] | None:
    """Entries beside the block of all workers; None where they cannot be in one TensorDict."""
    if not results[0].rest:
        return {}
    rests = []
    for result in results:
        form, steps = cast(Block, result.block).layout.form, cast(Block, result.block).layout.steps
        rests.append(TensorDict({}, [*form.env, steps[result.part]]))
        for key, value in result.rest.items():
            rests[-1].set(key, value)
    together = _stacked(rests, join)
    return {key: together.get(key) for key in results[0].rest} if type(together) is TensorDict else None


def _stacked(batches: Sequence[TensorDictBase], join: Join) -> TensorDictBase:
    """Join by copying; lazily where shapes differ. Rollouts that ended early, with their data, are filled up."""
    batches, table = join_tables(batches)
    together = _laid_together(batches, join)
    return together if table is None else put_table(together, table)


def _laid_together(batches: Sequence[TensorDictBase], join: Join) -> TensorDictBase:
    if join == "stack" or (join == "first" and batches[0].ndim > 1):
        batches = [_filled_up(batch, max(other.batch_size[-1] for other in batches)) for batch in batches]
    if join == "stack":
        return stack_frames(list(batches), 0, None)
    ndim = batches[0].ndim
    stacked: Any
    dim = 0 if join == "first" else ndim - 1
    try:
        stacked = torch.cat(cast(Any, list(batches)), dim)
    except (RuntimeError, KeyError) as error:
        raise ValueError(
            f"cat_results={0 if join == 'first' else -1}: rollouts of the workers have entries that cannot be "
            f"concatenated: {error}. Pass cat_results='stack', the default."
        ) from error
    stacked.names = [*[None] * (ndim - 1), "time"]
    return cast(TensorDictBase, stacked)


def _filled_up(batch: TensorDictBase, steps: int) -> TensorDictBase:
    """A lazy stack of frames with ``steps`` of them: those that were not taken hold nothing, and have the id -1."""
    missing = steps - batch.batch_size[-1]
    if not missing or not isinstance(batch, LazyStackedTensorDict) or batch.stack_dim != batch.ndim - 1:
        return batch
    frames = batch.tensordicts
    filled: Any = LazyStackedTensorDict(
        *frames, *(blank_frame(frames) for _ in range(missing)), stack_dim=batch.stack_dim, stack_dim_name="time"
    )
    return cast(TensorDictBase, filled)


def are_alike(one: TensorDictBase, other: TensorDictBase) -> bool:
    """Whether the one can be overwritten with the other, and nothing is left of it."""
    if not is_dense(one) or not is_dense(other) or one.batch_size != other.batch_size:
        return False
    ours, theirs = dict(one.items(True, True)), dict(other.items(True, True))
    return ours.keys() == theirs.keys() and all(
        (value.shape, value.dtype) == (theirs[key].shape, theirs[key].dtype) for key, value in ours.items()
    )


class BatchShaping:
    """Splits batches into trajectories, moves them to a device, and returns the same TensorDict each time.

    Args:
        splits: cut them into padded trajectories.
        postproc: called with what was split.
        device: where batches are delivered; None, or the CPU: where they are.
        same_td: write each batch into the first one, where it has the same entries.
    """

    def __init__(
        self,
        *,
        splits: bool,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None,
        device: Any,
        same_td: bool,
    ) -> None:
        self._splits, self._postproc, self._returns_same = splits, postproc, same_td
        self._device = None if device is None or torch.device(device).type == "cpu" else device
        self._same_td: TensorDictBase | None = None

    def __call__(self, batch: TensorDictBase | None) -> TensorDictBase | None:
        """The batch to deliver; None stays None."""
        if batch is None:
            return None
        batch = self.shape(batch)
        if not self._returns_same:
            return batch
        if self._same_td is None or not are_alike(self._same_td, batch):
            self._same_td = batch.clone()
        else:
            self._same_td.update_(batch)
        return self._same_td

    def shape(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch, split and moved, in a TensorDict of its own."""
        if self._splits:
            batch = split_trajectories(batch, prefix="collector")
            batch = batch if self._postproc is None else self._postproc(batch)
        return batch if self._device is None else batch.to(self._device)


class PendingRollouts:
    """Asks workers for rollouts.

    Args:
        group: the workers.
        store: memory of batches.
        total_frames: to collect in all; infinity for no end.

    Attributes:
        frames: collected so far, as far as they have arrived.
        held: how many keep rollouts from beginning.
        limiter: of the replay buffer: asked before rollouts begin.
        restarting: workers that reset their environments before the next rollout, because one before it is lost.
        over: workers whose data is over.
        num_messages: sent and received.
        waiting_for: what the next rollout waits for.
    """

    def __init__(self, group: WorkerGroup, store: BlockStore, total_frames: float) -> None:
        self.group, self.store, self.total_frames = group, store, total_frames
        self.frames = self.held = self.num_messages = 0
        self.limiter: SampleToInsertRatio | None = None
        self.restarting: set[int] = set()
        self.over: set[int] = set()
        self.waiting_for: str | None = None
        self._runs = itertools.count()

    @property
    def on_hold(self) -> bool:
        """Whether no rollout may begin."""
        return bool(self.held or self.group.num_pauses)

    def ask(self, worker: WorkerHandle, block: Block | None) -> None:
        """Ask for a rollout, to lie in a block; None: the worker asks for one."""
        self.group.order(worker, next(self._runs), block, reset=worker.index in self.restarting)
        self.restarting.discard(worker.index)
        self.num_messages += 1

    def may_begin(self, frames: int) -> bool:
        """Whether the replay buffer may take so many more frames."""
        if self.limiter is None or self.limiter.may_insert(frames):
            return True
        self.waiting_for = self.limiter.wants(frames)
        return False

    @staticmethod
    def frames_of(worker: WorkerHandle) -> int:
        """In a rollout of a worker."""
        return worker.ready.frames_per_batch if worker.ready is not None else 0

    @property
    def num_in_progress(self) -> int:
        """Rollouts that were asked for and have not arrived."""
        return sum(len(worker.runs) for worker in self.group.workers)

    @property
    def frames_asked(self) -> int:
        """Collected, or asked for."""
        return self.frames + sum(len(worker.runs) * self.frames_of(worker) for worker in self.group.workers)

    @property
    def is_short(self) -> bool:
        """Whether a worker is gone for good."""
        return any(worker.error is not None for worker in self.group.workers)

    def grant(
        self, worker: WorkerHandle, request: messages.MemoryRequest, layout: BlockLayout, block: Block, part: int
    ) -> messages.MemoryGrant:
        """Let the current rollout lie in a part of a block."""
        old = worker.runs.get(request.run)
        if old is not None:
            old.runs.discard(request.run)
        worker.runs[request.run] = block
        block.runs.add(request.run)
        return messages.MemoryGrant(request.run, layout, block.number, block.offset, part)

    def grant_alone(self, worker: WorkerHandle, request: messages.MemoryRequest) -> messages.MemoryGrant:
        """Let the current rollout lie in a block of its own."""
        layout = BlockLayout(request.form, (request.form.steps,), "alone")
        return self.grant(worker, request, layout, self.store.take(layout), 0)


class Staleness:
    """Keeps ``version at delivery - version that acted first <= limit``.

    Where workers are to wait, a rollout begins only if it will be delivered in time: with ``n`` rollouts ahead that are
    delivered in the order in which they began, the last one is ``(n - 1) * pace`` versions old, so
    ``n = limit // pace + 1``. The pace is the most versions that the consumer has published from one delivery to the
    next; until it is known, ``n = 1``.

    Args:
        limit: versions; None: any number.
        waits: whether workers wait; otherwise what is too stale is dropped.
        versions: gives the version that was published last for each worker.

    Example:
        >>> staleness = Staleness(4, waits=True, versions=lambda: [0])
        >>> staleness.most_ahead
        1
    """

    def __init__(self, limit: int | None, *, waits: bool, versions: Callable[[], Sequence[int]]) -> None:
        self.limit, self.versions = limit, versions
        self.waits = waits and limit is not None
        self.drops = not waits and limit is not None
        self._pace: int | None = None
        self._last: int | None = None

    @property
    def most_ahead(self) -> float:
        """Rollouts that may be in progress, or finished and not delivered."""
        if not self.waits:
            return math.inf
        return 1 if self._pace is None else (self.limit or 0) // max(1, self._pace) + 1

    def too_stale(self, results: Iterable[Result], versions: Sequence[int]) -> bool:
        """Whether rollouts must not be delivered any more, when ``versions`` are published."""
        limit = self.limit
        return limit is not None and any(versions[r.worker] - r.found.oldest_version > limit for r in results)

    def delivered(self) -> None:
        """Note that a batch is delivered."""
        version = max(self.versions())
        if self._last is not None:
            self._pace = max(self._pace or 0, version - self._last)
        self._last = version


class Strategy(ABC):
    """Decides for a :class:`~rollwright.collectors.workers.schedule.Schedule`, which calls it under its lock.

    Attributes:
        awaits: what :meth:`ready` waits for, for messages.
        loses_what_fails: whether rollouts of a batch that could not be made are lost, and their workers restart.
        in_step: whether all workers take the same number of steps.
        results: rollouts that have arrived and were not removed, in that order.
    """

    awaits: str
    loses_what_fails: bool
    in_step: bool

    def __init__(self, rollouts: PendingRollouts) -> None:
        self._rollouts, self._workers = rollouts, rollouts.group.workers
        self.results: list[Result] = []

    @abstractmethod
    def ask(self) -> None:
        """Ask workers for as many rollouts as may be in progress."""

    @abstractmethod
    def ready(self) -> bool:
        """:meth:`ask`; whether the rollouts of the next batch have arrived."""

    @abstractmethod
    def has_next(self) -> bool:
        """Whether they are there now."""

    @abstractmethod
    def is_hopeless(self) -> bool:
        """Whether they cannot arrive any more."""

    @abstractmethod
    def next_rollouts(self) -> list[Result]:
        """The rollouts of the next batch."""

    def remove(self, results: Collection[Result]) -> None:
        """These rollouts are delivered or dropped."""
        self.results = [result for result in self.results if result not in results]

    def add(self, result: Result) -> None:
        """A rollout has arrived."""
        self.results.append(result)

    @abstractmethod
    def combine(self, results: Sequence[Result]) -> TensorDictBase:
        """The batch of some rollouts."""

    @abstractmethod
    def grant(self, worker: WorkerHandle, request: messages.MemoryRequest) -> messages.MemoryGrant:
        """Memory for a rollout that needs it."""

    @abstractmethod
    def lost(self, worker: WorkerHandle) -> None:
        """A worker is gone, and with it what it was asked for."""

    def part_of(self, worker: WorkerHandle, block: Block | None) -> int:
        """Which part of a block is a worker's."""
        return 0

    def delivered(self) -> None:  # noqa: B027 - most wait until the consumer comes again
        """A batch was delivered."""


_AHEAD = 2  # rollouts that a worker may be ahead of the consumer: in progress, or finished and not taken yet


class FirstCome(Strategy):
    """Each batch is of one rollout of one worker, in the order in which they arrive.

    A batch that could not be made stays the next one: its worker has gone on from its end.

    Args:
        rollouts: asks workers.
        staleness: how old batches may be.
        stored: whether workers write into a replay buffer.
    """

    awaits = "a rollout of any worker"
    loses_what_fails = False
    in_step = False

    def __init__(self, rollouts: PendingRollouts, staleness: Staleness, *, stored: bool) -> None:
        super().__init__(rollouts)
        self._staleness, self._stored = staleness, stored
        self._layouts: dict[int, BlockLayout | None] = {}  # None: its rollouts lie in no block

    def ready(self) -> bool:
        """:meth:`ask`; whether the rollouts of the next batch have arrived."""
        self.ask()
        if self.results and self._staleness.waits:  # the one that began first is the next
            first = min(self.results, key=lambda result: result.found.run)
            if any(run < first.found.run for worker in self._workers for run in worker.runs):
                return False
            self.results = [first, *(result for result in self.results if result is not first)]
        return self.has_next()

    def has_next(self) -> bool:
        """Whether they are there now."""
        return bool(self.results)

    def is_hopeless(self) -> bool:
        """Whether they cannot arrive any more."""
        return self._rollouts.is_short and not self._rollouts.num_in_progress

    def ask(self) -> None:
        """Ask all workers for as much as they may be ahead."""
        rollouts = self._rollouts
        if rollouts.is_short or rollouts.on_hold:
            return
        waiting = [result.worker for result in self.results]
        for ahead in range(1, 2 if self._staleness.drops else _AHEAD + 1):
            for worker in self._workers:
                in_progress = len(worker.runs) + waiting.count(worker.index)
                if (
                    in_progress >= ahead
                    or not worker.available
                    or worker.index in rollouts.over
                    or rollouts.frames_asked >= rollouts.total_frames
                ):
                    continue
                if in_progress and worker.index not in self._layouts and not self._stored:
                    continue  # it is asked for the next one with a block for it
                if len(waiting) + rollouts.num_in_progress >= self._staleness.most_ahead:
                    return
                if rollouts.may_begin(rollouts.frames_of(worker) * (1 + rollouts.num_in_progress)):
                    layout = self._layouts.get(worker.index)
                    rollouts.ask(worker, None if layout is None else rollouts.store.take(layout))

    def next_rollouts(self) -> list[Result]:
        """The rollouts of the next batch."""
        return self.results[:1]

    def delivered(self) -> None:
        """A batch was delivered: the worker goes on while the consumer has it."""
        if not self._staleness.waits:
            self.ask()

    def add(self, result: Result) -> None:
        """A rollout has arrived."""
        self._layouts.setdefault(result.worker, None)
        super().add(result)

    def combine(self, results: Sequence[Result]) -> Any:
        """The batch of some rollouts."""
        [result] = results
        return batch_of(result)

    def grant(self, worker: WorkerHandle, request: messages.MemoryRequest) -> messages.MemoryGrant:
        """Memory for a rollout that needs it."""
        grant = self._rollouts.grant_alone(worker, request)
        self._layouts[worker.index] = grant.layout
        return grant

    def lost(self, worker: WorkerHandle) -> None:
        """A worker is gone, and with it what it was asked for."""
        self._layouts.pop(worker.index, None)


class Gather(Strategy):
    """Each batch is of one rollout of every worker whose data is not over.

    Args:
        rollouts: asks workers.
        join: how rollouts are put together.
        least: how many workers are waited for; the others are interrupted then.
    """

    awaits = "rollouts of all workers"
    loses_what_fails = True
    in_step = True

    def __init__(self, rollouts: PendingRollouts, *, join: Join, least: int) -> None:
        super().__init__(rollouts)
        self._join, self._least = join, least
        self._steps = tuple(_steps(worker) for worker in self._workers)
        self._layout: BlockLayout | None = None
        self._block: Block | None = None  # of this round
        self._fitting: set[int] = set()  # workers that know the layout
        self._interrupted = False

    def ready(self) -> bool:
        """:meth:`ask`; whether the rollouts of the next batch have arrived."""
        self.ask()
        if self._least <= len(self.results) < len(self._workers) - len(self._absent()) and not self._interrupted:
            self._interrupted = True
            for worker in self._workers:
                self._rollouts.group.interrupt(worker)
        return self.has_next()

    def has_next(self) -> bool:
        """Whether they are there now."""
        return bool(self.results) and len(self.results) + len(self._absent()) == len(self._workers)

    def _absent(self) -> set[int]:
        """Workers whose data is over, and who have no part in this round."""
        over = self._rollouts.over
        return over and over - {result.worker for result in self.results}

    def is_hopeless(self) -> bool:
        """Whether they cannot arrive any more."""
        return self._rollouts.is_short

    def ask(self) -> None:
        """Ask every worker that has no part in this round yet."""
        rollouts = self._rollouts
        begins = not self.results and not rollouts.num_in_progress
        if (begins and rollouts.held) or rollouts.group.num_pauses:
            return
        arrived = {result.worker for result in self.results}
        lacking = [w for w in self._workers if w.index not in arrived and w.index not in rollouts.over]
        if begins and not rollouts.may_begin(sum(map(rollouts.frames_of, lacking))):
            return
        for worker in lacking:
            if worker.available and not worker.runs:
                if self._layout is not None and self._block is None:
                    self._block = rollouts.store.take(self._layout)
                rollouts.ask(worker, self._block if worker.index in self._fitting else None)

    def next_rollouts(self) -> list[Result]:
        """The rollouts of the next batch."""
        return sorted(self.results, key=lambda result: result.worker)

    def remove(self, results: Collection[Result]) -> None:
        """These rollouts are delivered or dropped."""
        super().remove(results)
        if not self.results:
            self._block, self._interrupted = None, False

    def combine(self, results: Sequence[Result]) -> TensorDictBase:
        """The batch of some rollouts."""
        batch = joined(results, self._join)
        if self._least < len(results):
            mark_taken(batch)
        return batch

    def grant(self, worker: WorkerHandle, request: messages.MemoryRequest) -> messages.MemoryGrant:
        """Memory for a rollout that needs it."""
        layout = BlockLayout(BatchForm(request.form.fields, request.form.env, 0), self._steps, self._join)
        if not self._can_join(worker, request.form):
            return self._rollouts.grant_alone(worker, request)
        if layout != self._layout:
            if self._block is not None and self._block.runs - {request.run}:
                return self._rollouts.grant_alone(worker, request)  # others write, in another form
            self._layout, self._block, self._fitting = layout, None, set()
        if self._block is None:
            self._block = self._rollouts.store.take(layout)
        self._fitting.add(worker.index)
        return self._rollouts.grant(worker, request, layout, self._block, worker.index)

    def part_of(self, worker: WorkerHandle, block: Block | None) -> int:
        """Which part of a block is a worker's."""
        return 0 if block is None or block.layout.join == "alone" else worker.index

    def _can_join(self, worker: WorkerHandle, form: BatchForm) -> bool:
        same = len(set(self._steps)) == 1
        env = tuple(worker.ready.batch_size) if worker.ready is not None else ()
        alike = all(other.ready is None or tuple(other.ready.batch_size) == env for other in self._workers)
        by_time = self._join == "time" or (self._join == "first" and not env)
        return alike and form.env == env and form.steps == self._steps[worker.index] and (same or by_time)

    def lost(self, worker: WorkerHandle) -> None:
        """A worker is gone, and with it what it was asked for."""
        self._fitting.discard(worker.index)


def _steps(worker: WorkerHandle) -> int:
    return worker.ready.frames_per_batch // worker.ready.num_envs if worker.ready is not None else 0
