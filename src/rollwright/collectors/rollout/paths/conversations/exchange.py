"""Exchange: an engine answers, conversations follow; with limits on what is waited for."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from rollwright.collectors.rollout.paths.conversations.dialogs import Dialog, Failures
from rollwright.collectors.rollout.paths.conversations.slots import Dialogs
from rollwright.data.llm.turns import FinishReason
from rollwright.envs.llm.core import Answer, Conversations, Outcome
from rollwright.errors import EnvError, PolicyError, RollwrightError
from rollwright.modules.llm.engine import Completion, Engine, Request

_POLL_S = 0.002  # for answers, while tools and rewards are in progress
_WAIT_S = 0.5  # for anything, before it is looked at whether the wait is in vain


class WaitsEnded(RollwrightError):
    """The collector was shut down while answers, tools or rewards were waited for; the turns were not taken."""


class Exchange:
    """Hands prompts to an engine, its answers to the environment, and complete turns to the rows.

    Args:
        conversations: of the environment.
        engine: of the policy.
        dialogs: the conversations in its slots.
        failures: what becomes of those that fail.

    Attributes:
        engine: of the policy.
    """

    def __init__(
        self,
        conversations: Conversations,
        engine: Engine,
        dialogs: Dialogs[Dialog],
        failures: Failures,
    ) -> None:
        self._conversations, self.engine, self._dialogs, self._failures = conversations, engine, dialogs, failures
        self._asked: dict[int, Dialog] = {}  # by key of the request
        self._keys = itertools.count()
        self._waits_until = math.inf  # on the clock of time.monotonic

    # What a rollout asks for --------------------------------------------------------------------------

    def act(self) -> None:
        """Answers to all prompts that a turn is to be taken of; of a stream, the next ones."""
        dialogs = self._dialogs
        if not dialogs.streams:
            self.answer_all([dialog for dialog in dialogs.ready if not dialogs.row_of(dialog)])
        elif dialogs.lack_turns():
            self.stream()

    def step(self) -> None:
        """What follows the answers, until there are turns to take."""
        if self._dialogs.streams:
            self.complete_one()
        else:
            self.complete_each()

    def answer_all(self, dialogs: Sequence[Dialog]) -> None:
        """Hand answers to the environment, when all have come."""
        answers: dict[int, Answer] = {}
        while True:
            self._ask([dialog for dialog in dialogs if self._dialogs.slots[dialog.slot] is dialog and dialog.is_ready])
            if not self._asked or self._failures.due:
                break
            self._check_waits()
            answers |= self._answers(_WAIT_S)
        if answers:
            self._conversations.submit({slot: answers[slot] for slot in sorted(answers)})
        self._dialogs.raise_due()

    def stream(self) -> bool:
        """Ask for answers to all prompts, and hand those that come first to the environment; whether any came."""
        self._ask(self._dialogs.ready)
        answers: dict[int, Answer] = {}
        while self._asked and not answers and not self._failures.due:
            self._check_waits()
            waits = bool(self._dialogs.waiting)
            answers = self._answers(_POLL_S if waits else _WAIT_S)
            if waits:
                break
            self._ask(self._dialogs.ready)  # again, after an error
        if answers:
            self._conversations.submit(answers)
        self._dialogs.raise_due()
        return bool(answers)

    def complete_each(self) -> None:
        """Take outcomes until each row has a turn; conversations that wait for others let those go ahead."""
        dialogs = self._dialogs
        while True:
            dialogs.fill(lacking=True)
            dialogs.raise_due()
            if not dialogs.lack_turns():
                return
            if not self.follow(None):
                dialogs.fill()
                if not (ready := dialogs.ready):
                    self._wake_or_stop()
                self.answer_all(ready)

    def complete_one(self) -> None:
        """Take outcomes until there is a turn."""
        dialogs = self._dialogs
        while dialogs.lack_turns():
            came = bool(dialogs.waiting) and self.follow(0.0 if self._asked else None)
            dialogs.fill()
            dialogs.raise_due()
            if dialogs.lack_turns() and not self.stream() and not came and not self._asked and not dialogs.ready:
                self._wake_or_stop()

    def _wake_or_stop(self) -> None:
        """Nothing goes on: those that have failed do, or it is an error."""
        if any(dialog.rests for dialog in self._dialogs):
            self._dialogs.wake()
        else:
            raise EnvError(self._stuck())

    def _stuck(self) -> str:
        waiting = ", ".join(dialog.name for dialog in self._dialogs.waiting)
        return (
            f"{type(self._conversations).__name__}: nothing follows the answers in {waiting}, and no other "
            "conversation goes on that they could wait for. Use as many environments as a group has conversations, or "
            "more, where a reward is of a whole group."
        )

    # The engine ---------------------------------------------------------------------------------------

    def _ask(self, dialogs: Sequence[Dialog]) -> None:
        if not dialogs:
            return
        requests = []
        for dialog in dialogs:
            self._dialogs.keep_before(dialog)
            key = next(self._keys)
            self._asked[key] = dialog
            dialog.asked = True
            if not dialog.number and isinstance(version := self.engine.version, int):
                self._dialogs.undelivered.versions[dialog.opening.draw.origin] = version
            requests.append(dialog.request(key))
        try:
            self.engine.submit(requests)
        except ValueError:  # nothing was accepted
            self._ask_each(requests)
        except Exception as error:
            self._ask_again(error)

    def _ask_each(self, requests: Sequence[Request]) -> None:
        """Ask one by one, since a request is refused: its conversation has failed."""
        for request in requests:
            try:
                self.engine.submit([request])
            except ValueError as found:
                dialog = self._asked.pop(cast(int, request.key))
                error = ValueError(f"{dialog.name}: {found}")
                error.__cause__ = found
                self._dialogs.fail(dialog, error)

    def _ask_again(self, error: Exception) -> None:
        """The engine has raised: what it was asked for is asked again, now or after the error was raised."""
        keys = list(self._asked)
        for dialog in self._asked.values():
            dialog.asked = False
        self._asked.clear()
        with suppress(Exception):  # it has raised already
            self.engine.cancel(keys)
        if not self._failures.may_retry(None):
            self._failures.due.append(error)

    def _answers(self, timeout: float) -> dict[int, Answer]:
        """Answers that have come, by slot; waits until there is one."""
        found: dict[int, Answer] = {}
        try:
            completions = self.engine.results(timeout)
        except Exception as error:
            self._ask_again(error)
            return found
        for completion in completions:
            dialog = self._asked.pop(cast(int, completion.key), None)
            if dialog is not None:  # else it was dropped meanwhile
                try:
                    found[dialog.slot] = self._answer(dialog, completion)
                except PolicyError as error:
                    self._dialogs.fail(dialog, error)
        if found:
            self._failures.ended_well(None)
        return found

    def _answer(self, dialog: Dialog, found: Completion) -> Answer:
        if found.finish_reason is FinishReason.ERROR:
            raise PolicyError(f"policy: the engine failed in {dialog.name}: {found.error}") from found.error
        return dialog.answer(found)

    def stats(self) -> dict[str, Any]:
        """What it adds to ``stats()``."""
        return {"tokens_discarded": self.engine.tokens_discarded}

    def close(self) -> None:
        """Nothing is asked for any more."""
        self.cancel(self._dialogs)

    def cancel(self, dialogs: Iterable[Dialog | None]) -> None:
        """Have the engine forget what conversations were asked for."""
        gone = {id(dialog) for dialog in dialogs if dialog is not None}
        keys = [key for key, dialog in self._asked.items() if id(dialog) in gone]
        if keys:
            self.engine.cancel(keys)
            for key in keys:
                del self._asked[key]

    # The environment ----------------------------------------------------------------------------------

    def follow(self, timeout: float | None) -> bool:
        """Take outcomes that have come; returns whether there were any."""
        outcomes = self._outcomes() if timeout is None else self._conversations.outcomes(timeout)
        for slot, outcome in outcomes.items():
            dialog = self._dialogs.slots[slot]
            assert dialog is not None
            if outcome.error is not None:
                self._dialogs.fail(dialog, outcome.error)
                continue
            try:
                ended = dialog.follow(outcome, self.engine.max_length, partial(self._conversations.cut, slot))
            except ValueError as found:  # of messages that cannot be written as tokens
                error = EnvError(f"{dialog.name}: {found}")
                error.__cause__ = found
                self._dialogs.fail(dialog, error)
                continue
            if ended is not None:
                self._dialogs.keep(dialog, ended)
        return bool(outcomes)

    def _outcomes(self) -> dict[int, Outcome]:
        """Outcomes that have come; waits until there is one, or none is to come."""
        while True:
            self._check_waits()
            until = time.monotonic() + _WAIT_S
            outcomes = self._conversations.outcomes(_WAIT_S)
            if outcomes or time.monotonic() < until:
                return outcomes

    def follow_all(self) -> None:
        """Wait for tools and rewards that are in progress."""
        while self._dialogs.waiting and self.follow(None):
            pass

    def end_waits(self, in_s: float) -> None:
        """Wait no longer than ``in_s`` seconds from now on for answers, tools and rewards; called by any thread."""
        self._waits_until = time.monotonic() + in_s

    def _check_waits(self) -> None:
        if time.monotonic() > self._waits_until:
            begun = ", ".join(dialog.name for dialog in self._dialogs if not dialog.is_untouched)
            raise WaitsEnded(
                f"shutdown: answers, tools or rewards were still to come in {begun}; they are not delivered."
            )
