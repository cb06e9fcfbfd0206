"""Environments that follow one another in one place: each is made when the one before it has failed."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rollwright.envs.base import EnvBase

__all__ = ["FAILURE", "MOST_FRUITLESS", "Notice", "Rite", "Succession", "check_failure", "num_recreations"]

Rite = Callable[[EnvBase, EnvBase | None], Any]

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

    Attributes:
        seed: given last.
        renewals: how many environments were there before.
        renewals_inside: how many were made anew inside of those.
        device: that they were moved to.
        fruitless: how often an environment was made anew since the last step that one took.
        rites: called with each new environment, and the one before it; None in its place: it is gone.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> place = Succession()
        >>> place.note_seed(0)
        >>> place.follow(GymEnv("CartPole-v1"), lambda: GymEnv("CartPole-v1"))
        GymEnv(env=CartPole-v1, batch_size=[], device=None)
        >>> place.renewals
        1
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self.renewals = self.renewals_inside = 0
        self.device: Any = None
        self.fruitless = 0
        self.rites: list[Rite] = []
        self._static_seed = False
        self._before = 0  # renewals before the seed was given

    def note_seed(self, seed: int | None, static_seed: bool = False) -> None:
        """Note a seed that the environment was given; what follows under it is the same each time it is given."""
        self.seed, self._static_seed, self._before = seed, static_seed, self.renewals

    def note_loss(self) -> None:
        """The environment is gone, with its process: another one is to :meth:`settle_in`."""
        self.renewals += 1
        self.fruitless = 0

    def settle_in(self, env: EnvBase, old: EnvBase | None = None) -> None:
        """Give a new environment what those before it had; its seed is none that was there before."""
        if self.device is not None:
            env.to(self.device)
        number = self.renewals - self._before
        if self.seed is not None and number:
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            with torch.random.fork_rng(devices):  # others draw from the global generators
                env.set_seed(_derived(self.seed, number), self._static_seed)
        for rite in self.rites:
            rite(env, old)

    def follow(
        self, old: EnvBase, maker: Callable[[], EnvBase], check: Callable[[EnvBase], Any] = lambda env: None
    ) -> EnvBase:
        """Close an environment that has failed, and make another, which is closed too if ``check`` raises."""
        _closed(old)  # it is broken
        self.renewals += 1
        env = maker()
        try:
            env.train(old.training)
            self.settle_in(env, old)
            check(env)
        except BaseException:
            _closed(env)
            raise
        self.renewals_inside += num_recreations(old)
        return env


def _closed(env: EnvBase) -> None:
    with contextlib.suppress(Exception):
        env.close(raise_if_closed=False)


def num_recreations(env: EnvBase) -> int:
    """How many environments were made anew in an environment, its parts included."""
    modules: list[Any] = [module for module in env.modules() if hasattr(type(module), "_num_recreated")]
    return sum(module._num_recreated for module in modules)


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
