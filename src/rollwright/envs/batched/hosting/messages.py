"""Messages to a process that hosts environments, and its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rollwright._keys import NestedKey
from rollwright._memory import Layout
from rollwright._processes.channel import ByValue
from rollwright._processes.failures import ExceptionInfo
from rollwright.envs.recreation.policy import RecreationPolicy
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
