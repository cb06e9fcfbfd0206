"""HostedRows: environments in other processes as the rows of a batch: commands, halves of steps, and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rollwright._interrupts import uninterrupted
from rollwright._keys import NestedKey
from rollwright.envs.arrays import Entry
from rollwright.envs.batched.hosting.answers import Gathered
from rollwright.envs.batched.hosting.outcomes import Outcomes
from rollwright.envs.batched.hosting.processes import CommandMaker, EnvProcesses
from rollwright.envs.recreation.rows import Missed, Recreation
from rollwright.errors import EnvError, NotNative


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
        """Call a function of :mod:`.calls` where the environments are; what it returns, by row.

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
