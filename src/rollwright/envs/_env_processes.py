"""The processes that host a batch of environments, seen from the one that uses them."""

from __future__ import annotations

import os
import pickle
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright._keys import NestedKey
from rollwright._processes.child import Child
from rollwright._processes.failures import Failure
from rollwright._processes.segment import Segment
from rollwright.envs._env_messages import Command, Lay, Leave, Raised, Reply, Some
from rollwright.envs._env_process import DONE_ROWS, Hosted, serve_envs
from rollwright.envs._shared_rows import Field, SharedRows, lay_out
from rollwright.envs._workers import Factory
from rollwright.errors import EnvError

__all__ = ["EnvProcesses", "Gathered", "Lost", "default_num_processes"]

PATIENCE_S = 3600.0  # for an environment that has no limit of its own
START_S = 600.0
CLOSE_S = 10.0
MOST_LAYOUTS = 16

Signature = tuple[tuple[NestedKey, tuple[int, ...], torch.dtype | np.dtype[Any]], ...]
Entries = Mapping[NestedKey, tuple[tuple[int, ...], torch.dtype]]


def default_num_processes(num_workers: int) -> int:
    """One for each CPU that this process may use, and no more than there are environments."""
    return max(1, min(num_workers, len(os.sched_getaffinity(0))))


CommandMaker = Callable[[int, Some, tuple[int, ...]], Command]


class Lost(NamedTuple):
    """A process that has ended, or was ended because an environment did not come back.

    Attributes:
        process: its index.
        row: the environment that it was at.
        rows: that it was to serve.
        how: a phrase.
        failure: its last words.
    """

    process: int
    row: int
    rows: tuple[int, ...]
    how: str
    failure: Failure | None


class Gathered(NamedTuple):
    """The answers to a command, by process, and the processes that will not answer."""

    replies: dict[int, Reply]
    lost: list[Lost]

    @property
    def raised(self) -> list[Raised]:
        """What environments raised, in the order of rows."""
        return sorted((one for reply in self.replies.values() for one in reply.raised), key=lambda one: one.row)


