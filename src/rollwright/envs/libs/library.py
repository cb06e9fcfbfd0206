"""LibraryEnv: an environment of another library, whose values are arrays; TensorDicts are made of them here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, place, unravel
from rollwright.data.entries import unchecked_td
from rollwright.data.specs import Composite
from rollwright.envs._results import complete_reset, complete_step, done_after_reset
from rollwright.envs.arrays import (
    FLAGS,
    STEPPING,
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
    objects_of,
    raise_named,
    refuse_overrides,
)
from rollwright.envs.base import EnvBase
from rollwright.errors import NotNative

_METHODS = (*STEPPING, "_step", "_reset")
_COLUMNS = ("reward", *FLAGS)  # ``[*batch]``, and in a TensorDict ``[*batch, 1]``


class LibraryEnv(EnvBase):
    """An environment of another library: a subclass steps it on arrays, and its data follow from its spaces.

    Attributes:
        space_keys: keys of what a reset gives beside flags and what readers of ``info`` add.
        space_rewards: what a step gives beside that, and flags.
        inner_name: of the attribute that is the other library's environment.
        nests: names of nested entries with a longer batch size than the root, and what it has more.
        returns_tensors: whether the other library's values are tensors.
    """

    returns_copies = True  # readers copy
    returns_tensors = False
    info_dict_reader: Sequence[Any] = ()
    nests: dict[str, tuple[int, ...]] = {}  # noqa: RUF012 - those that have any set their own
    space_keys: list[NestedKey]
    space_rewards: dict[NestedKey, Entry]
    inner_name: str

    @abstractmethod
    def step_values(self, given: TensorDictBase | Values) -> Values:
        """Act, by the actions among ``given``; the content of ``"next"`` as arrays."""

    @abstractmethod
    def reset_values(self, rows: Rows | None, **kwargs: Any) -> Values:
        """Begin new trajectories where ``rows``, flat, marks; what the first steps are taken from, as arrays."""

    @property
    def steps_on_arrays(self) -> bool:  # type: ignore[override]
        """See :class:`EnvBase`: where its values are no tensors."""
        return not self.returns_tensors

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.tensordict_of(self.step_values(tensordict))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        return self.tensordict_of(self.reset_data(mask, **kwargs))

    def reset_data(self, mask: torch.Tensor | None, **kwargs: Any) -> Values:
        """:meth:`reset_values` of a mask ``[*batch, 1]``; where the other library has tensors, on these."""
        return self.reset_values(None if mask is None else mask.reshape(-1).cpu().numpy(), **kwargs)

    def tensordict_of(self, values: Mapping[NestedKey, Any]) -> TensorDict:
        """The data that values by key stand for: arrays, tensors, objects; over the memory of those of the CPU."""
        nested: dict[str, Any] = {}
        batch = self.batch_size
        for key, value in values.items():
            if key in _COLUMNS and not isinstance(value, torch.Tensor):
                value = np.asarray(value).reshape(*batch, 1)
            place(nested, key, torch.from_numpy(value) if isinstance(value, np.ndarray) else value)
        for name, size in self.nests.items():
            nested[name] = unchecked_td(nested[name], torch.Size([*batch, *size]))
        data, device = unchecked_td(nested, batch), self.device
        return data if device is None else data.to(device)

    def in_turn(
        self, envs: Sequence[LibraryEnv], entries: dict[NestedKey, Entry], name_error: NameRow
    ) -> RowsStep | None:
        """A function that steps such environments, which return ``entries``; see :meth:`ArrayEnv.in_turn`."""
        return None

    def _array_form(self) -> ArrayEnv:
        return LibraryArrays(self)


def _specs_of(env: EnvBase) -> tuple[Composite, ...]:
    return env.full_observation_spec, env.full_action_spec, env.full_reward_spec, env.full_done_spec


class LibraryArrays(ArrayEnv):
    """The array form of a :class:`LibraryEnv`.

    Raises:
        NotNative: the environment was subclassed in how it steps, its specs are others, or readers of ``info`` do not
            say what they read.
    """

    def __init__(self, env: LibraryEnv) -> None:
        refuse_overrides(env, LibraryEnv)
        self._env, self._inner, self._readers = env, getattr(env, env.inner_name), list(env.info_dict_reader)
        self.may_be_unfit, self.reads_presets = bool(self._readers), False
        self._follows_tensors = not env.returns_tensors  # where it did so before, there was a reason to take this form
        self.batch, self.nests = tuple(env.batch_size), env.nests
        flags = entries_of(env.full_done_spec, env.ndim) if env.nests else {}
        self.flags = {key: entry for key, entry in flags.items() if as_tuple(key)[0] in env.nests}
        check_flags(env, self.flags)
        self.entries = entries_of(env.full_observation_spec, env.ndim, objects=not env.ndim)
        self.rewards = entries_of(env.full_reward_spec, env.ndim, env.reward_keys)
        self.reads = list(env.action_keys)
        self._specs = _specs_of(env)
        if self.entries.keys() != {*env.space_keys, *self._read_of_info()} or self.rewards != env.space_rewards:
            raise NotNative("its specs are not those of its spaces")
        if self.flags and env.allow_done_after_reset:
            raise NotNative("allow_done_after_reset=True")
        flag = Entry((*self.batch, 1), np.dtype(np.bool_), True)
        self._after_reset = _forms(self.entries)
        self._after_step = {**self._after_reset, **_forms(self.rewards), **_forms(dict.fromkeys(FLAGS, flag))}

    @property
    def wrapper(self) -> LibraryEnv:
        """The environment that this is the form of."""
        return self._env

    def _read_of_info(self) -> list[NestedKey]:
        """Entries that readers of ``info`` announce."""
        specs = [getattr(reader, "info_spec", None) for reader in self._readers]
        if None in specs:
            raise NotNative("a reader of info has no info_spec, which says what it reads")
        if self._readers and objects_of(self.entries):
            raise NotNative("it has entries that hold objects, and readers of info")
        return [unravel(key) for spec in specs for key in cast(Composite, spec).leaves()]

    def check(self) -> None:
        """Test that the environment is what this form was made of; to be called once a batch."""
        if self._env.returns_tensors and self._follows_tensors:
            raise NotNative("it returns tensors")
        now = self._env.info_dict_reader
        if len(now) != len(self._readers) or not all(map(is_, now, self._readers)):
            raise NotNative("its readers of info have changed")
        if not all(map(is_, _specs_of(self._env), self._specs)):
            raise NotNative("its specs have changed")
        if not vars(self._env).keys().isdisjoint(_METHODS):
            raise NotNative("methods of it were exchanged")
        if getattr(self._env, self._env.inner_name) is not self._inner:
            raise NotNative("the environment in it is another one")

    def step(self, root: Values, preset: Values) -> Values:
        """Act."""
        if self._env.is_closed:
            check_open(self._env, "step")
        try:
            values = self._env.step_values(root)
        except Exception as error:
            raise_named(self._env, "step", error)
        if self._readers and _forms_of(values) != self._after_step:
            raise _unfit(complete_step(self._env, unchecked_td({}), self._env.tensordict_of(values)))
        return values

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """Begin new trajectories in the environments that ``rows``, bool ``[*batch]``, marks; None: in all."""
        check_open(self._env, "reset")
        try:
            values = self._env.reset_values(None if rows is None else rows.reshape(-1), **kwargs)
        except Exception as error:
            raise_named(self._env, "reset", error)
        if self._readers and _forms_of(values) != self._after_reset:
            given = None if rows is None else unchecked_td({})
            raise _unfit(complete_reset(self._env, given, self._env.tensordict_of(values)))
        for key in (*FLAGS[:1], *self.flags) if self.flags else ():
            if as_tuple(key)[-1] == "done" and np.any(values[key]):
                raise done_after_reset(self._env, key)
        return values

    def in_turn(self, parts: Sequence[ArrayEnv], name_error: NameRow) -> RowsStep | None:
        """See :meth:`ArrayEnv.in_turn`: where all are of one class, without objects or readers of ``info``."""
        envs = [part.wrapper for part in parts if isinstance(part, LibraryArrays)]
        if self._readers or objects_of(self.entries) or len(envs) < len(parts):
            return None
        return self._env.in_turn(envs, self.entries, name_error)


def _unfit(outcome: TensorDictBase) -> UnfitOutcome:
    return UnfitOutcome("a reader of info writes what its info_spec does not announce", outcome)


def _forms(entries: Mapping[Any, Entry]) -> dict[NestedKey, Any]:
    """Shapes and dtypes in row form."""
    return {key: (entry.shape[:-1] if entry.column else entry.shape, entry.dtype) for key, entry in entries.items()}


def _forms_of(values: Values) -> dict[NestedKey, Any]:
    return {key: _form_of(value) for key, value in values.items()}


def _form_of(value: Any) -> Any:
    if isinstance(value, (bool, np.generic, np.ndarray)):
        array = np.asarray(value)
        return array.shape, array.dtype
    return None
