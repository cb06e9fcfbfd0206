"""Handles steps that a hosted environment did not take: an error, or the end of its trajectory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from tensordict import TensorDictBase

from rollwright._processes.health import RestartPolicy
from rollwright._tensors import device_of
from rollwright.data.layout import DoneGroup, complete_done
from rollwright.envs.arrays import Values
from rollwright.envs.batched.hosting.answers import Gathered, LostProcess
from rollwright.envs.batched.hosting.messages import RowFailure
from rollwright.envs.batched.hosting.processes import EnvProcesses
from rollwright.envs.each import renamed
from rollwright.envs.recreation.policy import MAX_FAILURES, RecreationWarning
from rollwright.errors import EnvError, RollwrightError


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
