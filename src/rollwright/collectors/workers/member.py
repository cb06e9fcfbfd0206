"""Member: what is known of one worker on the side of its collector."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Protocol

from rollwright._processes.channel import ChannelClosed
from rollwright._processes.child import Child
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.counters import Words
from rollwright.collectors.workers.memory.store import Block
from rollwright.collectors.workers.worker import WorkerSpec
from rollwright.errors import WorkerError

__all__ = ["Listener", "Member"]


class Listener(Protocol):
    """Who is told what workers say of their rollouts."""

    def needs(self, worker: Member, need: say.Need) -> say.Grant:
        """Give memory for a rollout; what this raises is raised in the worker."""

    def collected(self, worker: Member, found: say.Collected, block: Block | None) -> None:
        """Take in a rollout, and the block that it was asked to lie in."""

    def failed(self, worker: Member, error: WorkerError) -> None:
        """Take in an error to be raised."""

    def lost(self, worker: Member) -> None:
        """A worker is gone, and with it what it was asked for; another may come in its place."""


class Member:
    """What is known of one worker here.

    Attributes:
        index: its number.
        spec: what it is made of.
        child: its process.
        words: numbers that it writes.
        ready: what it told of itself; None while it starts.
        runs: rollouts that it was asked for and has not answered, in order, with their blocks.
        error: why it is gone for good.
        num_collected: rollouts of it that have arrived.
        called: what it was asked to call last.
        pulse: of its words, when it was looked at last.
        pulse_at: when that had changed, by ``time.monotonic()``.
        looked_at: when it was looked at last.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.index, self.spec = spec.index, spec
        self.words = Words(spec.words, spec.index)
        self.child: Child | None = None
        self.ready: say.Ready | None = None
        self.runs: dict[int, Block | None] = {}
        self.error: WorkerError | None = None
        self.num_collected = 0
        self._told = threading.local()
        self.called = ""
        self.pulse, self.pulse_at, self.looked_at = (0, 0), 0.0, 0.0

    @property
    def there(self) -> bool:
        """Whether it can be told something."""
        return self.ready is not None and self.child is not None

    @property
    def line(self) -> int:
        """File descriptor of the line to it; -1 without."""
        return -1 if self.child is None else self.child.channel.fileno()

    @property
    def threads(self) -> int | None:
        """That torch uses in it."""
        return None if self.ready is None else self.ready.threads

    @property
    def name(self) -> str:
        """For messages."""
        return f"worker {self.index}"

    @property
    def num_told(self) -> int:
        """Rollouts of it that had arrived when it answered the last call of this thread."""
        return getattr(self._told, "num", 0)

    @num_told.setter
    def num_told(self, num: int) -> None:
        self._told.num = num

    def send(self, message: Any, *, attention: bool = False) -> None:
        """Tell it something, without waiting: what the line has no room for goes in :meth:`catch_up`.

        If it is gone, that will be heard of.
        """
        child = self.child
        if child is not None:
            with contextlib.suppress(ChannelClosed):
                child.channel.post(message)
        if attention:
            self.words.call_attention()

    @property
    def behind(self) -> bool:
        """Whether it was told something that the line had no room for."""
        child = self.child
        return child is not None and child.channel.behind

    def catch_up(self) -> None:
        """Go on telling it what the line had no room for."""
        child = self.child
        if child is not None:
            with contextlib.suppress(ChannelClosed):
                child.channel.flush()
            self.words.call_attention()  # it may have read all that was there before

    def doing(self) -> str:
        """A phrase for messages."""
        if self.error is not None:
            return f"{self.name} has failed"
        return f"{self.name} is {self.words.state.name.lower().replace('_', ' ')}"
