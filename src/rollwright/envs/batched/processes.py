"""The processes that host a batch of environments, and the TensorDicts that are exchanged with them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from rollwright._interrupts import uninterrupted
from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright._memory import Layout, Segment
from rollwright._processes.channel import ByValue
from rollwright._processes.child import STOPPED_S, Child
from rollwright._processes.connection import Heartbeats
from rollwright._processes.pool import Pool
from rollwright.data.specs import Composite, NonTensor, StackedComposite
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.host import DONE_ROWS, Hosted, serve_envs
from rollwright.envs.batched.messages import (
    AHEAD,
    Answers,
    CallFunction,
    Close,
    Command,
    Entries,
    Gathered,
    InputLayouts,
    Nests,
    OutcomeStructure,
    Reply,
    RowFailure,
    SetLayout,
    SharedRows,
    Signature,
    Some,
    dense_leaves,
    nested,
)
from rollwright.envs.factories import Factory
from rollwright.errors import EnvError

DEFAULT_TIMEOUT_S = 3600.0  # for an environment that has no limit of its own
START_S = 600.0
CLOSE_S = 10.0
SHORT_CLOSE_S = 1.0  # to close what an interrupted close() has left
_NAP_S = 0.2

_START = 0  # the ticket of the first answer of each process


def default_num_processes(num_workers: int) -> int:
    """One for each CPU that this process may use, and no more than there are environments."""
    return max(1, min(num_workers, len(os.sched_getaffinity(0))))


CommandMaker = Callable[[int, Some, tuple[int, ...]], Command]


class EnvProcesses:
    """Environments in processes: row ``i`` is in process ``i % num_processes``, so that they share each range of rows.

    A command goes to the processes of its rows at once (:meth:`post`); :meth:`gather` waits for their answers. Several
    commands may be in progress: a process takes them in order.

    Ctrl-C is handled while something is waited for, not in the middle of a message or of what is noted with it. What an
    interrupted call has sent is finished before the next command, and dropped.

    Args:
        makers: one for each row.
        num_processes: how many processes.
        describe: see :func:`~rollwright.envs.batched.host.serve_envs`.
        start_method: see :class:`~rollwright._processes.child.Child`.
        timeout_s: the longest that an environment may take for a step or a reset; None: an hour.
        recreates: recreate environments that raise.
        num_threads: of torch in each process.

    Attributes:
        described: what ``describe`` returned for each row.

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
        recreates: bool = False,
        num_threads: int = 1,
    ) -> None:
        self._makers = list(makers)
        self._describe = describe
        self._start_method = start_method
        self._limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        self._recreates = recreates
        self._num_threads = num_threads
        self.num_processes = num_processes
        self.rows = [tuple(range(process, len(makers), num_processes)) for process in range(num_processes)]
        self._segment = Segment()
        self.described: list[Any] = [None] * len(makers)
        self._answers = Answers(self.described)
        self._pool = Pool(num_processes, self._answers.received, only_answers=True)
        self._discarded: set[int] = set()  # tickets whose answers are awaited before the next command, and dropped
        self._outcomes: Layout[NestedKey] | None = None
        self._inputs = InputLayouts(self._segment, num_processes)
        try:
            self.start(range(num_processes))
        except BaseException:
            self.end(0.0)
            raise

    @property
    def structures(self) -> dict[tuple[str, int], OutcomeStructure]:
        """What the last step and the last reset of each row consisted of, as far as processes have reported it."""
        return self._answers.structures

    @property
    def recreations(self) -> list[int]:
        """How many environments were in each row's place before."""
        recreation_policies = self._answers.recreation_policies
        return [
            recreation_policies[row].num_recreated if row in recreation_policies else 0
            for row in range(len(self._makers))
        ]

    @property
    def num_recreated(self) -> int:
        """How many environments were recreated, those inside of them included."""
        return sum(
            policy.num_recreated + policy.num_recreated_inside for policy in self._answers.recreation_policies.values()
        )

    @property
    def num_messages(self) -> int:
        """Sent and received so far."""
        return self._pool.num_messages

    # Starting -----------------------------------------------------------------------------------

    def start(self, processes: Iterable[int]) -> None:
        """Start processes, all at once, and wait until their environments are made."""
        processes = list(processes)
        self._pool.calls.open(_START)
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
        for row, value in gathered.values().items():
            self.described[row] = value

    def _make(self, process: int) -> None:
        """Start a process, which answers as soon as its environments are made."""
        rows = self.rows[process]
        child = Child(
            serve_envs,
            self._segment,
            {row: self._makers[row] for row in rows},
            {row: policy for row, policy in self._answers.recreation_policies.items() if row in rows},
            self._describe,
            (torch.initial_seed() + 1 + process) % 2**63,
            self._recreates,
            name=f"rollwright-envs-{process}",
            start_method=self._start_method,
            num_threads=self._num_threads,
        )
        with uninterrupted:
            self._pool.add(process, child)
            self._inputs.begin_anew(process)
            self._pool.calls.ask(_START, process, rows)
            self._discarded.add(_START)
            if self._outcomes:
                self._pool.send(process, SetLayout(0, self._outcomes))

    # Shared memory ------------------------------------------------------------------------------

    def lay_outcomes(self, entries: Entries) -> SharedRows:
        """Give the outcomes of steps and resets their places; to be called once, before the first of these."""
        entries = {DONE_ROWS: ((len(self._makers),), torch.int64), **entries}
        self._outcomes = layout = Layout.of((key, *entry) for key, entry in entries.items())
        self._inputs.begin_at(layout.end)
        rows = SharedRows(self._segment, layout)
        self._answers.marks = rows.arrays[DONE_ROWS]
        for process in range(self.num_processes):
            self._pool.send(process, SetLayout(0, layout))
        return rows

    def inputs(self, signature: Signature) -> tuple[int, SharedRows]:
        """The number of a layout for what is sent, and its memory; the same ones for the same entries."""
        self._settle()  # an interrupted command may not have been read yet
        found = self._inputs.find(signature)
        if found is None:
            if self._inputs.is_full:
                for ticket in self._pool.calls.tickets():
                    self._await(ticket)
            with uninterrupted:
                if self._inputs.is_full:
                    self._inputs.clear()
                found = self._inputs.add(signature)
        return found

    def finished(self, ticket: int, row: int) -> bool:
        """Whether a row has been served, though its process may be lost."""
        return self._answers.finished(ticket, row)

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
            command: makes it, from the ticket, the rows as they are sent to the process (None: all of its), and
                the same rows in full.
            rows: in rising order.
            layout: of :meth:`inputs`, where the command uses one.
            keeps: whether other commands may follow before :meth:`gather`; the caller is to :meth:`flush` this one. If
                not, and an interrupt keeps the caller from it, the answers are dropped before the next command.

        Returns:
            The ticket, for :meth:`gather`.
        """
        self._settle()
        with uninterrupted:
            ticket = self._pool.calls.open()
            if not keeps:
                self._discarded.add(ticket)
            for process, mine in self._share_out(rows).items():
                lay = None if layout is None else self._inputs.message(process, layout)
                if lay is not None:
                    self._pool.send(process, lay)
                message = command(ticket, None if mine is self.rows[process] else mine, mine)
                self._pool.calls.ask(ticket, process, mine)
                try:
                    self._pool.send(process, message)
                except BaseException:  # it cannot be pickled, and was not sent
                    self._pool.calls.withdraw(ticket, process)
                    raise
        if not keeps:
            self.flush()
        return ticket

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], rows: Iterable[int] | None = None
    ) -> tuple[int, Gathered]:
        """Call ``function(hosted, *args)`` where environments are; ticket and answers, see :meth:`Gathered.values`."""
        packed = ByValue(args) if args else None
        listed = None if rows is None else list(rows)
        ticket = self.post(lambda ticket, some, _: CallFunction(ticket, some, function, packed), listed)
        return ticket, self.gather(ticket)

    def flush(self) -> None:
        """Wait until what was posted is sent. If Ctrl-C ends that, the rest goes while answers are awaited."""
        self._pool.flush(self._limit_s)

    def _settle(self) -> None:
        """Wait for what was interrupted."""
        while self._discarded:
            self.gather(next(iter(self._discarded)))

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

    def discard(self, ticket: int) -> None:
        """Let the answers to a command be awaited and dropped before the next one, unless :meth:`gather` takes them."""
        self._discarded.add(ticket)

    def is_answered(self, ticket: int) -> bool:
        """Whether nothing is missing for :meth:`gather`."""
        return not self._pool.calls[ticket].due

    def gather(self, ticket: int) -> Gathered:
        """Wait for the answers to a command, and take them.

        A process in which no environment finishes anything for longer than the limit of a step is killed.
        """
        self.discard(ticket)  # if this is interrupted
        self._await(ticket)
        with uninterrupted:
            self._discarded.discard(ticket)
            return self._answers.gathered(ticket, self._pool.calls.close(ticket))

    def _await(self, ticket: int) -> None:
        due = self._pool.calls[ticket].due
        limit_s = self._limit_s if ticket != _START else START_S
        heartbeats = Heartbeats()
        while due:
            if self.run_once(min(limit_s, _NAP_S)):
                continue
            for process in list(due):
                if heartbeats.is_silent(process, self._answers.progress(process, self.rows[process]), limit_s):
                    self._kill(process, limit_s)

    def kill_late(self, ticket: int) -> None:
        """Kill the processes that have not answered a command, which took longer than the limit of a step."""
        for process in list(self._pool.calls[ticket].due):
            self._kill(process, self._limit_s)

    def _kill(self, process: int, limit_s: float) -> None:
        self._pool.drop(process, f"did not come back within {limit_s:g} s and was killed")

    def run_once(self, timeout_s: float) -> bool:
        """Take in what has come, see :meth:`Pool.run_once`; if nothing has, look for processes that are stopped."""
        if self._pool.run_once(timeout_s):
            return True
        for process in self._pool.stopped(STOPPED_S):
            self._pool.drop(process, f"was stopped by a signal, did not go on for {STOPPED_S:g} s and was killed")
        return False

    # Endings ------------------------------------------------------------------------------------

    def is_connected(self, process: int) -> bool:
        """Whether a process was not lost, or was replaced since."""
        return self._pool.by_place[process] is not None

    def replace(self, process: int) -> None:
        """Restart a process, with new environments."""
        for row in self.rows[process]:
            self._answers.recreation_policies[row].note_loss()
        self.start([process])

    def end(self, limit_s: float | None = None) -> tuple[list[RowFailure], list[str]]:
        """Close all environments and end all processes, whatever they are doing.

        Args:
            limit_s: for environments to close; None: ten seconds; 0: do not wait.

        After an interrupt it may be called again, and goes on.

        Returns:
            What closing raised; and which processes had to be made to end.
        """
        limit_s = CLOSE_S if limit_s is None else limit_s
        until = time.monotonic() + limit_s
        calls = self._pool.calls
        ticket = calls.open()
        for process in self._pool.connections:
            with uninterrupted:
                calls.ask(ticket, process)
                if limit_s:
                    self._pool.send(process, Close(ticket))
        ended = self._pool.end(lambda: until, hang_up=not limit_s)
        call = calls.close(ticket)
        return self._answers.gathered(ticket, call).raised, [
            f"the process of environments {list(self.rows[process])} was {end.how}"
            for process, end in ended.items()
            if limit_s and process in call.due and end.how != "ended"
        ]

    def pids(self) -> list[int | None]:
        """Of the processes; None for one that has ended."""
        children: list[Any] = [self._pool.by_place[process] for process in range(self.num_processes)]
        return [None if child is None else child.pid for child in children]


Shapes = dict[NestedKey, tuple[tuple[int, ...], torch.dtype]]


def shareable(specs: Iterable[Composite]) -> Shapes:
    """The entries of stacked specs that have one shape and dtype in all environments."""
    found: Shapes = {}

    def walk(spec: Composite, above: tuple[str, ...]) -> None:
        if isinstance(spec, StackedComposite):
            return
        for name, leaf in spec.items():
            key = (*above, str(name))
            if isinstance(leaf, Composite):
                walk(leaf, key)
            elif leaf is None or leaf.dtype is None or isinstance(leaf, NonTensor):
                continue
            elif -1 not in leaf.shape:
                found[unravel(key)] = tuple(leaf.shape), leaf.dtype

    for spec in specs:
        walk(spec, ())
    return found


def overwritten(td: TensorDictBase, other: TensorDictBase) -> TensorDictBase:
    """``td`` with the values that ``other`` has of its entries."""
    if isinstance(td, LazyStackedTensorDict) and not is_non_tensor(td):
        for one, another in zip(td.tensordicts, other.unbind(td.stack_dim), strict=True):
            overwritten(one, another)
        return td
    for key in list(td.keys()):
        value, new = td.get(key), other.get(key, None)
        if new is None:
            continue
        td.set(key, overwritten(value, new) if is_tensor_collection(value) and not is_non_tensor(value) else new)
    return td


class Sent(NamedTuple):
    """Data written for environments to read; see :class:`~rollwright.envs.batched.messages.StepRows`."""

    layout: int
    nests: Nests
    rest: list[TensorDictBase] | None

    def rest_of(self, rows: Iterable[int]) -> ByValue | None:
        """What has no place in shared memory."""
        return None if self.rest is None else ByValue({row: self.rest[row] for row in rows})


def send_rows(processes: EnvProcesses, td: TensorDictBase) -> Sent:
    """Write the tensors of ``td``, ``[rows, *]``, where environments find them."""
    leaves, nests, complete = dense_leaves(td)
    number, shared = processes.inputs(tuple((key, tuple(value.shape), value.dtype) for key, value in leaves.items()))
    for key, value in leaves.items():
        shared.tensors[key].copy_(value.detach())
    rest = None if complete else [row.detach() for row in td.exclude(*leaves).unbind(0)]
    return Sent(number, {path: size[1:] for path, size in nests.items()}, rest)


class Outcomes:
    """Return values of environments, in shared rows and beside them.

    Args:
        shared: rows that the processes write.
        structures: what outcomes consist of, by call and row.
        default: entries of a step, where no environment has reported any.
        batch_size: of each environment.
    """

    def __init__(
        self,
        shared: SharedRows,
        structures: Mapping[tuple[str, int], OutcomeStructure],
        default: OutcomeStructure,
        batch_size: torch.Size,
    ) -> None:
        self.shared = shared
        self._structures = structures
        self._default = default
        self._batch_size = batch_size

    @staticmethod
    def beside(replies: Iterable[Reply]) -> dict[int, TensorDictBase]:
        """By row: what is not in shared rows."""
        rest: dict[int, TensorDictBase] = {}
        for reply in replies:
            if reply.rest is not None:
                rest.update(reply.rest.value)
        return rest

    def common_form(self, call: str, rows: Iterable[int]) -> OutcomeStructure | None:
        """The form of all ``rows``; None where they differ."""
        structures = [self._structures.get((call, row)) for row in rows]
        known = [form for form in structures if form is not None]
        if not known:
            return self._default
        return known[0] if all(form == known[0] for form in known) else None

    def dense(self, form: OutcomeStructure, num_rows: int) -> TensorDictBase:
        """All rows as one TensorDict of new tensors."""
        leaves = {key: self.shared.tensors[key].clone() for key in form.keys}
        nests = {path: (num_rows, *size) for path, size in form.nests.items()}
        return nested(leaves, nests, (num_rows, *self._batch_size))

    def row(self, call: str, row: int, rest: dict[int, TensorDictBase]) -> TensorDictBase:
        """One row as a TensorDict of new tensors."""
        form = self._structures.get((call, row), self._default)
        td = nested({key: self.shared.tensors[key][row].clone() for key in form.keys}, form.nests, self._batch_size)
        beside: Any = rest.get(row)
        if beside is None:
            return td
        return td.update(beside) if form.keys else beside  # a lazy stack cannot be read as a whole


def lay_out_outcomes(env: EnvBase, processes: EnvProcesses, *, ahead: bool = False) -> Outcomes:
    """Give the outcomes of a batch of environments their places in shared memory.

    Args:
        env: the batch, whose specs list what there is.
        processes: that host the environments.
        ahead: whether first values of trajectories have places of their own, below ``AHEAD``.
    """
    entries = shareable([env.full_observation_spec, env.full_state_spec, env.full_reward_spec, env.full_done_spec])
    returned = dict.fromkeys([*env.observation_keys, *env.reward_keys, *env.done_keys])
    form = OutcomeStructure(tuple(key for key in returned if key in entries), {})
    if ahead:
        entries.update({(AHEAD, *as_tuple(key)): entries[key] for key in env.observation_keys if key in entries})
    return Outcomes(processes.lay_outcomes(entries), processes.structures, form, env.batch_size[1:])
