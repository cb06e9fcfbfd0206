"""RecreationPolicy: limits how often an environment is recreated, and what the next one takes over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rollwright._warnings import warn_user
from rollwright.envs.base import EnvBase
from rollwright.envs.each import renamed
from rollwright.errors import RollwrightError

Hook = Callable[[EnvBase, EnvBase | None], Any]

FAILURE = ("raise", "recreate")
MAX_FAILURES = 3  # in a row, without a step in between


def check_failure(on_env_failure: Any) -> bool:
    """Test the option; whether environments are recreated.

    Raises:
        ValueError: it is none of :data:`FAILURE`.
    """
    if on_env_failure not in FAILURE:
        raise ValueError(f"on_env_failure: expected one of {FAILURE}, got {on_env_failure!r}.")
    return bool(on_env_failure == "recreate")


class RecreationPolicy:
    """Counts the failures of one environment, and gives its replacement what it had.

    Can be pickled: the replacement may live in another process.

    Attributes:
        seed: given last.
        num_recreated: how many environments were replaced.
        num_recreated_inside: how many were replaced inside of those.
        device: that they were moved to.
        failures: in a row, without a step in between.
        hooks: called with each new environment and the one before it; None in its place: it was lost with its process.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> policy = RecreationPolicy()
        >>> policy.note_seed(0)
        >>> policy.replace(GymEnv("CartPole-v1"), lambda: GymEnv("CartPole-v1"))
        GymEnv(env=CartPole-v1, batch_size=[], device=None)
        >>> policy.num_recreated
        1
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self.num_recreated = self.num_recreated_inside = 0
        self.device: Any = None
        self.failures = 0
        self.hooks: list[Hook] = []
        self._static_seed = False
        self._before = 0  # replaced before the seed was given

    def note_seed(self, seed: int | None, static_seed: bool = False) -> None:
        """Note a seed that the environment was given; the seeds of its replacements are derived from it."""
        self.seed, self._static_seed, self._before = seed, static_seed, self.num_recreated

    def note_failure(self, error: RollwrightError) -> None:
        """Count a failure.

        Raises:
            RollwrightError: it is one too many.
        """
        if self.failures >= MAX_FAILURES:
            raise renamed(f"recreated {MAX_FAILURES} times without a step in between", error) from error
        self.failures += 1

    def note_loss(self) -> None:
        """The environment is lost with its process: another one is to be :meth:`prepare`-d."""
        self.num_recreated += 1
        self.failures = 0

    def prepare(self, env: EnvBase, old: EnvBase | None = None) -> None:
        """Give a replacement what the environment before it had; it gets a seed of its own."""
        if self.device is not None:
            env.to(self.device)
        number = self.num_recreated - self._before
        if self.seed is not None and number:
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            with torch.random.fork_rng(devices):  # others draw from the global generators
                env.set_seed(_derived(self.seed, number), self._static_seed)
        for hook in self.hooks:
            hook(env, old)

    def replace(
        self, old: EnvBase, maker: Callable[[], EnvBase], check: Callable[[EnvBase], Any] = lambda env: None
    ) -> EnvBase:
        """Close an environment that has failed, and make another, which is closed too if ``check`` raises."""
        _close(old)  # it is broken
        self.num_recreated += 1
        env = maker()
        try:
            env.train(old.training)
            self.prepare(env, old)
            check(env)
        except BaseException:
            _close(env)
            raise
        self.num_recreated_inside += num_recreations(old)
        return env


def _close(env: EnvBase) -> None:
    with contextlib.suppress(Exception):
        env.close(raise_if_closed=False)


def num_recreations(env: EnvBase) -> int:
    """How many environments were recreated in an environment, its parts included."""
    modules: list[Any] = [module for module in env.modules() if hasattr(type(module), "num_recreated")]
    return sum(module.num_recreated for module in modules)


def _derived(seed: int, number: int) -> int:
    return int(np.random.SeedSequence([int(seed) % 2**64, number]).generate_state(1)[0])


class RecreationWarning:
    """Warns of the first environment that is recreated.

    Args:
        counted_in: where all of them are counted.
    """

    def __init__(self, counted_in: str) -> None:
        self._counted_in = counted_in
        self._has_warned = False

    def warn(self, place: str, text: str) -> None:
        """Warn that the environment of ``place`` was recreated, because of ``text``."""
        if self._has_warned:
            return
        self._has_warned = True
        warn_user(
            f"{place} was recreated, and its trajectory ends as truncated: {text.rstrip('.')}. Further ones are "
            f"counted in {self._counted_in} without a warning.",
            RuntimeWarning,
        )
