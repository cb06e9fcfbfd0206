"""StridedIds: trajectory ids of one worker, apart from those of its siblings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollwright.collectors.workers.counters import Count, WorkerCounters


class StridedIds:
    """Ids of one worker of several: ``k * num_workers + worker``, so that all have their own, in any order of events.

    Args:
        counters: hold k, for the one that takes this worker's place.
        worker: index.
        num_workers: how many there are.
    """

    def __init__(self, counters: WorkerCounters, worker: int, num_workers: int) -> None:
        self._counters, self._worker, self._stride = counters.counts, worker, num_workers
        self._next = self._counters[Count.NUM_IDS]

    def take(self, n: int) -> NDArray[np.int64]:
        """``n`` fresh ids as an array."""
        first, self._next = self._next, self._next + n
        self._counters[Count.NUM_IDS] = self._next
        return np.arange(first, first + n, dtype=np.int64) * self._stride + self._worker

    def state_dict(self) -> dict[str, int]:
        """The least number that is no id yet, of any worker's."""
        return {"traj_id": self._next * self._stride}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on above the saved ids, and never below those handed out already."""
        self._next = max(self._next, -(-int(state_dict["traj_id"]) // self._stride))
        self._counters[Count.NUM_IDS] = self._next
