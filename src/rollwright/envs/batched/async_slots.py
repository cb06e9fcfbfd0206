"""Slots: the interface of a pool to the threads or processes that hold its environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase


class Came(NamedTuple):
    """The result of a step or a reset.

    Attributes:
        row: whose.
        outcome: as of ``step_outcome`` or ``reset_outcome``; None if it failed.
        error: why.
    """

    row: int
    outcome: TensorDictBase | None
    error: Exception | None


class Slots(ABC):
    """One place for each environment; at most one call is in progress in each.

    Attributes:
        facts: what is known of each environment: batch size, device, specs.
    """

    facts: Sequence[Any]

    @abstractmethod
    def post(self, row: int, td: TensorDictBase | None, *, resets: bool, kwargs: dict[str, Any]) -> None:
        """Begin a step (from ``td``), or a reset. If it raises, nothing has begun."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Wait until at least one call has ended, or the time is over. An interrupt here loses nothing."""

    @abstractmethod
    def collect(self) -> Iterator[Came]:
        """All that has ended so far. To be used up at once, in a block that nothing interrupts."""

    @abstractmethod
    def set_seed(self, row: int, seed: int | None, static_seed: bool) -> int | None:
        """Seed an environment, where none is busy."""

    @abstractmethod
    def move(self, device: torch.device | str | int) -> None:
        """Move all environments, where none is busy; :attr:`facts` change."""

    def call_in_hosts(self, function: Callable[..., object]) -> None:  # noqa: B027  (threads are in this process)
        """See :class:`~rollwright.envs.batched.base.BatchedEnv`."""

    @abstractmethod
    def look_up(self, name: str) -> Any:
        """An attribute of each, as a list; or a function that calls a method of each."""

    @abstractmethod
    def call(self, row: int, name: str, args: tuple[Any, ...]) -> Any:
        """What a method of one environment returns, which is not busy."""

    @abstractmethod
    def close(self, *, hurries: bool = False) -> tuple[list[Exception], list[str]]:
        """Close all, within seconds: what they raised, and what had to be left behind or killed.

        Args:
            hurries: an earlier call was interrupted: end what is left of them, and wait for no more than a second.
        """
