"""The array form of SerialEnv: environments on arrays, stepped in turn; and its steps on TensorDicts, taken there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
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
from rollwright.envs.on_arrays.tensordicts import as_tensordict
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
        self.on_tensordicts, self.held_back = first.on_tensordicts, first.held_back
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
        marks, last = root.get(STEPPED), self._last
        taken: Sequence[Callable[[], Values]] | None = None
        if self._in_turn is not None and marks is None:
            stepped = self._in_turn(root)
            if isinstance(stepped, dict):
                self._last = dict(stepped)
                return stepped
            taken = stepped
        out: Values = _blank(self.outcome)
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
                raise self._named_error(i, error) from error
            for key, value in outcome.items():
                if key in out:
                    out[key][i] = value
        if unfit:
            raise self._unfit(out, range(len(self._parts)), unfit)
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

    def _unfit(self, values: Values, places: Sequence[int], unfit: Mapping[int, UnfitOutcome]) -> UnfitOutcome:
        """An outcome of which some rows do not fit arrays, as a lazy stack.

        Args:
            values: of the rows that fit.
            places: that hold something; the others have a copy of the first of them.
            unfit: what the rows at some places are.
        """
        part = self._parts[0]
        flags: dict[NestedKey, Entry] = dict.fromkeys(
            part.root_flags, Entry((*part.batch, 1), np.dtype(np.bool_), True)
        )
        values = {key: value for key, value in values.items() if key not in FLAGS or key in flags}
        forms = {**part.carried, **part.rewards, **flags}
        rows: dict[int, TensorDictBase] = {i: found.outcome for i, found in unfit.items()}
        for i in set(places) - rows.keys():
            mine = {key: np.array(value[i, ...]) for key, value in values.items()}
            rows[i] = as_tensordict(mine, forms, torch.Size(part.batch), None)
        whole = [rows[i] if i in rows else rows[places[0]].clone() for i in range(len(self._parts))]
        return UnfitOutcome(str(next(iter(unfit.values()))), LazyStackedTensorDict.lazy_stack(whole, 0))

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        return self._reset(rows, None, kwargs)

    def reset_from(self, root: Values, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset_from`."""
        return self._reset(rows, root, kwargs)

    def _reset(self, rows: Rows | None, root: Values | None, kwargs: dict[str, Any]) -> Values:
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
                raise self._named_error(i, error) from error
            for key, memory in out.items():
                memory[slice(None) if blank else i] = fresh[key]  # the others are not read, and hold nothing by chance
            blank = False
        if unfit:
            raise self._unfit({**out, **_no_flags(self.batch)}, places, unfit)
        return out

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
        try:
            return super().step(root, preset)
        except UnfitOutcome as found:
            raise UnfitOutcome(str(found), self._env.joined_step(found.outcome.unbind(0))) from None

    def _reset(self, rows: Rows | None, root: Values | None, kwargs: dict[str, Any]) -> Values:
        check_open(self._env, "reset")
        self._env.seed_for_reset(kwargs)
        try:
            return super()._reset(rows, root, kwargs)
        except UnfitOutcome as found:
            joined = self._env.joined_reset(found.outcome.unbind(0), whole=root is None)
            raise UnfitOutcome(str(found), joined) from None


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


def _no_flags(batch: tuple[int, ...]) -> Values:
    return {flag: np.zeros(batch, np.bool_) for flag in FLAGS}


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
