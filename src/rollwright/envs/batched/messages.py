"""Messages to a process that hosts environments, its answers, and the memory that both share."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rollwright._keys import NestedKey, place
from rollwright._memory import Layout, Segment, in_numpy
from rollwright._processes.channel import ByValue
from rollwright._processes.connection import ExceptionInfo
from rollwright._processes.pool import Answer, PendingCall
from rollwright.envs.recreation import RecreationPolicy
from rollwright.errors import EnvError

Some = tuple[int, ...] | None  # rows; None: all that the process hosts

AHEAD = "ahead"  # nest of first values, in shared rows

# Commands -------------------------------------------------------------------------------------------
#
# A command with a ticket is answered by one Reply with that ticket, in order.


class SetLayout(NamedTuple):
    """Set the layout of outcomes (number 0), or of data that are sent. There is no answer."""

    number: int
    layout: Layout[NestedKey]
    forget: bool = False  # all layouts but that of outcomes, before this one


class StepRows(NamedTuple):
    """Step on TensorDicts."""

    ticket: int
    rows: Some
    layout: int
    nests: dict[tuple[str, ...], tuple[int, ...]]  # batch sizes of the nested TensorDicts
    rest: ByValue | None  # by row: a TensorDict of what has no place in the layout


class ResetRows(NamedTuple):
    """Reset on TensorDicts, or on nothing (``layout=None``)."""

    ticket: int
    rows: Some
    layout: int | None
    nests: dict[tuple[str, ...], tuple[int, ...]]
    rest: ByValue | None
    kwargs: ByValue | None


class StepArrays(NamedTuple):
    """Step on arrays; entries below ``"next"`` in the layout are the preset."""

    ticket: int
    rows: Some
    layout: int
    ahead: bool = False  # reset what has ended at once; first values go below AHEAD


class ResetArrays(NamedTuple):
    """Reset on arrays; where ``reads_root``, from the root in the layout, which is empty without one."""

    ticket: int
    rows: Some
    partial: bool  # whether the caller named the rows
    masks: dict[int, Any]  # by row, where environments are batches themselves
    kwargs: ByValue | None
    reads_root: bool = False
    layout: int | None = None


class CallFunction(NamedTuple):
    """Call ``function(hosted, *args)`` for each of the rows, in order; a function of a module of this package."""

    ticket: int
    rows: Some
    function: Callable[..., Any]
    args: ByValue | None


class Close(NamedTuple):
    """Close the environments and end; what closing raised is in the answer."""

    ticket: int


Command = SetLayout | StepRows | ResetRows | StepArrays | ResetArrays | CallFunction | Close

# Answers --------------------------------------------------------------------------------------------


class OutcomeStructure(NamedTuple):
    """Keys and nested TensorDicts of an outcome."""

    keys: tuple[NestedKey, ...]  # entries written into shared rows
    nests: dict[tuple[str, ...], tuple[int, ...]]


class RowFailure(NamedTuple):
    """An error that an environment raised."""

    row: int
    kind: type[Exception]  # to be raised; of this package, or Python's own
    text: str
    failure: ExceptionInfo


class Recreated(NamedTuple):
    """An environment has raised and was recreated."""

    row: int
    text: str


class Reply(NamedTuple):
    """An answer.

    Attributes:
        ticket: of the command.
        raised: what went wrong; other rows were served.
        recreated: each time that an environment was recreated.
        recreation_policies: by row: what environments hand on, where that is another than in the reply before.
        structures: by ``"step"`` or ``"reset"`` and row, where it differs from the reply before.
        rest: by row: a TensorDict of what is not in shared rows.
        values: of :class:`CallFunction`, by row; pickled with :mod:`cloudpickle`.
        masks: of actions, by row and key, where environments have set some.
        unfit: by row: why an outcome on arrays is a TensorDict, as those of :class:`StepRows` and :class:`ResetRows`.
    """

    ticket: int
    raised: tuple[RowFailure, ...] = ()
    recreated: tuple[Recreated, ...] = ()
    recreation_policies: dict[int, RecreationPolicy] | None = None
    structures: dict[tuple[str, int], OutcomeStructure] | None = None
    rest: ByValue | None = None
    values: bytes | None = None
    unfit: dict[int, str] | None = None
    masks: dict[tuple[int, NestedKey], Any] | None = None


def as_raised(row: int, error: BaseException) -> RowFailure:
    """An exception, in a form that another process can read."""
    ours = type(error).__module__ in ("rollwright.errors", "builtins") and isinstance(error, Exception)
    return RowFailure(row, type(error) if ours else EnvError, str(error), ExceptionInfo.of(error))  # type: ignore[arg-type]


class SharedRows:
    """Entries of a segment, as tensors and as arrays over the same memory.

    Args:
        segment: grown to hold them.
        layout: of the entries, ``[rows, *]`` each.

    Attributes:
        tensors: by key.
        arrays: by key, but for dtypes that NumPy does not know.
    """

    def __init__(self, segment: Segment, layout: Layout[NestedKey]) -> None:
        self.layout = layout
        segment.grow(layout.end)
        self.tensors: dict[NestedKey, Tensor] = layout.map(segment)
        self.arrays: dict[NestedKey, NDArray[Any]] = {
            key: tensor.numpy() for key, tensor in self.tensors.items() if in_numpy(tensor.dtype)
        }


Nests = dict[tuple[str, ...], tuple[int, ...]]


def dense_leaves(td: TensorDictBase) -> tuple[dict[NestedKey, Tensor], Nests, bool]:
    """The tensors of a TensorDict by key, the batch sizes of those nested in it, and whether that is all of it."""
    leaves: dict[NestedKey, Tensor] = {}
    nests: Nests = {}
    complete = type(td) is TensorDict and _walk(td, (), leaves, nests)
    return leaves, nests, complete


def _walk(td: TensorDictBase, above: tuple[str, ...], leaves: dict[NestedKey, Tensor], nests: Nests) -> bool:
    complete = True
    for name, value in td.items():
        if isinstance(value, Tensor):
            if value.layout is torch.strided and not value.is_nested:
                leaves[(*above, name) if above else name] = value
            else:
                complete = False
        elif type(value) is TensorDict:
            nests[*above, name] = tuple(value.batch_size)
            complete &= _walk(value, (*above, name), leaves, nests)
        else:
            complete = False
    return complete


def nested(leaves: Mapping[NestedKey, Tensor], nests: Nests, batch: Any, device: Any = None) -> TensorDict:
    """The opposite of :func:`dense_leaves`."""
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        place(tree, key, value)
    td = TensorDict(tree, batch, device=device)
    for path, size in nests.items():
        inner = td.get(path, None)
        if inner is None:
            td.set(path, TensorDict({}, size, device=device))
        elif tuple(inner.batch_size) != size:
            inner.batch_size = size
    return td


def row_of(
    given: Mapping[NestedKey, Tensor], row: int, nests: Nests, batch: Any, rest: TensorDictBase | None
) -> TensorDictBase:
    """One row as a TensorDict of new tensors, with what went beside shared memory."""
    td = nested({key: rows[row].clone() for key, rows in given.items()}, nests, batch)
    if rest is None:
        return td
    return td.update(rest) if given else rest


MOST_LAYOUTS = 16

Signature = tuple[tuple[NestedKey, tuple[int, ...], torch.dtype | np.dtype[Any]], ...]
Entries = Mapping[NestedKey, tuple[tuple[int, ...], torch.dtype]]


class InputLayouts:
    """A layout for each set of entries that is sent, and which process was sent it.

    Args:
        segment: shared with the processes.
        num_processes: how many of these.
    """

    def __init__(self, segment: Segment, num_processes: int) -> None:
        self._segment = segment
        self._first_free = self._free = 0
        self._layouts: dict[Signature, tuple[int, SharedRows]] = {}
        self._last = 0
        self._known: list[set[int]] = [set() for _ in range(num_processes)]  # by process
        self._forgets = [False] * num_processes

    def begin_at(self, first_free: int) -> None:
        """Use the memory from this byte on."""
        self._free = self._first_free = first_free

    @property
    def is_full(self) -> bool:
        """Whether there are so many that the next one needs a :meth:`clear` before."""
        return len(self._layouts) == MOST_LAYOUTS

    def clear(self) -> None:
        """Forget all, here and in the processes; none may be reading any."""
        self._layouts.clear()
        self._free = self._first_free
        self._forgets = [True] * len(self._known)

    def find(self, signature: Signature) -> tuple[int, SharedRows] | None:
        """The number and the memory for these entries; None where there is none yet."""
        return self._layouts.get(signature)

    def add(self, signature: Signature) -> tuple[int, SharedRows]:
        """Lay out these entries: keys, shapes ``[rows, *]``, dtypes."""
        layout = Layout.of(((key, shape, _of_torch(dtype)) for key, shape, dtype in signature), self._free)
        rows = SharedRows(self._segment, layout)
        self._free = layout.end
        self._last += 1
        self._layouts[signature] = self._last, rows
        return self._last, rows

    def begin_anew(self, process: int) -> None:
        """Another process is in its place, which was sent none."""
        self._known[process].clear()
        self._forgets[process] = False

    def message(self, process: int, number: int) -> SetLayout | None:
        """What a process has to be sent before it can read a layout; None if nothing."""
        if number in self._known[process]:
            return None
        rows = next(rows for known, rows in self._layouts.values() if known == number)
        forgets, self._forgets[process] = self._forgets[process], False
        if forgets:
            self._known[process].clear()
        self._known[process].add(number)
        return SetLayout(number, rows.layout, forgets)


def _of_torch(dtype: torch.dtype | np.dtype[Any]) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else torch.from_numpy(np.empty(0, dtype)).dtype


class LostProcess(NamedTuple):
    """A process that has ended, or was ended because an environment did not return.

    Attributes:
        process: its index.
        row: the environment that it was at.
        rows: that it was to serve.
        how: a phrase.
        failure: what it raised at its end.
    """

    process: int
    row: int
    rows: tuple[int, ...]
    how: str
    failure: ExceptionInfo | None


class Gathered(NamedTuple):
    """The answers to a command, by process, and the processes that will not answer."""

    replies: dict[int, Reply]
    lost: list[LostProcess]

    @property
    def raised(self) -> list[RowFailure]:
        """What environments raised, in the order of rows."""
        return sorted((one for reply in self.replies.values() for one in reply.raised), key=lambda one: one.row)

    @property
    def recreated(self) -> list[Recreated]:
        """Which were recreated, in the order of rows."""
        return sorted(one for reply in self.replies.values() for one in reply.recreated)

    @property
    def unfit(self) -> dict[int, str]:
        """By row: why an outcome on arrays is a TensorDict."""
        found: dict[int, str] = {}
        for reply in self.replies.values():
            found.update(reply.unfit or {})
        return dict(sorted(found.items()))

    def values(self) -> dict[int, Any]:
        """What a function has returned, by row."""
        values: dict[int, Any] = {}
        for reply in self.replies.values():
            values.update(pickle.loads(reply.values or b""))
        return {row: values[row] for row in sorted(values)}


class Answers:
    """State that is gathered from all answers, taken or not.

    Args:
        described: what is known of each environment; the masks of its actions are kept as they are now.

    Attributes:
        marks: int64 ``[num_rows]``: the ticket that was finished last in each row, as its process has written it.
        structures: what the last step and the last reset of each row consisted of.
        recreation_policies: what the environment of each row would hand on; none where they are not recreated.
        counts: how many answers each process has sent.
    """

    def __init__(self, described: Sequence[Any]) -> None:
        self._described = described
        self.marks: NDArray[np.int64] = np.zeros(len(described), np.int64)
        self.structures: dict[tuple[str, int], OutcomeStructure] = {}
        self.recreation_policies: dict[int, RecreationPolicy] = {}
        self.counts: dict[int, int] = {}

    def received(self, process: int, reply: Reply) -> Answer:
        """Take in an answer, see :class:`~rollwright._processes.pool.Pool`."""
        if reply.structures:
            self.structures.update(reply.structures)
        if reply.recreation_policies:
            self.recreation_policies.update(reply.recreation_policies)
        for (row, key), mask in (reply.masks or {}).items():
            spec = self._described[row].full_spec("action")[key]
            spec.mask = None if mask is None else torch.from_numpy(mask).to(spec.device)
        self.counts[process] = self.counts.get(process, 0) + 1
        return Answer(reply.ticket, reply)

    def finished(self, ticket: int, row: int) -> bool:
        """Whether a row has been served, though its process may be lost."""
        return bool(self.marks[row] == ticket)

    def gathered(self, ticket: int, call: PendingCall) -> Gathered:
        """What has become of a command."""
        lost = []
        for process, (loss, rows) in call.losses.items():
            row = next((row for row in rows if not self.finished(ticket, row)), rows[-1])
            lost.append(LostProcess(process, row, rows, loss.how, loss.failure))
        return Gathered(call.answers, lost)

    def progress(self, process: int, rows: tuple[int, ...]) -> tuple[int, bytes]:
        """Changes with each answer of a process, and with each row that it finishes."""
        return self.counts.get(process, 0), self.marks[list(rows)].tobytes()
