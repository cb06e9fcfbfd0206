"""Dialog: a conversation in progress, its tokens, and its saved state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from rollwright.data.llm.branches import Branches
from rollwright.data.llm.chain import TokenChain
from rollwright.data.llm.turns import FinishReason, Marks, Message, Turn, turn_seed
from rollwright.data.transcript import Mark, Part
from rollwright.envs.checkpoint import packed
from rollwright.envs.llm.core import Answer, NextTurn, Opening, Outcome
from rollwright.modules.llm.engine import Completion, Engine, Request


@dataclass(slots=True)
class EndedTurn:
    """A turn that is ready for a batch.

    Attributes:
        turn: the turn itself.
        id: of the trajectory.
        opening: how the conversation began.
        ended: return and length of the conversation, with its last turn; None before.
    """

    turn: Turn
    id: int
    opening: Opening
    ended: tuple[float, int] | None = None


@dataclass(slots=True)
class Dialog:
    """A conversation in a slot.

    Attributes:
        slot: of the environment.
        opening: how it began.
        chain: its tokens: of the sequence that goes on.
        id: of its trajectory.
        branches: its sequences, where its environment chooses among them.
        seed: of the last request; None: none was made since it was loaded.
        next: how its environment asks for the next answer; None: it leaves that to the engine.
        number: of the next turn.
        total: sum of its rewards.
        asked: whether an answer is asked for.
        rests: it has failed, and goes on when others have.
        pending: the last answer, while nothing has followed it.
        held: turns that wait for the end of the conversation, where whole ones are delivered.
        before: its state before the last answer was asked for, where that is kept.
        memory: of the environment's transforms.
    """

    slot: int
    opening: Opening
    chain: TokenChain
    id: int = -1
    number: int = 0
    total: float = 0.0
    asked: bool = False
    rests: bool = False
    pending: Turn | None = None
    held: list[EndedTurn] = field(default_factory=list)
    before: dict[str, Any] | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    branches: Branches = field(default_factory=Branches)
    next: NextTurn | None = None
    seed: int | None = None

    @classmethod
    def begun(cls, slot: int, opening: Opening, chain: TokenChain) -> Dialog:
        """A conversation at its first prompt; or before it, where an outcome brings that."""
        if opening.tokens is not None:
            chain.open(opening.tokens)
        elif opening.text is not None:
            chain.open(opening.text)
        elif opening.messages:
            chain.open(opening.messages)
        chain.transcript.messages.extend(opening.messages)
        return cls(slot, opening, chain)

    @property
    def messages(self) -> list[Message]:
        """So far."""
        return self.chain.transcript.messages

    @property
    def name(self) -> str:
        """For messages."""
        return name_of(self.opening, self.number)

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was asked in it yet."""
        return not self.asked and self.pending is None and not self.number

    @property
    def is_waiting(self) -> bool:
        """Whether something is to follow an answer, or the first prompt is to come."""
        return self.pending is not None or not self.chain.num_prompt

    @property
    def is_ready(self) -> bool:
        """Whether its prompt waits for an answer that nobody was asked for."""
        return not self.asked and not self.rests and not self.is_waiting

    def request(self, key: int, engine: Engine) -> Request:
        """What the engine is asked for the next answer."""
        origin, asks = self.opening.draw.origin, self.next
        self.seed = turn_seed(origin, self.number if asks is None or asks.seed is None else -1 - asks.seed)
        sampling = replace(engine.sampling, **asks.sampling) if asks is not None and asks.sampling else None
        return Request(key, self.chain.tokens, self.seed, sampling=sampling)

    def answer(self, found: Completion, engine: Engine) -> Answer:
        """Take what the model wrote."""
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

    def failed(self, engine: Engine, like: Mapping[str, Any]) -> EndedTurn:
        """End it with the turn that failed, which has no reward; nothing of its turns that are here is trained on.

        Args:
            engine: that it was asked of.
            like: further entries of another turn, which this one gets, too: without values.
        """
        turn = self.pending
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
        """The conversation between an outcome and an answer, or at its end, while its last outcome waits for others.

        What was asked for is asked for again.
        """
        messages, pending = self.messages, self.pending
        return {
            **{name: getattr(self, name) for name in _SAVED},
            "chain": self.chain.place(),
            "messages": Part(messages, len(messages)),
            "pending": None if pending is None else replace(pending, marks=None, tokens=pending.tokens.clone()),
            "memory": dict(self.memory),
            "held": list(self.held),
            "environment": dict(of_environment),
        }

    @classmethod
    def loaded(cls, saved: Mapping[str, Any], chain: TokenChain) -> Dialog:
        """The conversation that :meth:`state_dict` saved."""
        chain.load_state_dict(saved["chain"])
        chain.transcript.messages = list(saved["messages"])
        own = {name: saved[name] for name in _SAVED}
        own |= {name: copy.copy(saved[name]) for name in ("held", "pending", "memory") if name in saved}
        if (pending := own.get("pending")) is not None:
            pending.marks = pending.placed()
        return cls(chain=chain, **own)


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
    chain = state["chain"]
    return packed({**state, "chain": {**chain, "tokens": chain["tokens"].clone()}})
