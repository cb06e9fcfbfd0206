"""The array form of GymWrapper: what gymnasium returns, as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rollwright.data.specs import Composite
from rollwright.envs.arrays import (
    ArrayEnv,
    Entry,
    Rows,
    Values,
    check_flags,
    check_open,
    entries_of,
    named_error,
    objects_of,
    refuse_overrides,
)
from rollwright.envs.base import EnvBase
from rollwright.errors import NotNative, RollwrightError

if TYPE_CHECKING:
    from rollwright.envs.libs.gym import GymWrapper

__all__ = ["GymArrays"]


def _specs_of(env: EnvBase) -> tuple[Composite, ...]:
    return env.full_observation_spec, env.full_action_spec, env.full_reward_spec, env.full_done_spec


class GymArrays(ArrayEnv):
    """The array form of a :class:`GymWrapper`.

    Raises:
        NotNative: the environment has readers of ``info``, was subclassed in how it steps, or holds objects.
    """

    def __init__(self, env: GymWrapper, known: type[GymWrapper]) -> None:
        refuse_overrides(env, known)
        check_flags(env)
        if env.info_dict_reader:
            raise NotNative("it has readers of info")
        self._env = env
        self.batch = tuple(env.batch_size)
        self.entries = entries_of(env.full_observation_spec, env.ndim, objects=not env.ndim)
        self.rewards = entries_of(env.full_reward_spec, env.ndim, env.reward_keys)
        self.reads = list(env.action_keys)
        self._specs = _specs_of(env)
        rewards = {"reward": Entry((*self.batch, 1), np.dtype(env.reward_dtype), True)}
        if self.entries.keys() != set(env.space_keys) or self.rewards != rewards:
            raise NotNative("its specs are not those of its spaces")

    def check(self) -> None:
        """See :meth:`ArrayEnv.check`."""
        if self._env.info_dict_reader:
            raise NotNative("it has readers of info")
        if any(now is not then for now, then in zip(_specs_of(self._env), self._specs, strict=True)):
            raise NotNative("its specs have changed")

    def step(self, root: Values, preset: Values) -> Values:
        """See :meth:`ArrayEnv.step`."""
        check_open(self._env, "step")
        try:
            return self._env.step_values(root)
        except RollwrightError:
            raise
        except Exception as error:
            raise named_error(self._env, "step", error) from error

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        check_open(self._env, "reset")
        try:
            return self._env.reset_values(None if rows is None else rows.reshape(-1), **kwargs)
        except RollwrightError:
            raise
        except Exception as error:
            raise named_error(self._env, "reset", error) from error

    # One of several environments in this process ------------------------------------------------------

    @property
    def takes_rows(self) -> bool:
        """See :attr:`ArrayEnv.takes_rows`: it is a single environment, without objects."""
        return not self.batch and not objects_of(self.entries)

    def row_actions(self, root: Values, num_rows: int) -> Sequence[Any] | None:
        """See :meth:`ArrayEnv.row_actions`."""
        return self._env.row_actions(root, num_rows)

    def step_row(self, action: Any, out: Values, i: int) -> None:
        """See :meth:`ArrayEnv.step_row`."""
        env = self._env
        if env.is_closed:
            check_open(env, "step")
        try:
            env.step_row(action, out, i)
        except RollwrightError:
            raise
        except Exception as error:
            raise named_error(env, "step", error) from error
