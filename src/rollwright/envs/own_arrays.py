"""The array form of an environment that a user wrote: a TensorDict for its ``_step`` alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rollwright._keys import NestedKey, key_str, leaf_keys, leaves
from rollwright.data.specs import Composite
from rollwright.envs._results import check_alive, complete_reset, complete_step
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
    raise_named,
    refuse_overrides,
)
from rollwright.envs.tensordicts_on_arrays import RootTensorDicts
from rollwright.errors import NotNative, RollwrightError

if TYPE_CHECKING:
    from rollwright.envs.base import EnvBase


_HERE, _TESTING = "rollwright.", "rollwright.testing."
_SPECS = ("observation", "action", "reward", "done", "state")


def specs_of(env: EnvBase) -> tuple[Composite, ...]:
    """All specs of an environment, the same objects as long as nobody sets others."""
    return tuple(env.full_spec(name) for name in _SPECS)


def refuse_more(env: EnvBase, known: type[EnvBase], *, own: bool) -> None:
    """Test that an environment does no more than to step and to reset.

    Args:
        env: the environment.
        known: the class that steps such environments.
        own: whether it does so by a ``_step`` and a ``_reset`` of its own, not by those of ``known``.

    Raises:
        NotNative: it does, or is one of this library's, whose classes step in other ways.
    """
    kinds = type(env).__mro__[: type(env).__mro__.index(known)] if own else ()
    if any(kind.__module__.startswith(_HERE) and not kind.__module__.startswith(_TESTING) for kind in kinds):
        raise NotNative(f"{type(env).__name__} speaks TensorDict")
    refuse_overrides(env, known, but=("_step", "_reset") if own else ())
    others = {
        "batch_locked=False": not env.batch_locked,
        "stand_ins": env.stand_ins,
        "ends_with_step": env.ends_with_step,
        "read_at_reset": env.read_at_reset,
        "has_token_rewards": env.has_token_rewards,
        "states that are no observations": set(env.state_keys) - set(env.observation_keys),
    }
    for name, is_there in others.items():
        if is_there:
            raise NotNative(f"{type(env).__name__} speaks TensorDict: it has {name}")


def unfit_outcome(form: Any, call: str, completed: TensorDictBase) -> UnfitOutcome:
    """The outcome of a step or a reset that is of another form than the specs announce."""
    announced = {*form.entries, *(form.rewards if call == "step" else ()), *form.root_flags, *form.flags}
    more = [key for key in leaf_keys(completed) if key not in announced]
    what = f"{key_str(more)}, which no spec announces" if more else f"a {type(completed).__name__} of another form"
    return UnfitOutcome(f"its {call} returns {what}", completed)


Method = Callable[..., Any]


class OwnArrays(ArrayEnv):
    """The array form of a user's subclass of :class:`~rollwright.envs.EnvBase`.

    Its ``_step`` and ``_reset`` are called with the TensorDict that the plain path would give them. What they return is
    read entry by entry, where it is what the specs say; where it is not, the tests of the plain path mend or refuse it.

    Args:
        env: the environment.
        known: the class that steps such environments.
        step: the environment's ``_step``.
        reset: the environment's ``_reset``.

    Raises:
        NotNative: it does more than to step and to reset, or its data are not tensors of fixed shapes.

    Attributes:
        roots: makes what steps and resets are given.
        observed: keys, shapes and dtypes of what it observes.
        rewarded: keys, forms, dtypes and sizes of its rewards.
        cuts: whether it has ``truncated``.
    """

    may_be_unfit = True
    done_follows = False

    def __init__(self, env: EnvBase, known: type[EnvBase], step: Method, reset: Method) -> None:
        refuse_more(env, known, own=True)
        check_flags(env, lacks_truncated=True)
        if any(env.full_done_spec[key].shape != (*env.batch_size, 1) for key in env.done_keys):
            raise NotNative("its flags have another shape than [*batch_size, 1]")
        self._env, self._base, self._step, self._begin = env, known, step, reset
        self.batch = tuple(env.batch_size)
        self._batch, self._device = env.batch_size, env.device
        self.entries = entries_of(env.full_observation_spec, env.ndim)
        self.rewards = entries_of(env.full_reward_spec, env.ndim, env.reward_keys)
        self.reads = list(env.action_keys)
        self._specs = specs_of(env)
        if wide := [name for spec in self._specs for name in _nests(spec) if spec[name].shape != self._batch]:
            raise NotNative(f"its nested entries have a batch size of their own: {key_str(wide)}")
        self._is_flat = not any(map(_nests, self._specs))
        self.observed = [
            (key, torch.Size(entry.shape), env.full_observation_spec[key].dtype) for key, entry in self.entries.items()
        ]
        self.rewarded = [
            (key, entry, env.full_reward_spec[key].dtype, torch.Size(entry.shape).numel())
            for key, entry in self.rewards.items()
        ]
        self.cuts = "truncated" in env.done_keys
        self.root_flags = FLAGS if self.cuts else FLAGS[:2]
        self._number = self._batch.numel()
        self._off: Any = np.zeros(self.batch, np.bool_)[()]
        self._copies = not env.returns_copies
        self.follows = env.sets_own_flags
        self.roots = RootTensorDicts(self._batch, self._device, set(self.rewards))

    def see_roots(self, forms: Mapping[NestedKey, Entry]) -> None:
        """Note the forms of all that roots hold, but for what a policy writes; see :attr:`may_be_unfit`."""
        self.roots.forms = dict(forms)

    def check(self) -> None:
        """Test that the environment is what this form was made of; to be called once a batch."""
        if any(now is not then for now, then in zip(specs_of(self._env), self._specs, strict=True)):
            raise NotNative("its specs have changed")
        refuse_more(self._env, self._base, own=True)
        check_flags(self._env, lacks_truncated=True)

    # Steps ------------------------------------------------------------------------------------

    def step(self, root: Values, preset: Values) -> Values:
        """See :meth:`ArrayEnv.step`.

        Raises:
            UnfitOutcome: it has entries that the specs do not announce.
        """
        td = self.roots.of_step(root)
        return self.finish(td, self.begin(td))

    def begin(self, td: TensorDict) -> Any:
        """What ``_step`` returns."""
        env = self._env
        if env.is_closed:
            check_open(env, "step")
        try:
            return self._step(td)
        except Exception as error:
            raise_named(env, "step", error)

    def finish(self, td: TensorDict, outcome: Any) -> Values:
        """The outcome of :meth:`step`, of what :meth:`begin` has returned."""
        out = self._read(outcome, follows=self.follows) if outcome is not td else None
        if out is None:
            completed = complete_step(self._env, td, outcome)
            out = self._read(completed, follows=False)
            if out is None:
                raise unfit_outcome(self, "step", completed)
        return out

    def in_turn(self, parts: Sequence[ArrayEnv], name_error: NameRow) -> RowsStep | None:
        """A function that steps environments like this one in turn, each as a row, faster than one by one."""
        same = [part for part in parts if type(part) is OwnArrays and part.roots.device == self.roots.device]
        return OwnRows(same, name_error) if len(same) == len(parts) else None

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`.

        Raises:
            UnfitOutcome: see :meth:`step`.
        """
        return self._reset(None if rows is None else self.roots.of_reset({}, rows), kwargs)

    def reset_from(self, root: Values, rows: Rows | None, **kwargs: Any) -> Values:
        """The same where what goes on may be read: ``root``, from which the next step would be taken."""
        return self._reset(self.roots.of_reset(root, rows), kwargs)

    def _reset(self, td: TensorDictBase | None, kwargs: dict[str, Any]) -> Values:
        env = self._env
        check_open(env, "reset")
        try:
            fresh = self._begin(td, **kwargs)
        except Exception as error:
            raise_named(env, "reset", error)
        out = self._read_reset(fresh)
        if out is None:
            completed = complete_reset(env, td, fresh)
            if td is not None:
                check_alive(env, completed, {(): td.get("_reset")})
            out = self._read_reset(completed)
            if out is None:
                raise unfit_outcome(self, "reset", completed)
        return out

    # From the environment ---------------------------------------------------------------------

    def _read(self, outcome: Any, *, follows: bool) -> Values | None:
        """What a step returned, where that is what the specs say, no more and no less; else None.

        Args:
            outcome: what it returned.
            follows: whether ``done`` is still to be set where one of its causes is.
        """
        items = self.items(outcome)
        if items is None:
            return None
        out: Values = {}
        number = self._observe(items, out)
        if number is None:
            return None
        for key, entry, dtype, size in self.rewarded:
            value = items.get(key)
            if type(value) is not Tensor or value.dtype is not dtype or value.numel() != size or not value.is_cpu:
                return None
            if size == 1 and entry.column and not self.batch:
                out[key] = entry.dtype.type(value.item())
            else:
                shape = entry.shape[:-1] if entry.column else entry.shape
                out[key] = self._own(value).reshape(shape)[()]
        found = self._flags(items)
        if found is None or number + len(self.rewarded) + found != len(items):
            return None
        flags = {flag: self._flag(items[flag]) for flag in self.root_flags if flag in items}
        completed = _completed(flags, self._off, cuts=self.cuts, follows=follows)
        return None if completed is None else {**out, **completed}

    def _read_reset(self, fresh: Any) -> Values | None:
        """What a reset returned, where that is what the specs say, and no flag is set; else None."""
        items = self.items(fresh)
        if items is None:
            return None
        out: Values = {}
        number, found = self._observe(items, out), self._flags(items)
        if number is None or found is None or number + found != len(items):
            return None
        return None if any(bool(items[flag].any()) for flag in self.root_flags if flag in items) else out

    def items(self, outcome: Any) -> dict[NestedKey, Any] | None:
        """Entries of what a step or a reset returned; None: it is no TensorDict of the right batch size."""
        if type(outcome) is not TensorDict or outcome.batch_size != self._batch:
            return None
        if self._is_flat:
            return dict(outcome.items())
        nests = (value for value in outcome.values(True) if isinstance(value, TensorDictBase))
        if any(type(nest) is not TensorDict or nest.batch_size != self._batch for nest in nests):
            return None
        return leaves(outcome)

    def _own(self, value: Tensor) -> Any:
        array = value.detach().numpy()
        return array.copy() if self._copies else array

    def _observe(self, items: Mapping[NestedKey, Any], out: Values) -> int | None:
        for key, shape, dtype in self.observed:
            value = items.get(key)
            if type(value) is not Tensor or value.dtype is not dtype or value.shape != shape or not value.is_cpu:
                return None
            out[key] = self._own(value)
        return len(self.observed)

    def _flags(self, items: Mapping[NestedKey, Any]) -> int | None:
        """How many flags there are."""
        found = 0
        for flag in self.root_flags:
            value = items.get(flag)
            if value is None:
                continue
            if type(value) is not Tensor or value.dtype is not torch.bool or value.numel() != self._number:
                return None
            found += 1
        return found

    def _flag(self, value: Tensor) -> Any:
        return value.detach().numpy().reshape(self.batch).copy() if self.batch else np.bool_(value.item())


