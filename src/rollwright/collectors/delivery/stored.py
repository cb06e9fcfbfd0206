"""Deliveries into a replay buffer, by rollout, by step or by trajectory; or into a queue, turn by turn."""

from __future__ import annotations

import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn, cast

from tensordict import TensorDictBase

from rollwright._interrupts import uninterrupted
from rollwright._keys import NestedKey, as_tuple, key_str, unravel
from rollwright._warnings import warn_user
from rollwright.collectors.core import never
from rollwright.collectors.delivery.assembler import GroupAssembler, Trajectory, TrajectoryAssembler
from rollwright.collectors.delivery.base import Batches, RolloutDelivery, TrajectoryBatches, split, turns_taken
from rollwright.collectors.delivery.rows import RowRange, StorageMemory, common_keys, copied
from rollwright.collectors.options import buffer_of, draws_slices, stats_of_buffer, storage_ndim
from rollwright.collectors.reports.observers import Profile
from rollwright.collectors.rollout.rollout import Rollout
from rollwright.collectors.rollout.state import placed, td_from, td_state
from rollwright.data.layout import TRAJ_IDS
from rollwright.data.llm.records import origins_in
from rollwright.data.replay_buffers import ReplayBuffer, SampleToInsertRatio
from rollwright.data.replay_buffers.samplers.slices import FLAG_DTYPES
from rollwright.data.replay_buffers.storages.batches import no_objects
from rollwright.data.specs import Composite, NonTensor
from rollwright.errors import RollwrightError

_LOOK_S = 0.1  # how often a wait for room looks whether it is to end
_LIMIT_S = 600.0  # for room, at most


class QueueClosed(RollwrightError):
    """The collector was shut down while a queue was full; what was not put is not counted as delivered."""


class QueueWriter:
    """Has the methods of a replay buffer that a delivery calls, and puts each row into a queue.

    A full queue is waited for; nothing is discarded.

    Args:
        queue: any object with ``put(item)``; with ``put(item, timeout=...)``, a wait for room has a limit, and
            ``stats()["waiting_for"]`` of the collector reports it.
        limit_s: seconds to wait for room at most.

    Attributes:
        write_count: items put so far.
        waiting_for: what a row waits for, while it does.
        closed: whether waiting ends.
        rest: what is left of data of which a part is in the queue, because ``put`` raised.

    Raises:
        TypeError: there is no ``put``.
    """

    def __init__(self, queue: Any, limit_s: float = _LIMIT_S) -> None:
        put: Callable[..., Any] | None = getattr(queue, "put", None)
        if not callable(put) or isinstance(queue, type):
            raise TypeError(
                f"queue: expected an object with put(), got {type(queue).__name__}: {queue!r}. Pass for example "
                "queue.Queue(maxsize=64)."
            )
        self.queue = queue
        self._takes_timeout = _has_timeout(put)
        self._limit_s = limit_s
        self.write_count = 0
        self.waiting_for: str | None = None
        self.closed = False
        self.rest: list[TensorDictBase] = []

    def extend(self, data: TensorDictBase) -> None:
        """Put each row of ``data``, ``[n]``; where that fails behind the first, :attr:`rest` has what is left.

        Raises:
            TimeoutError: nobody takes anything.
            QueueClosed: the collector was shut down meanwhile.
        """
        rows = list(data.unbind(0))
        for number, row in enumerate(rows):
            try:
                self.add(row)
            except BaseException:
                self.rest = rows[number:] if number else []
                raise

    def put_rest(self) -> None:
        """Put what was left.

        Raises:
            TimeoutError, QueueClosed: see :meth:`extend`; what was not put stays.
        """
        while self.rest:
            self.add(self.rest[0])
            del self.rest[0]

    def add(self, data: TensorDictBase) -> None:
        """Put one item."""
        self.put(lambda: self.try_put(data))

    def try_put(self, data: TensorDictBase) -> bool:
        """Put one item; False where the queue stays full for a moment."""
        try:
            if self._takes_timeout:
                self.queue.put(data, timeout=_LOOK_S)
            else:
                self.queue.put(data)
        except Exception as error:
            if not self._takes_timeout or not _is_full(error):
                raise
            return False
        self.write_count += 1
        return True

    def put(self, attempt: Callable[[], bool]) -> None:
        """Attempt to put something until that succeeds.

        Raises:
            TimeoutError, QueueClosed: see :meth:`extend`.
        """
        until = time.monotonic() + self._limit_s
        while not attempt():
            self.waiting_for = f"room in the queue ({type(self.queue).__name__}), which is full"
            if self.closed:
                self.waiting_for = None
                raise QueueClosed(
                    f"queue: the collector was shut down while it waited for room; {self.write_count} turns were put. "
                    "Take them from the queue before shutdown(), or load the last saved state."
                )
            if time.monotonic() > until:
                raise TimeoutError(
                    f"queue: waited {self._limit_s:g} s for {self.waiting_for}. Take items from it, or make it larger."
                )
        self.waiting_for = None

    def sample(self, *args: Any, **kwargs: Any) -> NoReturn:
        """There is nothing to sample from."""
        raise RuntimeError("queue: turns are put into a queue, which cannot be sampled from. Call its get().")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "waiting_for": None}


