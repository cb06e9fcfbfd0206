"""What becomes of rollouts with a replay buffer: they are written into it, as they are, by step, or by trajectory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.collectors.delivery.assembler import Trajectory, TrajectoryAssembler
from rollwright.collectors.delivery.batches import Batches, Delivery, TrajectoryBatches, copied, never
from rollwright.collectors.delivery.checks import buffer_of, storage_ndim
from rollwright.collectors.delivery.rows import common_keys
from rollwright.collectors.delivery.storage_memory import StorageMemory
from rollwright.data.replay_buffers import SampleToInsertRatio, SliceSampler
from rollwright.data.replay_buffers.storages.base import no_objects
from rollwright.data.specs import Composite, NonTensor

if TYPE_CHECKING:
    from rollwright.collectors._delivering import DeliveringCore

__all__ = ["StoredBatches", "StoredFrames", "StoredTrajectories", "await_publication", "choose_delivery"]


def choose_delivery(core: DeliveringCore) -> Delivery:
    """What the options ask for."""
    options = core.options
    if options.replay_buffer is None:
        return Batches(core) if options.trajs_per_batch is None else TrajectoryBatches(core)
    if options.trajs_per_batch is not None:
        return StoredTrajectories(core)
    return StoredBatches(core) if options.extend_buffer else StoredFrames(core)


class Stored(Delivery):
    """Writes into a replay buffer, and yields None for each rollout."""

    def __init__(self, core: DeliveringCore) -> None:
        super().__init__(core)
        self._buffer = buffer_of(core.options)
        self._flat = storage_ndim(self._buffer) == 1 and getattr(self._buffer, "routing_dim", None) is None
        self._check_slices(core)
        self._check_objects(core)
        self._limiter: SampleToInsertRatio | None = getattr(self._buffer, "insert_limiter", None)
        if self._limiter is not None:
            self._limiter.check(frames=core.frames_per_batch)

    def _check_objects(self, core: DeliveringCore) -> None:
        """Test that the storage can keep what the environment says that it gives; the policy's entries show later."""
        members = getattr(self._buffer, "members", [self._buffer])
        storages = [member.storage for member in members if hasattr(member, "storage")]
        strict = [storage for storage in storages if not getattr(storage, "keeps_objects", True)]
        changed = core.options.postproc is not None and core.options.extend_buffer
        if not strict or changed or any(getattr(member, "transforms", ()) for member in members):
            return
        observed, state = (_objects_in(spec) for spec in (core.env.full_observation_spec, core.env.full_state_spec))
        if observed or state:
            keys = [*observed, *state, *(("next", *as_tuple(key)) for key in observed)]
            raise TypeError(no_objects("replay_buffer", keys, type(strict[0]).__name__))

    def _check_slices(self, core: DeliveringCore) -> None:
        sampler = getattr(self._buffer, "sampler", None)
        tracked = core.options.track_traj_ids or not isinstance(sampler, SliceSampler)
        if self._flat and not tracked and core.env.numel() > 1:
            raise ValueError(
                f"track_traj_ids=False: a flat buffer holds the frames of {core.env.numel()} environments side by "
                "side, and a SliceSampler could not tell where one ends. Leave track_traj_ids out, or make the storage "
                "with ndim=2."
            )

    def stats(self) -> dict[str, Any]:
        """See :meth:`Delivery.stats`."""
        limits = {} if self._limiter is None else {"limiter": self._limiter.stats()}
        return {**super().stats(), "write_count": getattr(self._buffer, "write_count", None), **limits}

    def has_room(self) -> bool:
        """See :meth:`Delivery.has_room`."""
        return self._limiter is None or self._limiter.may_insert(self._core.frames_per_batch)

    def await_room(self, stop: Callable[[], bool] = never) -> None:
        """See :meth:`Delivery.await_room`."""
        if self._limiter is None or self.has_room():
            return
        frames = self._core.frames_per_batch
        self.waiting_for = self._limiter.wants(frames)
        try:
            self._limiter.await_insert(frames, stop=stop, whom=type(self._core).__name__)
        finally:
            self.waiting_for = None

    def _extend(self, data: TensorDictBase) -> None:
        """Write frames, flattened where the storage has one dimension."""
        self._buffer.extend(data.reshape(-1) if self._flat and data.ndim != 1 else data)


