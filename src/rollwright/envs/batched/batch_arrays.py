"""BatchArrays: the array form of a batch of environments, one a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey
from rollwright.envs.arrays import FLAGS, ArrayEnv, Entry, UnfitOutcome, Values, check_flags
from rollwright.envs.on_arrays.tensordicts import as_tensordict
from rollwright.errors import NotNative

if TYPE_CHECKING:
    from rollwright.envs.batched.base import BatchedEnv


class ArrayFacts(NamedTuple):
    """A description of an array form; see :class:`~rollwright.envs.arrays.ArrayEnv`."""

    entries: dict[NestedKey, Entry]
    rewards: dict[NestedKey, Entry]
    flags: dict[NestedKey, Entry]
    reads: list[NestedKey]
    nests: dict[str, tuple[int, ...]]
    root_flags: tuple[str, ...]
    done_follows: bool
    may_be_unfit: bool
    on_tensordicts: list[str]
    held_back: str

    @classmethod
    def of(cls, form: ArrayEnv) -> ArrayFacts:
        """That of one, in a form that can be sent to another process."""
        kept = {"flags": dict, "nests": dict, "on_tensordicts": list}
        return cls(*(kept.get(name, lambda value: value)(getattr(form, name)) for name in cls._fields))


class BatchArrays(ArrayEnv):
    """Environments on arrays as one, each of them a row; those of one batch have equal entries."""

    def _describe(self, env: BatchedEnv, facts: Sequence[ArrayFacts], number: int, *, below: bool) -> None:
        """Become the form of ``number`` environments.

        Args:
            env: the batch.
            facts: of each of its environments.
            number: of those that this is the form of.
            below: whether there may be flags below the root.

        Raises:
            NotNative: they differ, or their flags are others.
        """
        self._facts = first = facts[0]
        if any(each[:-2] != first[:-2] for each in facts):
            raise NotNative("its environments differ in their entries")
        check_flags(env, first.flags if below else (), lacks_truncated=len(first.root_flags) < len(FLAGS))
        self._number, self._inner = number, env.batch_size[1:]
        self.batch = (number, *self._inner)
        self.entries, self.rewards, self.flags = map(self._widened, (first.entries, first.rewards, first.flags))
        self.reads, self.nests, self.root_flags = first.reads, first.nests, first.root_flags
        self.done_follows, self.may_be_unfit = first.done_follows, first.may_be_unfit
        self.on_tensordicts, self.held_back = first.on_tensordicts, first.held_back
        self._outcome_forms = {**self.carried, **self.rewards, **_flags(self.root_flags, self.batch)}

    def _widened(self, entries: Mapping[NestedKey, Entry]) -> dict[NestedKey, Entry]:
        return {key: entry.replace(shape=(self._number, *entry.shape)) for key, entry in entries.items()}

    def _unfit(
        self,
        env: BatchedEnv,
        call: str,
        values: Values,
        places: Iterable[int],
        unfit: Mapping[int, UnfitOutcome],
        *,
        whole: bool = False,
    ) -> UnfitOutcome:
        """An outcome of which some rows do not fit arrays.

        Args:
            env: the batch.
            call: ``"step"`` or ``"reset"``.
            values: of the rows that fit, in a reset without flags; and what the policy has written, where others return
                that, too.
            places: that hold something; the others have a copy of the first of them.
            unfit: what the rows at some places are.
            whole: whether nothing was given to the reset.
        """
        shown = unfit[min(unfit)]
        if call == "reset":
            off: Any = np.zeros(self.batch, np.bool_)
            values = {**values, **dict.fromkeys(self.root_flags, off)}
        own = {*self._outcome_forms, *FLAGS}
        kept = [key for key in values if key in own or shown.outcome.get(key, None) is not None]
        rows: dict[int, TensorDictBase] = {i: found.outcome for i, found in unfit.items()}
        for i in set(places) - rows.keys():
            rows[i] = _as_row(self._facts, {key: np.array(values[key][i, ...]) for key in kept}, self._inner)
        some = rows[min(rows)]
        joined = env.joined(call, [rows[i] if i in rows else some.clone() for i in range(self._number)], whole=whole)
        return UnfitOutcome(str(shown), joined)


def check_presets(form: ArrayEnv, outcome: Values, preset: Values) -> None:
    """Test that what a policy wrote below ``"next"``, and the environment does not return itself, is as it was.

    Raises:
        UnfitOutcome: it is not, and has no place in shared rows.
    """
    for key, value in preset.items():
        if key in form.carried or key in form.rewards or key not in outcome:
            continue
        found = np.asarray(outcome[key])
        if (found.dtype, found.shape, found.tobytes()) != (value.dtype, value.shape, value.tobytes()):
            td = _as_row(form, outcome, torch.Size(form.batch))
            raise UnfitOutcome(f"its step changes {key!r}, which the policy has written", td)


def _as_row(form: ArrayFacts | ArrayEnv, outcome: Values, batch_size: torch.Size) -> TensorDict:
    """An outcome of one environment as a TensorDict."""
    forms = {**form.entries, **form.flags, **form.rewards, **_flags(form.root_flags, batch_size)}
    shown = {key: value for key, value in outcome.items() if key not in FLAGS or key in forms}
    return as_tensordict(shown, forms, batch_size, None)


def _flags(names: Sequence[str], batch: tuple[int, ...]) -> dict[NestedKey, Entry]:
    return {name: Entry((*batch, 1), np.dtype(np.bool_), True) for name in names}


def blank(entries: Mapping[NestedKey, Entry]) -> dict[NestedKey, Any]:
    """New arrays, their content left open."""
    return {key: np.empty(shape[:-1] if column else shape, dtype) for key, (shape, dtype, column) in entries.items()}
