"""The array form of ParallelEnv: environments on arrays, in other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from rollwright._interrupts import uninterrupted
from rollwright._keys import NestedKey, as_tuple
from rollwright._processes.channel import ByValue
from rollwright.envs.arrays import (
    STEPPED,
    ArrayEnv,
    Entry,
    Rows,
    UnfitOutcome,
    Values,
    check_open,
    refuse_overrides,
    works_on_tensordicts,
)
from rollwright.envs.batched import host
from rollwright.envs.batched.base import ArrayFacts, BatchArrays
from rollwright.envs.batched.messages import AHEAD, Gathered, ResetArrays, Some, StepArrays
from rollwright.envs.batched.rows import HostedRows, end_array_rows
from rollwright.errors import NotNative

if TYPE_CHECKING:
    from rollwright.envs.batched.parallel import ParallelEnv


class ParallelArrays(BatchArrays):
    """The array form of a :class:`ParallelEnv`, or of a range of its environments.

    :meth:`send` and :meth:`receive` are the halves of a step; between them the environments work, and the other
    groups of :meth:`groups` may be served.

    Raises:
        NotNative: one of its environments has no array form, or they differ.
    """

    def __init__(self, env: ParallelEnv, hosted: HostedRows, known: type[ParallelEnv]) -> None:
        refuse_overrides(env, known)
        facts: list[ArrayFacts] = list(hosted.call(host.array_facts).values())
        hosted.roots = None  # the environments have new forms
        self._view(env, hosted, range(env.num_workers), facts)

    @classmethod
    def _group(cls, env: ParallelEnv, hosted: HostedRows, rows: range, facts: list[ArrayFacts]) -> Self:
        self = cls.__new__(cls)
        self._view(env, hosted, rows, facts)
        return self

    def _view(self, env: ParallelEnv, hosted: HostedRows, rows: range, facts: list[ArrayFacts]) -> None:
        self._env, self._hosted, self._rows = env, hosted, rows
        self._describe(env, facts, len(rows), below=False)
        self._forms: dict[NestedKey, Entry] = {}  # of roots
        shared = hosted.outcomes.shared.arrays
        here = slice(rows.start, rows.stop)
        self._outcome: dict[NestedKey, NDArray[Any]] = {
            key: shared[key][here, ..., 0] if entry.column else shared[key][here]
            for key, entry in self._outcome_forms.items()
        }
        self._first = {
            key: shared[AHEAD, *as_tuple(key)][here, ..., 0] if entry.column else shared[AHEAD, *as_tuple(key)][here]
            for key, entry in self.entries.items()
        }
        self._ahead = False
        self._ended: Rows | None = None  # what was reset ahead
        self._ticket: int | None = None
        self._num_seedings = 0
        self._due: frozenset[int] = frozenset()
        self._root: Values = {}
        self._preset: Values = {}
        self._stepped: list[bool] | None = None

    def check(self) -> None:
        """Test that the environment is what this form was made of; to be called once a batch."""
        check_open(self._env, "step")
        if self._hosted.is_closed:
            raise NotNative("its environments were closed, and others were made")
        self._hosted.call(host.check_arrays)

    def groups(self, number: int) -> list[ArrayEnv]:
        """The batch in ``number`` parts of consecutive rows, each an array form of its own with all of its methods."""
        if self.may_be_unfit:  # then all go on with TensorDicts, from the same step on
            names = self.on_tensordicts
            raise NotNative(works_on_tensordicts(names) if names else "its environments are a user's own")
        count = len(self._rows)
        if not 1 <= number <= count:
            raise NotNative(f"it has {count} environments, which do not make {number} groups")
        edges = [self._rows.start + count * i // number for i in range(number + 1)]
        return [
            self._group(self._env, self._hosted, range(start, stop), [self._facts]) for start, stop in pairwise(edges)
        ]

    # Steps --------------------------------------------------------------------------------------

    def step(self, root: Values, preset: Values) -> Values:
        """Act."""
        self.send(root, preset)
        return self.receive()

    def send(self, root: Values, preset: Values) -> None:
        """Begin a step; arguments as of :meth:`step`, and read before it returns."""
        check_open(self._env, "step")
        self._hosted.check_free(self._env, self._rows)
        given = {key: root[key] for key in self._seen(root)}
        for key, value in preset.items():
            given["next", *as_tuple(key)] = value
        layout = self._write(given)
        marks = root.get(STEPPED)
        stepped = None if marks is None else marks.reshape(len(self._rows), -1).any(-1).tolist()

        def command(ticket: int, some: Some, mine: Sequence[int]) -> StepArrays:
            return StepArrays(ticket, some, layout, self.resets_ahead)

        self._root, self._preset, self._stepped = root, preset, stepped
        self._num_seedings = self._hosted.num_seedings
        with uninterrupted:
            self._ticket, self._due = self._hosted.post_step(command, self._rows, layout, stepped)
        self._hosted.processes.flush()

    def _seen(self, root: Values) -> list[NestedKey]:
        """Keys of what environments are given of the root, of which they know the forms then."""
        if not self.may_be_unfit:
            return self.reads
        if self._hosted.roots is not self._forms:
            of_one = {key: Entry(shape[1:], dtype, column) for key, (shape, dtype, column) in self._forms.items()}
            self._hosted.call(host.see_roots, of_one)
            self._hosted.roots = self._forms
        return [key for key in root if key != STEPPED]

    def see_roots(self, forms: Mapping[NestedKey, Entry]) -> None:
        """Note the forms of all that roots hold, but for what a policy writes; see :attr:`may_be_unfit`."""
        self._forms = dict(forms)

    @property
    def resets_ahead(self) -> bool:
        """See :class:`ArrayEnv`; never where a reset reads what goes on."""
        return self._ahead

    @resets_ahead.setter
    def resets_ahead(self, value: bool) -> None:
        self._ahead = value and not self.may_be_unfit

    def _write(self, given: Values) -> int:
        """Write what environments read; the number of its layout."""
        workers, rows = self._env.num_workers, self._rows
        signature = tuple((key, (workers, *value.shape[1:]), value.dtype) for key, value in given.items())
        number, shared = self._hosted.processes.inputs(signature)
        for key, value in given.items():
            shared.arrays[key][rows.start : rows.stop] = value
        return number

    def receive(self) -> Values:
        """Wait for the step that :meth:`send` has begun; returns what :meth:`step` does."""
        ticket, self._ticket = self._ticket, None
        gathered, missed = self._hosted.receive_step(self._env, ticket)
        unfit = self._unfit_rows("step", [gathered])
        out = {key: value.copy() for key, value in self._outcome.items()}
        if "truncated" not in out:
            out["truncated"] = np.zeros(self.batch, np.bool_)
        self._ended = out["done"].copy() if self.resets_ahead and out["done"].any() else None
        failed, cut = missed.failed | self._due, missed.cut
        if unfit:  # what rows of lost processes hold may be what does not fit
            failed, cut = failed | cut, frozenset()
        if failed or cut:
            self._forget([row - self._rows.start for row in failed | cut])
            self._repeat(out, [row - self._rows.start for row in failed])
            end_array_rows(out, [row - self._rows.start for row in cut], failed=False)
        if unfit:
            raise self._unfit(self._env, "step", {**out, **self._preset}, self._rows, unfit)
        self._root = {}
        return out

    def _unfit_rows(self, call: str, gathered: Sequence[Gathered]) -> dict[int, UnfitOutcome]:
        """By row: what does not fit arrays."""
        unfit: dict[int, UnfitOutcome] = {}
        for each in gathered:
            if reasons := each.unfit:
                rest = self._hosted.outcomes.beside(each.replies.values())
                rows = {row: self._hosted.outcomes.row(call, row, rest) for row in reasons}
                unfit.update((row, UnfitOutcome(reasons[row], td)) for row, td in rows.items())
        return unfit

    def _forget(self, rows: list[int]) -> None:
        """These have new environments, which were not reset ahead."""
        if self._ended is not None:
            self._ended[rows] = False

    def _repeat(self, out: Values, rows: list[int]) -> None:
        """Let rows of an outcome, which are none, mean that nothing has changed, and end."""
        for key in self.entries:
            if key in self._root:
                out[key][rows] = self._root[key][rows]
        for key in self.rewards:
            out[key][rows] = 0
        end_array_rows(out, rows, failed=True)

    # Resets -------------------------------------------------------------------------------------

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """Begin new trajectories in the environments that ``rows``, bool ``[*batch]``, marks; None: in all."""
        return self._reset(rows, None, kwargs)

    def reset_from(self, root: Values, rows: Rows | None, **kwargs: Any) -> Values:
        """The same where what goes on may be read: ``root``, from which the next step would be taken."""
        return self._reset(rows, root if self.may_be_unfit else None, kwargs)

    def _reset(self, rows: Rows | None, root: Values | None, kwargs: dict[str, Any]) -> Values:
        env = self._env
        check_open(env, "reset")
        self._hosted.drop_steps(self._rows)
        env.seed_for_reset(kwargs)
        ended, self._ended = self._ended, None
        if ended is None or kwargs or self._hosted.num_seedings != self._num_seedings:
            self._reset_now(rows, root, kwargs)
            return {key: self._outcome[key].copy() for key in self.entries}
        rest = ~ended if rows is None else rows & ~ended
        if rest.any():
            self._reset_now(rest, None, kwargs)
        fresh = {key: self._outcome[key].copy() for key in self.entries}
        for key, value in self._first.items():
            fresh[key][ended] = value[ended]
        return fresh

    def _reset_now(self, rows: Rows | None, root: Values | None, kwargs: dict[str, Any]) -> None:
        given: Values = {}
        if self.may_be_unfit:
            root_now = root or {}
            given = {key: root_now[key] for key in self._seen(root_now) if as_tuple(key)[0] != "next"}
        layout = self._write(given) if given else None
        start = self._rows.start
        masks: dict[int, Any] = {}
        marked: Sequence[int] = self._rows
        if rows is not None:
            marked = [start + int(i) for i in np.flatnonzero(rows.reshape(len(rows), -1).any(-1))]
            if rows.ndim > 1:
                masks = {row: rows[row - start] for row in marked}
        packed = ByValue(kwargs) if kwargs else None

        def command(ticket: int, some: Some, mine: Sequence[int]) -> ResetArrays:
            own = {row: masks[row] for row in mine if masks}
            return ResetArrays(ticket, some, rows is not None, own, packed, root is not None, layout)

        unfit = self._unfit_rows("reset", list(self._hosted.reset(command, marked, layout)))
        if unfit:
            values = {key: self._outcome[key] for key in self.entries}
            raise self._unfit(self._env, "reset", values, marked, unfit, whole=root is None)
