"""The array form of ParallelEnv: environments on arrays, in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from rollwright._interrupts import uninterrupted
from rollwright._keys import NestedKey, as_tuple
from rollwright._processes.channel import ByValue
from rollwright.envs.arrays import FLAGS, ArrayEnv, Entry, Rows, Values, check_flags, check_open, refuse_overrides
from rollwright.envs.batched.hosting import calls
from rollwright.envs.batched.hosting.calls import ArrayFacts
from rollwright.envs.batched.hosting.messages import AHEAD, ResetArrays, Some, StepArrays
from rollwright.envs.recreation.rows import end_array_rows
from rollwright.errors import EnvError, NotNative

if TYPE_CHECKING:
    from rollwright.envs.batched.parallel import ParallelEnv

__all__ = ["ParallelArrays"]


class ParallelArrays(ArrayEnv):
    """The array form of a :class:`ParallelEnv`, or of a range of its environments.

    :meth:`send` and :meth:`receive` are the halves of a step; between them the environments work, and the other
    groups of :meth:`groups` may be served.

    Raises:
        NotNative: one of its environments has no array form, or they differ.
    """

    def __init__(self, env: ParallelEnv, known: type[ParallelEnv]) -> None:
        refuse_overrides(env, known)
        check_flags(env)
        facts: list[ArrayFacts] = list(env._ask(calls.array_facts).values())
        if any(each != facts[0] for each in facts):
            raise NotNative("its environments differ in their entries")
        self._env, self._openings = env, env.openings
        self._take(range(env.num_workers), facts[0])

    def _take(self, rows: range, facts: ArrayFacts) -> None:
        self._rows, self._facts = rows, facts
        self._all = len(rows) == self._env.num_workers
        self.batch = (len(rows), *self._env.batch_size[1:])
        self.entries, self.rewards = self._widened(facts.entries), self._widened(facts.rewards)
        self.reads = facts.reads
        flag = Entry((*self.batch, 1), np.dtype(np.bool_), True)
        shared = self._env._outcomes.shared.arrays
        here = slice(rows.start, rows.stop)
        outcome = {**self.entries, **self.rewards, **dict.fromkeys(cast("tuple[NestedKey, ...]", FLAGS), flag)}
        self._outcome: dict[NestedKey, NDArray[Any]] = {
            key: shared[key][here, ..., 0] if entry.column else shared[key][here] for key, entry in outcome.items()
        }
        self._signatures: dict[Any, Any] = {}
        self._first = {
            key: shared[AHEAD, *as_tuple(key)][here, ..., 0] if entry.column else shared[AHEAD, *as_tuple(key)][here]
            for key, entry in self.entries.items()
        }
        self._ended: Rows | None = None  # what was reset ahead
        self._ticket: int | None = None
        self._num_seedings = 0
        self._due: frozenset[int] = frozenset()
        self._root: Values = {}

    def _widened(self, entries: dict[NestedKey, Entry]) -> dict[NestedKey, Entry]:
        return {key: entry._replace(shape=(len(self._rows), *entry.shape)) for key, entry in entries.items()}

    def check(self) -> None:
        """See :meth:`ArrayEnv.check`."""
        if self._env.openings != self._openings:
            raise NotNative("its environments were closed, and others were made")
        check_open(self._env, "step")
        self._env._ask(calls.check_arrays)

    def groups(self, number: int) -> list[ArrayEnv]:
        """See :meth:`ArrayEnv.groups`."""
        count = len(self._rows)
        if not 1 <= number <= count:
            raise NotNative(f"it has {count} environments, which do not make {number} groups")
        edges = [self._rows.start + count * i // number for i in range(number + 1)]
        made: list[ArrayEnv] = []
        for start, stop in pairwise(edges):
            group = ParallelArrays.__new__(ParallelArrays)
            group._env, group._openings = self._env, self._openings
            group._take(range(start, stop), self._facts)
            made.append(group)
        return made

    # Steps --------------------------------------------------------------------------------------

    def step(self, root: Values, preset: Values) -> Values:
        """See :meth:`ArrayEnv.step`."""
        self.send(root, preset)
        return self.receive()

    def send(self, root: Values, preset: Values) -> None:
        """See :meth:`ArrayEnv.send`."""
        env = self._env
        check_open(env, "step")
        env._check_free(self._rows)
        given = {key: root[key] for key in self.reads}
        for key, value in preset.items():
            given["next", *as_tuple(key)] = value
        layout = self._write(given)
        self._root, self._due = root, env._recreation.due(self._rows)
        rows: Sequence[int] | None = None if self._all else self._rows
        if self._due:
            rows = [row for row in self._rows if row not in self._due]

        def command(ticket: int, some: Some, mine: Sequence[int]) -> StepArrays:
            return StepArrays(ticket, some, layout, self.resets_ahead)

        self._num_seedings = env._num_seedings
        with uninterrupted:
            self._ticket = env._processes.post(command, rows, layout, keeps=True)
            env._under_way[self._ticket] = self._rows
        env._processes.flush()

    def _write(self, given: Values) -> int:
        """Write what environments read; the number of its layout."""
        workers, rows = self._env.num_workers, self._rows
        signature = tuple((key, (workers, *value.shape[1:]), value.dtype) for key, value in given.items())
        number, shared = self._env._processes.inputs(signature)
        for key, value in given.items():
            shared.arrays[key][rows.start : rows.stop] = value
        return number

    def receive(self) -> Values:
        """See :meth:`ArrayEnv.receive`."""
        env, ticket, self._ticket = self._env, self._ticket, None
        if ticket is None or not env._take_up(ticket):
            raise EnvError(f"{env}: receive() before send(). Call send() first.")
        gathered = env._processes.gather(ticket)
        missed = env._recreation.settle(ticket, gathered, "step")
        out = {key: value.copy() for key, value in self._outcome.items()}
        self._ended = out["done"].copy() if self.resets_ahead and out["done"].any() else None
        if missed.failed or missed.cut or self._due:
            self._forget([row - self._rows.start for row in missed.failed | missed.cut | self._due])
            self._repeat(out, [row - self._rows.start for row in missed.failed | self._due])
            end_array_rows(out, [row - self._rows.start for row in missed.cut], failed=False)
        self._root = {}
        return out

    def _forget(self, rows: list[int]) -> None:
        """These have new environments, which were not reset ahead."""
        if self._ended is not None:
            self._ended[rows] = False

    def _repeat(self, out: Values, rows: list[int]) -> None:
        """Let rows of an outcome, which are none, say that nothing has changed, and end."""
        for key in self.entries:
            if key in self._root:
                out[key][rows] = self._root[key][rows]
        for key in self.rewards:
            out[key][rows] = 0
        end_array_rows(out, rows, failed=True)

    # Resets -------------------------------------------------------------------------------------

    def reset(self, rows: Rows | None, **kwargs: Any) -> Values:
        """See :meth:`ArrayEnv.reset`."""
        env = self._env
        check_open(env, "reset")
        env._drop(self._rows)
        env.seed_for_reset(kwargs)
        ended, self._ended = self._ended, None
        if ended is None or kwargs or env._num_seedings != self._num_seedings:
            self._reset_now(rows, kwargs)
            return {key: self._outcome[key].copy() for key in self.entries}
        rest = ~ended if rows is None else rows & ~ended
        if rest.any():
            self._reset_now(rest, kwargs)
        fresh = {key: self._outcome[key].copy() for key in self.entries}
        for key, value in self._first.items():
            fresh[key][ended] = value[ended]
        return fresh

    def _reset_now(self, rows: Rows | None, kwargs: dict[str, Any]) -> None:
        env, start = self._env, self._rows.start
        masks: dict[int, Any] = {}
        marked: Sequence[int] = self._rows
        if rows is not None:
            marked = [start + int(i) for i in np.flatnonzero(rows.reshape(len(rows), -1).any(-1))]
            if rows.ndim > 1:
                masks = {row: rows[row - start] for row in marked}
        packed = ByValue(kwargs) if kwargs else None

        def command(ticket: int, some: Some, mine: Sequence[int]) -> ResetArrays:
            return ResetArrays(ticket, some, rows is not None, {row: masks[row] for row in mine if masks}, packed)

        while marked:
            ticket = env._processes.post(command, marked)
            gathered = env._processes.gather(ticket)
            again = env._recreation.settle(ticket, gathered, "reset").failed
            env._recreation.begun(set(marked) - again)
            marked = sorted(again)
