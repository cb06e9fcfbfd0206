"""The array form of SerialEnv: environments on arrays, stepped in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rollwright._keys import NestedKey
from rollwright.envs.arrays import (
    STEPPED,
    Entry,
    Rows,
    UnfitOutcome,
    Values,
    array_form,
    check_open,
    refuse_overrides,
)
from rollwright.envs.batched.batch_arrays import ArrayFacts, BatchArrays, blank
from rollwright.envs.each import own_kwargs
from rollwright.errors import EnvError, NotNative

if TYPE_CHECKING:
    from rollwright.envs.serial import SerialEnv


class SerialArrays(BatchArrays):
    """The array form of a :class:`SerialEnv`: environments on arrays that are stepped in turn, one a row.

    Raises:
        NotNative: one of its environments has no array form, or they differ.
    """

    def __init__(self, env: SerialEnv, known: type[SerialEnv]) -> None:
        refuse_overrides(env, known)
        self._env, self._openings = env, env.openings
        self._parts = [array_form(part, unfit=True) for part in env.known_parts()]
        self._describe(env, [ArrayFacts.of(part) for part in self._parts], len(self._parts), below=True)
        self.reads_presets = any(part.reads_presets for part in self._parts)
        self._in_turn = self._parts[0].in_turn(self._parts, env.named_error)
        self._last: Values = {}  # outcomes of the step before

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
        out: Values = blank({**self._outcome_forms, "truncated": self._outcome_forms["done"]})
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
            raise self._unfit(self._env, "step", out, range(len(self._parts)), unfit)
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

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        return self._reset(rows, None, kwargs)

    def reset_from(self, root: Values, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset_from`."""
        return self._reset(rows, root, kwargs)

    def _reset(self, rows: Rows | None, root: Values | None, kwargs: dict[str, Any]) -> Values:
        check_open(self._env, "reset")
        self._env.seed_for_reset(kwargs)
        out, is_first = blank(self.carried), rows is not None
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
                memory[slice(None) if is_first else i] = fresh[
                    key
                ]  # the others are not read, and hold nothing by chance
            is_first = False
        if unfit:
            raise self._unfit(self._env, "reset", out, places, unfit, whole=root is None)
        return out


def _marked(rows: Rows) -> list[int]:
    """The environments of which a row, or a part of it, is marked."""
    marked: list[int] = np.flatnonzero(rows if rows.ndim == 1 else rows.reshape(len(rows), -1).any(-1)).tolist()
    return marked
