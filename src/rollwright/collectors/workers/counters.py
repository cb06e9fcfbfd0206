"""Shared-memory counters of one worker, and what it writes there: progress, trajectory ids, places in the data."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwright._memory import Segment
from rollwright.collectors.core import DataCursor, RolloutObserver, Stage
from rollwright.collectors.delivery.base import RolloutDelivery
from rollwright.collectors.options import CollectorOptions, buffer_of, ledger_of
from rollwright.collectors.rollout.stats import NUM_EPISODES
from rollwright.collectors.workers import messages
from rollwright.data.llm.turns import Origin
from rollwright.envs.recreation import num_recreations

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


def packed_position(place: Mapping[str, Any] | None) -> bytes | None:
    """A place of :meth:`~rollwright.collectors.core.DataCursor.place` as a message has it."""
    return None if place is None else pickle.dumps(place, protocol=5)


def _count(number: int) -> Count:
    return Count.RESERVED_ODD if number % 2 else Count.RESERVED_EVEN


def _ledger(options: CollectorOptions) -> Any:
    return None if options.replay_buffer is None else ledger_of(buffer_of(options))


def _is_published(ledger: Any, reserved: int) -> bool:
    return ledger is not None and reserved > 0 and bool(ledger.was_published(reserved - 1))


class Publications:
    """Announces what a worker writes into a replay buffer, before it does; for use in the worker.

    The collector is sent the place behind it first. If the worker is killed, the ledger of the buffer says whether it
    was published: its first position is in shared memory as soon as it is reserved.

    Args:
        counters: of the worker.
        options: of its collector.
        send: a message to the collector's process.
    """

    def __init__(self, counters: WorkerCounters, options: CollectorOptions, send: Callable[[Any], None]) -> None:
        self._counts, self._options, self._send = counters.counts, options, send
        self._number = 0

    def begin(self, cursor: DataCursor, ids: Iterable[int] | None) -> None:
        """Announce trajectories; see :meth:`~rollwright.collectors.core.RolloutObserver.publishes`."""
        place, ledger = packed_position(cursor.place(ids)), _ledger(self._options)
        if place is None or ledger is None:
            return
        last_is_published = self._number > 0 and _is_published(ledger, self._counts[_count(self._number)])
        self._number += 1
        count = _count(self._number)
        self._counts[count] = 0  # of the one before the last, whose end the collector knows
        self._send(messages.Publishes(self._number, place, last_is_published))

        def noted(position: int) -> None:
            self._counts[count] = 1 + position

        ledger.on_reserve = noted


class DeliveredPosition:
    """The place in the data behind what has arrived of a worker, or was published by it in a replay buffer.

    For use in the collector's process.

    Args:
        counters: of the worker.
        options: of its collector.
    """

    def __init__(self, counters: WorkerCounters, options: CollectorOptions) -> None:
        self._counts, self._options = counters.counts, options
        self._known: bytes | None = None
        self._announced: messages.Publishes | None = None  # what may be published, or not

    def follow(self, options: CollectorOptions) -> None:
        """A worker with these options is started: its writes are known by them."""
        self._options = options

    @property
    def is_known(self) -> bool:
        """Whether the worker has sent one: nothing else is known to have been delivered."""
        return self._known is not None or self._announced is not None

    def move(self, place: bytes | None) -> None:
        """The worker has sent where it is; None: nothing that is announced is open any more."""
        if place is None and self._announced is not None:
            place = self._announced.place
        self._known, self._announced = place or self._known, None

    def announce(self, message: messages.Publishes) -> None:
        """The worker is about to publish something."""
        if self._announced is not None and message.last_is_published:
            self._known = self._announced.place
        self._announced = message

    def of_dead(self) -> bytes | None:
        """Where a replacement begins, when the worker is dead; None: at the start."""
        announced, self._announced = self._announced, None
        if announced is not None and _is_published(_ledger(self._options), self._counts[_count(announced.number)]):
            self._known = announced.place
        return self._known


_STATES = {
    Stage.RESET: WorkerState.COLLECTING,  # which may be stuck, too
    Stage.COMPILE: WorkerState.STARTING,  # takes as long as it takes
    Stage.STEPS: WorkerState.COLLECTING,  # each step has the whole limit for itself
    Stage.FINISH: WorkerState.DELIVERING,
}


class WorkerObserver(RolloutObserver):
    """Refuses batches of weights that are too old.

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
        """A stage begins."""
        self._counters.state = _STATES[stage]

    def accepts(self, frames: int) -> bool:
        """A batch of ``frames`` frames was taken; if it is refused, it is dropped and another one is taken."""
        published = self._counters.counts[Count.PUBLISHED]
        if self._limit is None or published - self.oldest <= self._limit or self._stopping():
            return True
        self.frames_dropped += frames
        self._counters.counts[Count.FRAMES_DROPPED] = self.frames_dropped
        self.begin()
        return False

    def warn(self, text: str) -> None:
        """Something that the user should know, in the middle of a rollout."""
        self.notes.append((UserWarning, text))

    def publishes(self, cursor: DataCursor, ids: Iterable[int] | None = None) -> None:
        """Trajectories are about to be published in a replay buffer."""
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