class OwnRows:
    """Steps such environments in turn, and joins what they return, tensor by tensor.

    Args:
        parts: the environments, whose entries are equal.
        name_error: see :meth:`ArrayEnv.in_turn`.
    """

    def __init__(self, parts: Sequence[OwnArrays], name_error: NameRow) -> None:
        self._parts, self._name_error, self._first = parts, name_error, parts[0]
        self._off = np.zeros((len(parts), *self._first.batch), np.bool_)

    def __call__(self, root: Values) -> Values | list[Callable[[], Values]]:
        """Step all of them; see :meth:`ArrayEnv.in_turn`."""
        tds = self._first.roots.of_rows(root, len(self._parts))
        outcomes = []
        for i, (part, td) in enumerate(zip(self._parts, tds, strict=True)):
            try:
                outcomes.append(part.begin(td))
            except RollwrightError as error:
                raise self._name_error(i, error) from error
        out = self._joined(tds, outcomes)
        if out is not None:
            return out
        taken = zip(self._parts, tds, outcomes, strict=True)
        return [partial(part.finish, td, outcome) for part, td, outcome in taken]

    def _joined(self, tds: Sequence[Any], outcomes: Sequence[Any]) -> Values | None:
        """What steps returned, where that is what the specs say, no more and no less; else None."""
        first, number = self._first, len(outcomes)
        rows: list[dict[NestedKey, Any]] = []
        for td, outcome in zip(tds, outcomes, strict=True):
            items = first.items(outcome) if outcome is not td else None
            if items is None or (rows and items.keys() != rows[0].keys()):
                return None
            rows.append(items)
        out: Values = {}
        for key, shape, dtype in first.observed:
            value = _stacked(rows, key, dtype)
            if value is None or value.shape[1:] != shape:
                return None
            out[key] = value
        for key, entry, dtype, size in first.rewarded:
            value = _stacked(rows, key, dtype)
            if value is None or value.size != number * size:
                return None
            out[key] = value.reshape(number, *(entry.shape[:-1] if entry.column else entry.shape))
        flags: dict[str, Any] = {}
        for flag in first.root_flags:
            if flag in rows[0]:
                value = _stacked(rows, flag, torch.bool)
                if value is None or value.size != self._off.size:
                    return None
                flags[flag] = value.reshape(self._off.shape)
        if len(out) + len(flags) != len(rows[0]):
            return None
        completed = _completed(flags, self._off, cuts=first.cuts, follows=first.follows)
        return None if completed is None else {**out, **completed}


