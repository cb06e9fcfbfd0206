"""Commands that processes were sent: who owes an answer, what has come, and what nobody waits for any more."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwright._processes.failures import Failure
from rollwright.envs.batched.hosting.messages import Form, Raised, Renewed, Reply
from rollwright.envs.recreation.policy import RecreationPolicy

__all__ = ["Gathered", "Lost", "UnderWay"]


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

    @property
    def renewed(self) -> list[Renewed]:
        """Which were made anew, in the order of rows."""
        return sorted(one for reply in self.replies.values() for one in reply.renewed)


class UnderWay:
    """Commands by ticket, from the first message to the last answer.

    Args:
        num_rows: number of environments.

    Attributes:
        dropped: tickets whose answers are to come before the next command: their caller may have been interrupted, and
            then nobody asks for them.
        marks: int64 ``[num_rows]``: the ticket that was finished last in each row, as its process has written it.
        forms: what the last step and the last reset of each row consisted of, whether anybody took the answer or not.
        pasts: what the environment of each row would hand on, likewise; none where they are not made anew.
    """

    def __init__(self, num_rows: int) -> None:
        self.marks: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.forms: dict[tuple[str, int], Form] = {}
        self.pasts: dict[int, RecreationPolicy] = {}
        self._due: dict[int, dict[int, tuple[int, ...]]] = {}  # by ticket and process: rows
        self._come: dict[int, Gathered] = {}
        self.dropped: set[int] = set()

    def begin(self, ticket: int) -> None:
        """A command is going to be sent."""
        self._due[ticket] = {}
        self._come[ticket] = Gathered({}, [])

    def expect(self, ticket: int, process: int, rows: tuple[int, ...]) -> None:
        """A process is to answer for these rows."""
        self._due[ticket][process] = rows

    def unexpect(self, ticket: int, process: int) -> None:
        """It was not told, after all."""
        self._due[ticket].pop(process, None)

    def answer(self, process: int, reply: Reply) -> bool:
        """A process has answered; whether a command was waiting for that."""
        self.forms.update(reply.forms or {})
        self.pasts.update(reply.pasts or {})
        due = self._due.get(reply.ticket)
        if due is None or process not in due:
            return False
        del due[process]
        self._come[reply.ticket].replies[process] = reply
        return True

    def lose(self, process: int, how: str, failure: Failure | None) -> bool:
        """A process will not answer any more, see :class:`Lost`; whether a command was waiting for it."""
        waited = False
        for ticket, due in self._due.items():
            rows = due.pop(process, None)
            if rows is not None:
                row = next((row for row in rows if not self.finished(ticket, row)), rows[-1])
                self._come[ticket].lost.append(Lost(process, row, rows, how, failure))
                waited = True
        return waited

    def finished(self, ticket: int, row: int) -> bool:
        """Whether a row has been served, though its process may be lost."""
        return bool(self.marks[row] == ticket)

    def tickets(self) -> list[int]:
        """Those whose answers nobody has taken."""
        return list(self._due)

    def due(self, ticket: int) -> dict[int, tuple[int, ...]]:
        """The processes that have not answered, and the rows of each."""
        return self._due[ticket]

    def owes(self, process: int, before: int | None = None) -> bool:
        """Whether a process owes an answer; to a command ``before`` this one, where it is given."""
        return any(process in due for ticket, due in self._due.items() if before is None or ticket < before)

    def take(self, ticket: int) -> Gathered:
        """What a command has come to, of which nothing is kept."""
        self.dropped.discard(ticket)
        del self._due[ticket]
        return self._come.pop(ticket)
