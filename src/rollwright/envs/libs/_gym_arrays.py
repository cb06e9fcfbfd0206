"""The array form of GymWrapper: what gymnasium returns, as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rollwright._keys import NestedKey
from rollwright.data.specs import Composite
from rollwright.envs.arrays import (
    ArrayEnv,
    Entry,
    NameRow,
    Rows,
    RowsStep,
    Values,
    check_flags,
    check_open,
    entries_of,
    named_error,
    objects_of,
    refuse_overrides,
)
from rollwright.envs.base import EnvBase
from rollwright.errors import EnvError, NotNative, RollwrightError, SpecError

if TYPE_CHECKING:
    from rollwright.envs.libs.gym import GymWrapper

__all__ = ["FLAG_TYPES", "GymArrays"]

FLAG_TYPES = (bool, np.bool_)  # what flags of a single environment are, as a rule


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
        self._env, self._gym = env, env.gym_env
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
        if self._env.gym_env is not self._gym:
            raise NotNative("its gymnasium environment is another one")

    def step(self, root: Values, preset: Values) -> Values:
        """See :meth:`ArrayEnv.step`."""
        if self._env.is_closed:
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

    def in_turn(self, parts: Sequence[ArrayEnv], name_error: NameRow) -> RowsStep | None:
        """See :meth:`ArrayEnv.in_turn`: where all are single environments, without objects."""
        if self.batch or objects_of(self.entries) or any(type(part) is not GymArrays for part in parts):
            return None
        return GymRows([part.wrapper for part in parts if isinstance(part, GymArrays)], self.entries, name_error)

    @property
    def wrapper(self) -> GymWrapper:
        """The environment that this is the form of."""
        return self._env


class GymRows:
    """Steps single environments whose spaces are equal.

    What gymnasium returns as a rule is written at once: a tuple of five, an array that is the one observation,
    a number, two flags. All else goes through :meth:`GymWrapper.read_step`, which converts it or reports it.

    Args:
        envs: the environments.
        entries: what each returns, but for the reward and flags.
        name_error: see :meth:`ArrayEnv.in_turn`.
    """

    def __init__(self, envs: Sequence[GymWrapper], entries: dict[NestedKey, Entry], name_error: NameRow) -> None:
        first, number = envs[0], len(envs)
        self._envs = [(env, env.gym_env) for env in envs]
        self._name_error, self._number = name_error, number
        self._actions = first.row_writer(number)
        self._memory = [
            (key, (number, *(shape[:-1] if column else shape)), dtype)
            for key, (shape, dtype, column) in entries.items()
        ]
        self._key, self._dtype, self._shape = first.plain_array
        self._reward_dtype = first.reward_dtype

    def __call__(self, root: Values) -> Values | None:
        """Step all of them.

        Args:
            root: holds the actions, ``[number, ...]``.

        Returns:
            The content of ``"next"``; None: an action cannot be taken, and nothing was stepped.
        """
        try:
            actions = self._actions.rows(root)
        except SpecError:
            return None
        number, dtype, shape = self._number, self._dtype, self._shape
        out: Values = {key: np.empty(size, kind) for key, size, kind in self._memory}
        observed: Any = out.get(self._key)
        out["reward"] = rewards = np.empty(number, self._reward_dtype)
        out["terminated"] = terminated = np.zeros(number, np.bool_)
        out["truncated"] = truncated = np.zeros(number, np.bool_)
        for i, (env, gym_env) in enumerate(self._envs):
            try:
                if env.is_closed:
                    check_open(env, "step")
                values = gym_env.step(actions[i])
                if type(values) is tuple and len(values) == 5:
                    observation, reward, ended, cut, _ = values
                    if isinstance(reward, (float, int)) and type(ended) in FLAG_TYPES and type(cut) in FLAG_TYPES:
                        plain = type(observation) is np.ndarray and observation.dtype == dtype
                        if plain and observation.shape == shape:
                            observed[i] = observation
                        else:
                            env.write_observation(observation, out, i)
                        rewards[i] = reward
                        if ended:
                            terminated[i] = True
                        if cut:
                            truncated[i] = True
                        continue
                for key, value in env.read_step(values).items():
                    if key != "done":
                        out[key][i] = value
            except Exception as error:
                self._fail(i, env, error)
        out["done"] = terminated | truncated
        return out

    def _fail(self, i: int, env: GymWrapper, error: Exception) -> NoReturn:
        """Raise what an environment's step ended with, as :meth:`GymArrays.step` and who calls it do."""
        if isinstance(error, RollwrightError) and not isinstance(error, EnvError):
            raise error
        try:
            if isinstance(error, EnvError):
                raise error
            raise named_error(env, "step", error) from error
        except EnvError as named:
            raise self._name_error(i, named) from named
