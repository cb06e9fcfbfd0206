"""One turn of a conversation, as an environment, an engine and a collector pass it on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import torch

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


@dataclass(slots=True)
class Turn:
    """One turn: what the model read, what it wrote, and what followed.

    Tokens are int64 on the CPU. ``tokens`` holds prompt and response; both are views of it, and ``tokens`` may be a
    view of the tokens of the whole conversation, which later turns extend and nobody overwrites.

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

    @property
    def done(self) -> bool:
        """Whether the conversation ended with this turn."""
        return self.terminated or self.truncated
