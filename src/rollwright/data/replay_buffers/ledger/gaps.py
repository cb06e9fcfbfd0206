"""Gaps: ranges of positions that were reserved and hold nothing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollwright.data.replay_buffers.ledger.layout import GAP, GAPS, LOST, NUM_GAPS, OLDEST_GAP, STOP

NO_GAPS = np.zeros((0, 2), np.int64)


class Gaps:
    """A ring of the newest gaps, in the memory of a ledger.

    Each is committed by one store of an int64, as all of the ledger is. They are changed under its lock.

    Args:
        head: header of the ledger.
        numbers: of the gaps.

    Attributes:
        array: the numbers, int64 ``[NUM_GAPS, GAP]``.
    """

    def __init__(self, head: memoryview, numbers: memoryview) -> None:
        self._head, self._numbers = head, numbers
        self.array: NDArray[np.int64] = np.frombuffer(numbers, np.int64).reshape(-1, GAP)

    @property
    def num_lost(self) -> int:
        """Positions in all gaps so far."""
        gaps = self._head[GAPS]
        return self._numbers[GAP * ((gaps - 1) % NUM_GAPS) + LOST] if gaps else 0

    def within(self, low: int, high: int) -> NDArray[np.int64]:
        """What lies between two positions: ``[k, 2]``, ascending, apart from one another."""
        head = self._head
        gaps = self.array[np.arange(head[OLDEST_GAP], head[GAPS]) % NUM_GAPS, :2]
        gaps = np.clip(gaps, low, high)
        gaps = gaps[gaps[:, 1] > gaps[:, 0]]
        gaps = gaps[np.argsort(gaps[:, 0], kind="stable")]
        if len(gaps) < 2:
            return gaps
        reached = np.maximum.accumulate(gaps[:, 1])
        first = np.append(True, gaps[1:, 0] > reached[:-1])  # a writer killed while it abandoned leaves a gap twice
        return np.stack([gaps[first, 0], np.maximum.reduceat(gaps[:, 1], np.flatnonzero(first))], 1)

    def holds(self, position: int) -> bool:
        """Whether a position is in a gap, of those that are remembered."""
        gaps = self.array[np.arange(self._head[OLDEST_GAP], self._head[GAPS]) % NUM_GAPS]
        return bool(((gaps[:, 0] <= position) & (position < gaps[:, 1])).any())

    def add(self, start: int, stop: int, low: int) -> None:
        """Note a gap.

        Args:
            start: first position.
            stop: the one behind the last.
            low: position before which gaps are forgotten.
        """
        if stop <= start:
            return
        head, gaps, lost = self._head, self._numbers, self.num_lost
        while head[OLDEST_GAP] < head[GAPS] and gaps[GAP * (head[OLDEST_GAP] % NUM_GAPS) + STOP] <= low:
            head[OLDEST_GAP] += 1
        if head[GAPS] > head[OLDEST_GAP]:
            last = GAP * ((head[GAPS] - 1) % NUM_GAPS)
            if gaps[last] <= start and stop <= gaps[last + STOP]:
                return  # a writer killed between two stores had noted it already
            if gaps[last + STOP] == start:
                gaps[last + STOP], gaps[last + LOST] = stop, lost + stop - start
                return
            if head[GAPS] - head[OLDEST_GAP] == NUM_GAPS:  # more than are remembered: what lies between is lost too
                gaps[last] = min(start, gaps[last])
                gaps[last + STOP], gaps[last + LOST] = max(stop, gaps[last + STOP]), lost + stop - start
                return
        at = GAP * (head[GAPS] % NUM_GAPS)
        gaps[at], gaps[at + STOP], gaps[at + LOST] = start, stop, lost + stop - start
        head[GAPS] += 1

    def begin(self, num_lost: int) -> None:
        """Forget all gaps, apart from the number of positions in them."""
        head = self._head
        head[OLDEST_GAP] = head[GAPS] = 0
        self.array[:] = 0
        if num_lost > 0:  # a gap that nobody reads any more keeps the count
            self._numbers[LOST], head[GAPS], head[OLDEST_GAP] = num_lost, 1, 1
