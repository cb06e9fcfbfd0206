"""Staleness: how many versions old the weights that acted in a batch may be when it is delivered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rollwright.collectors.workers.schedules.joining import Result


class Staleness:
    """Keeps ``version at delivery - version that acted first <= limit``.

    Where workers are to wait, a rollout begins only if it will be delivered in time: with ``n`` rollouts ahead that are
    delivered in the order in which they began, the last one is ``(n - 1) * pace`` versions old, so
    ``n = limit // pace + 1``. The pace is the most versions that the consumer has published from one delivery to the
    next; until it is known, ``n = 1``.

    Args:
        limit: versions; None: any number.
        waits: whether workers wait; otherwise what is too stale is dropped.
        versions: gives the version that was published last for each worker.

    Example:
        >>> staleness = Staleness(4, waits=True, versions=lambda: [0])
        >>> staleness.most_ahead
        1
    """

    def __init__(self, limit: int | None, *, waits: bool, versions: Callable[[], Sequence[int]]) -> None:
        self.limit, self.versions = limit, versions
        self.waits = waits and limit is not None
        self.drops = not waits and limit is not None
        self._pace: int | None = None
        self._last: int | None = None

    @property
    def most_ahead(self) -> float:
        """Rollouts that may be in progress, or finished and not delivered."""
        if not self.waits:
            return math.inf
        return 1 if self._pace is None else (self.limit or 0) // max(1, self._pace) + 1

    def too_stale(self, results: Iterable[Result], versions: Sequence[int]) -> bool:
        """Whether rollouts must not be delivered any more, when ``versions`` are published."""
        limit = self.limit
        return limit is not None and any(versions[r.worker] - r.found.oldest_version > limit for r in results)

    def delivered(self) -> None:
        """Note that a batch is delivered."""
        version = max(self.versions())
        if self._last is not None:
            self._pace = max(self._pace or 0, version - self._last)
        self._last = version
