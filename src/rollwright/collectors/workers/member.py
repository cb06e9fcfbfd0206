"""Member: the state of one worker in the collector's process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from rollwright._processes.connection import Connection
from rollwright._processes.pool import Pool
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.counters import WorkerCounters
from rollwright.collectors.workers.memory.store import Block
from rollwright.collectors.workers.worker_side.places import PlaceInData
from rollwright.errors import WorkerError

if TYPE_CHECKING:
    from rollwright.collectors.workers.worker import WorkerSpec


class Listener(Protocol):
    """Takes in what workers send of their rollouts."""

    def needs(self, worker: Member, need: say.Need) -> say.Grant:
        """Give memory for a rollout; what this raises is raised in the worker."""

    def collected(self, worker: Member, found: say.Collected, block: Block | None) -> None:
        """Take in a rollout, and the block that it was asked to lie in."""

    def failed(self, worker: Member, error: WorkerError) -> None:
        """Take in an error to be raised."""

    def lost(self, worker: Member) -> None:
        """A worker is gone, and with it what it was asked for; another may be started in its place."""


class Member:
    """The state of one worker, as its collector knows it.

    Args:
        spec: what it is made of.
        pool: its connection is the one of place ``spec.index``.

    Attributes:
        index: its number.
        spec: see above.
        counters: numbers that it writes.
        ready: what it has sent of itself; None while it starts.
        runs: rollouts that it was asked for and has not answered, in order, with their blocks.
        error: why it is gone for good.
        num_collected: rollouts of it that have arrived.
        called: what it was asked to call last.
        place: where in its data who takes its place begins.
        of_path: what its path added to ``stats()`` at the end of its last rollout.
    """

    def __init__(self, spec: WorkerSpec, pool: Pool) -> None:
        self.index, self.spec, self._pool = spec.index, spec, pool
        self.counters = WorkerCounters(spec.counters, spec.index)
        self.ready: say.Ready | None = None
        self.runs: dict[int, Block | None] = {}
        self.error: WorkerError | None = None
        self.num_collected = 0
        self.of_path: Mapping[str, Any] = {}
        self._answered = threading.local()
        self.called = ""
        self.place = PlaceInData(self.counters, spec.options)
        self._last: Connection | None = None

    @property
    def connection(self) -> Connection | None:
        """To its process; None: it is gone."""
        return self._pool.by_place[self.index]

    def started(self, connection: Connection) -> None:
        """Another process takes this place."""
        self._last = connection
        self._pool.add(self.index, connection)

    def remote_clock(self) -> float | None:
        """Of the machine that it runs on, where that is another; see :class:`Connection`."""
        connection = self.connection
        return None if connection is None or connection.host is None else connection.clock()

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        connection = self.connection
        return connection is not None and not connection.wait(0.0)

    @property
    def pid(self) -> int | None:
        """Of its process, on its machine."""
        connection = self.connection
        return None if connection is None else connection.pid

    @property
    def available(self) -> bool:
        """Whether it has started, and is not gone."""
        return self.ready is not None and self.connection is not None

    @property
    def threads(self) -> int | None:
        """That torch uses in it."""
        return None if self.ready is None else self.ready.threads

    @property
    def name(self) -> str:
        """For messages."""
        host = None if self._last is None else self._last.host
        return f"worker {self.index}" if host is None else f"worker {self.index} on {host}"

    @property
    def num_at_answer(self) -> int:
        """Rollouts of it that had arrived when it answered the last call of this thread."""
        return getattr(self._answered, "num", 0)

    @num_at_answer.setter
    def num_at_answer(self, num: int) -> None:
        self._answered.num = num

    def send(self, message: Any, *, attention: bool = False) -> None:
        """Send a message without waiting.

        Args:
            message: one of :mod:`~rollwright.collectors.workers.messages`.
            attention: have it read after the current step; otherwise, after the rollout.
        """
        self._pool.send(self.index, message)
        if attention:
            self.counters.call_attention()

    @property
    def behind(self) -> bool:
        """Whether it was sent something that there was no room for yet."""
        connection = self.connection
        return connection is not None and connection.behind

    def failed(self, what: str) -> WorkerError:
        """An error that names it."""
        error = WorkerError(f"{self.name} {what}.")
        error.worker = self.index
        return error

    def doing(self) -> str:
        """A phrase for messages."""
        if self.error is not None:
            return f"{self.name} has failed"
        return f"{self.name} is {self.counters.state.name.lower().replace('_', ' ')}"
