"""Trajectory ids: where they come from and when they change."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["TrajectoryPool", "ids_after", "renew"]


class TrajectoryPool:
    """Hands out trajectory ids, each once, in rising order.

    Example:
        >>> pool = TrajectoryPool()
        >>> pool.get_traj_and_increment(2), pool.get_traj_and_increment(1)
        (tensor([0, 1]), tensor([2]))
        >>> pool.state_dict()
        {'traj_id': 3}
    """

    def __init__(self) -> None:
        self._next = 0

    def get_traj_and_increment(self, n: int = 1, device: torch.device | None = None) -> torch.Tensor:
        """``n`` fresh ids, int64 ``[n]``."""
        first, self._next = self._next, self._next + n
        return torch.arange(first, first + n, device=device)

    def state_dict(self) -> dict[str, int]:
        """The next id to hand out."""
        return {"traj_id": self._next}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on above the saved ids, and never below those handed out already."""
        self._next = max(self._next, int(state_dict["traj_id"]))


def renew(ids: torch.Tensor, ended: torch.Tensor, pool: TrajectoryPool) -> torch.Tensor:
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
        >>> renew(ids, torch.tensor([False, True, False]), pool)
        tensor([0, 3, 2])
    """
    count = int(ended.sum())
    if not count:
        return ids
    ended = ended.to(ids.device)
    return ids.masked_scatter(ended, pool.get_traj_and_increment(count, ids.device)).reshape(ids.shape)


def ids_after(ids: NDArray[Any], ended: NDArray[Any], pool: TrajectoryPool) -> NDArray[Any]:
    """Ids of the steps of a batch, and of the one after it: :func:`renew` for all steps at once.

    Args:
        ids: int64 ``[*env]``, at the first step.
        ended: bool ``[T, *env]``.
        pool: where fresh ids come from; they exceed all that it handed out before.

    Returns:
        int64 ``[T + 1, *env]``.

    Example:
        >>> pool = TrajectoryPool()
        >>> ids = pool.get_traj_and_increment(2).numpy()
        >>> ids_after(ids, np.array([[False, True], [True, False]]), pool).tolist()
        [[0, 1], [0, 2], [3, 2]]
    """
    steps = np.full((len(ended) + 1, *ids.shape), -1, np.int64)
    steps[0] = ids
    steps[1:][ended] = pool.get_traj_and_increment(int(np.count_nonzero(ended))).numpy()
    return np.maximum.accumulate(steps, axis=0)
