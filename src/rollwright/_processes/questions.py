"""Questions: requests to several processes, and their answers so far."""

from __future__ import annotations

from typing import Any

from rollwright._processes.connection import ExitReason


class Question:
    """One question, which several processes may be asked.

    Attributes:
        due: by place of the process: what was noted when it was asked; only of those that have not answered.
        answers: by place.
        losses: by place, of those that will not answer: why, and what was noted when they were asked.
    """

    __slots__ = ("answers", "due", "losses")

    def __init__(self) -> None:
        self.due: dict[int, Any] = {}
        self.answers: dict[int, Any] = {}
        self.losses: dict[int, tuple[ExitReason, Any]] = {}


class Questions:
    """Questions by ticket, from the first message to the last answer.

    Example:
        >>> questions = Questions()
        >>> ticket = questions.open()
        >>> questions.ask(ticket, 0)
        >>> questions.ask(ticket, 1)
        >>> questions.answer(ticket, 0, "yes")
        >>> questions.lose(1, ExitReason("was killed by SIGKILL"))
        >>> question = questions.close(ticket)
        >>> question.answers, question.losses[1][0].how
        ({0: 'yes'}, 'was killed by SIGKILL')
    """

    def __init__(self) -> None:
        self._open: dict[int, Question] = {}
        self._last = 0

    def open(self, ticket: int | None = None) -> int:
        """Begin a question; its ticket, higher than all before, unless one is given."""
        if ticket is None:
            ticket = self._last = self._last + 1
        self._open[ticket] = Question()
        return ticket

    def ask(self, ticket: int, place: int, note: Any = None) -> None:
        """A process is to answer."""
        self._open[ticket].due[place] = note

    def withdraw(self, ticket: int, place: int) -> None:
        """A process was not asked, after all."""
        self._open[ticket].due.pop(place, None)

    def answer(self, ticket: int, place: int, value: Any) -> None:
        """A process has answered; an answer that nobody waits for any more is dropped."""
        question = self._open.get(ticket)
        if question is not None and place in question.due:
            del question.due[place]
            question.answers[place] = value

    def lose(self, place: int, loss: ExitReason) -> None:
        """A process will not answer any more."""
        for question in self._open.values():
            if place in question.due:
                question.losses[place] = loss, question.due.pop(place)

    def __getitem__(self, ticket: int) -> Question:
        return self._open[ticket]

    def tickets(self) -> list[int]:
        """Those that are open."""
        return list(self._open)

    def owes(self, place: int) -> bool:
        """Whether a process owes an answer."""
        return any(place in question.due for question in self._open.values())

    def close(self, ticket: int) -> Question:
        """The question, whose answers are dropped from here on."""
        return self._open.pop(ticket)
