"""Trajectory ids: where they come from and when they change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright.collectors.core import TrajectoryIds

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.ledger.ledger import Ledger


class TrajectoryPool:
    """Hands out trajectory ids, each once, in rising order.

    Args:
        ledger: of a replay buffer's storage: ids are taken there, so that collectors that write one buffer, one after
            another or at a time, have none in common; None: of this pool alone.

    Example:
        >>> pool = TrajectoryPool()
        >>> pool.get_traj_and_increment(2), pool.get_traj_and_increment(1)
        (tensor([0, 1]), tensor([2]))
        >>> pool.state_dict()
        {'traj_id': 3}
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._next = 0
        self._ledger = ledger

    def get_traj_and_increment(self, n: int = 1, device: torch.device | None = None) -> torch.Tensor:
        """``n`` fresh ids, int64 ``[n]``."""
        return torch.from_numpy(self.take(n)).to(device)

    def take(self, n: int) -> NDArray[np.int64]:
        """``n`` fresh ids as an array."""
        first = self._next
        if self._ledger is not None:
            first = self._ledger.take_ids(n)
            if first < self._next:  # the buffer was put back to an earlier state
                self._ledger.raise_ids(self._next)
                first = self._ledger.take_ids(n)
        self._next = first + n
        return np.arange(first, first + n, dtype=np.int64)

    def state_dict(self) -> dict[str, int]:
        """The next id to hand out."""
        return {"traj_id": self._next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on above the saved ids, and never below those handed out already."""
        self._next = max(self._next, int(state_dict["traj_id"]))
        if self._ledger is not None:
            self._ledger.raise_ids(self._next)


def replace_ended(ids: torch.Tensor, ended: torch.Tensor, pool: TrajectoryIds) -> torch.Tensor:
    """Ids of the next step: fresh ones where a trajectory ended.

    Args:
        ids: int64 ``[*env]``.
        ended: bool ``[*env]``.
        pool: where fresh ids come from.

    Returns:
        ``ids`` itself when nothing ended, else a new tensor.

    Example:
        >>> pool = TrajectoryPool()
        >>> ids = pool.get_traj_and_increment(3)
        >>> replace_ended(ids, torch.tensor([False, True, False]), pool)
        tensor([0, 3, 2])
    """
    count = int(ended.sum())
    if not count:
        return ids
    fresh = torch.from_numpy(pool.take(count)).to(ids.device)
    return ids.masked_scatter(ended.to(ids.device), fresh).reshape(ids.shape)
