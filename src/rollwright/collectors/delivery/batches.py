"""Deliveries that yield: each rollout as it is, or whole trajectories."""

from __future__ import annotations

from collections.abc import Sequence

from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright.collectors.delivery.assembler import TrajectoryAssembler
from rollwright.collectors.delivery.base import RolloutDelivery
from rollwright.collectors.delivery.rows import RowRange, common_keys, concatenate, pad


class Batches(RolloutDelivery):
    """Yields each rollout."""

    def next(self) -> TensorDictBase | None:
        """See :class:`~rollwright.collectors.core.Delivery`."""
        with self._collected() as batch:
            found = self._hand_out(batch)
            self.rollout.cursor.delivered()
            return found


class TrajectoryBatches(RolloutDelivery):
    """Yields a number of complete trajectories at a time, in the order in which they ended."""

    assembler: TrajectoryAssembler
    num_batches = None

    @property
    def _count(self) -> int:
        return self.rollout.options.groups_per_batch or self.rollout.options.trajs_per_batch or 1

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
            found = [self.pieces_of(trajectory) for trajectory in popped]
            pieces = [piece for trajectory in found for piece in trajectory]
            self._warn_of_left_out(common_keys(pieces)[1], "not every frame of these trajectories has them")
            padded = self.rollout.options.traj_format == "padded"
            batch = self._hand_out(pad(found) if padded else copied(pieces))
        except BaseException:
            self.give_back(popped)
            raise
        self._delivered_trajectories = True
        self.rollout.cursor.delivered(trajectory.id for trajectory in popped)
        return batch

    def next_of_rollout(self) -> list[TensorDictBase]:
        """The trajectories (or groups) that are complete after one more rollout, each ``[length]``."""
        self.collect_trajectories()
        handed, popped = [], []
        try:
            while self.assembler.num_complete:
                found = self.assembler.pop(1)  # of groups: all of one
                popped += found
                handed.append(self._hand_out(copied([piece for each in found for piece in self.pieces_of(each)])))
        except BaseException:
            self.give_back(popped)
            raise
        self.rollout.cursor.delivered(trajectory.id for trajectory in popped)
        return handed


def copied(pieces: Sequence[RowRange]) -> TensorDictBase:
    """The rows of pieces one after another, in memory of their own; ragged ones are views, which nobody overwrites."""
    joined = concatenate(pieces)
    return joined if len(pieces) > 1 or isinstance(joined, LazyStackedTensorDict) else joined.clone()
