"""One turn of a conversation, as an environment, an engine and a collector pass it on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, NamedTuple, cast

import torch

from rollwright.data.transcript import Mark, Transcript

Message = Mapping[str, Any]  # a chat message: "role", "content", perhaps "tool_calls", "tool_call_id", "name"
Version = int | str  # of weights: a number, or a UUID
InputMode = Literal["history", "text", "tokens"]  # what a prompt is
LayoutName = Literal["nested", "flat"]  # of the keys of a record
LogProbMode = Literal["sampled", "raw"]  # of the distribution that was sampled from; of the model's


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # the model wrote its end
    LENGTH = "length"  # no room for more tokens
    TOOL = "tool"  # the model called a tool
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a conversation comes from.

    Attributes:
        index: of the prompt in its dataset.
        epoch: how often the dataset was read to its end before.
        repeat: which of the conversations that begin with this prompt, from 0.
        group: id of the group: the repeats of one prompt in one epoch. No two groups of a run share one.
        seed: of the run; see :func:`turn_seed`.
    """

    index: int
    epoch: int
    repeat: int
    group: int
    seed: int

    @property
    def name(self) -> str:
        """Of the conversation, for people."""
        return f"prompt {self.index} (epoch {self.epoch}, repeat {self.repeat})"


def turn_seed(origin: Origin, turn: int) -> int:
    """The seed of the generator that samples one turn: 63 bits, made of seed, prompt, epoch, repeat and turn.

    Batch size, order of arrival and worker are not part of it.
    """
    text = f"{origin.seed}/{origin.index}/{origin.epoch}/{origin.repeat}/{turn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


class Marks(NamedTuple):
    """Where a turn is in the transcript of its conversation.

    Attributes:
        prompt: behind what the model read.
        answer: behind what it wrote.
        following: behind what followed; without tokens and text where there is no further prompt.
        jumps: whether that is in another sequence, whose messages do not go on from these.
    """

    prompt: Mark
    answer: Mark
    following: Mark
    jumps: bool = False


@dataclass(slots=True)
class Turn:
    """One turn: what the model read, what it wrote, and what followed.

    Tokens are int64 on the CPU. ``tokens`` holds prompt and response; both are views of it, and ``tokens`` may be a
    view of the tokens of the whole conversation, which later turns extend and nobody overwrites.

    The turns of a collector are marks in the transcript of their conversation, and pickled as such: the tokens, texts
    and messages of all turns in one pickle are in it once.

    Attributes:
        origin: where the conversation comes from.
        number: of the turn in its conversation, from 0.
        sequence: of the token sequence in the conversation, from 0; it rises where earlier turns were rewritten.
        prompt: messages that the model read.
        response: the message that it wrote.
        added: messages of the environment, which follow; the next turn's prompt is prompt, response and these.
        prompt_text, response_text: as strings.
        tokens: ``[prompt + response]``.
        num_prompt: tokens of the prompt.
        log_probs: of the response, float32 ``[response]``; None: the engine gave none.
        log_prob_mode: ``"sampled"``: of the distribution that was sampled from; ``"raw"``: of the model's.
        versions: of the weights that sampled each token of the response: int64 ``[response]``, or UUIDs.
        version: of the weights that sampled the last token.
        finish_reason: why the response ended.
        next_prompt: tokens of the next turn's prompt; None: there is none.
        next_prompt_text: the same as a string.
        next_messages: those of the next turn's prompt, where it is not prompt, response and ``added``: another sequence
            goes on; None: it is.
        reward: of the turn, or float32 ``[response]``, one for each token.
        terminated: whether the conversation ended with this turn, with nothing to follow.
        truncated: whether it was cut off there, by a limit.
        masked: whether none of its tokens is trained on: its conversation has failed.
        seconds: by stage: ``queue``, ``generation``, ``tool``, ``reward``.
        extras: further entries of engine or environment, by key.
        marks: where it is in a transcript: prompt, tokens, texts and messages are then read there; None: nowhere.
    """

    origin: Origin
    number: int
    sequence: int
    prompt: Sequence[Message]
    response: Message
    prompt_text: str
    response_text: str
    tokens: torch.Tensor
    num_prompt: int
    log_probs: torch.Tensor | None
    log_prob_mode: LogProbMode
    versions: torch.Tensor | Sequence[str]
    version: Version
    finish_reason: FinishReason
    added: Sequence[Message] = ()
    next_prompt: torch.Tensor | None = None
    next_prompt_text: str = ""
    next_messages: Sequence[Message] | None = None
    reward: float | torch.Tensor = 0.0
    terminated: bool = False
    truncated: bool = False
    masked: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    marks: Marks | None = None

    @property
    def done(self) -> bool:
        """Whether the conversation ended with this turn."""
        return self.terminated or self.truncated

    def place(self, marks: Marks) -> None:
        """Say where it is in a transcript: what was read, written and followed is as it stands there."""
        self.marks = marks
        prompt, answer, following, jumps = marks
        self.tokens, self.num_prompt = answer.read(), prompt.tokens
        self.prompt, self.response = prompt.chat, answer.transcript.messages[prompt.messages]
        self.prompt_text, self.next_prompt_text = cast(str, prompt.text), cast(str, following.text)
        self.next_prompt = following.read() if following.tokens else None
        self.added = () if jumps else following.transcript.messages[answer.messages : following.messages]
        self.next_messages = following.chat if jumps else None

    def placed(self) -> Marks:
        """Where it is in a transcript; in one of its own, where it is in none."""
        if self.marks is not None:
            return self.marks
        messages = [*self.prompt, self.response, *self.added]
        own = Transcript(self.tokens, [self.prompt_text, self.response_text], messages)
        prompt = Mark(own, self.num_prompt, 1, len(self.prompt))
        answer = Mark(own, own.size, 2, len(self.prompt) + 1)
        if self.next_prompt is None:
            return Marks(prompt, answer, Mark(own, 0, 0, len(messages)))
        jumps = self.next_messages is not None
        chat = messages if self.next_messages is None else self.next_messages
        following = Transcript(self.next_prompt, [self.next_prompt_text], chat)
        return Marks(prompt, answer, following.mark(), jumps)

    def __getstate__(self) -> dict[str, Any]:
        left_out = () if self.marks is None else _OF_MARKS
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}

    def __setstate__(self, state: Any) -> None:
        given = state[1] if isinstance(state, tuple) else state  # of before there were marks
        for each in fields(self):
            if each.default is not MISSING and each.name not in given:
                setattr(self, each.name, each.default)
        for name, value in given.items():
            setattr(self, name, value)
        if self.marks is not None:
            self.place(self.marks)


_OF_MARKS = frozenset(
    (
        "tokens",
        "num_prompt",
        "prompt",
        "response",
        "prompt_text",
        "next_prompt_text",
        "next_prompt",
        "added",
        "next_messages",
    )
)


def _joined(slot: Any) -> property:
    """A string that may be kept as pieces of a transcript."""
    return property(lambda turn: str(slot.__get__(turn)), slot.__set__)


for _name in ("prompt_text", "next_prompt_text"):
    setattr(Turn, _name, _joined(getattr(Turn, _name)))
