"""The array form of a TransformedEnv whose transforms only keep the books: rows in, rows out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from operator import is_
from typing import Any

import numpy as np
import torch

from rollwright._keys import NestedKey, unravel
from rollwright.data.specs import NonTensor
from rollwright.envs.arrays import (
    ArrayEnv,
    Entry,
    Rows,
    Values,
    check_flags,
    check_open,
    entries_of,
    named_error,
    refuse_overrides,
)
from rollwright.envs.transforms.base import Transform
from rollwright.envs.transforms.bookkeeping import InitTracker, RewardSum, StepCounter
from rollwright.envs.transforms.compose import Compose
from rollwright.envs.transforms.primer import TensorDictPrimer
from rollwright.envs.transforms.transformed_env import TransformedEnv
from rollwright.errors import NotNative, RollwrightError

__all__ = ["TransformedArrays"]


class RowTransform(ABC):
    """What a transform does to the content of ``"next"``, and to first observations, on arrays.

    Attributes:
        entries: what it adds.
        reads: what it reads from the root.
    """

    entries: dict[NestedKey, Entry]
    reads: list[NestedKey]

    @abstractmethod
    def step(self, root: Values, out: Values) -> None:
        """Change ``out``, the content of ``"next"`` of the step that began at ``root``."""

    @abstractmethod
    def reset(self, fresh: Values) -> None:
        """Add first values to ``fresh``; rows that do not begin anew are dropped later."""


def _column(batch: tuple[int, ...], dtype: type[np.generic], value: int) -> Any:
    """A constant as a column: an array ``[*batch]``, or a number."""
    return np.full(batch, value, dtype) if batch else dtype(value)


class MarkFirst(RowTransform):
    """:class:`InitTracker` on rows."""

    def __init__(self, transform: InitTracker, env: ArrayEnv) -> None:
        self.key = transform._entries[0][1]
        self.entries = {self.key: Entry((*env.batch, 1), np.dtype(np.bool_), True)}
        self.reads = []
        self._no, self._yes = _column(env.batch, np.bool_, 0), _column(env.batch, np.bool_, 1)

    def step(self, root: Values, out: Values) -> None:
        """See :meth:`RowTransform.step`."""
        out[self.key] = self._no

    def reset(self, fresh: Values) -> None:
        """See :meth:`RowTransform.reset`."""
        fresh[self.key] = self._yes


class CountSteps(RowTransform):
    """:class:`StepCounter` on rows."""

    def __init__(self, transform: StepCounter, env: ArrayEnv) -> None:
        if transform.max_steps is not None and (transform.truncated_key != "truncated" or not transform.update_done):
            raise NotNative("StepCounter sets another flag than done and truncated")
        self.key = transform._entries[0][1]
        self.entries = {self.key: Entry((*env.batch, 1), np.dtype(np.int64), True)}
        self.reads = [self.key]
        self._transform = transform
        self._zero = _column(env.batch, np.int64, 0)

    def step(self, root: Values, out: Values) -> None:
        """See :meth:`RowTransform.step`."""
        out[self.key] = count = root[self.key] + 1
        most = self._transform.max_steps
        if most is not None:
            cut = count >= most
            out["truncated"] = out["truncated"] | cut
            out["done"] = out["done"] | cut

    def reset(self, fresh: Values) -> None:
        """See :meth:`RowTransform.reset`."""
        fresh[self.key] = self._zero


class SumRewards(RowTransform):
    """:class:`RewardSum` on rows."""

    def __init__(self, transform: RewardSum, env: ArrayEnv) -> None:
        if transform.reset_keys:
            raise NotNative("RewardSum has reset_keys")
        self._pairs = transform._pairs()
        unknown = [key for key, _ in self._pairs if key not in env.rewards]
        if unknown:
            raise NotNative(f"RewardSum sums {unknown[0]!r}")
        self.entries = {out_key: env.rewards[in_key] for in_key, out_key in self._pairs}
        self.reads = list(self.entries)
        self._zero = {
            key: _column(env.batch, entry.dtype.type, 0) if entry.column else np.zeros(entry.shape, entry.dtype)
            for key, entry in self.entries.items()
        }

    def step(self, root: Values, out: Values) -> None:
        """See :meth:`RowTransform.step`."""
        for in_key, out_key in self._pairs:
            out[out_key] = root[out_key] + out[in_key]

    def reset(self, fresh: Values) -> None:
        """See :meth:`RowTransform.reset`."""
        fresh.update(self._zero)


class Prime(RowTransform):
    """:class:`TensorDictPrimer` on rows."""

    def __init__(self, transform: TensorDictPrimer, env: ArrayEnv) -> None:
        if transform.single_default_value or transform.reset_key is not None:
            raise NotNative("TensorDictPrimer has a reset_key, or one default value for all")
        self._transform = transform
        self._specs = transform._placed(torch.Size(env.batch))
        if any(isinstance(spec, NonTensor) for spec in self._specs.values()):
            raise NotNative("TensorDictPrimer holds objects")
        spec = transform.transform_observation_spec(transform.primers.empty().expand(env.batch))
        self.entries = entries_of(spec, len(env.batch))
        self.reads = list(self._specs)

    def step(self, root: Values, out: Values) -> None:
        """See :meth:`RowTransform.step`."""
        for key in self._specs:
            if key not in out:
                out[key] = root[key]

    def reset(self, fresh: Values) -> None:
        """See :meth:`RowTransform.reset`."""
        for key, spec in self._specs.items():
            fresh[key] = self._transform._first(key, spec).detach().cpu().numpy()


FORMS: dict[type[Transform], Any] = {
    InitTracker: MarkFirst,
    StepCounter: CountSteps,
    RewardSum: SumRewards,
    TensorDictPrimer: Prime,
}


OVERRIDABLE = {"_apply_transform", "_call", "_reset", "_step"}  # on an instance


def _same(now: list[Transform], then: list[Transform]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


def _chain(transform: Transform) -> list[Transform]:
    if type(transform) is Compose:
        return [part for child in transform for part in _chain(child)]
    return [transform]


class TransformedArrays(ArrayEnv):
    """The array form of a :class:`TransformedEnv`.

    Raises:
        NotNative: a transform works on TensorDicts, or the environment has no array form.
    """

    def __init__(self, env: TransformedEnv, base: ArrayEnv | None = None) -> None:
        refuse_overrides(env, TransformedEnv)
        check_flags(env)
        if not env.cache_specs:
            raise NotNative("cache_specs=False")
        self._env = env
        self._base = base = env.base_env._array_form() if base is None else base
        self.batch, self.rewards = base.batch, base.rewards
        self.entries, self.reads = dict(base.entries), list(base.reads)
        self._rows: list[RowTransform] = []
        self._transforms = _chain(env.transform)
        for transform in self._transforms:
            if type(transform) not in FORMS or OVERRIDABLE & vars(transform).keys():
                raise NotNative(f"{type(transform).__name__} works on TensorDicts")
            rows = FORMS[type(transform)](transform, base)
            self._rows.append(rows)
            self.entries.update(rows.entries)
            self.reads += [key for key in rows.reads if key not in self.reads]
        if self.entries.keys() != {unravel(key) for key in env.observation_keys}:
            raise NotNative("its specs are not those of its transforms")

    @property
    def resets_ahead(self) -> bool:
        """See :class:`ArrayEnv`."""
        return self._base.resets_ahead

    @resets_ahead.setter
    def resets_ahead(self, value: bool) -> None:
        self._base.resets_ahead = value

    def check(self) -> None:
        """See :meth:`ArrayEnv.check`."""
        self._base.check()
        if not _same(_chain(self._env.transform), self._transforms):
            raise NotNative("its transforms have changed")

    def step(self, root: Values, preset: Values) -> Values:
        """See :meth:`ArrayEnv.step`."""
        check_open(self._env, "step")
        return self._transformed(root, preset, self._base.step(root, preset))

    def _transformed(self, root: Values, preset: Values, out: Values) -> Values:
        for key, value in preset.items():
            out.setdefault(key, value)
        try:
            for rows in self._rows:
                rows.step(root, out)
        except KeyError as error:
            raise named_error(self._env, "step", error) from error
        return out

    def groups(self, number: int) -> list[ArrayEnv]:
        """See :meth:`ArrayEnv.groups`."""
        return [TransformedArrays(self._env, base) for base in self._base.groups(number)]

    def send(self, root: Values, preset: Values) -> None:
        """See :meth:`ArrayEnv.send`."""
        check_open(self._env, "step")
        self._base.send(root, preset)
        self._sent = root, preset

    def receive(self) -> Values:
        """See :meth:`ArrayEnv.receive`."""
        return self._transformed(*self._sent, self._base.receive())

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        check_open(self._env, "reset")
        fresh = self._base.reset(rows, **kwargs)
        try:
            for transform in self._rows:
                transform.reset(fresh)
        except RollwrightError:
            raise
        except Exception as error:
            raise named_error(self._env, "reset", error) from error
        return fresh
