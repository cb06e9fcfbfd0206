"""Strategy: which rollouts are asked for, and which of those that have arrived make the next batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from tensordict import TensorDictBase

from rollwright.collectors.workers import messages as say
from rollwright.collectors.workers.member import Member
from rollwright.collectors.workers.memory.store import Block
from rollwright.collectors.workers.schedules.joining import Result


class Strategy(ABC):
    """Decides for a :class:`~rollwright.collectors.workers.schedules.schedule.Schedule`, which calls it under its lock.

    Attributes:
        awaits: what :meth:`ready` waits for, for messages.
        loses_what_fails: whether rollouts of a batch that could not be made are lost, and their workers restart.
        in_step: whether all workers take the same number of steps.
    """

    awaits: str
    loses_what_fails: bool
    in_step: bool

    @abstractmethod
    def ask(self) -> None:
        """Ask workers for as many rollouts as may be in progress."""

    @abstractmethod
    def ready(self) -> bool:
        """:meth:`ask`; whether the rollouts of the next batch have arrived."""

    @abstractmethod
    def has_next(self) -> bool:
        """Whether they are there now."""

    @abstractmethod
    def is_hopeless(self) -> bool:
        """Whether they cannot arrive any more."""

    @abstractmethod
    def next_rollouts(self) -> list[Result]:
        """The rollouts of the next batch."""

    @abstractmethod
    def remove(self, results: Collection[Result]) -> None:
        """These rollouts are delivered or dropped."""

    @abstractmethod
    def add(self, result: Result) -> None:
        """A rollout has arrived."""

    @abstractmethod
    def waiting(self) -> list[Result]:
        """All that have arrived and were not removed."""

    @abstractmethod
    def combine(self, results: Sequence[Result]) -> TensorDictBase:
        """The batch of some rollouts."""

    @abstractmethod
    def grant(self, worker: Member, need: say.Need) -> say.Grant:
        """Memory for a rollout that needs it."""

    @abstractmethod
    def lost(self, worker: Member) -> None:
        """A worker is gone, and with it what it was asked for."""

    def part_of(self, worker: Member, block: Block | None) -> int:
        """Which part of a block is a worker's."""
        return 0

    def delivered(self) -> None:  # noqa: B027 - most wait until the consumer comes again
        """A batch was delivered."""
