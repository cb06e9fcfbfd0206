"""The boards of a sender: a common one, and one for each receiver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollwright._memory import Segment
from rollwright.weight_update._board import Board
from rollwright.weight_update.forms import State

__all__ = ["Boards"]


class Boards:
    """Weights for all receivers, or for some.

    What is for all goes to the common board, and is copied once. What is for some, or must be kept apart, goes to
    their own.

    Args:
        num_receivers: how many there are.
    """

    def __init__(self, num_receivers: int) -> None:
        self._common = Board()
        self._own = [Board() for _ in range(num_receivers)]

    def __len__(self) -> int:
        return len(self._own)

    def publish(
        self,
        version: int,
        models: Mapping[str, State],
        receivers: Sequence[int] | None = None,
        *,
        shared: bool = True,
        timeout_s: float = 1.0,
    ) -> None:
        """Publish weights, whole for each receiver; see :meth:`Board.publish`.

        Args:
            version: of the publication.
            models: flat states by model.
            receivers: who gets them; None: all.
            shared: whether all may read the same memory.
            timeout_s: how long to wait for receivers that cannot keep up, for each board.
        """
        if receivers is None and shared:
            self._common.publish(version, models, timeout_s=timeout_s)
            return
        for receiver in range(len(self)) if receivers is None else receivers:
            self._own[receiver].publish(version, models, timeout_s=timeout_s)

    def of(self, receiver: int) -> list[Board]:
        """What a receiver follows, with a :class:`WeightFeed`; to be handed over while its process starts."""
        return [self._common.as_reader(receiver), self._own[receiver].as_reader(receiver)]

    def has_taken(self, receiver: int) -> bool:
        """Whether a receiver has what was published last."""
        return all(board.stamp_taken(receiver) >= board.stamp for board in (self._common, self._own[receiver]))

    def forget(self, receiver: int) -> None:
        """Wait no more for a receiver that is dead."""
        for board in (self._common, self._own[receiver]):
            board.forget(receiver)

    def segments(self) -> list[Segment]:
        """The memory of all boards."""
        return [board.segment for board in (self._common, *self._own)]
