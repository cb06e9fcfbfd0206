"""Places in the data that a worker sends, so that who takes its place goes on behind what was delivered."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rollwright.collectors.core import DataCursor
from rollwright.collectors.delivery_options import buffer_of, ledger_of
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.counters import Count, WorkerCounters


def packed_place(place: Mapping[str, Any] | None) -> bytes | None:
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
        place, ledger = packed_place(cursor.place(ids)), _ledger(self._options)
        if place is None or ledger is None:
            return
        last_is_published = self._number > 0 and _is_published(ledger, self._counts[_count(self._number)])
        self._number += 1
        count = _count(self._number)
        self._counts[count] = 0  # of the one before the last, whose end the collector knows
        self._send(say.Publishes(self._number, place, last_is_published))

        def noted(position: int) -> None:
            self._counts[count] = 1 + position

        ledger.on_reserve = noted


class PlaceInData:
    """The place in the data behind what has arrived of a worker, or was published by it in a replay buffer.

    For use in the collector's process.

    Args:
        counters: of the worker.
        options: of its collector.
    """

    def __init__(self, counters: WorkerCounters, options: CollectorOptions) -> None:
        self._counts, self._options = counters.counts, options
        self._known: bytes | None = None
        self._announced: say.Publishes | None = None  # what may be published, or not

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

    def announce(self, message: say.Publishes) -> None:
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
