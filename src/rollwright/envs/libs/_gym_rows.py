"""Steps single gymnasium environments in turn, each of which writes its row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rollwright._keys import NestedKey
from rollwright.envs.arrays import Entry, NameRow, Values, check_open, named_error
from rollwright.errors import EnvError, RollwrightError, SpecError

if TYPE_CHECKING:
    from rollwright.envs.libs.gym import GymWrapper


FLAG_TYPES = (bool, np.bool_)  # what flags of a single environment are, as a rule


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
        """Raise what an environment's step ended with, as :meth:`LibraryArrays.step` and who calls it do."""
        if isinstance(error, RollwrightError) and not isinstance(error, EnvError):
            raise error
        try:
            if isinstance(error, EnvError):
                raise error
            raise named_error(env, "step", error) from error
        except EnvError as named:
            raise self._name_error(i, named) from named
