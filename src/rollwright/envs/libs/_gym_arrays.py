"""The array form of GymWrapper: what gymnasium returns, as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from rollwright._keys import NestedKey, unravel
from rollwright.data.specs import Composite
from rollwright.data.unchecked import unchecked_td
from rollwright.envs._checks import complete_reset, complete_step
from rollwright.envs.arrays import (
    FLAGS,
    ArrayEnv,
    Entry,
    NameRow,
    Rows,
    RowsStep,
    UnfitOutcome,
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
        NotNative: the environment was subclassed in how it steps, or readers of ``info`` do not say what they read.
    """

    def __init__(self, env: GymWrapper, known: type[GymWrapper]) -> None:
        refuse_overrides(env, known)
        check_flags(env)
        self._env, self._gym, self._readers = env, env.gym_env, list(env.info_dict_reader)
        self.may_be_unfit = bool(self._readers)
        self._follows_tensors = not env.returns_tensors  # where it did so before, there was a reason to take this form
        self.batch = tuple(env.batch_size)
        self.entries = entries_of(env.full_observation_spec, env.ndim, objects=not env.ndim)
        self.rewards = entries_of(env.full_reward_spec, env.ndim, env.reward_keys)
        self.reads = list(env.action_keys)
        self._specs = _specs_of(env)
        rewards = {"reward": Entry((*self.batch, 1), np.dtype(env.reward_dtype), True)}
        if self.entries.keys() != {*env.space_keys, *self._read_of_info()} or self.rewards != rewards:
            raise NotNative("its specs are not those of its spaces")
        flags = dict.fromkeys(cast("tuple[NestedKey, ...]", FLAGS), Entry((*self.batch, 1), np.dtype(np.bool_), True))
        self._after_reset, self._after_step = _forms(self.entries), _forms({**self.entries, **self.rewards, **flags})

    def _read_of_info(self) -> list[NestedKey]:
        """Entries that readers of ``info`` announce."""
        specs = [getattr(reader, "info_spec", None) for reader in self._readers]
        if None in specs:
            raise NotNative("a reader of info has no info_spec, which says what it reads")
        if self._readers and objects_of(self.entries):
            raise NotNative("it has entries that hold objects, and readers of info")
        return [unravel(key) for spec in specs for key in cast(Composite, spec).leaves()]

    def check(self) -> None:
        """See :meth:`ArrayEnv.check`."""
        if self._env.returns_tensors and self._follows_tensors:
            raise NotNative("it returns tensors")
        now = self._env.info_dict_reader
        if len(now) != len(self._readers) or not all(map(is_, now, self._readers)):
            raise NotNative("its readers of info have changed")
        if not all(map(is_, _specs_of(self._env), self._specs)):
            raise NotNative("its specs have changed")
        if self._env.gym_env is not self._gym:
            raise NotNative("its gymnasium environment is another one")

    def step(self, root: Values, preset: Values) -> Values:
        """See :meth:`ArrayEnv.step`."""
        if self._env.is_closed:
            check_open(self._env, "step")
        try:
            values = self._env.step_values(root)
        except RollwrightError:
            raise
        except Exception as error:
            raise named_error(self._env, "step", error) from error
        if self._readers and _forms_of(values) != self._after_step:
            outcome = complete_step(self._env, unchecked_td({}), self._env.tensordict_of(values))
            raise UnfitOutcome("a reader of info writes what its info_spec does not announce", outcome)
        return values

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        check_open(self._env, "reset")
        try:
            values = self._env.reset_values(None if rows is None else rows.reshape(-1), **kwargs)
        except RollwrightError:
            raise
        except Exception as error:
            raise named_error(self._env, "reset", error) from error
        if self._readers and _forms_of(values) != self._after_reset:
            given = None if rows is None else unchecked_td({})
            fresh = complete_reset(self._env, given, self._env.tensordict_of(values))
            raise UnfitOutcome("a reader of info writes what its info_spec does not announce", fresh)
        return values

    def in_turn(self, parts: Sequence[ArrayEnv], name_error: NameRow) -> RowsStep | None:
        """See :meth:`ArrayEnv.in_turn`: where all are single environments, without objects or readers of ``info``."""
        same = [part for part in parts if type(part) is GymArrays]
        if self.batch or self._readers or objects_of(self.entries) or len(same) < len(parts):
            return None
        return GymRows([part.wrapper for part in same], self.entries, name_error)

    @property
    def wrapper(self) -> GymWrapper:
        """The environment that this is the form of."""
        return self._env


def _forms(entries: Mapping[NestedKey, Entry]) -> dict[NestedKey, Any]:
    """Shapes and dtypes in row form."""
    return {key: (entry.shape[:-1] if entry.column else entry.shape, entry.dtype) for key, entry in entries.items()}


def _forms_of(values: Values) -> dict[NestedKey, Any]:
    return {key: _form_of(value) for key, value in values.items()}


def _form_of(value: Any) -> Any:
    if isinstance(value, (bool, np.generic, np.ndarray)):
        array = np.asarray(value)
        return array.shape, array.dtype
    return None


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
