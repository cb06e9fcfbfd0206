"""Holding: rollouts that were asked for together, and are small, travel back together."""

from __future__ import annotations

import math
import time

_HOLD_S = 0.02
_LARGE = 1 << 16  # bytes, which are better on their way while others collect


class Holding:
    """Decides when what a remote group has queued is sent.

    A message costs the collector as much processor as a small rollout itself. So a small one waits for those that were
    asked for in the same message, for 20 ms at most; everything else is sent at once.

    Example:
        >>> holding = Holding()
        >>> for serial in (1, 2):
        ...     holding.ordered(serial)
        >>> holding.orders_read()
        >>> holding.collected(1, 100)
        >>> holding.left_s() > 0
        True
        >>> holding.collected(2, 100)
        >>> holding.left_s()
        0.0
    """

    def __init__(self) -> None:
        self._orders: list[int] = []
        self._due: set[int] = set()  # serial numbers of workers whose rollouts travel together
        self._until = math.inf

    def ordered(self, serial: int) -> None:
        """A worker was asked for a rollout."""
        self._orders.append(serial)

    def orders_read(self) -> None:
        """What has arrived was read: the rollouts that it asked for belong together."""
        if self._orders:
            self._due = set(self._orders)
            self._orders.clear()

    def collected(self, serial: int, num_bytes: int) -> None:
        """The rollout of a worker was queued."""
        is_due = serial in self._due
        self._due.discard(serial)
        if is_due and self._due and num_bytes < _LARGE:
            self._until = min(self._until, time.monotonic() + _HOLD_S)
        else:
            self._until = 0.0

    def queued(self) -> None:
        """Something else was queued."""
        self._until = 0.0

    def ended(self, serial: int) -> None:
        """A worker is gone."""
        self._due.discard(serial)

    def left_s(self) -> float:
        """Seconds until what is queued is to be sent; infinity: nothing is."""
        return self._until if self._until in (0.0, math.inf) else max(0.0, self._until - time.monotonic())

    def pushed(self) -> None:
        """What was queued is sent."""
        self._until = math.inf
