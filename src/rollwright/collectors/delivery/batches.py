"""What becomes of rollouts: they are yielded, or cut into whole trajectories that are."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from rollwright._keys import NestedKey, key_str
from rollwright.collectors.delivery.assembler import TrajectoryAssembler
from rollwright.collectors.delivery.rows import Piece, common_keys, concatenate, pad
from rollwright.data.layout import end_of_trajectory

if TYPE_CHECKING:
    from rollwright.collectors._delivering import DeliveringCore

__all__ = ["Batches", "Delivery", "TrajectoryBatches", "copied"]


def never() -> bool:
    """No."""
    return False


_ENDLESS = "This collector has no end (total_frames=-1), hence no length. Pass total_frames= to set one."
_UNKNOWN = (
    "This collector delivers whole trajectories (trajs_per_batch), and how many will end is not known, so it has no "
    "length. Iterate over it instead."
)


class Delivery(ABC):
    """Turns rollouts into what a collector yields.

    Args:
        core: the collector.

    Attributes:
        num_batches: how many will be yielded; None where that is not known.
        no_length: raised where it is asked for.
        assembler: of trajectories, where there is one.
        how: for ``stats()["paths"]``.
        waiting_for: what the next rollout waits for, while it does.
    """

    assembler: TrajectoryAssembler | None = None
    waiting_for: str | None = None

    def __init__(self, core: DeliveringCore) -> None:
        self._core = core
        self._left_out: set[NestedKey] = set()
        self._delivered = self._told_end = False
        self.num_batches = core._counts.batches
        self.no_length: Exception = RuntimeError(_ENDLESS)

    def ready(self) -> bool:
        """Whether there is something to deliver; it may take rollouts to know."""
        return not self._core.completed

    def has_room(self) -> bool:
        """Whether the next rollout may begin now."""
        return True

    def await_room(self, stop: Callable[[], bool] = never) -> None:  # noqa: B027 - most have it
        """Wait until it may.

        Args:
            stop: asked again and again, whether to give up.

        Raises:
            TimeoutError, RuntimeError: the wait is in vain.
        """

    @abstractmethod
    def next(self) -> TensorDictBase | None:
        """What is yielded next; only after :meth:`ready`."""

    @property
    def how(self) -> dict[str, str]:
        """What is done with rollouts, by part."""
        return {}

    def stats(self) -> dict[str, Any]:
        """What ``stats()`` of a collector says of it."""
        held = self.assembler
        if held is None:
            return {}
        return {
            "trajectories_held": held.num_complete,
            "frames_held": held.frames_held,
            "frames_dropped": held.frames_dropped,
        }

    def forget(self) -> None:
        """Drop what is held: all begins anew."""
        if self.assembler is not None:
            self.assembler.drop()

    def missed(self) -> None:
        """Drop what cannot become whole: a rollout was taken that is not delivered."""
        if self.assembler is not None:
            self.assembler.miss(self._core._traj_pool.state_dict()["traj_id"])

    def ended(self) -> None:
        """All frames are stepped: warn, once, where nothing of them became whole."""
        held = 0 if self.assembler is None else self.assembler.frames_held
        if held and not self._delivered and not self._told_end:
            self._told_end = True
            warnings.warn(
                f"{type(self._core).__name__} ends without a batch of whole trajectories: frames_held={held} frames "
                "belong to fewer complete trajectories than trajs_per_batch asks for, or to none. Pass a larger "
                "total_frames, or a smaller max_frames_per_traj.",
                UserWarning,
                stacklevel=3,
            )

    def _take_in(self, assembler: TrajectoryAssembler) -> None:
        """Collect a batch, and hand it to the assembler; where that fails, no trajectory goes on across the hole."""
        core = self._core
        known = assembler.frames_held + assembler.frames_dropped - core._frames
        try:
            batch = core._collect()
            ended = end_of_trajectory(batch.get("next"), core.env.done_groups, batch.ndim)
            assembler.take(batch, core._taken // core.env.numel(), ended)
        except BaseException:
            if core._begun:
                core._path.carrier = None
                assembler.begin_anew(known + core._frames)
            raise
        core._step_profiler()

    def _say_left_out(self, keys: Iterable[NestedKey], why: str) -> None:
        """Warn, once, of entries that are not delivered."""
        new = set(keys) - self._left_out
        if new:
            self._left_out |= new
            warnings.warn(f"{type(self._core).__name__} leaves out {key_str(new)}: {why}.", UserWarning, stacklevel=4)


class Batches(Delivery):
    """Yields each rollout."""

    def next(self) -> TensorDictBase | None:
        """See :meth:`Delivery.next`."""
        core = self._core
        with core._or_begin_anew():
            batch = core._hand_out(core._collect())
        core._step_profiler()
        return batch


class TrajectoryBatches(Delivery):
    """Yields a number of complete trajectories at a time, in the order in which they ended."""

    assembler: TrajectoryAssembler

    def __init__(self, core: DeliveringCore) -> None:
        super().__init__(core)
        # list() asks for a length, and takes a TypeError for none; without an end, it is better stopped.
        self.num_batches, self.no_length = None, self.no_length if self.num_batches is None else TypeError(_UNKNOWN)
        self.assembler = TrajectoryAssembler(core.env.numel())
        self._count = core.options.trajs_per_batch or 1
        self._padded = core.options.traj_format == "padded"

    def ready(self) -> bool:
        """See :meth:`Delivery.ready`."""
        while self.assembler.num_complete < self._count:
            if self._core.completed:
                return False
            self._take_in(self.assembler)
        return True

    def next(self) -> TensorDictBase | None:
        """See :meth:`Delivery.next`."""
        popped = self.assembler.pop(self._count)
        try:
            found = [trajectory.pieces for trajectory in popped]
            pieces = [piece for trajectory in found for piece in trajectory]
            self._say_left_out(common_keys(pieces)[1], "not every frame of these trajectories has them")
            batch = self._core._hand_out(pad(found) if self._padded else copied(pieces))
        except BaseException:
            self.assembler.frames_dropped += sum(trajectory.length for trajectory in popped)
            raise
        self._delivered = True
        return batch


def copied(pieces: Sequence[Piece]) -> TensorDictBase:
    """The rows of pieces one after another, in memory of their own."""
    joined = concatenate(pieces)
    return joined if len(pieces) > 1 else joined.clone()
