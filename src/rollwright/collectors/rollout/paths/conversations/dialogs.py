"""InSlot and Dialog: a conversation in progress, and its saved state; Failures: what becomes of one that fails."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from rollwright.collectors.options import CollectorOptions
from rollwright.data.llm.branches import Branches
from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.turns import FinishReason, Marks, Message, Origin, Turn, turn_seed
from rollwright.data.transcript import Mark, Part
from rollwright.envs.checkpoint import packed
from rollwright.envs.llm.core import Answer, NextTurn, Opening, Outcome
from rollwright.errors import EnvError
from rollwright.modules.llm.engine import Completion, Engine, Request


@dataclass(slots=True)
class EndedTurn:
    """A turn that is ready for a batch.

    Attributes:
        turn: the turn itself: a :class:`Turn`, or one on TensorDicts.
        id: of the trajectory.
        opening: how the conversation began.
        ended: return and length of the conversation, with its last turn; None before.
    """

    turn: Any
    id: int
    opening: Opening
    ended: tuple[float, int] | None = None


@dataclass(slots=True)
class InSlot:
    """A conversation in a slot: of an environment that is sent answers, and returns what follows.

    Attributes:
        slot: of the environment.
        opening: how it began.
        id: of its trajectory.
        number: of the next turn.
        total: sum of its rewards.
        asked: whether an answer is asked for.
        rests: it has failed, and goes on when others have.
        held: turns that wait for the end of the conversation, where whole ones are delivered.
        before: its state before the last answer was asked for, where that is kept.
        memory: of the environment's transforms.
        seed: of the last request; None: none was made since it was loaded.
        begun: whether there is its first prompt.
    """

    slot: int
    opening: Opening
    id: int = -1
    number: int = 0
    total: float = 0.0
    asked: bool = False
    rests: bool = False
    held: list[EndedTurn] = field(default_factory=list)
    before: dict[str, Any] | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    begun: bool = False

    def begin(self) -> None:
        """Go to the first prompt; or before it, where an outcome brings that.

        Raises:
            ValueError: it cannot be written as tokens.
        """
        self.begun = True

    @property
    def has_prompt(self) -> bool:
        """Whether there is a prompt, the first one or a later one."""
        return self.begun

    @property
    def has_answer(self) -> bool:
        """Whether there is an answer, or may be, that nothing has followed yet."""
        return self.asked

    @property
    def stays(self) -> bool:
        """Whether it can be asked again as it is, after a failure; else its environment may have taken a step."""
        return False

    @property
    def messages(self) -> list[Message]:
        """So far, where they are kept here."""
        return []

    @property
    def name(self) -> str:
        """For messages."""
        return name_of(self.opening, self.number)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was asked in it yet."""
        return not self.asked and not self.has_answer and not self.number

    @property
    def is_waiting(self) -> bool:
        """Whether something is to follow an answer, or the first prompt is to come."""
        return self.has_answer or not self.has_prompt

    @property
    def is_ready(self) -> bool:
        """Whether its prompt waits for an answer that nobody was asked for."""
        return not self.asked and not self.rests and not self.is_waiting

    def failed(self, like: Mapping[str, Any]) -> EndedTurn:
        """End it with the turn that failed, which has no reward; nothing of its turns that are here is trained on.

        Args:
            like: further entries of another turn, which this one gets, too: without values.
        """
        raise NotImplementedError

    def state_dict(self, of_environment: Mapping[str, Any]) -> dict[str, Any]:
        """The conversation between an outcome and an answer, or at its end, while its last outcome waits for others.

        What was asked for is asked for again.
        """
        found = {name: getattr(self, name) for name in _SAVED}
        return {**found, "held": list(self.held), "environment": dict(of_environment)}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` saved."""
        for name in _SAVED:
            setattr(self, name, saved[name])
        self.begun, self.held = True, list(saved.get("held", ()))


@dataclass(slots=True, kw_only=True)
class Dialog(InSlot):
    """A conversation whose answers an engine samples.

    Attributes:
        engine: which it is.
        chain: its tokens: of the sequence that goes on.
        branches: its sequences, where its environment chooses among them.
        next: how its environment asks for the next answer; None: it leaves that to the engine.
        pending: the last answer, while nothing has followed it.
    """

    engine: Engine
    chain: TokenChain
    branches: Branches = field(default_factory=Branches)
    next: NextTurn | None = None
    pending: Turn | None = None

    def begin(self) -> None:
        """Go to the first prompt; or before it, where an outcome brings that."""
        opening, chain = self.opening, self.chain
        if opening.tokens is not None:
            chain.open(opening.tokens)
        elif opening.text is not None:
            chain.open(opening.text)
        elif opening.messages:
            chain.open(opening.messages)
        chain.transcript.messages.extend(opening.messages)

    @property
    def has_prompt(self) -> bool:
        """Whether there is a prompt, the first one or a later one."""
        return self.chain.num_prompt > 0

    @property
    def has_answer(self) -> bool:
        """Whether there is an answer, or may be, that nothing has followed yet."""
        return self.pending is not None

    @property
    def stays(self) -> bool:
        """Whether it can be asked again as it is, after a failure; else its environment may have taken a step."""
        return self.has_prompt and not self.has_answer

    @property
    def messages(self) -> list[Message]:
        """So far."""
        return self.chain.transcript.messages

    def request(self, key: int) -> Request:
        """What the engine is asked for the next answer."""
        origin, asks, engine = self.opening.draw.origin, self.next, self.engine
        self.seed = turn_seed(origin, self.number if asks is None or asks.seed is None else -1 - asks.seed)
        sampling = replace(engine.sampling, **asks.sampling) if asks is not None and asks.sampling else None
        return Request(key, self.chain.tokens, self.seed, sampling=sampling)

    def answer(self, found: Completion) -> Answer:
        """Take what the model wrote."""
        engine = self.engine
        chain, prompt, response = self.chain, self.chain.transcript.mark(), self.chain.decode(found.tokens)
        message = {"role": "assistant", "content": response}
        chain.answer(found.tokens, found.finish_reason, message)
        self.messages.append(message)
        versions = found.versions
        last = versions[-1] if len(versions) else engine.version
        answer = chain.transcript.mark()
        self.pending = Turn(
            origin=self.opening.draw.origin,
            number=self.number,
            sequence=chain.sequence,
            prompt=prompt.chat,
            response=message,
            prompt_text=cast(str, prompt.text),
            response_text=response,
            tokens=answer.read(),
            num_prompt=prompt.tokens,
            log_probs=found.log_probs,
            log_prob_mode=engine.sampling.log_prob_mode,
            versions=versions,
            version=int(last) if isinstance(last, torch.Tensor) else last,
            finish_reason=found.finish_reason,
            seconds=dict(found.seconds),
            extras=dict(found.extras),
            marks=Marks(prompt, answer, answer._replace(tokens=0, texts=0)),
        )
        self.asked = False
        return Answer(
            message, response, found.tokens, found.finish_reason, str(prompt.text), found.log_probs, prompt.tokens
        )

    def follow(self, outcome: Outcome, max_length: int | None, cut: Callable[[], bool]) -> EndedTurn | None:
        """Take what followed the answer; the turn is complete.

        A conversation that has no room for another token ends there.

        Args:
            outcome: what followed.
            max_length: tokens that prompt and response have room for.
            cut: called where there is no room: ends the conversation in its environment; returns whether another
                outcome follows, with the rewards of its end.

        Returns:
            The turn; None: another outcome is to follow first, or this one has brought the first prompt.
        """
        turn = self.pending
        if turn is None:
            self._go_on(outcome)
            return None
        was_cut = turn.next_prompt is not None  # then this is the same outcome again, with the rewards of the end
        turn.reward = outcome.reward
        turn.terminated, turn.truncated = outcome.terminated, outcome.truncated
        turn.seconds.update(outcome.seconds)
        turn.extras.update(outcome.extras)
        if not was_cut:
            self._note(turn, outcome)
            chain = self.chain
            if turn.done:
                self.messages.extend(outcome.messages)
                following = chain.transcript.mark()._replace(tokens=0, texts=0)
            else:
                self._go_on(outcome)
                following = self.chain.transcript.mark()
            self._place(turn, following, jumps=self.chain is not chain)
        if not turn.done and max_length is not None and self.chain.transcript.size >= max_length:
            turn.truncated = True
            if cut():
                return None
        self.pending = None
        reward = outcome.reward
        self.total += float(reward.sum()) if isinstance(reward, torch.Tensor) else float(reward)
        self.number += 1
        return EndedTurn(turn, self.id, self.opening, (self.total, self.number) if turn.done else None)

    def _go_on(self, outcome: Outcome) -> None:
        """Take what leads to the next prompt: of this sequence, or of the one that the environment has chosen."""
        self.next = outcome.next
        if (asks := outcome.next) is not None:
            self.chain = self.branches.turn_to(asks.sequence, self.chain, outcome.messages, asks.template)
        else:
            self.chain.follow(outcome.messages)
            self.messages.extend(outcome.messages)

    def failed(self, like: Mapping[str, Any]) -> EndedTurn:
        """End it with the turn that failed, which has no reward; nothing of its turns that are here is trained on."""
        turn, engine = self.pending, self.engine
        if turn is None:
            none = torch.zeros(0, dtype=torch.int64)
            turn = Turn(
                origin=self.opening.draw.origin,
                number=self.number,
                sequence=self.chain.sequence,
                prompt=list(self.messages),
                response={"role": "assistant", "content": ""},
                prompt_text=self.chain.text,
                response_text="",
                tokens=self.chain.tokens.clone(),
                num_prompt=self.chain.transcript.size,
                log_probs=torch.zeros(0),
                log_prob_mode=engine.sampling.log_prob_mode,
                versions=[] if isinstance(engine.version, str) else none,
                version=engine.version,
                finish_reason=FinishReason.ERROR,
            )
        turn.finish_reason, turn.terminated, turn.truncated = FinishReason.ERROR, False, True
        turn.reward = 0.0
        if turn.marks is not None:
            self._place(turn, turn.marks.answer._replace(tokens=0, texts=0))
        turn.extras = {key: _blank(value) for key, value in like.items()} | turn.extras
        for each in (turn, *(held.turn for held in self.held)):
            each.masked = True
        self.pending = None
        self.number += 1
        return EndedTurn(turn, self.id, self.opening, (self.total, self.number))

    def _note(self, turn: Turn, outcome: Outcome) -> None:
        """Write what an environment made of the answer: it called tools, perhaps."""
        if outcome.response is None:
            return
        if turn.finish_reason is FinishReason.STOP:  # one that was cut by its length says so
            turn.finish_reason = FinishReason.TOOL
        assert turn.marks is not None
        prompt = turn.marks.prompt
        for messages in (prompt.transcript.messages, self.messages):  # two, where it was loaded
            messages[prompt.messages] = outcome.response
        if self.chain.messages:
            self.chain.messages[-1] = outcome.response

    def _place(self, turn: Turn, following: Mark, *, jumps: bool = False) -> None:
        """The turn is complete, and so is the transcript up to there."""
        assert turn.marks is not None
        turn.place(turn.marks._replace(following=following, jumps=jumps))
        for mark in (turn.marks.answer, following):
            mark.settle()

    # State ------------------------------------------------------------------------------------

    def state_dict(self, of_environment: Mapping[str, Any]) -> dict[str, Any]:
        """The conversation between an outcome and an answer, or at its end, while its last outcome waits for others."""
        messages, pending = self.messages, self.pending
        return {
            **InSlot.state_dict(self, of_environment),
            "chain": self.chain.place(),
            "messages": Part(messages, len(messages)),
            "pending": None if pending is None else replace(pending, marks=None, tokens=pending.tokens.clone()),
            "memory": dict(self.memory),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` saved."""
        InSlot.load(self, saved)
        self.chain.load_state_dict(saved["chain"])
        self.chain.transcript.messages = list(saved["messages"])
        self.pending, self.memory = copy.copy(saved.get("pending")), dict(saved.get("memory", {}))
        if self.pending is not None:
            self.pending.marks = self.pending.placed()


_SAVED = ("slot", "opening", "id", "number", "total")


def _blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value) if value.numel() == 1 else value.new_zeros((0, *value.shape[1:]))
    return type(value)() if isinstance(value, str | int | float | list | dict) else None


def name_of(opening: Opening, number: int) -> str:
    """The name of a conversation and its turn, for messages."""
    return f"the conversation of {opening.draw.origin.name}, turn {number}"


def packed_dialog(state: Mapping[str, Any]) -> torch.Tensor:
    """A state of :meth:`Dialog.state_dict` in memory of its own: a pickle of a view holds all that it is a view of."""
    if "chain" in state:
        state = {**state, "chain": {**state["chain"], "tokens": state["chain"]["tokens"].clone()}}
    return packed(state)


class Failures:
    """Counts failures, and knows what the options say of them: ``on_error``, ``max_retries`` and ``max_failures``.

    Args:
        options: of the collector.
        counts: where they are counted, by class of what was raised.

    Attributes:
        on_error: ``"raise"``, ``"drop"`` or ``"mask"``.
        retries: whether anything is tried again.
        due: errors that the rollout raises next.
    """

    def __init__(self, options: CollectorOptions, counts: Callable[[], Counter[str]]) -> None:
        self.on_error, self._most_retries = options.on_error, options.max_retries
        self._most_in_a_row, self._counts = options.max_failures, counts
        self.retries = self._most_retries > 0
        self.due: deque[BaseException] = deque()
        self._tried: Counter[Origin | None] = Counter()  # how often again; None: the engine as a whole
        self._in_a_row = 0

    def may_retry(self, origin: Origin | None) -> bool:
        """Whether a conversation (or, with None, the engine) is tried once more; that counts."""
        if self._tried[origin] >= self._most_retries:
            self._tried.pop(origin, None)
            return False
        self._tried[origin] += 1
        return True

    def ended_well(self, origin: Origin | None) -> None:
        """A conversation has ended, or the engine has answered."""
        self._tried.pop(origin, None)
        if origin is not None:
            self._in_a_row = 0

    def add(self, origin: Origin, error: BaseException) -> None:
        """A conversation has failed for good."""
        self._tried.pop(origin, None)
        self._counts()[type(error.__cause__ or error).__name__] += 1
        if self.on_error == "raise":
            if not any(each is error for each in self.due):  # a reward of a whole group fails once
                self.due.append(error)
            return
        self._in_a_row += 1
        if self._in_a_row >= self._most_in_a_row:
            text = (
                f"on_error={self.on_error!r}: {self._in_a_row} conversations have failed, and none has ended well "
                f"between them. The last: {error} Correct the cause, or pass a larger max_failures."
            )
            stop = EnvError(text)
            stop.__cause__ = error
            self.due.append(stop)
            self._in_a_row = 0
