"""The processes that host a batch of environments, seen from the one that uses them."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from rollwright._interrupts import uninterrupted
from rollwright._keys import NestedKey
from rollwright._memory import Layout, Segment
from rollwright._processes.child import Child
from rollwright._processes.connection import end_all
from rollwright.envs.batched.hosting.host import DONE_ROWS, Hosted, serve_envs
from rollwright.envs.batched.hosting.input_layouts import Entries, InputLayouts, Signature
from rollwright.envs.batched.hosting.lines import ProcessLines
from rollwright.envs.batched.hosting.messages import Command, Form, Lay, Leave, Raised, Some
from rollwright.envs.batched.hosting.shared_rows import SharedRows
from rollwright.envs.batched.hosting.under_way import Gathered, UnderWay
from rollwright.envs.factories import Factory
from rollwright.errors import EnvError

__all__ = ["EnvProcesses", "default_num_processes"]

PATIENCE_S = 3600.0  # for an environment that has no limit of its own
START_S = 600.0
CLOSE_S = 10.0
HURRY_S = 1.0  # to close what an interrupted close() has left

_START = 0  # the ticket of the first answer of each process


def default_num_processes(num_workers: int) -> int:
    """One for each CPU that this process may use, and no more than there are environments."""
    return max(1, min(num_workers, len(os.sched_getaffinity(0))))


CommandMaker = Callable[[int, Some, tuple[int, ...]], Command]


class EnvProcesses:
    """Environments in processes: row ``i`` is in process ``i % num_processes``, so that they share each range of rows.

    A command goes to the processes of its rows at once (:meth:`post`); :meth:`gather` waits for their answers. Several
    commands may be under way: a process takes them in order.

    Ctrl-C is heard while something is waited for, and not in the middle of a message or of what is noted with it. What
    an interrupted call has sent is seen through before the next command, and dropped.

    Args:
        makers: one for each row.
        num_processes: how many processes.
        describe: see :func:`~rollwright.envs.batched.hosting.host.serve_envs`.
        start_method: see :class:`~rollwright._processes.child.Child`.
        timeout_s: the longest that an environment may take for a step or a reset; None: an hour.
        renews: make environments that raise anew.
        num_threads: of torch in each process.

    Attributes:
        described: what ``describe`` said of each row.

    Raises:
        EnvError, TypeError: a factory failed.
    """

    def __init__(
        self,
        makers: Sequence[Factory],
        num_processes: int,
        *,
        describe: Callable[[Hosted], Any],
        start_method: str | None = None,
        timeout_s: float | None = None,
        renews: bool = False,
        num_threads: int = 1,
    ) -> None:
        self._makers = list(makers)
        self._describe = describe
        self._start_method = start_method
        self._limit_s = PATIENCE_S if timeout_s is None else timeout_s
        self._renews = renews
        self._num_threads = num_threads
        self.num_processes = num_processes
        self.rows = [tuple(range(process, len(makers), num_processes)) for process in range(num_processes)]
        self._segment = Segment()
        self._ticket = 0
        self._under_way = UnderWay(len(makers))
        self._lines = ProcessLines(num_processes, self._under_way)
        self._outcomes: Layout[NestedKey] | None = None
        self._inputs = InputLayouts(self._segment, num_processes)
        self.described: list[Any] = [None] * len(makers)
        try:
            self.start(range(num_processes))
        except BaseException:
            self.end(0.0)
            raise

    @property
    def forms(self) -> dict[tuple[str, int], Form]:
        """What the last step and the last reset of each row consisted of, as far as processes have said."""
        return self._under_way.forms

    @property
    def renewals(self) -> list[int]:
        """How many environments were in each row's place before."""
        pasts = self._under_way.pasts
        return [pasts[row].num_recreated if row in pasts else 0 for row in range(len(self._makers))]

    @property
    def num_recreated(self) -> int:
        """How many environments were made anew, those inside of them included."""
        return sum(past.num_recreated + past.num_recreated_inside for past in self._under_way.pasts.values())

    @property
    def num_messages(self) -> int:
        """Sent and received so far."""
        return self._lines.num_messages

    # Starting -----------------------------------------------------------------------------------

    def start(self, processes: Iterable[int]) -> None:
        """Start processes, all at once, and wait until their environments are made."""
        processes = list(processes)
        self._under_way.begin(_START)
        for process in processes:
            self._make(process)
        gathered = self.gather(_START)
        for raised in gathered.raised:
            raise raised.kind(raised.text) from raised.failure.error(f"worker {raised.row}")
        for lost in gathered.lost:
            cause = None if lost.failure is None else lost.failure.error(f"process {lost.process}")
            raise EnvError(
                f"create_env_fn: the process that makes the environments {list(self.rows[lost.process])} {lost.how}."
            ) from cause
        for process in processes:
            for row, value in pickle.loads(gathered.replies[process].values or b"").items():
                self.described[row] = value

    def _make(self, process: int) -> None:
        """Start a process, which answers as soon as its environments are made."""
        rows = self.rows[process]
        child = Child(
            serve_envs,
            self._segment,
            {row: self._makers[row] for row in rows},
            {row: past for row, past in self._under_way.pasts.items() if row in rows},
            self._describe,
            (torch.initial_seed() + 1 + process) % 2**63,
            self._renews,
            name=f"rollwright-envs-{process}",
            start_method=self._start_method,
            num_threads=self._num_threads,
        )
        with uninterrupted:
            self._lines.lay(process, child)
            self._inputs.begin_anew(process)
            self._under_way.expect(_START, process, rows)
            self._under_way.dropped.add(_START)
            if self._outcomes:
                self._lines.send(process, Lay(0, self._outcomes))

    # Shared memory ------------------------------------------------------------------------------

    def lay_outcomes(self, entries: Entries) -> SharedRows:
        """Give the outcomes of steps and resets their places; to be called once, before the first of these."""
        entries = {DONE_ROWS: ((len(self._makers),), torch.int64), **entries}
        self._outcomes = layout = Layout.of((key, *entry) for key, entry in entries.items())
        self._inputs.begin_at(layout.end)
        rows = SharedRows(self._segment, layout)
        self._under_way.marks = rows.arrays[DONE_ROWS]
        for process in range(self.num_processes):
            self._lines.send(process, Lay(0, layout))
        return rows

    def inputs(self, signature: Signature) -> tuple[int, SharedRows]:
        """The number of a layout for what is sent, and its memory; the same ones for the same entries."""
        self._settle()  # an interrupted command may not have been read yet
        found = self._inputs.find(signature)
        if found is None:
            if self._inputs.is_full:
                for ticket in self._under_way.tickets():
                    self._await(ticket)
            with uninterrupted:
                if self._inputs.is_full:
                    self._inputs.clear()
                found = self._inputs.add(signature)
        return found

    def finished(self, ticket: int, row: int) -> bool:
        """Whether a row has been served, though its process may be lost."""
        return self._under_way.finished(ticket, row)

    # Messages -----------------------------------------------------------------------------------

    def post(
        self,
        command: CommandMaker,
        rows: Sequence[int] | None = None,
        layout: int | None = None,
        *,
        keeps: bool = False,
    ) -> int:
        """Send a command to the processes of ``rows`` (None: all).

        Args:
            command: makes it, from the ticket, the rows as the process is to be told them (None: all of its), and
                the same rows in full.
            rows: in rising order.
            layout: of :meth:`inputs`, where the command uses one.
            keeps: whether other commands may follow before :meth:`gather`; the caller is to :meth:`see_off` this one.
                If not, and an interrupt keeps the caller from it, the answers are dropped before the next command.

        Returns:
            The ticket, for :meth:`gather`.
        """
        self._settle()
        with uninterrupted:
            self._ticket += 1
            ticket = self._ticket
            self._under_way.begin(ticket)
            if not keeps:
                self._under_way.dropped.add(ticket)
            for process, mine in self._share_out(rows).items():
                lay = None if layout is None else self._inputs.message(process, layout)
                if lay is not None:
                    self._lines.send(process, lay)
                message = command(ticket, None if mine is self.rows[process] else mine, mine)
                self._under_way.expect(ticket, process, mine)
                try:
                    self._lines.send(process, message)
                except BaseException:  # it cannot be pickled, and the process has not heard of it
                    self._under_way.unexpect(ticket, process)
                    raise
        if not keeps:
            self.see_off()
        return ticket

    def see_off(self) -> None:
        """Wait until what was posted is on its way. If Ctrl-C ends that, the rest goes while answers are awaited."""
        self._lines.see_off(self._limit_s)

    def _settle(self) -> None:
        """Wait for what was interrupted."""
        while self._under_way.dropped:
            self.gather(next(iter(self._under_way.dropped)))

    def _share_out(self, rows: Sequence[int] | None) -> dict[int, tuple[int, ...]]:
        if rows is None:
            return dict(enumerate(self.rows))
        shared: dict[int, list[int]] = {}
        for row in rows:
            shared.setdefault(row % self.num_processes, []).append(row)
        return {
            process: self.rows[process] if len(mine) == len(self.rows[process]) else tuple(mine)
            for process, mine in shared.items()
        }

    def drop(self, ticket: int) -> None:
        """Let the answers to a command come before the next one, which :meth:`gather` may take in between."""
        self._under_way.dropped.add(ticket)

    def is_answered(self, ticket: int) -> bool:
        """Whether nothing is missing for :meth:`gather`."""
        return not self._under_way.due(ticket)

    def gather(self, ticket: int, limit_s: float | None = None) -> Gathered:
        """Wait for the answers to a command, and take them.

        Args:
            ticket: of the command.
            limit_s: the longest without any environment coming back; None: the limit of a step.
        """
        self.drop(ticket)  # unless it is seen through
        self._await(ticket, limit_s)
        with uninterrupted:
            return self._under_way.take(ticket)

    def _await(self, ticket: int, limit_s: float | None = None) -> None:
        due = self._under_way.due(ticket)
        if limit_s is None:
            limit_s = self._limit_s if ticket != _START else START_S
        marks: dict[int, list[int]] = {}
        until = time.monotonic() + limit_s
        while due:
            if self.pump(max(0.0, until - time.monotonic())) or time.monotonic() < until:
                continue
            for process, rows in list(due.items()):
                mark = [int(self._under_way.marks[row]) for row in self.rows[process]]
                begins = process not in marks and any(self.finished(ticket, row) for row in rows)
                waits = process not in marks and self._under_way.owes(process, before=ticket)
                if begins or waits or mark != marks.get(process, mark):
                    marks[process] = mark
                else:
                    self._lines.lose(process, f"did not come back within {limit_s:g} s and was killed")
            until = time.monotonic() + limit_s

    def pump(self, timeout_s: float) -> bool:
        """See :meth:`ProcessLines.pump`."""
        return self._lines.pump(timeout_s)

    # Endings ------------------------------------------------------------------------------------

    def is_there(self, process: int) -> bool:
        """Whether a process was not lost, or was replaced since."""
        return self._lines.is_there(process)

    def replace(self, process: int) -> None:
        """Start a process anew, with new environments."""
        for row in self.rows[process]:
            self._under_way.pasts[row].note_loss()
        self.start([process])

    def end(self, limit_s: float | None = None) -> tuple[list[Raised], list[str]]:
        """Close all environments and end all processes, whatever they are doing.

        Args:
            limit_s: for environments to close; None: ten seconds; 0: do not wait.

        After an interrupt it may be called again, and goes on.

        Returns:
            What closing raised; and which processes had to be made to end.
        """
        limit_s = CLOSE_S if limit_s is None else limit_s
        until = time.monotonic() + limit_s
        self._ticket += 1
        ticket = self._ticket
        self._under_way.begin(ticket)
        for process in self._lines.living():
            with uninterrupted:
                self._under_way.expect(ticket, process, self.rows[process])
                if limit_s:
                    self._lines.send(process, Leave(ticket))
        due = self._under_way.due(ticket)
        while due and (rest := until - time.monotonic()) > 0:
            self.pump(rest)
        self._lines.lose_deaf()
        left = self._lines.living()
        stuck = [process for process in left if process in due]
        for child in left.values():
            child.channel.close()
        forced = end_all([left[process] for process in stuck], 0.0)
        end_all(list(left.values()), max(1.0, until - time.monotonic()))  # the others have answered, and only to end
        self._lines.hang_up()
        raised = self._under_way.take(ticket).raised
        if not limit_s:
            return raised, []
        return raised, [
            f"the process of environments {list(self.rows[process])} was {how}"
            for process, how in zip(stuck, forced, strict=True)
        ]

    def pids(self) -> list[int | None]:
        """Of the processes; None for one that has ended."""
        living = self._lines.living()
        return [living[process].pid if process in living else None for process in range(self.num_processes)]