class QueueBacklog:
    """Turns that workers have collected, and that the collector's process puts into a queue, each once.

    A worker that is killed has put nothing itself: what has arrived of it is put, and the rest is collected again.

    Args:
        writer: puts them.

    Attributes:
        lock: while it is held, nothing arrives, and nothing is put.
        writer: see above.
    """

    def __init__(self, writer: QueueWriter) -> None:
        self.writer = writer
        self.lock = threading.RLock()
        self._rows: deque[TensorDictBase] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    @contextmanager
    def taking(self) -> Iterator[Callable[[Any], None]]:
        """What adds a batch, ``[n]``; from then on, the lock is held until the end of the ``with`` block."""
        with ExitStack() as held:

            def take(batch: TensorDictBase | None) -> None:
                held.enter_context(self.lock)
                if batch is not None:
                    self._rows.extend(row for row in batch.reshape(-1).unbind(0) if _is_turn(row))

            yield take

    def drain(self) -> None:
        """Put all turns.

        Raises:
            TimeoutError, QueueClosed: see :meth:`QueueWriter.extend`; the turns that were not put stay.
        """
        while self._rows:
            self.writer.put(self._put_first)

    def _put_first(self) -> bool:
        with self.lock, uninterrupted:
            if self._rows and not self.writer.try_put(self._rows[0]):
                return False
            if self._rows:
                self._rows.popleft()
            return True

    def clear(self) -> None:
        """Drop all turns."""
        with self.lock:
            self._rows.clear()

    def state_dict(self) -> list[Any]:
        """Turns that were not put."""
        return [td_state(row) for row in self._rows]

    def restore(self, turns: Sequence[Any]) -> None:
        """Hold these turns, and no others."""
        with self.lock:
            self._rows = deque(turns)


def _is_turn(row: TensorDictBase) -> bool:
    """Whether a row was taken, and is no padding."""
    ids = row.get(TRAJ_IDS, None)
    return ids is None or bool(ids >= 0)


