"""The array form of SerialEnv: environments on arrays, stepped in turn; and its steps on TensorDicts, taken there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rollwright._keys import NestedKey, place
from rollwright.data.unchecked import unchecked_td
from rollwright.envs.arrays import (
    FLAGS,
    STEPPED,
    ArrayEnv,
    Entry,
    Rows,
    UnfitOutcome,
    Values,
    array_form,
    check_flags,
    check_open,
    refuse_overrides,
)
from rollwright.envs.each import own_kwargs, renamed
from rollwright.errors import EnvError, NotNative, RollwrightError

if TYPE_CHECKING:
    from rollwright.envs.serial import SerialEnv

__all__ = ["SerialArrays", "SerialSteps", "TurnArrays"]


class TurnArrays(ArrayEnv):
    """Environments on arrays that are stepped in turn, one a row.

    Args:
        parts: the environments.
        name: of the batch, for errors.

    Attributes:
        outcome: what a step returns, flags included.

    Raises:
        NotNative: they differ.
    """

    def __init__(self, parts: Sequence[ArrayEnv], name: str) -> None:
        self._parts, self._name = list(parts), name
        first = self._parts[0]
        for part in self._parts:
            if _facts(part) != _facts(first):
                raise NotNative("its environments differ in their entries")
        self.batch = (len(self._parts), *first.batch)
        self.entries, self.rewards = self._widened(first.entries), self._widened(first.rewards)
        self.reads, self.nests, self.flags = first.reads, first.nests, self._widened(first.flags)
        self.root_flags, self.done_follows, self.may_be_unfit = first.root_flags, first.done_follows, first.may_be_unfit
        self._in_turn = first.in_turn(self._parts, self._named_error)
        self._last: Values = {}  # outcomes of the step before
        flag = Entry((*self.batch, 1), np.dtype(np.bool_), True)
        self.outcome = {**self.carried, **self.rewards, **dict.fromkeys(cast("tuple[NestedKey, ...]", FLAGS), flag)}

    def _widened(self, entries: Mapping[NestedKey, Entry]) -> dict[NestedKey, Entry]:
        workers = self.batch[0]
        return {key: Entry((workers, *shape), dtype, column) for key, (shape, dtype, column) in entries.items()}

    def check(self) -> None:
        """See :meth:`ArrayEnv.check`."""
        for part in self._parts:
            part.check()

    def step(self, root: Values, preset: Values) -> Values:
        """See :meth:`ArrayEnv.step`."""
        reads, marks, last = self.reads, root.get(STEPPED), self._last
        if self._in_turn is not None and marks is None:
            stepped = self._in_turn(root)
            if stepped is not None:
                self._last = dict(stepped)
                return stepped
        out = _blank(self.outcome)
        for i, part in enumerate(self._parts):
            mine = {key: root[key][i, ...] for key in reads}  # with the dots, a single number is an array too
            if marks is not None and last:
                if not np.any(marks[i]):
                    for key, value in last.items():
                        out[key][i] = value[i]
                    continue
                mine[STEPPED] = marks[i]
            try:
                outcome = part.step(mine, {key: value[i, ...] for key, value in preset.items()} if preset else preset)
            except EnvError as error:
                raise self._named_error(i, error) from error
            except UnfitOutcome:
                self._hold("step", range(i) if marks is None else [j for j in range(i) if np.any(marks[j])])
                raise
            for key, value in outcome.items():
                if key in out:
                    out[key][i] = value
        self._last = dict(out)
        return out

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        out = _blank(self.carried)
        marked = range(len(self._parts)) if rows is None else _marked(rows)
        root = None if rows is None or self.root_for_reset is None else self.root_for_reset().unbind(0)
        for i in marked:
            part = self._parts[i]
            part.root_for_reset = None if root is None else partial(_same, root[i])
            try:
                own = own_kwargs(kwargs, i) if kwargs else kwargs
                fresh = part.reset(None if rows is None else np.asarray(rows[i]), **own)
            except EnvError as error:
                raise self._named_error(i, error) from error
            except UnfitOutcome:
                self._hold("reset", [j for j in marked if j < i])
                raise
            for key, memory in out.items():
                memory[i] = fresh[key]
        return out

    def hold(self, call: str) -> None:
        """See :meth:`ArrayEnv.hold`."""
        self._hold(call, range(len(self._parts)))

    def _hold(self, call: str, parts: Iterable[int]) -> None:
        for i in parts:
            self._parts[i].hold(call)

    def _named_error(self, i: int, error: RollwrightError) -> RollwrightError:
        return renamed(f"{self._name}[{i}]", error)


class SerialArrays(TurnArrays):
    """The array form of a :class:`SerialEnv`.

    Raises:
        NotNative: one of its environments has no array form, or they differ.
    """

    def __init__(self, env: SerialEnv, known: type[SerialEnv]) -> None:
        refuse_overrides(env, known)
        self._env, self._openings = env, env.openings
        parts = [array_form(getattr(env, f"worker{i}"), unfit=True) for i in range(env.num_workers)]
        super().__init__(parts, type(env).__name__)
        check_flags(env, self.flags, lacks_truncated=len(self.root_flags) < len(FLAGS))

    def check(self) -> None:
        """See :meth:`ArrayEnv.check`."""
        if self._env.openings != self._openings:
            raise NotNative("its environments were closed, and others were made")
        super().check()

    def step(self, root: Values, preset: Values) -> Values:
        """See :meth:`ArrayEnv.step`."""
        if self._env.is_closed:
            check_open(self._env, "step")
        return super().step(root, preset)

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        check_open(self._env, "reset")
        self._env.seed_for_reset(kwargs)
        return super().reset(rows, **kwargs)


class SerialSteps:
    """Steps of a :class:`SerialEnv` on TensorDicts, taken on arrays.

    Args:
        env: the environment.
    """

    def __init__(self, env: SerialEnv) -> None:
        self._env = env
        self._arrays: TurnArrays | None = None
        self._may_be_native = True

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Step all environments; None: it cannot be done so, and nothing was stepped."""
        env = self._env
        if not self._may_be_native or type(tensordict) is not TensorDict or tensordict.get("next", None) is not None:
            return None
        arrays = self._form()
        if arrays is None:
            return None
        root: Values = {}
        for key in arrays.reads:
            value = tensordict.get(key, None)
            if type(value) is not Tensor or value.dtype is torch.bfloat16 or value.device.type != "cpu":
                return None
            entry, array = arrays.entries.get(key), value.detach().numpy()
            root[key] = array[..., 0] if entry is not None and entry.column else array
        nested: dict[str, Any] = {}
        out = arrays.step(root, {})
        for key, (shape, dtype, _) in arrays.outcome.items():
            place(nested, key, torch.from_numpy(np.asarray(out[key], dtype).reshape(shape)))
        for name, size in arrays.nests.items():
            nested[name] = unchecked_td(nested[name], torch.Size([*arrays.batch, *size]), device=env.device)
        return unchecked_td(nested, env.batch_size, device=env.device)

    def _form(self) -> TurnArrays | None:
        """The array form as it is now."""
        try:
            if self._arrays is not None:
                self._arrays.check()
                return self._arrays
        except NotNative:
            self._arrays = None
        try:
            self._arrays = self._made()
        except NotNative:  # and the same at each step, until its environments are others
            self._may_be_native = False
        return self._arrays

    def _made(self) -> TurnArrays:
        if self._env.device is not None and self._env.device.type != "cpu":
            raise NotNative("its data is not on the CPU")
        if self._env.ndim != 1:
            raise NotNative("a batch in it has a memory of its own of what was stepped")
        made = array_form(self._env)
        if not isinstance(made, TurnArrays):
            raise NotNative("its array form is another one")
        return made


def _facts(form: ArrayEnv) -> tuple[Any, ...]:
    """What the environments of a batch have in common."""
    entries = form.entries, form.rewards, form.reads, dict(form.flags), dict(form.nests)
    return *entries, form.root_flags, form.done_follows, form.may_be_unfit


def _same(td: TensorDictBase) -> TensorDictBase:
    return td


def _marked(rows: Rows) -> list[int]:
    """The environments of which a row, or a part of it, is marked."""
    marked: list[int] = np.flatnonzero(rows if rows.ndim == 1 else rows.reshape(len(rows), -1).any(-1)).tolist()
    return marked


def _blank(entries: dict[NestedKey, Entry]) -> Values:
    """New arrays, their content left open."""
    return {
        key: np.empty(entry.shape[:-1] if entry.column else entry.shape, entry.dtype) for key, entry in entries.items()
    }
