"""Shared-memory counters of one worker, which it and its collector read and write without a message."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from rollwright._memory import Segment
from rollwright.collectors.rollout.stats import NUM_EPISODES
from rollwright.data.llm.turns import Origin

BEAT_S = 1.0  # the longest nap of a worker that waits


class Count(IntEnum):
    """Places of the whole numbers.

    Those of the collector: ``ATTENTION`` (grows with each message that does not wait for the end of a rollout),
    ``PUBLISHED`` (version of the newest weights). Those of the worker: the rest.
    """

    ATTENTION = 0
    PUBLISHED = 1
    STATE = 2
    BEAT = 3  # steps taken, whatever becomes of them: grows as long as the worker is not stuck
    FRAMES = 4
    BATCHES = 5
    EPISODES = 6
    VERSION = 7  # of the weights that act
    OLDEST = 8  # version that acted first in the current rollout; -1: there is none
    NUM_IDS = 9  # trajectory ids taken
    FRAMES_DROPPED = 10
    CHANGES = 11  # of its state, and naps while it waits
    ENV_RECREATIONS = 12  # environments that were recreated
    RESERVED_EVEN = 13  # 1 + position of what was reserved last in the replay buffer, for messages Publishes of even
    RESERVED_ODD = 14  # numbers, and of odd ones; 0: nothing
    CONVERSATIONS = 15  # whose tools, environment or rewards are waited for; and of the first one, what follows
    PROMPT = 16
    EPOCH = 17
    REPEAT = 18
    TURN = 19


class Gauge(IntEnum):
    """Places of the fractional numbers."""

    POLICY_S = 0
    ENV_S = 1
    WRITE_S = 2
    WAIT_S = 3
    WEIGHTS_S = 4
    TOTAL_S = 5


class WorkerState(IntEnum):
    """States of a worker."""

    STARTING = 0
    WAITING = 1
    COLLECTING = 2
    PAUSED = 3
    CALLED = 4
    TAKING_WEIGHTS = 5
    STOPPING = 6
    ENDED = 7
    DELIVERING = 8
    PREPARING = 9


_NUMBERS = 512  # bytes
_PAGE = _NUMBERS + 32 * NUM_EPISODES


class WorkerCounters:
    """The numbers of one worker.

    Args:
        segment: of all workers.
        worker: index.

    Attributes:
        page: the memory of all of them.
        counts: by :class:`Count`.
        gauges: by :class:`Gauge`.
        episodes: the last ones that ended, rows of :class:`~rollwright.collectors.rollout.stats.EpisodeStats`; 0: none.

    Example:
        >>> counters = WorkerCounters(Segment(), 0)
        >>> counters.counts[Count.FRAMES] += 20
        >>> counters.counts[Count.FRAMES]
        20
    """

    def __init__(self, segment: Segment, worker: int) -> None:
        start = worker * _PAGE
        segment.grow(start + _PAGE)
        self.page = memory = segment.map(start, _PAGE)[:_PAGE]
        self.counts: Any = memory[: _NUMBERS // 2].cast("q")
        self.gauges: Any = memory[_NUMBERS // 2 : _NUMBERS].cast("d")
        self.episodes = np.frombuffer(memory, np.float64, offset=_NUMBERS).reshape(NUM_EPISODES, 4)

    def call_attention(self) -> None:
        """Make the worker read its messages after the current step."""
        self.counts[Count.ATTENTION] += 1

    @property
    def state(self) -> WorkerState:
        """What the worker does."""
        return WorkerState(self.counts[Count.STATE])

    @state.setter
    def state(self, state: WorkerState) -> None:
        self.counts[Count.STATE] = state
        self.counts[Count.CHANGES] += 1

    def beat(self) -> None:
        """Show that the worker is not stuck while it waits."""
        self.counts[Count.CHANGES] += 1

    @property
    def pulse(self) -> tuple[int, int]:
        """Differs from what it was before if the worker is not stuck."""
        return self.counts[Count.BEAT], self.counts[Count.CHANGES]

    def note_waits(self, waited_for: Sequence[tuple[Origin, int]]) -> None:
        """Note the conversations, and their turns, whose tools, environment or rewards are waited for."""
        if waited_for:
            origin, turn = waited_for[0]
            places = (Count.PROMPT, Count.EPOCH, Count.REPEAT, Count.TURN)
            for place, value in zip(places, (origin.index, origin.epoch, origin.repeat, turn), strict=True):
                self.counts[place] = value
        self.counts[Count.CONVERSATIONS] = len(waited_for)

    def waits(self) -> str:
        """The conversations of :meth:`note_waits`, for people; empty: none."""
        number = self.counts[Count.CONVERSATIONS]
        if not number:
            return ""
        index, epoch, repeat, turn = (
            self.counts[place] for place in (Count.PROMPT, Count.EPOCH, Count.REPEAT, Count.TURN)
        )
        others = "" if number == 1 else f", and {number - 1} more"
        return f"the conversation of {Origin(index, epoch, repeat, 0, 0).name}, turn {turn}{others}"

    def seconds(self) -> dict[str, float]:
        """Time by stage."""
        return {time.name[:-2].lower(): self.gauges[time] for time in Gauge if time.name.endswith("_S")}