def _has_timeout(put: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(put).parameters
    except (TypeError, ValueError):
        return False
    return "timeout" in parameters


def _is_full(error: Exception) -> bool:
    return isinstance(error, queue.Full) or type(error).__name__ in ("Full", "QueueFull")


def choose_delivery(
    rollout: Rollout, profile: Profile, split: Callable[[TensorDictBase], TensorDictBase] = split
) -> RolloutDelivery:
    """What the options ask for."""
    options = rollout.options
    kind: type[RolloutDelivery]
    if options.replay_buffer is None:
        kind = TrajectoryBatches if options.delivers_whole else Batches
    elif options.delivers_whole:
        kind = StoredTrajectories
    else:
        kind = StoredBatches if options.extend_buffer else StoredFrames
    return kind(rollout, profile, split)


class Stored(RolloutDelivery):
    """Writes into a replay buffer, and yields None for each rollout."""

    def __init__(self, rollout: Rollout, *parts: Any) -> None:
        super().__init__(rollout, *parts)
        self._buffer = buffer_of(rollout.options)
        self._flat = storage_ndim(self._buffer) == 1 and getattr(self._buffer, "routing_dim", None) is None
        self._check_slices()
        self._check_objects()
        self._check_names()
        self._limiter: SampleToInsertRatio | None = getattr(self._buffer, "insert_limiter", None)
        if self._limiter is not None:
            self._limiter.check(frames=rollout.counts.frames)

    def _check_objects(self) -> None:
        """Test that the storage can keep what the specs of the environment list; the policy's entries show later."""
        members = getattr(self._buffer, "members", [self._buffer])
        storages = [member.storage for member in members if hasattr(member, "storage")]
        strict = [storage for storage in storages if not getattr(storage, "keeps_objects", True)]
        env, options = self.rollout.env, self.rollout.options
        changed = options.postproc is not None and options.extend_buffer
        if not strict or changed or any(getattr(member, "transforms", ()) for member in members):
            return
        observed, state = (_objects_in(spec) for spec in (env.full_observation_spec, env.full_state_spec))
        if observed or state:
            keys = [*observed, *state, *(("next", *as_tuple(key)) for key in observed)]
            raise TypeError(no_objects("replay_buffer", keys, type(strict[0]).__name__))

    def _check_names(self) -> None:
        """Test that the environment has no entries of the names that the buffer's batches get."""
        env, options = self.rollout.env, self.rollout.options
        for member in getattr(self._buffer, "members", [self._buffer]):
            if (options.postproc is not None and options.extend_buffer) or getattr(member, "transforms", None):
                return  # what is stored has other names, perhaps
            names: Any = getattr(member, "own_names", None)
            if named := set(names or ()) & set(env.observation_keys):
                raise ValueError(
                    f"replay_buffer: the environment observes {key_str(named)}, under which batches of a "
                    f"{type(member).__name__} hold what its sampler returns. Rename it, by a RenameTransform of the "
                    "environment, or use a ReplayBuffer."
                )
            flag = getattr(getattr(member, "sampler", None), "init_key", None)
            if flag in env.observation_keys and env.full_observation_spec[flag].dtype not in FLAG_DTYPES:
                raise ValueError(
                    f"replay_buffer: the environment observes {flag!r}, which its sampler of slices marks their first "
                    "steps with. Rename it, by a RenameTransform of the environment, or pass the sampler another "
                    "init_key."
                )

    def _check_slices(self) -> None:
        slices, env = draws_slices(self._buffer), self.rollout.env
        if self.rollout.options.stores_rows and slices and self.rollout.num_rows > 1:
            raise ValueError(
                "flatten_data=False: an element of the buffer would be all turns that one environment took in a batch, "
                "and its sampler draws slices of single turns (SliceSampler). Leave flatten_data out, or pass another "
                "sampler."
            )
        tracked = self.rollout.options.track_traj_ids or not slices
        if self._flat and not tracked and env.numel() > 1:
            raise ValueError(
                f"track_traj_ids=False: a flat buffer holds the frames of {env.numel()} environments side by "
                "side, and a SliceSampler could not tell where one ends. Leave track_traj_ids out, or make the storage "
                "with ndim=2."
            )

    def stats(self) -> dict[str, Any]:
        """What ``stats()`` of a collector reports on its rollout and its delivery."""
        limits = {} if self._limiter is None else {"limiter": self._limiter.stats()}
        stats = {**super().stats(), **stats_of_buffer(self._buffer), **limits}
        stats["waiting_for"] = stats["waiting_for"] or getattr(self._buffer, "waiting_for", None)
        if self._rest and "conversations_unfinished" in stats:
            names = [*stats["conversations_unfinished"], *(origins_in(turn)[0].name for turn in self._rest)]
            stats |= {"undelivered": len(self._rest), "conversations_unfinished": list(dict.fromkeys(names))}
        return stats

    def has_room(self) -> bool:
        """Whether the next rollout may begin now."""
        return self._limiter is None or self._limiter.may_insert(self.rollout.counts.frames)

    def await_room(self, stop: Callable[[], bool] = never) -> None:
        """Wait until it may."""
        if self._limiter is None or self.has_room():
            return
        frames = self.rollout.counts.frames
        self.waiting_for = self._limiter.wants(frames)
        try:
            self._limiter.await_insert(frames, stop=stop, whom=self.rollout.owner)
        finally:
            self.waiting_for = None

    # What a queue has taken in part ---------------------------------------------------------------

    @property
    def _rest(self) -> list[TensorDictBase]:
        return self._buffer.rest if isinstance(self._buffer, QueueWriter) else []

    def ready(self) -> bool:
        """Whether there is something to deliver; it may take rollouts to know."""
        return bool(self._rest) or super().ready()

    def _put_rest(self) -> bool:
        """Put what is left of a batch that a queue has taken in part; returns whether there was any."""
        if not self._rest:
            return False
        cast(QueueWriter, self._buffer).put_rest()
        return True

    def _store(self, write: Callable[[Any], object], data: Any, *, then: Callable[[], None]) -> None:
        """Write, and note it: Ctrl-C comes before both or after them, or where a buffer not of ours waits."""
        with uninterrupted if isinstance(self._buffer, ReplayBuffer) else nullcontext():
            write(data)
            then()

    def _written(self, write: Callable[[], object]) -> BaseException | None:
        """Write; returns the error where a queue has taken a part: that is delivered, and the rest is put next."""
        try:
            write()
        except BaseException as error:
            if not self._rest:
                raise
            return error
        return None

    def save_held(self) -> tuple[dict[str, Any] | None, list[str]]:
        """See :meth:`RolloutDelivery.save_held`; and what is left of a batch that a queue has taken in part."""
        held, unsaved = super().save_held()
        if not self._rest:
            return held, unsaved
        return {"of_trajectories": held, "rest": [td_state(row) for row in self._rest]}, unsaved

    def load_held(self, held: Mapping[str, Any] | None, *args: Any, **kwargs: Any) -> None:
        """Go on with frames that were saved."""
        rest: list[Any] = []
        if held is not None and "rest" in held:
            rest, held = [td_from(td) for td in placed(held["rest"])], held["of_trajectories"]
        if isinstance(self._buffer, QueueWriter):
            self._buffer.rest = rest
        super().load_held(held, *args, **kwargs)

    # Writing ------------------------------------------------------------------------------------------

    def _add(self, frame: TensorDictBase) -> None:
        self._buffer.add(frame)

    def _extend(self, data: TensorDictBase) -> None:
        """Write frames, flattened where the storage has one dimension, unless an element is to be a row of them.

        Rows that were not taken are no frames.
        """
        if 0 in data.shape:  # a hook, or postproc, has kept nothing
            return
        if self._flat and data.ndim != 1 and not self.rollout.options.stores_rows:
            data = turns_taken(data.reshape(-1))
        self._buffer.extend(data)


class StoredBatches(Stored):
    """Writes whole rollouts: straight into the storage's rows where that can be, else through ``extend``."""

    def __init__(self, rollout: Rollout, *parts: Any) -> None:
        super().__init__(rollout, *parts)
        self._memory = cast(StorageMemory, rollout.memory)
        room, frames = getattr(getattr(self._buffer, "storage", None), "max_size", None), rollout.counts.frames
        if room is not None and frames > room:
            warn_user(
                f"replay_buffer: a batch of frames_per_batch={frames} frames is larger than the storage, which has "
                f"room for {room}: {frames - room} frames of each batch are lost. Make the storage larger, or pass "
                f"frames_per_batch={room} at most.",
                UserWarning,
            )

    def next(self, taken: list[TensorDictBase | None]) -> None:
        """See :meth:`RolloutDelivery.next`."""
        if self._put_rest():
            taken.append(None)
            return
        rollout, memory = self.rollout, self._memory
        error: BaseException | None = None
        hooked = rollout.hooks.post_collect_hook is not None
        with memory.batch(keeps_batches=hooked, in_background=self.in_background), self._collected(taken) as batch:
            rollout.observer.publishes(rollout.cursor)
            with uninterrupted:
                rest = memory.publish(batch, rollout.steps_taken)
                if rest is None:
                    self.batches += 1
                    self._is_stored(taken)
            if rest is not None:
                store = partial(self._store, self._extend, then=partial(self._is_stored, taken))
                error = self._written(partial(self._hand_out, rest, store))
        if error is not None:
            rollout.cursor.delivered()
            raise error

    def _is_stored(self, taken: list[TensorDictBase | None]) -> None:
        self.rollout.cursor.delivered()
        taken.append(None)

    @property
    def how(self) -> dict[str, str]:
        """What is done with rollouts, by part, for ``stats()["paths"]``."""
        return {"buffer": self._memory.how}


class StoredFrames(Stored):
    """Writes every step when it was taken."""

    def __init__(self, rollout: Rollout, *parts: Any) -> None:
        super().__init__(rollout, *parts)
        self._alone = (not self._flat or not rollout.env.ndim) and not hasattr(self._buffer, "members")
        rollout.write_frames_to(self._add if self._alone else self._extend)

    def next(self, taken: list[TensorDictBase | None]) -> None:
        """See :meth:`RolloutDelivery.next`."""
        with self._collected(taken) as batch:
            self._count_batch(batch)
            self.rollout.cursor.delivered()
        taken.append(None)

    @property
    def how(self) -> dict[str, str]:
        """What is done with rollouts, by part, for ``stats()["paths"]``."""
        return {"buffer": f"{'add' if self._alone else 'extend'} after every step: extend_buffer=False"}


class StoredTrajectories(Stored):
    """Writes each trajectory (of groups: all of one) when it is complete, alone or with others that are."""

    assembler: TrajectoryAssembler

    def __init__(self, rollout: Rollout, *parts: Any) -> None:
        super().__init__(rollout, *parts)
        self._by_pieces = hasattr(self._buffer, "extend_pieces")
        self._at_once = rollout.options.trajs_per_write or 1

    def ready(self) -> bool:
        """Whether there is something to deliver; it may take rollouts to know."""
        return bool(self.assembler.num_complete) or super().ready()

    def next(self, taken: list[TensorDictBase | None]) -> None:
        """See :meth:`RolloutDelivery.next`."""
        if self._put_rest():
            taken.append(None)
            return
        if not self.rollout.completed:  # else what a failed delivery has left
            self.collect_trajectories()
        self._check_oversampling()
        if self.rollout.options.max_policy_lag is not None and isinstance(self.assembler, GroupAssembler):
            self.assembler.choose(self._by_age)
        self.batches += 1
        while self.assembler.num_complete:
            popped: list[Trajectory] = []
            stored: list[bool] = []
            try:
                with uninterrupted:
                    popped = self.assembler.pop(min(self._at_once, self.assembler.num_complete))
                self.rollout.observer.publishes(self.rollout.cursor, [found.id for found in popped])
                pieces = [piece for found in popped for piece in self.pieces_of(found)]
                then = partial(self._are_stored, popped, stored)
                error = self._written(partial(self._write, pieces, then))
                if error is not None:
                    then()
            except BaseException:
                if not stored:
                    self.give_back(popped)
                raise
            if error is not None:
                raise error
        taken.append(None)

    def _are_stored(self, popped: list[Trajectory], stored: list[bool]) -> None:
        stored.append(True)
        self._delivered_trajectories = True
        self._kept = self._filtered = 0
        self.rollout.cursor.delivered(found.id for found in popped)

    def _write(self, pieces: list[RowRange], then: Callable[[], None]) -> None:
        rollout = self.rollout
        self._check_length(sum(piece.stop - piece.start for piece in pieces))
        keys, others = common_keys(pieces)
        self._warn_of_left_out(others, "not every frame of a trajectory has them")
        if rollout.options.postproc is not None or rollout.hooks.post_collect_hook is not None:
            self._hand_out(copied(pieces), partial(self._store, self._extend, then=then), count=False)
        elif not self._by_pieces:
            self._store(self._extend, copied(pieces), then=then)
        else:
            self._store(self._buffer.extend_pieces, [piece.as_td(keys) for piece in pieces], then=then)

    def _check_length(self, length: int) -> None:
        room = getattr(getattr(self._buffer, "storage", None), "max_size", None)
        if room is not None and length > room:
            raise ValueError(
                f"replay_buffer: a trajectory of {length} frames is longer than the storage, which has room for "
                f"{room}. Make the storage larger, or end trajectories with max_frames_per_traj."
                f"{'' if self._at_once == 1 else ' Lower trajs_per_write, which writes several at a time.'}"
            )

    @property
    def how(self) -> dict[str, str]:
        """What is done with rollouts, by part, for ``stats()["paths"]``."""
        copies = "extend_pieces" if self._by_pieces else "extend"
        what = "trajectory: trajs_per_batch" if self.rollout.options.groups_per_batch is None else "group"
        return {"buffer": f"{copies} with each complete {what}"}


def _objects_in(spec: Composite) -> list[NestedKey]:
    return [unravel(key) for key in spec.leaves() if isinstance(spec[key], NonTensor)]


def await_publication(buffer: Any, stop: Callable[[], bool] = never) -> None:
    """Wait until what was written can be read: rows before it may still be written, by another process.

    Args:
        buffer: a replay buffer, or an ensemble of some.
        stop: asked again and again, whether to wait no longer.

    Raises:
        TimeoutError: a process that lives does not publish what it reserved before.
    """
    for member in getattr(buffer, "members", [buffer]):
        ledger: Any = getattr(getattr(member, "storage", None), "ledger", None)
        if ledger is not None:
            ledger.await_published(stop)
