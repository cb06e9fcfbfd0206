"""Exchange: an engine answers, conversations follow; with limits on what is waited for."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

from rollwright.collectors.rollout.paths.conversations.dialogs import Dialog
from rollwright.collectors.rollout.paths.conversations.slots import Dialogs
from rollwright.data.llm.turns import FinishReason
from rollwright.envs.llm.core import Answer, Conversations, Outcome
from rollwright.envs.llm.transforms import TurnHook
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

    Attributes:
        engine: of the policy.
        hooks: what transforms of the environment do with a complete turn.
    """

    def __init__(
        self,
        conversations: Conversations,
        engine: Engine,
        dialogs: Dialogs,
        *,
        hooks: list[TurnHook],
    ) -> None:
        self._conversations, self.engine, self._dialogs = conversations, engine, dialogs
        self.hooks = hooks
        self._asked: dict[int, Dialog] = {}  # by key of the request
        self._keys = itertools.count()
        dialogs.asked = self
        self._waits_until = math.inf  # on the clock of time.monotonic

    # What a rollout asks for --------------------------------------------------------------------------

    def answer_all(self, dialogs: Sequence[Dialog]) -> None:
        """Hand answers to the environment, when all have come."""
        self._ask(dialogs)
        answers: dict[int, Answer] = {}
        while self._asked:
            self._check_waits()
            answers |= self._answers(_WAIT_S)
        if answers:
            self._conversations.submit({slot: answers[slot] for slot in sorted(answers)})

    def stream(self) -> bool:
        """Ask for answers to all prompts, and hand those that come first to the environment; whether any came."""
        self._ask(self._dialogs.ready)
        answers: dict[int, Answer] = {}
        while self._asked and not answers:
            self._check_waits()
            waits = bool(self._dialogs.waiting)
            answers = self._answers(_POLL_S if waits else _WAIT_S)
            if waits:
                break
        if answers:
            self._conversations.submit(answers)
        return bool(answers)

    def complete_each(self) -> None:
        """Take outcomes until each row has a turn; conversations that wait for others let those go ahead."""
        while self._dialogs.lack_turns():
            if not self.follow(None):
                self._dialogs.fill()
                if not (ready := self._dialogs.ready):
                    raise EnvError(self._stuck())
                self.answer_all(ready)

    def complete_one(self) -> None:
        """Take outcomes until there is a turn."""
        dialogs = self._dialogs
        while dialogs.lack_turns():
            came = bool(dialogs.waiting) and self.follow(0.0 if self._asked else None)
            dialogs.fill()
            if dialogs.lack_turns() and not self.stream() and not came and not self._asked:
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
            requests.append(dialog.request(key, self.engine))
        try:
            self.engine.submit(requests)
        except ValueError as error:
            self._explain(requests, error)

    def _explain(self, requests: Sequence[Request], error: ValueError) -> None:
        """Raise the error of the first request that is refused alone, with the name of its conversation."""
        for request in requests:
            try:
                self.engine.submit([request])
            except ValueError as found:
                raise ValueError(f"{self._asked.pop(cast(int, request.key)).name}: {found}") from found
        raise error

    def _answers(self, timeout: float) -> dict[int, Answer]:
        """Answers that have come, by slot; waits until there is one."""
        found = {}
        for completion in self.engine.results(timeout):
            dialog = self._asked.pop(cast(int, completion.key), None)
            if dialog is not None:  # else it was dropped meanwhile
                found[dialog.slot] = self._answer(dialog, completion)
        return found

    def _answer(self, dialog: Dialog, found: Completion) -> Answer:
        if found.finish_reason is FinishReason.ERROR:
            raise PolicyError(f"policy: the engine failed in {dialog.name}: {found.error}") from found.error
        return dialog.answer(found, self.engine)

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
            if outcome.error is not None:
                raise outcome.error
            dialog = self._dialogs.slots[slot]
            assert dialog is not None
            try:
                ended = dialog.follow(outcome, self.engine.max_length, partial(self._conversations.cut, slot))
            except ValueError as error:  # of messages that cannot be written as tokens
                raise EnvError(f"{dialog.name}: {error}") from error
            if ended is not None:
                for hook in self.hooks:
                    hook(ended.turn, dialog.memory)
                if ended.turn.done:  # perhaps by a hook
                    ended.ended = dialog.total, dialog.number
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
        """See :meth:`TurnPath.end_waits`."""
        self._waits_until = time.monotonic() + in_s

    def _check_waits(self) -> None:
        if time.monotonic() > self._waits_until:
            begun = ", ".join(dialog.name for dialog in self._dialogs if not dialog.is_untouched)
            raise WaitsEnded(
                f"shutdown: answers, tools or rewards were still to come in {begun}; they are not delivered."
            )
