"""Answers: replies of processes that host environments, and the processes that were lost."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright._processes.failures import ExceptionInfo
from rollwright._processes.pool import Answer, PendingCall
from rollwright.envs.batched.hosting.messages import OutcomeStructure, Recreated, Reply, RowFailure
from rollwright.envs.recreation.policy import RecreationPolicy


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
