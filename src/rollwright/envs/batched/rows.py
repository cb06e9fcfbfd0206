"""Environments in other processes as the rows of a batch: commands, halves of steps, failures, rows of none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from rollwright._interrupts import uninterrupted
from rollwright._keys import NestedKey
from rollwright._processes.connection import RestartPolicy
from rollwright._tensors import device_of
from rollwright.data.layout import DoneGroup, complete_done
from rollwright.envs.arrays import Entry, Values
from rollwright.envs.batched.messages import Gathered, LostProcess, RowFailure
from rollwright.envs.batched.processes import CommandMaker, EnvProcesses, Outcomes
from rollwright.envs.factories import renamed
from rollwright.envs.recreation import MAX_FAILURES, RecreationWarning
from rollwright.errors import EnvError, NotNative, RollwrightError


class Missed(NamedTuple):
    """Rows whose trajectories end with a step, since their environments are new ones now.

    Attributes:
        failed: those that took no step: their last observation is repeated.
        cut: those that did, before their process was lost.
    """

    failed: frozenset[int]
    cut: frozenset[int]


NONE = Missed(frozenset(), frozenset())


class Recreation:
    """Decides what follows from failures: raises them, or has environments recreated and marks whose trajectories end.

    Args:
        name: of the batch, for messages.
        processes: that host the environments.
        enabled: whether environments are recreated.
    """

    def __init__(self, name: str, processes: EnvProcesses, *, enabled: bool) -> None:
        self._name = name
        self._processes = processes
        self._enabled = enabled
        self._unreset: set[int] = set()  # rows with new environments, which were not reset yet
        self._restarts = RestartPolicy(MAX_FAILURES, in_a_row=True)
        self._warning = RecreationWarning(".recreations")

    def due(self, rows: range) -> frozenset[int]:
        """Rows that cannot be stepped: their environments are new and wait for a reset."""
        return frozenset(self._unreset.intersection(rows)) if self._unreset else NONE.failed

    def load(self, rows: Iterable[int]) -> None:
        """Take these for the rows that cannot be stepped."""
        self._unreset = set(rows)

    def begun(self, rows: Iterable[int]) -> None:
        """These were reset."""
        if self._unreset:
            self._unreset.difference_update(rows)

    def settle(self, ticket: int, gathered: Gathered, call: str) -> Missed:
        """See to what went wrong with a command.

        Returns:
            The rows it concerns; in a reset, ``failed`` are those to be reset once more.

        Raises:
            RollwrightError: an environment has failed, and is not recreated.
        """
        for row, text in gathered.recreated:
            self._tell(row, text)
        for raised in gathered.raised:
            raise self._error(raised) from raised.failure.error(f"{self._name}[{raised.row}]")
        failed: set[int] = set()
        cut: set[int] = set()
        for lost in gathered.lost:
            done = {row for row in lost.rows if self._processes.finished(ticket, row)}
            self._replace(lost, call)
            cut |= done
            failed |= set(lost.rows) - done
        if call == "step":
            for process in gathered.replies:
                self._restarts.succeeded(process)
        else:
            failed, cut = failed | cut, set()
        return Missed(frozenset(failed), frozenset(cut))

    def _replace(self, lost: LostProcess, call: str) -> None:
        reason = f"{self._name}[{lost.row}]: its process {lost.how}, in {call}"
        cause = None if lost.failure is None else lost.failure.error(f"process {lost.process}")
        if not self._enabled:
            raise EnvError(
                f"{reason}. It hosted the environments {list(self._processes.rows[lost.process])}. Make a new batch, "
                "or pass on_env_failure='recreate'."
            ) from cause
        if self._processes.is_connected(lost.process):
            return  # replaced with the command before
        if self._restarts.next_delay(lost.process) is None:
            raise EnvError(
                f"{reason}. {MAX_FAILURES} processes before it ended in the same place, without a step in between."
            ) from cause
        self._unreset.update(self._processes.rows[lost.process])
        self._processes.replace(lost.process)
        self._tell(lost.row, f"its process {lost.how}, in {call}")

    def _error(self, raised: RowFailure) -> Exception:
        error = raised.kind(raised.text)
        place = f"{self._name}[{raised.row}]"
        return renamed(place, error) if isinstance(error, RollwrightError) else EnvError(f"{place}: {raised.text}")

    def _tell(self, row: int, text: str) -> None:
        self._warning.warn(f"{self._name}[{row}]", text)


def end_rows(td: TensorDictBase, groups: list[DoneGroup], rows: Iterable[int], *, failed: bool) -> None:
    """Mark rows of what a step returned as truncated; those that were done already stay as they are.

    Args:
        td: ``[rows, *]``, completed in place.
        groups: of flags.
        rows: indices.
        failed: they took no step: their flags mean nothing.
    """
    complete_done(td, groups)
    ends = torch.zeros(td.batch_size[0], dtype=torch.bool, device=device_of(td))
    ends[sorted(rows)] = True
    for group in groups:
        flags = {key: td.get(key) for key in group.keys}
        here = ends.reshape(-1, *[1] * (flags[group.done].ndim - 1))
        if failed:
            flags = {key: flag & ~here for key, flag in flags.items()}
        if group.truncated is not None:
            flags[group.truncated] = flags[group.truncated] | (here & ~flags[group.done])
        flags[group.done] = flags[group.done] | here
        for key, flag in flags.items():
            td.set(key, flag)


def end_array_rows(out: Values, rows: list[int], *, failed: bool) -> None:
    """As :func:`end_rows`, on arrays."""
    if failed:
        out["done"][rows] = out["terminated"][rows] = out["truncated"][rows] = False
    out["truncated"][rows] |= ~out["done"][rows]
    out["done"][rows] = True


class HostedRows:
    """The environments of a batch, from their start until they are closed.

    Args:
        name: of the batch, for messages.
        processes: that host them.
        outcomes: of steps and resets, in shared memory and beside it.
        recreates: whether environments that fail are recreated.

    Attributes:
        num_seedings: how often they were seeded.
        is_closed: whether they were closed.
        roots: forms of the roots that the environments have been told, see :meth:`ArrayEnv.see_roots`; None: none.
    """

    def __init__(self, name: str, processes: EnvProcesses, outcomes: Outcomes, *, recreates: bool) -> None:
        self.name, self.processes, self.outcomes = name, processes, outcomes
        self.recreation = Recreation(name, processes, enabled=recreates)
        self._num_rows = len(processes.described)
        self.num_seedings = 0
        self.is_closed = False
        self.roots: Mapping[NestedKey, Entry] | None = None
        self._steps: dict[int, range] = {}  # rows of steps between their halves, by ticket

    def call(self, function: Callable[..., Any], *args: Any, rows: Iterable[int] | None = None) -> dict[int, Any]:
        """Call a function of :mod:`.host` where the environments are; what it returns, by row.

        Raises:
            Exception: what the first environment has raised.
        """
        ticket, gathered = self.processes.call(function, args, rows)
        for raised in gathered.raised:
            remote = raised.failure.error(f"{self.name}[{raised.row}]")
            if raised.kind in (AttributeError, NotNative):
                raise raised.kind(raised.text) from remote
            raise remote
        self.recreation.settle(ticket, gathered, function.__name__)
        if gathered.lost:
            raise EnvError(
                f"{self.name}[{gathered.lost[0].row}]: its process {gathered.lost[0].how}, in {function.__name__}, and "
                "was replaced. Try again."
            )
        return gathered.values()

    # Steps ------------------------------------------------------------------------------------

    def check_free(self, env: Any, rows: range) -> None:
        """Test that no step of these rows is between its halves.

        Raises:
            EnvError: one is; ``env`` is named.
        """
        if any(rows.start < other.stop and other.start < rows.stop for other in self._steps.values()):
            raise EnvError(f"{env}: step before receive(). Receive the steps that are in progress, or reset.")

    def step(self, command: CommandMaker, layout: int, marks: Sequence[bool] | None = None) -> tuple[Gathered, Missed]:
        """Let rows take a step, all or those that ``marks`` names; those that wait for a reset count as missed."""
        chosen, due = self._ready(range(self._num_rows), marks)
        ticket = self.processes.post(command, chosen, layout)
        gathered = self.processes.gather(ticket)
        missed = self.recreation.settle(ticket, gathered, "step")
        return gathered, Missed(missed.failed | due, missed.cut)

    def post_step(
        self, command: CommandMaker, rows: range, layout: int, marks: Sequence[bool] | None = None
    ) -> tuple[int, frozenset[int]]:
        """Send free rows what they need for a step, but those that wait for a reset; nothing may interrupt this.

        Args:
            command: see :meth:`EnvProcesses.post`.
            rows: all, or a part of them.
            layout: of what was written for them.
            marks: for each of ``rows`` whether it takes a step; None: all do.

        Returns:
            A ticket for :meth:`receive_step`; and the rows that wait for a reset, since their environments are new.
        """
        chosen, due = self._ready(rows, marks)
        ticket = self.processes.post(command, chosen, layout, keeps=True)
        self._steps[ticket] = rows
        return ticket, due

    def _ready(self, rows: range, marks: Sequence[bool] | None) -> tuple[Sequence[int] | None, frozenset[int]]:
        due = self.recreation.due(rows)
        if marks is not None:
            due = due.intersection(row for row, is_marked in zip(rows, marks, strict=True) if is_marked)
            chosen = [row for row, is_marked in zip(rows, marks, strict=True) if is_marked and row not in due]
            return chosen, due
        if due:
            return [row for row in rows if row not in due], due
        return None if len(rows) == self._num_rows else rows, due

    def receive_step(self, env: Any, ticket: int | None) -> tuple[Gathered, Missed]:
        """Wait for a step, and see to what went wrong in it.

        Raises:
            EnvError: it was not sent, was received before or was dropped.
            RollwrightError: an environment has failed, and is not recreated.
        """
        if ticket is None or not self._claim(ticket):
            raise EnvError(f"{env}: receive() before send(). Call send() first.")
        gathered = self.processes.gather(ticket)
        return gathered, self.recreation.settle(ticket, gathered, "step")

    def drop_steps(self, rows: range) -> None:
        """Wait for steps of these rows that are in progress, and drop what comes of them."""
        for ticket, other in list(self._steps.items()):
            if rows.start < other.stop and other.start < rows.stop:
                self._claim(ticket)
                self.recreation.settle(ticket, self.processes.gather(ticket), "step")

    def _claim(self, ticket: int) -> bool:
        """Note that a step is received now, or never; whether it was in progress."""
        with uninterrupted:
            known = self._steps.pop(ticket, None) is not None
            if known:
                self.processes.discard(ticket)
        return known

    def reset(self, command: CommandMaker, rows: Sequence[int], layout: int | None = None) -> Iterator[Gathered]:
        """Reset rows, and once more where their process was lost; the answers, which are to be used up."""
        while rows:
            ticket = self.processes.post(command, rows, layout)
            gathered = self.processes.gather(ticket)
            again = self.recreation.settle(ticket, gathered, "reset").failed
            yield gathered
            self.recreation.begun(set(rows) - again)
            rows = sorted(again)
