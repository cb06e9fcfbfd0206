"""Heartbeats: finds processes that have shown no progress for too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class Heartbeats:
    """Watches a value of each process that changes as long as the process is not stuck.

    Time between two looks counts for half of a limit at most: this process may have been stopped, with those that it
    watches.

    Args:
        clock: seconds.

    Example:
        >>> now = 0.0
        >>> heartbeats = Heartbeats(lambda: now)
        >>> heartbeats.is_silent(0, "a value", 1.0)
        False
        >>> for now in (0.4, 0.8, 1.2):
        ...     silent = heartbeats.is_silent(0, "a value", 1.0)
        >>> silent
        True
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[int, tuple[Any, float, float]] = {}  # by place: value, since when, when it was looked at

    def begin(self, place: int) -> None:
        """The time of a process begins now."""
        self._last.pop(place, None)

    def is_silent(self, place: int, value: Any, limit_s: float | None, now: float | None = None) -> bool:
        """Whether a value has not changed for longer than the limit.

        Args:
            place: of the process.
            value: that it changes.
            limit_s: None: there is none at this time.
            now: by the clock of the process's machine, where that is another.
        """
        now = self._clock() if now is None else now
        last, since, looked_at = self._last.get(place, (value, now, now))
        if limit_s is None or value != last:
            since = now
        else:
            since += max(0.0, min(now - looked_at, now - since) - limit_s / 2)
        self._last[place] = value, since, now
        return limit_s is not None and now - since > limit_s
