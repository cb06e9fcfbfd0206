"""Environments that follow one another in one place: each is made when the one before it has failed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rollwright.envs.base import EnvBase

__all__ = ["FAILURE", "MOST_FRUITLESS", "Notice", "Succession", "check_failure"]

FAILURE = ("raise", "recreate")
MOST_FRUITLESS = 3  # environments made anew without a step in between


def check_failure(on_env_failure: Any) -> bool:
    """Test the option; whether environments are made anew.

    Raises:
        ValueError: it is none of :data:`FAILURE`.
    """
    if on_env_failure not in FAILURE:
        raise ValueError(f"on_env_failure: expected one of {FAILURE}, got {on_env_failure!r}.")
    return bool(on_env_failure == "recreate")


class Succession:
    """What an environment hands on to the one that takes its place.

    Args:
        seed: given last.
        renewals: how many environments were there before.
        device: that they were moved to.

    Attributes:
        seed, renewals, device: as above.
        fruitless: how often an environment was made anew since the last step that one took.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> place = Succession(seed=0)
        >>> place.follow(GymEnv("CartPole-v1"), lambda: GymEnv("CartPole-v1"))
        GymEnv(env=CartPole-v1, batch_size=[], device=None)
        >>> place.renewals
        1
    """

    def __init__(self, seed: int | None = None, renewals: int = 0, device: Any = None) -> None:
        self.seed = seed
        self.renewals = renewals
        self.device = device
        self.fruitless = 0
        self._static_seed = False
        self._before = 0  # renewals before the seed was given

    def note_seed(self, seed: int | None, static_seed: bool = False) -> None:
        """Note a seed that the environment was given; what follows under it is the same each time it is given."""
        self.seed, self._static_seed, self._before = seed, static_seed, self.renewals

    def settle_in(self, env: EnvBase) -> None:
        """Give a new environment what those before it had; its seed is none that was there before."""
        if self.device is not None:
            env.to(self.device)
        number = self.renewals - self._before
        if self.seed is not None and number:
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            with torch.random.fork_rng(devices):  # others draw from the global generators
                env.set_seed(_derived(self.seed, number), self._static_seed)

    def follow(self, old: EnvBase, maker: Callable[[], EnvBase]) -> EnvBase:
        """Close an environment that has failed, and make another."""
        with contextlib.suppress(Exception):  # it is broken
            old.close(raise_if_closed=False)
        self.renewals += 1
        env = maker()
        env.train(old.training)
        self.settle_in(env)
        return env


def _derived(seed: int, number: int) -> int:
    return int(np.random.SeedSequence([int(seed) % 2**64, number]).generate_state(1)[0])


class Notice:
    """Tells of environments that were made anew, once.

    Args:
        counted_in: where all of them are counted.
    """

    def __init__(self, counted_in: str) -> None:
        self._counted_in = counted_in
        self._is_told = False

    def tell(self, place: str, text: str) -> None:
        """Warn that the environment of ``place`` was made anew, because of ``text``."""
        if self._is_told:
            return
        self._is_told = True
        warnings.warn(
            f"{place} was made anew, and its trajectory ends as truncated: {text.rstrip('.')}. Further ones are "
            f"counted in {self._counted_in}, and not told.",
            RuntimeWarning,
            stacklevel=2,
        )