class EnvProcesses:
    """Environments in processes: row ``i`` is in process ``i % num_processes``, so that they share each range of rows.

    A command goes to the processes of its rows at once (:meth:`post`); :meth:`gather` waits for their answers. Several
    commands may be under way: a process takes them in order.

    Args:
        makers: one for each row.
        num_processes: how many processes.
        describe: see :func:`~rollwright.envs._env_process.serve_envs`.
        start_method: see :class:`~rollwright._processes.child.Child`.
        timeout_s: the longest that an environment may take for a step or a reset; None: an hour.
        renews: make environments that raise anew.

    Attributes:
        described: what ``describe`` said of each row.
        seeds: that each row was given last.
        renewals: how many environments were in each row's place before.
        device: that environments were moved to.
        num_messages: sent and received so far.

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
    ) -> None:
        self._makers = list(makers)
        self._describe = describe
        self._start_method = start_method
        self._limit_s = PATIENCE_S if timeout_s is None else timeout_s
        self._renews = renews
        self.num_processes = num_processes
        self.rows = [tuple(range(process, len(makers), num_processes)) for process in range(num_processes)]
        self.seeds: list[int | None] = [None] * len(makers)
        self.renewals = [0] * len(makers)
        self.device: Any = None
        self.num_messages = 0
        self._segment = Segment()
        self._children: list[Child | None] = [None] * num_processes
        self._endings = ["has ended"] * num_processes
        self._poll = select.poll()
        self._watched: dict[int, tuple[int, bool]] = {}  # by file descriptor: the process, and whether it is its end
        self._ticket = 0
        self._due: dict[int, dict[int, tuple[int, ...]]] = {}  # by ticket and process: rows
        self._come: dict[int, Gathered] = {}
        self._given_up: set[int] = set()
        self._outcomes: tuple[Field, ...] = ()
        self._finished: NDArray[np.int64] = np.zeros(len(makers), np.int64)
        self._first_free = self._free = 0
        self._layouts: dict[Any, tuple[int, SharedRows]] = {}
        self._last_layout = 0
        self._laid: list[set[int]] = [set() for _ in range(num_processes)]
        self._forgets = [False] * num_processes
        self.described: list[Any] = [None] * len(makers)
        try:
            self.start(range(num_processes))
        except BaseException:
            self.end(0.0)
            raise

    # Starting -----------------------------------------------------------------------------------

    def start(self, processes: Iterable[int]) -> None:
        """Start processes, all at once, and wait until their environments are made."""
        processes = list(processes)
        self._due[0] = {process: self.rows[process] for process in processes}
        self._come[0] = Gathered({}, [])
        for process in processes:
            rows = self.rows[process]
            child = Child(
                serve_envs,
                self._segment,
                {row: self._makers[row] for row in rows},
                {row: (self.seeds[row], self.renewals[row], self.device) for row in rows},
                self._describe,
                (torch.initial_seed() + 1 + process) % 2**63,
                self._renews,
                name=f"rollwright-envs-{process}",
                start_method=self._start_method,
            )
            self._children[process] = child
            self._laid[process].clear()
            self._forgets[process] = False
            for fd, is_end in ((child.channel.fileno(), False), (child.sentinel, True)):
                self._watched[fd] = process, is_end
                self._poll.register(fd, select.POLLIN)
        gathered = self.gather(0, START_S)
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
            if self._outcomes:
                self._send(process, Lay(0, self._outcomes))

    # Shared memory ------------------------------------------------------------------------------

    def lay_outcomes(self, entries: Entries) -> SharedRows:
        """Give the outcomes of steps and resets their places; to be called once, before the first of these."""
        entries = {DONE_ROWS: ((len(self._makers),), torch.int64), **entries}
        fields, self._first_free = lay_out(entries, 0)
        self._free = self._first_free
        self._outcomes = tuple(fields)
        rows = SharedRows(self._segment, fields)
        self._finished = rows.arrays[DONE_ROWS]
        for process in range(self.num_processes):
            self._send(process, Lay(0, self._outcomes))
        return rows

    def inputs(self, signature: Signature) -> tuple[int, SharedRows]:
        """The number of a layout for what is sent, and its memory; the same ones for the same entries."""
        self._settle()  # an interrupted command may not have been read yet
        found = self._layouts.get(signature)
        if found is None:
            if len(self._layouts) == MOST_LAYOUTS:
                for ticket in list(self._due):
                    self.gather(ticket, keep=True)
                self._layouts.clear()
                self._free = self._first_free
                self._forgets = [True] * self.num_processes
            fields, self._free = lay_out(
                {key: (shape, _of_torch(dtype)) for key, shape, dtype in signature}, self._free
            )
            self._last_layout += 1
            found = self._layouts[signature] = self._last_layout, SharedRows(self._segment, fields)
        return found

    def finished(self, ticket: int, row: int) -> bool:
        """Whether a row has been served, though its process may be lost."""
        return bool(self._finished[row] == ticket)

    # Messages -----------------------------------------------------------------------------------

    def post(self, command: CommandMaker, rows: Sequence[int] | None = None, layout: int | None = None) -> int:
        """Send a command to the processes of ``rows`` (None: all).

        Args:
            command: makes it, from the ticket, the rows as the process is to be told them (None: all of its), and
                the same rows in full.
            rows: in rising order.
            layout: of :meth:`inputs`, where the command uses one.

        Returns:
            The ticket, for :meth:`gather`.
        """
        self._settle()
        self._ticket += 1
        ticket = self._ticket
        due = self._due[ticket] = self._share_out(rows)
        self._come[ticket] = Gathered({}, [])
        for process, mine in list(due.items()):
            if layout is not None and layout not in self._laid[process]:
                self._lay(process, layout)
            self._send(process, command(ticket, None if mine is self.rows[process] else mine, mine))
        return ticket

    def _settle(self) -> None:
        """Wait for what was interrupted."""
        while self._given_up:
            self.gather(next(iter(self._given_up)))

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

    def _lay(self, process: int, layout: int) -> None:
        rows = next(rows for number, rows in self._layouts.values() if number == layout)
        forgets, self._forgets[process] = self._forgets[process], False
        if forgets:
            self._laid[process].clear()
        self._laid[process].add(layout)
        self._send(process, Lay(layout, tuple(rows.fields), forgets))

    def _send(self, process: int, message: Command) -> None:
        child = self._children[process]
        if child is None:
            self._lose(process)
            return
        try:
            child.channel.send(message, timeout_s=self._limit_s)
            self.num_messages += 1
        except EOFError:
            self._lose(process)
        except TimeoutError:
            self._lose(process, "did not read what it was sent")

    def gather(self, ticket: int, limit_s: float | None = None, *, keep: bool = False) -> Gathered:
        """Wait for the answers to a command.

        An interrupt leaves the rest of them to be waited for with the next command.

        Args:
            ticket: of the command.
            limit_s: the longest without any environment coming back; None: the limit of a step.
            keep: whether they are to be gathered again.
        """
        due = self._due[ticket]
        limit_s = self._limit_s if limit_s is None else limit_s
        self._given_up.add(ticket)  # unless it is seen through
        marks: dict[int, list[int]] = {}
        until = time.monotonic() + limit_s
        while due:
            if self.pump(max(0.0, until - time.monotonic())) or time.monotonic() < until:
                continue
            for process, rows in list(due.items()):
                mark = [int(self._finished[row]) for row in self.rows[process]]
                begins = process not in marks and any(self.finished(ticket, row) for row in rows)
                waits = process not in marks and any(process in other for of, other in self._due.items() if of < ticket)
                if begins or waits or mark != marks.get(process, mark):
                    marks[process] = mark
                else:
                    self._lose(process, f"did not come back within {limit_s:g} s and was killed")
            until = time.monotonic() + limit_s
        self._given_up.discard(ticket)
        if keep:
            return self._come[ticket]
        del self._due[ticket]
        return self._come.pop(ticket)

    def pump(self, timeout_s: float) -> list[int]:
        """Wait until something comes in, and take it; the tickets that were answered, or never will be."""
        answered: list[int] = []
        for fd, _ in self._poll.poll(timeout_s * 1e3):
            process, is_end = self._watched.get(fd, (-1, False))
            child = self._children[process] if process >= 0 else None
            if child is None:
                continue  # it was lost a moment ago
            try:
                while self._take(process, child, answered):
                    if not is_end and not any(process in due for due in self._due.values()):
                        break  # nothing else can have come: no need to ask
                else:
                    if is_end:
                        answered += self._lose(process)
            except EOFError:
                answered += self._lose(process)
        return answered

    def _take(self, process: int, child: Child, answered: list[int]) -> bool:
        """Read a message, where there is one; whether there was."""
        if not child.channel.poll():
            return False
        message = child.channel.recv(0.0)
        self.num_messages += 1
        if isinstance(message, Failure):
            answered += self._lose(process, "has failed", message)
            return True
        due = self._due.get(message.ticket)
        if due is not None and process in due:
            del due[process]
            self._come[message.ticket].replies[process] = message
            answered.append(message.ticket)
        return True

    # Endings ------------------------------------------------------------------------------------

    def _lose(self, process: int, how: str = "", failure: Failure | None = None) -> list[int]:
        """Take leave of a process; whoever waits for it is told. The tickets of these."""
        child, self._children[process] = self._children[process], None
        if child is not None:
            for fd in [fd for fd, (of, _) in self._watched.items() if of == process]:
                self._poll.unregister(fd)
                del self._watched[fd]
            if how:
                child.kill()
            child.end(1.0)
            self._endings[process] = how or child.how_it_ended()
        told = []
        for ticket, due in self._due.items():
            rows = due.pop(process, None)
            if rows is not None:
                row = next((row for row in rows if not self.finished(ticket, row)), rows[-1])
                self._come[ticket].lost.append(Lost(process, row, rows, self._endings[process], failure))
                told.append(ticket)
        return told

    def is_there(self, process: int) -> bool:
        """Whether a process was not lost, or was replaced since."""
        return self._children[process] is not None

    def replace(self, process: int) -> None:
        """Start a process anew, with new environments."""
        for row in self.rows[process]:
            self.renewals[row] += 1
        self.start([process])

    def end(self, limit_s: float | None = None) -> tuple[list[Raised], list[str]]:
        """Close all environments and end all processes, whatever they are doing.

        Args:
            limit_s: for environments to close; None: ten seconds; 0: do not wait.

        Returns:
            What closing raised; and which processes had to be made to end.
        """
        limit_s = CLOSE_S if limit_s is None else limit_s
        self._ticket += 1
        ticket = self._ticket
        living = [process for process, child in enumerate(self._children) if child is not None]
        self._due[ticket] = {process: self.rows[process] for process in living}
        self._come[ticket] = come = Gathered({}, [])
        until = time.monotonic() + limit_s
        if limit_s:
            for process in living:
                self._send(process, Leave(ticket))
            while self._due[ticket] and (rest := until - time.monotonic()) > 0:
                self.pump(rest)
        forced = []
        left = [(process, child) for process, child in enumerate(self._children) if child is not None]
        for _, child in left:
            child.channel.close()
        for process, child in left:
            answered = process not in self._due[ticket]  # and has only to end
            how = child.end(max(1.0, until - time.monotonic()) if answered else 0.0)
            if limit_s and not answered:
                forced.append(f"the process of environments {list(self.rows[process])} was {how}")
        self._children = [None] * self.num_processes
        self._watched.clear()
        self._poll = select.poll()
        return come.raised, forced

    def pids(self) -> list[int | None]:
        """Of the processes; None for one that has ended."""
        return [None if child is None else child.pid for child in self._children]


def _of_torch(dtype: torch.dtype | np.dtype[Any]) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else torch.from_numpy(np.empty(0, dtype)).dtype
