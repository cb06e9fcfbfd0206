"""Checks of the contract of EnvBase, for users to run on their environments.

====================  ========================================================================================
``specs``             steps have the entries, shapes, dtypes and values that the specs announce
``reset``             returns observations and flags, no reward, nothing done
``step``              returns the data it was given, changed only by ``"next"``
``flags``             ``done == terminated | truncated``
``same_seed``         one seed, the same bits: in two instances, and in one instance seeded again
``different_seeds``   two seeds, different data (only with ``stochastic=True``)
``partial_reset``     ``"_reset"`` touches the rows that it marks, and no other, then and later
``last_observation``  ``("next", observation)`` at a done step is not that of the new trajectory, and
                      ``step_and_maybe_reset`` gives what ``step`` and ``reset`` give by hand
``aliasing``          later steps do not overwrite what earlier ones returned
``arrays``            frames collected on arrays, where there is that form, are those collected on TensorDicts
``close``             a step after closing raises, and a reset does or opens it again
====================  ========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable

from rollwright.envs.base import EnvBase
from rollwright.testing import env_checks
from rollwright.testing.comparison import MakeEnv
from rollwright.testing.suites import add_tests, checks_in

CHECKS = checks_in(env_checks)
"""By name: each is called with a function that makes the environment, a seed, and a number of steps."""


def check_env(
    make_env: MakeEnv,
    *,
    seed: int = 0,
    num_steps: int = 30,
    stochastic: bool = False,
    skip: Iterable[str] = (),
) -> None:
    """Run every check of this module on an environment.

    Args:
        make_env: returns a new environment; called several times.
        seed: what environments are seeded with (and ``seed + 1``).
        num_steps: steps to take in one check; let it exceed the length of an episode, or the ends of
            episodes go unchecked.
        stochastic: the environment is random, so that two seeds must give different data.
        skip: names of checks to leave out; ``"partial_reset"`` for instance where the rows of a batch
            share one random generator.

    Raises:
        EnvError: a check failed; the message gives where, what was expected, what came, and what to do.
        TypeError: ``make_env`` is an environment, not a function that returns one.
        ValueError: ``skip`` names no check.

    Example:
        >>> from rollwright.testing.mocking_classes import CountingEnv
        >>> check_env(lambda: CountingEnv(max_steps=3, batch_size=[2]))
    """
    if isinstance(make_env, EnvBase):
        raise TypeError(
            f"make_env: expected a function that returns a new environment, got {type(make_env).__name__}. "
            "Pass lambda: followed by what constructs it."
        )
    left_out = set(skip)
    unknown = left_out - set(CHECKS)
    if unknown:
        raise ValueError(f"skip: expected names among {sorted(CHECKS)}, got {sorted(unknown)}. Take these out.")
    if not stochastic:
        left_out.add("different_seeds")
    for name, check in CHECKS.items():
        if name not in left_out:
            try:
                check(make_env, seed, num_steps)
            except Exception as error:
                error.add_note(f"in the check {name!r} of check_env")
                raise


class EnvConformance:
    """The checks of :func:`check_env` as pytest tests: inherit, and define how to make the environment.

    Each check is a method ``test_<name>``; override one with ``None`` to leave it out.

    Attributes:
        seed: as in :func:`check_env`.
        num_steps: as in :func:`check_env`.
        stochastic: as in :func:`check_env`.

    Example:
        >>> from rollwright.testing.mocking_classes import CountingEnv
        >>> class TestCounting(EnvConformance):
        ...     def make_env(self):
        ...         return CountingEnv(max_steps=3)
    """

    seed: int = 0
    num_steps: int = 30
    stochastic: bool = False

    def make_env(self) -> EnvBase:
        """Return a new environment; to be overridden."""
        raise TypeError(f"{type(self).__name__} has no make_env: define `make_env(self)`, returning an environment.")

    def check(self, name: str) -> None:
        """Run one check; that of different seeds where the environment is random."""
        if self.stochastic or name != "different_seeds":
            CHECKS[name](self.make_env, self.seed, self.num_steps)


add_tests(EnvConformance, CHECKS, EnvConformance.check)
