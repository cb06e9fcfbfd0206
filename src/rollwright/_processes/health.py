"""Finds processes that are stuck, and limits how often and how soon failed ones are replaced."""

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


_LONGEST_S = 60.0
_HEALTHY = 10.0  # times the last delay


class RestartPolicy:
    """Decides on replacements, for each of several places.

    The first in a place comes after ``delay_s`` seconds, each further one after twice as long as the last, a minute at
    most. What was at work for more than ten times its last delay is taken to be healthy: if it fails after that, the
    delay is ``delay_s`` again.

    Args:
        most: replacements in one place.
        delay_s: before the first.
        in_a_row: ``most`` counts those without success in between; otherwise all.
        clock: seconds.

    Attributes:
        most: see above.
        counts: replacements of each place, as ``most`` counts them.

    Example:
        >>> policy = RestartPolicy(2, delay_s=0.1)
        >>> [policy.next_delay(0) for _ in range(3)]
        [0.1, 0.2, None]
    """

    def __init__(
        self,
        most: int,
        *,
        delay_s: float = 0.0,
        in_a_row: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most, self._delay_s, self._in_a_row, self._clock = most, delay_s, in_a_row, clock
        self.counts: dict[int, int] = {}
        self._delays: dict[int, float] = {}  # the last of each
        self._began: dict[int, float] = {}

    def began(self, place: int) -> None:
        """What is in a place is at work."""
        self._began[place] = self._clock()

    def succeeded(self, place: int) -> None:
        """What is in a place has done some work."""
        if self._in_a_row:
            self.counts.pop(place, None)

    def next_delay(self, place: int) -> float | None:
        """What was in a place has failed: seconds until it is replaced, which is counted; None: it is not."""
        count = self.counts.get(place, 0)
        if count >= self.most:
            return None
        self.counts[place] = count + 1
        last, began = self._delays.get(place), self._began.pop(place, None)
        healthy = last is None or (began is not None and self._clock() - began > _HEALTHY * last)
        self._delays[place] = self._delay_s if healthy or last is None else min(_LONGEST_S, 2 * last)
        return self._delays[place]
