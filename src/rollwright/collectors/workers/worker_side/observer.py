"""WorkerObserver: writes the progress of a worker's rollouts into its shared-memory counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rollwright.collectors.core import DataCursor, Stage
from rollwright.collectors.delivery.base import RolloutDelivery
from rollwright.collectors.workers.counters import Count, Gauge, WorkerCounters, WorkerState
from rollwright.collectors.workers.worker_side.places import Publications
from rollwright.envs.recreation.policy import num_recreations

_STATES = {
    Stage.RESET: WorkerState.COLLECTING,  # which may be stuck, too
    Stage.COMPILE: WorkerState.STARTING,  # takes as long as it takes
    Stage.STEPS: WorkerState.COLLECTING,  # each step has the whole limit for itself
    Stage.FINISH: WorkerState.DELIVERING,
}


class WorkerObserver:
    """A :class:`~rollwright.collectors.core.RolloutObserver` that refuses batches of weights that are too old.

    Args:
        counters: of the worker.
        max_policy_lag: versions that may have been published since the first of a batch acted; None: any number.
        stopping: whether the worker ends.
        publications: sends what is about to be published; None: nobody asks.

    Attributes:
        version: of the weights that act.
        oldest: of those that acted in the current rollout.
        frames_dropped: of batches that were refused.
        notes: category and text of warnings that the collector is to give.
    """

    def __init__(
        self,
        counters: WorkerCounters,
        max_policy_lag: int | None,
        stopping: Callable[[], bool],
        publications: Publications | None = None,
    ) -> None:
        self._counters, self._limit, self._stopping = counters, max_policy_lag, stopping
        self._publications = publications
        self.version = self.oldest = 0
        self.frames_dropped = counters.counts[Count.FRAMES_DROPPED]
        self._recreations_before = counters.counts[Count.ENV_RECREATIONS]
        self._spent: list[float] = []
        self.notes: list[tuple[type[Warning], str]] = []

    def continue_counts(self, delivery: RolloutDelivery) -> None:
        """Count from where the worker was whose place this one takes."""
        counts, gauges, rollout = self._counters.counts, self._counters.gauges, delivery.rollout
        rollout.frames, delivery.batches = counts[Count.FRAMES], counts[Count.BATCHES]
        rollout.episodes.episodes = counts[Count.EPISODES]
        rollout.timer.total = gauges[Gauge.TOTAL_S]
        rollout.timer.seconds.update(
            policy=gauges[Gauge.POLICY_S], env=gauges[Gauge.ENV_S], write=gauges[Gauge.WRITE_S]
        )

    def write_counts(self, delivery: RolloutDelivery) -> None:
        """Write down how far it is."""
        counts, gauges, rollout = self._counters.counts, self._counters.gauges, delivery.rollout
        seconds, episodes = rollout.timer.seconds, rollout.episodes
        counts[Count.FRAMES], counts[Count.BATCHES] = rollout.frames, delivery.batches
        counts[Count.ENV_RECREATIONS] = self._recreations_before + num_recreations(rollout.env)
        gauges[Gauge.POLICY_S], gauges[Gauge.ENV_S] = seconds["policy"], seconds["env"]
        gauges[Gauge.WRITE_S], gauges[Gauge.TOTAL_S] = seconds["write"], rollout.timer.total
        if counts[Count.EPISODES] != episodes.episodes:
            counts[Count.EPISODES], rows = episodes.episodes, episodes.rows()
            self._counters.episodes[: len(rows)], self._counters.episodes[len(rows) :] = rows, 0

    def begin(self) -> None:
        """A rollout begins with the weights that act."""
        self.oldest = self._counters.counts[Count.OLDEST] = self.version

    def take_version(self, version: int) -> None:
        """Other weights act."""
        self.version = self._counters.counts[Count.VERSION] = version

    def enter(self, stage: Stage) -> None:
        """See :class:`~rollwright.collectors.core.RolloutObserver`."""
        self._counters.state = _STATES[stage]

    def accepts(self, frames: int) -> bool:
        """See :class:`~rollwright.collectors.core.RolloutObserver`."""
        published = self._counters.counts[Count.PUBLISHED]
        if self._limit is None or published - self.oldest <= self._limit or self._stopping():
            return True
        self.frames_dropped += frames
        self._counters.counts[Count.FRAMES_DROPPED] = self.frames_dropped
        self.begin()
        return False

    def warn(self, text: str) -> None:
        """See :class:`~rollwright.collectors.core.RolloutObserver`."""
        self.notes.append((UserWarning, text))

    def publishes(self, cursor: DataCursor, ids: Iterable[int] | None = None) -> None:
        """See :class:`~rollwright.collectors.core.RolloutObserver`."""
        if self._publications is not None:
            self._publications.begin(cursor, ids)

    @contextmanager
    def spending(self, stage: str | None) -> Iterator[None]:
        """Add the time of the ``with`` block to that of a stage; what is spent inside on another is not counted."""
        begun = time.perf_counter()
        self._spent.append(0.0)
        try:
            yield
        finally:
            elapsed = time.perf_counter() - begun
            inside = self._spent.pop()
            if self._spent:
                self._spent[-1] += elapsed
            if stage is not None:
                self._counters.gauges[Gauge[f"{stage.upper()}_S"]] += elapsed - inside
