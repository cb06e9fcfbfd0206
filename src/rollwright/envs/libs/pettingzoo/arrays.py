"""The array form of PettingZooWrapper: what PettingZoo returns, as arrays of each group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rollwright._keys import as_tuple
from rollwright.data.specs import Composite
from rollwright.envs._checks import done_after_reset
from rollwright.envs.arrays import (
    FLAGS,
    ArrayEnv,
    Rows,
    Values,
    check_flags,
    check_open,
    entries_of,
    named_error,
    refuse_overrides,
)
from rollwright.envs.base import EnvBase
from rollwright.errors import NotNative, RollwrightError

if TYPE_CHECKING:
    from rollwright.envs.libs.pettingzoo.env import PettingZooWrapper

__all__ = ["PettingZooArrays"]


def _specs_of(env: EnvBase) -> tuple[Composite, ...]:
    return env.full_observation_spec, env.full_action_spec, env.full_reward_spec, env.full_done_spec


class PettingZooArrays(ArrayEnv):
    """The array form of a :class:`PettingZooWrapper`.

    Raises:
        NotNative: the environment was subclassed in how it steps, its specs are others, or it holds objects.
    """

    def __init__(self, env: PettingZooWrapper, known: type[PettingZooWrapper]) -> None:
        refuse_overrides(env, known)
        self._env, self._inner = env, env.pettingzoo_env
        self.batch = ()
        flags = entries_of(env.full_done_spec, 0)
        self.flags = {key: entry for key, entry in flags.items() if key not in FLAGS}
        check_flags(env, self.flags)
        self.entries = entries_of(env.full_observation_spec, 0)
        self.rewards = entries_of(env.full_reward_spec, 0)
        self.nests = {name: (len(agents),) for name, agents in env.group_map.items()}
        self.reads = list(env.action_keys)
        self._specs = _specs_of(env)
        rewards = {(name, "reward") for name in env.group_map}
        if self.entries.keys() != set(env.space_keys) or self.rewards.keys() != rewards:
            raise NotNative("its specs are not those of its spaces")
        if env.allow_done_after_reset:
            raise NotNative("allow_done_after_reset=True")

    def check(self) -> None:
        """See :meth:`ArrayEnv.check`."""
        if any(now is not then for now, then in zip(_specs_of(self._env), self._specs, strict=True)):
            raise NotNative("its specs have changed")
        if self._env.pettingzoo_env is not self._inner:
            raise NotNative("its environment of PettingZoo is another one")

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
            fresh = self._env.reset_values(**kwargs)
        except RollwrightError:
            raise
        except Exception as error:
            raise named_error(self._env, "reset", error) from error
        for key in (*FLAGS[:1], *self.flags):
            if as_tuple(key)[-1] == "done" and np.any(fresh[key]):
                raise done_after_reset(self._env, key)
        return fresh
