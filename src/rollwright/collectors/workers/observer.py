"""WorkerObserver: writes how far a worker's rollouts are into its shared-memory counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollwright.collectors.core import Stage
from rollwright.collectors.delivery.base import RolloutDelivery
from rollwright.collectors.workers.counters import State, Time, Word, Words
from rollwright.envs.recreation.policy import num_recreations

__all__ = ["WorkerObserver"]

_STATES = {
    Stage.RESET: State.COLLECTING,  # which may be stuck, too
    Stage.COMPILE: State.STARTING,  # takes as long as it takes
    Stage.STEPS: State.COLLECTING,  # each step has the whole limit for itself
    Stage.FINISH: State.DELIVERING,
}


class WorkerObserver:
    """A :class:`~rollwright.collectors.core.RolloutObserver` that refuses batches of weights that are too old.

    Args:
        words: of the worker.
        max_policy_lag: versions that may have been published since the first of a batch acted; None: any number.
        stopping: whether the worker ends.

    Attributes:
        version: of the weights that act.
        oldest: of those that acted in the rollout under way.
        frames_dropped: of batches that were refused.
        notes: category and text of warnings that the collector is to give.
    """

    def __init__(self, words: Words, max_policy_lag: int | None, stopping: Callable[[], bool]) -> None:
        self._words, self._limit, self._stopping = words, max_policy_lag, stopping
        self.version = self.oldest = 0
        self.frames_dropped = words.whole[Word.FRAMES_DROPPED]
        self._recreations_before = words.whole[Word.ENV_RECREATIONS]
        self._spent: list[float] = []
        self.notes: list[tuple[type[Warning], str]] = []

    def continue_counts(self, delivery: RolloutDelivery) -> None:
        """Count from where the worker was whose place this one takes."""
        whole, parts, rollout = self._words.whole, self._words.parts, delivery.rollout
        rollout.frames, delivery.batches = whole[Word.FRAMES], whole[Word.BATCHES]
        rollout.episodes.episodes = whole[Word.EPISODES]
        rollout.timer.total = parts[Time.TOTAL_S]
        rollout.timer.seconds.update(policy=parts[Time.POLICY_S], env=parts[Time.ENV_S], write=parts[Time.WRITE_S])

    def write_counts(self, delivery: RolloutDelivery) -> None:
        """Write down how far it is."""
        whole, parts, rollout = self._words.whole, self._words.parts, delivery.rollout
        seconds, episodes = rollout.timer.seconds, rollout.episodes
        whole[Word.FRAMES], whole[Word.BATCHES] = rollout.frames, delivery.batches
        whole[Word.ENV_RECREATIONS] = self._recreations_before + num_recreations(rollout.env)
        parts[Time.POLICY_S], parts[Time.ENV_S] = seconds["policy"], seconds["env"]
        parts[Time.WRITE_S], parts[Time.TOTAL_S] = seconds["write"], rollout.timer.total
        if whole[Word.EPISODES] != episodes.episodes and episodes.num_in_window:
            summary = episodes.summary()
            whole[Word.EPISODES] = summary["episodes"]
            parts[Time.MEAN_RETURN], parts[Time.MEAN_LENGTH] = summary["mean_return"], summary["mean_length"]
            parts[Time.LAST_RETURN], parts[Time.WINDOW] = summary["last_return"], float(episodes.num_in_window)
            parts[Time.LAST_RETURN_AT] = time.monotonic()

    def begin(self) -> None:
        """A rollout begins with the weights that act."""
        self.oldest = self._words.whole[Word.OLDEST] = self.version

    def take_version(self, version: int) -> None:
        """Other weights act."""
        self.version = self._words.whole[Word.VERSION] = version

    def enter(self, stage: Stage) -> None:
        """See :class:`~rollwright.collectors.core.RolloutObserver`."""
        self._words.state = _STATES[stage]

    def accepts(self, frames: int) -> bool:
        """See :class:`~rollwright.collectors.core.RolloutObserver`."""
        published = self._words.whole[Word.PUBLISHED]
        if self._limit is None or published - self.oldest <= self._limit or self._stopping():
            return True
        self.frames_dropped += frames
        self._words.whole[Word.FRAMES_DROPPED] = self.frames_dropped
        self.begin()
        return False

    def warn(self, text: str) -> None:
        """See :class:`~rollwright.collectors.core.RolloutObserver`."""
        self.notes.append((UserWarning, text))

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
                self._words.parts[Time[f"{stage.upper()}_S"]] += elapsed - inside