class StoredBatches(Stored):
    """Writes whole rollouts: straight into the storage's rows where that can be, else through ``extend``."""

    def __init__(self, core: DeliveringCore) -> None:
        super().__init__(core)
        self._memory = cast(StorageMemory, core._memory)
        self._check_room()

    def _check_room(self) -> None:
        room, frames = getattr(getattr(self._buffer, "storage", None), "max_size", None), self._core.frames_per_batch
        if room is not None and frames > room:
            warnings.warn(
                f"replay_buffer: a batch of frames_per_batch={frames} frames is larger than the storage, which has "
                f"room for {room}: {frames - room} frames of each batch are lost. Make the storage larger, or pass "
                f"frames_per_batch={room} at most.",
                UserWarning,
                stacklevel=5,
            )

    def next(self) -> TensorDictBase | None:
        """See :meth:`Delivery.next`."""
        core, memory = self._core, self._memory
        hooked = core._post_collect_hook is not None
        with core._or_begin_anew(), memory.batch(keeps_batches=hooked, in_background=core._in_background):
            batch = core._collect()
            rest = memory.publish(batch, core._taken // core.env.numel())
            if rest is None:
                core._iter += 1
            else:
                core._hand_out(rest, self._extend)
        core._step_profiler()
        return None

    @property
    def how(self) -> dict[str, str]:
        """See :meth:`Delivery.how`."""
        return {"buffer": self._memory.how}


class StoredFrames(Stored):
    """Writes every step when it was taken."""

    def __init__(self, core: DeliveringCore) -> None:
        super().__init__(core)
        self._alone = (not self._flat or not core.env.ndim) and not hasattr(self._buffer, "members")
        core._write_frame = self._write
        core._take(core._path)

    def next(self) -> TensorDictBase | None:
        """See :meth:`Delivery.next`."""
        core = self._core
        with core._or_begin_anew():
            batch = core._collect()
            core._iter += 1
            if core._post_collect_hook is not None:
                core._post_collect_hook(batch)
        core._step_profiler()
        return None

    def _write(self, frame: TensorDictBase) -> None:
        if not self._core._collecting:
            return
        if self._alone:
            self._buffer.add(frame)
        else:
            self._extend(frame)

    @property
    def how(self) -> dict[str, str]:
        """See :meth:`Delivery.how`."""
        return {"buffer": f"{'add' if self._alone else 'extend'} after every step: extend_buffer=False"}


class StoredTrajectories(Stored):
    """Writes each trajectory alone, when it is complete."""

    assembler: TrajectoryAssembler

    def __init__(self, core: DeliveringCore) -> None:
        super().__init__(core)
        self.assembler = TrajectoryAssembler(core.env.numel())
        self._by_pieces = hasattr(self._buffer, "extend_pieces")

    def next(self) -> TensorDictBase | None:
        """See :meth:`Delivery.next`."""
        self._take_in(self.assembler)
        self._core._iter += 1
        while self.assembler.num_complete:
            [found] = self.assembler.pop(1)
            try:
                self._write(found)
            except BaseException:
                self.assembler.frames_dropped += found.length
                raise
            self._delivered = True
        return None

    def _write(self, found: Trajectory) -> None:
        core = self._core
        self._check_length(found.length)
        keys, others = common_keys(found.pieces)
        self._say_left_out(others, "not every frame of a trajectory has them")
        if core.options.postproc is not None or core._post_collect_hook is not None:
            core._hand_out(copied(found.pieces), self._extend, count=False)
        elif not self._by_pieces:
            self._extend(copied(found.pieces))
        else:
            self._buffer.extend_pieces([piece.as_td(keys) for piece in found.pieces])

    def _check_length(self, length: int) -> None:
        room = getattr(getattr(self._buffer, "storage", None), "max_size", None)
        if room is not None and length > room:
            raise ValueError(
                f"replay_buffer: a trajectory of {length} frames is longer than the storage, which has room for "
                f"{room}. Make the storage larger, or end trajectories with max_frames_per_traj."
            )

    @property
    def how(self) -> dict[str, str]:
        """See :meth:`Delivery.how`."""
        copies = "extend_pieces" if self._by_pieces else "extend"
        return {"buffer": f"{copies} with each complete trajectory: trajs_per_batch"}


def _objects_in(spec: Composite) -> list[NestedKey]:
    return [unravel(key) for key in spec.keys(True, True) if isinstance(spec[key], NonTensor)]


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
