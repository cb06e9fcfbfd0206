"""Deliveries that yield: each rollout as it is, or whole trajectories."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import TensorDictBase

from rollwright.collectors.delivery.assembler import TrajectoryAssembler
from rollwright.collectors.delivery.base import RolloutDelivery
from rollwright.collectors.delivery.rows import RowRange, common_keys, concatenate, pad

__all__ = ["Batches", "TrajectoryBatches", "copied"]


class Batches(RolloutDelivery):
    """Yields each rollout."""

    def next(self) -> TensorDictBase | None:
        """See :class:`~rollwright.collectors.core.Delivery`."""
        with self._collected() as batch:
            return self._hand_out(batch)


class TrajectoryBatches(RolloutDelivery):
    """Yields a number of complete trajectories at a time, in the order in which they ended."""

    assembler: TrajectoryAssembler
    num_batches = None

    @property
    def _count(self) -> int:
        return self.rollout.options.trajs_per_batch or 1

    def ready(self) -> bool:
        """See :class:`~rollwright.collectors.core.Delivery`."""
        while self.assembler.num_complete < self._count:
            if self.rollout.completed:
                return False
            self.collect_trajectories()
        return True

    def next(self) -> TensorDictBase | None:
        """See :class:`~rollwright.collectors.core.Delivery`."""
        popped = self.assembler.pop(self._count)
        try:
            found = [trajectory.pieces for trajectory in popped]
            pieces = [piece for trajectory in found for piece in trajectory]
            self._warn_of_left_out(common_keys(pieces)[1], "not every frame of these trajectories has them")
            padded = self.rollout.options.traj_format == "padded"
            batch = self._hand_out(pad(found) if padded else copied(pieces))
        except BaseException:
            self.assembler.frames_dropped += sum(trajectory.length for trajectory in popped)
            raise
        self._delivered_trajectories = True
        return batch

    def next_of_rollout(self) -> list[TensorDictBase]:
        """The trajectories that end in one more rollout, one after another ``[length]``."""
        self.collect_trajectories()
        found = self.assembler.pop(self.assembler.num_complete)
        return [self._hand_out(copied(trajectory.pieces)) for trajectory in found]


def copied(pieces: Sequence[RowRange]) -> TensorDictBase:
    """The rows of pieces one after another, in memory of their own."""
    joined = concatenate(pieces)
    return joined if len(pieces) > 1 else joined.clone()
