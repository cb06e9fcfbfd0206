"""The array form of SerialEnv: environments on arrays, stepped in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
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
from rollwright.envs.each import own_kwargs
from rollwright.envs.on_arrays.tensordicts import as_tensordict
from rollwright.errors import EnvError, NotNative

if TYPE_CHECKING:
    from rollwright.envs.serial import SerialEnv


class SerialArrays(ArrayEnv):
    """The array form of a :class:`SerialEnv`: environments on arrays that are stepped in turn, one a row.

    Raises:
        NotNative: one of its environments has no array form, or they differ.
    """

    def __init__(self, env: SerialEnv, known: type[SerialEnv]) -> None:
        refuse_overrides(env, known)
        self._env, self._openings = env, env.openings
        self._parts = [array_form(part, unfit=True) for part in env.known_parts()]
        first = self._parts[0]
        if any(_facts(part) != _facts(first) for part in self._parts):
            raise NotNative("its environments differ in their entries")
        self.batch = (len(self._parts), *first.batch)
        self.entries, self.rewards = self._widened(first.entries), self._widened(first.rewards)
        self.reads, self.nests, self.flags = first.reads, first.nests, self._widened(first.flags)
        self.root_flags, self.done_follows, self.may_be_unfit = first.root_flags, first.done_follows, first.may_be_unfit
        check_flags(env, self.flags, lacks_truncated=len(self.root_flags) < len(FLAGS))
        self._in_turn = first.in_turn(self._parts, env.named_error)
        self._last: Values = {}  # outcomes of the step before
        self.on_tensordicts, self.held_back = first.on_tensordicts, first.held_back
        self._outcome = {**self.carried, **self.rewards, **_flags(FLAGS, self.batch)}

    def _widened(self, entries: Mapping[NestedKey, Entry]) -> dict[NestedKey, Entry]:
        workers = self.batch[0]
        return {key: Entry((workers, *shape), dtype, column) for key, (shape, dtype, column) in entries.items()}

    def check(self) -> None:
        """See :meth:`ArrayEnv.check`."""
        if self._env.openings != self._openings:
            raise NotNative("its environments were closed, and others were made")
        for part in self._parts:
            part.check()

    def step(self, root: Values, preset: Values) -> Values:
        """See :meth:`ArrayEnv.step`."""
        if self._env.is_closed:
            check_open(self._env, "step")
        marks, last = root.get(STEPPED), self._last
        taken: Sequence[Callable[[], Values]] | None = None
        if self._in_turn is not None and marks is None:
            stepped = self._in_turn(root)
            if isinstance(stepped, dict):
                self._last = dict(stepped)
                return stepped
            taken = stepped
        out: Values = _blank(self._outcome)
        unfit: dict[int, UnfitOutcome] = {}
        if self.may_be_unfit:  # which may change what the policy has written
            out.update({key: value.copy() for key, value in preset.items() if key not in out})
        for i, part in enumerate(self._parts):
            if marks is not None and last and not np.any(marks[i]):
                for key, value in last.items():
                    out[key][i] = value[i]
                continue
            try:
                if taken is not None:
                    outcome = taken[i]()
                else:
                    mine = {key: root[key][i, ...] for key in self._seen(root)}  # with the dots, numbers are arrays too
                    if marks is not None and last:
                        mine[STEPPED] = marks[i]
                    outcome = part.step(mine, {key: value[i, ...] for key, value in preset.items()})
            except UnfitOutcome as found:
                unfit[i] = found
                continue
            except EnvError as error:
                raise self._env.named_error(i, error) from error
            for key, value in outcome.items():
                if key in out:
                    out[key][i] = value
        if unfit:
            rows = self._rows_of(out, range(len(self._parts)), unfit)
            raise UnfitOutcome(_reason(unfit), self._env.joined("step", rows))
        self._last = dict(out)
        return out

    def _seen(self, root: Values) -> Iterable[NestedKey]:
        """Keys of what an environment is given of the root."""
        return root if self.may_be_unfit else self.reads

    def see_roots(self, forms: Mapping[NestedKey, Entry]) -> None:
        """See :meth:`ArrayEnv.see_roots`."""
        of_one = {key: Entry(shape[1:], dtype, column) for key, (shape, dtype, column) in forms.items()}
        for part in self._parts:
            part.see_roots(of_one)

    def _rows_of(
        self, values: Values, places: Sequence[int], unfit: Mapping[int, UnfitOutcome]
    ) -> list[TensorDictBase]:
        """An outcome of which some rows do not fit arrays.

        Args:
            values: of the rows that fit.
            places: that hold something; the others have a copy of the first of them.
            unfit: what the rows at some places are.
        """
        part = self._parts[0]
        flags = _flags(part.root_flags, part.batch)
        values = {key: value for key, value in values.items() if key not in FLAGS or key in flags}
        forms = {**part.carried, **part.rewards, **flags}
        rows: dict[int, TensorDictBase] = {i: found.outcome for i, found in unfit.items()}
        for i in set(places) - rows.keys():
            mine = {key: np.array(value[i, ...]) for key, value in values.items()}
            rows[i] = as_tensordict(mine, forms, torch.Size(part.batch), None)
        return [rows[i] if i in rows else rows[places[0]].clone() for i in range(len(self._parts))]

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        return self._reset(rows, None, kwargs)

    def reset_from(self, root: Values, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset_from`."""
        return self._reset(rows, root, kwargs)

    def _reset(self, rows: Rows | None, root: Values | None, kwargs: dict[str, Any]) -> Values:
        check_open(self._env, "reset")
        self._env.seed_for_reset(kwargs)
        out, blank = _blank(self.carried), rows is not None
        unfit: dict[int, UnfitOutcome] = {}
        places = range(len(self._parts)) if rows is None else _marked(rows)
        for i in places:
            part, mask = self._parts[i], None if rows is None else np.asarray(rows[i])
            try:
                own = own_kwargs(kwargs, i) if kwargs else kwargs
                if root is None or not self.may_be_unfit:
                    fresh = part.reset(mask, **own)
                else:
                    fresh = part.reset_from({key: value[i, ...] for key, value in root.items()}, mask, **own)
            except UnfitOutcome as found:
                unfit[i] = found
                continue
            except EnvError as error:
                raise self._env.named_error(i, error) from error
            for key, memory in out.items():
                memory[slice(None) if blank else i] = fresh[key]  # the others are not read, and hold nothing by chance
            blank = False
        if unfit:
            off: Any = np.zeros(self.batch, np.bool_)
            fresh = self._rows_of({**out, **dict.fromkeys(FLAGS, off)}, places, unfit)
            raise UnfitOutcome(_reason(unfit), self._env.joined("reset", fresh, whole=root is None))
        return out


def _reason(unfit: Mapping[int, UnfitOutcome]) -> str:
    return str(next(iter(unfit.values())))


def _flags(names: Sequence[str], batch: tuple[int, ...]) -> dict[NestedKey, Entry]:
    return {name: Entry((*batch, 1), np.dtype(np.bool_), True) for name in names}


def _facts(form: ArrayEnv) -> tuple[Any, ...]:
    """What the environments of a batch have in common."""
    entries = form.entries, form.rewards, form.reads, dict(form.flags), dict(form.nests)
    return *entries, form.root_flags, form.done_follows, form.may_be_unfit


def _marked(rows: Rows) -> list[int]:
    """The environments of which a row, or a part of it, is marked."""
    marked: list[int] = np.flatnonzero(rows if rows.ndim == 1 else rows.reshape(len(rows), -1).any(-1)).tolist()
    return marked


def _blank(entries: dict[NestedKey, Entry]) -> Values:
    """New arrays, their content left open."""
    return {
        key: np.empty(entry.shape[:-1] if entry.column else entry.shape, entry.dtype) for key, entry in entries.items()
    }
