"""Member: what is known of one worker on the side of its collector."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from rollwright._interrupts import uninterrupted
from rollwright._processes.child import Child
from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.store import Block
from rollwright.collectors.workers.words import Words
from rollwright.collectors.workers.worker import WorkerSpec
from rollwright.errors import WorkerError

__all__ = ["Listener", "Member"]


_FULL_S = 60.0  # a step may take long, and the line has little room


class Listener(Protocol):
    """Who is told what workers say of their rollouts."""

    def needs(self, worker: Member, need: say.Need) -> say.Grant:
        """Give memory for a rollout."""

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
        num_told: likewise, when it answered a call last.
        called: what it was asked to call last.
        pulse: of its words, when it was looked at last.
        pulse_at: when that had changed, by ``time.monotonic()``.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.index, self.spec = spec.index, spec
        self.words = Words(spec.words, spec.index)
        self.child: Child | None = None
        self.ready: say.Ready | None = None
        self.runs: dict[int, Block | None] = {}
        self.error: WorkerError | None = None
        self.sending = threading.Lock()
        self.num_collected = self.num_told = 0
        self.called = ""
        self.pulse, self.pulse_at = (0, 0), 0.0

    @property
    def there(self) -> bool:
        """Whether it can be told something."""
        return self.ready is not None and self.child is not None

    @property
    def threads(self) -> int | None:
        """That torch uses in it."""
        return None if self.ready is None else self.ready.threads

    @property
    def name(self) -> str:
        """For messages."""
        return f"worker {self.index}"

    def send(self, message: Any, *, attention: bool = False, timeout_s: float = _FULL_S) -> bool:
        """Tell it something; False if it is gone, which will be heard of.

        Raises:
            TimeoutError: it does not read, and the line is full.
        """
        child = self.child
        if child is None:
            return False
        try:
            with uninterrupted:
                self._send(child, message, attention, time.monotonic() + timeout_s)
        except EOFError:
            return False
        except TimeoutError as error:
            raise TimeoutError(f"waited {timeout_s:g} s for {self.doing()} to read what it was told") from error
        return True

    def _send(self, child: Child, message: Any, attention: bool, until: float) -> None:
        if not self.sending.acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimeoutError("another thread tells it something, and it does not read")
        try:
            if attention:
                self.words.call_attention()
            child.channel.send(message, until - time.monotonic())
            if attention:
                self.words.call_attention()
        finally:
            self.sending.release()

    def doing(self) -> str:
        """A phrase for messages."""
        if self.error is not None:
            return f"{self.name} has failed"
        return f"{self.name} is {self.words.state.name.lower().replace('_', ' ')}"