def _stacked(rows: Sequence[Mapping[NestedKey, Any]], key: NestedKey, dtype: torch.dtype | None) -> NDArray[Any] | None:
    """An entry of several environments; None: they differ in it, or lack it."""
    values: list[Any] = [row.get(key) for row in rows]
    for value in values:
        if type(value) is not Tensor or value.dtype is not dtype:
            return None
    try:
        return torch.stack(values).detach().numpy()
    except (RuntimeError, TypeError):  # of several shapes, or not in this memory
        return None


def _completed(flags: Mapping[str, Any], off: Any, *, cuts: bool, follows: bool) -> Values | None:
    """All flags, those that are missing by the rules of :func:`~rollwright.data.layout.complete_done`.

    Args:
        flags: ``[*batch]`` each.
        off: none of them is set.
        cuts: whether the environment has ``truncated``.
        follows: whether ``done`` is still to be set where one of its causes is.

    Returns:
        Them; None: there are none, or they contradict.
    """
    done, terminated, truncated = map(flags.get, FLAGS)
    if done is not None and terminated is not None and (truncated is not None or not cuts):
        if follows:
            done = done | terminated if truncated is None else done | terminated | truncated
    elif done is None and terminated is None and truncated is None:
        return None
    else:
        if terminated is None:
            terminated = off if done is None else done if truncated is None else done & ~truncated
        if truncated is None and cuts:
            truncated = off if done is None else done & ~terminated
        if done is None:
            done = terminated if truncated is None else terminated | truncated
    causes = terminated if truncated is None else terminated | truncated
    if np.count_nonzero(causes & ~done):  # such flags stay in roots, which have none on arrays
        return None
    return {"done": done, "terminated": terminated, "truncated": off if truncated is None else truncated}


def _nests(spec: Composite) -> list[NestedKey]:
    return [key for key in spec.keys(True) if isinstance(spec[key], Composite)]
