"""What a collector asks of an environment of conversations, and what an environment asks of its data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rollwright.data.llm.turns import FinishReason, Message, Origin
from rollwright.errors import EnvError


@dataclass(frozen=True, slots=True)
class PromptDraw:
    """A prompt that was drawn from the data.

    Attributes:
        origin: where it comes from.
        row: the item of the dataset: columns by name.
    """

    origin: Origin
    row: Mapping[str, Any]


class DataPlace(ABC):
    """The place in data of prompts: which of them were delivered.

    A group is the repeats of one prompt in one epoch. ``state_dict()`` is the place after the last delivery: what was
    drawn and not delivered is drawn again from the place that loads it.
    """

    @abstractmethod
    def delivered(self, origin: Origin) -> None:
        """The conversation from ``origin`` has reached the consumer, whole; or it was dropped on purpose."""

    @abstractmethod
    def claim(self, origin: Origin) -> None:
        """The conversation from ``origin`` was saved and goes on: it is not drawn again; after a load."""

    @abstractmethod
    def group_size(self, origin: Origin) -> int:
        """Conversations of the group of ``origin`` that were not delivered before the last load."""

    def divided(self, states: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
        """Places of ``count`` parts of the data, behind all that was delivered of the parts that it had before.

        Args:
            states: of :meth:`state_dict`, one for each of those parts.
            count: number of parts.

        Raises:
            ValueError: the data cannot be divided anew.
        """
        raise ValueError(f"{type(self).__name__} does not divide its data anew. Implement divided().")

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The place in the data."""

    def check_state(self, state_dict: Mapping[str, Any]) -> None:  # noqa: B027 - many take any
        """Raise what :meth:`load_state_dict` would raise of a state of another make; nothing is changed."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a place in the data."""


class PromptSource(DataPlace):
    """Hands out prompts, and knows which of them were delivered."""

    @abstractmethod
    def draw(self) -> PromptDraw:
        """The next prompt.

        Raises:
            StopIteration: all epochs are over.
        """

    def undelivered(self) -> Iterator[tuple[int, int]]:
        """Group and repeat of all conversations that were not delivered, in the order of the data, without an end."""
        raise NotImplementedError(
            f"{type(self).__name__} does not know the order of its data. Implement undelivered()."
        )

    @abstractmethod
    def shard(self, index: int, count: int) -> None:
        """Hand out each ``count``-th group only, from ``index`` on; before the first draw."""

    @abstractmethod
    def set_seed(self, seed: int) -> None:
        """Shuffle by ``seed`` from the start of the data on, and give it to the origins; before the first draw."""


@dataclass(slots=True)
class Opening:
    """How a conversation begins.

    Without messages, text and tokens, an outcome with the first messages follows before there is any answer.

    Attributes:
        draw: its prompt.
        messages: what the model reads first; empty where the data has text or tokens.
        text: the same as a string, where no template is used.
        tokens: the same as tokens, int64 ``[prompt]``, where the data has them.
        error: why it cannot begin: its row has no prompt, its environment could not be made; None: it begins.
    """

    draw: PromptDraw
    messages: Sequence[Message] = ()
    text: str | None = None
    tokens: torch.Tensor | None = None
    error: EnvError | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that the model reads first."""
        return not self.messages and self.text is None and self.tokens is None

    def column(self, name: str, argument: str) -> Any:
        """The value of a column in the row of its prompt.

        Raises:
            EnvError: there is no such column; names the argument that asks for it.
        """
        row = self.draw.row
        if name not in row:
            raise EnvError(
                f"{argument}: the row has no column {name!r}; it has {sorted(map(str, row))}. Correct the key."
            )
        return row[name]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model wrote.

    Attributes:
        message: role, content and tool calls.
        text: of the response, without its end-of-sequence token.
        tokens: int64 ``[response]``.
        finish_reason: why it ended.
        prompt: text that the model read; empty where it is not known.
        log_probs: of the tokens, float32 ``[response]``; None: there are none.
        num_prompt: tokens that the model read.
    """

    message: Message
    text: str
    tokens: torch.Tensor
    finish_reason: FinishReason
    prompt: str = ""
    log_probs: torch.Tensor | None = None
    num_prompt: int = 0


@dataclass(frozen=True, slots=True)
class NextTurn:
    """How the next answer is asked for, where an environment decides that.

    Attributes:
        sequence: the token sequence of the conversation that goes on: 0 for the first, or the next number, which begins
            one: the messages of the outcome are then all that the model reads.
        template: arguments of the chat template for a sequence that begins, over those of the environment.
        sampling: fields of :class:`~rollwright.modules.llm.Sampling` for this answer, over those of the engine.
        seed: of the answer within its conversation; None: the number of the turn.
    """

    sequence: int
    template: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None


@dataclass(slots=True)
class Outcome:
    """What follows an answer.

    Attributes:
        messages: of the environment: tools' results, a user's reply; none where the conversation is over.
        reward: of the turn, or float32 ``[response]``, one for each token.
        terminated: whether the conversation is over, with nothing to follow.
        truncated: whether it was cut off, by a limit.
        seconds: ``tool`` and ``reward``.
        extras: further entries of the record, by key: columns of the data, the number of each reward function.
        response: the answer's message where it called tools: its text without the calls, and ``tool_calls``; calls that
            cannot be read stay in the text. The turn then ends with ``TOOL``. None: it called none.
        next: how the next answer is asked for; None: the messages follow, and the engine decides.
        error: a tool, a reward or the environment failed in this conversation, which does not go on; names
            conversation, argument and remedy. What it has beside ``seconds`` does not count then. None: nothing failed.
    """

    messages: Sequence[Message] = ()
    reward: float | torch.Tensor = 0.0
    terminated: bool = False
    truncated: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    response: Message | None = None
    next: NextTurn | None = None
    error: EnvError | None = None


class ConversationSlots(ABC):
    """Conversations side by side, each in a slot, that can be begun, saved and loaded.

    Attributes:
        num_slots: conversations side by side.
        source: the place in the data of their prompts.
    """

    num_slots: int
    source: DataPlace

    @abstractmethod
    def open(self, slot: int) -> Opening:
        """Begin a conversation in a slot; one that was in progress there is dropped.

        One that cannot begin has an :attr:`Opening.error`, and its slot has none.

        Raises:
            StopIteration: the data is over.
        """

    def takes(self, slot: int, opening: Opening) -> bool:
        """Whether a conversation that begins again can do so in this slot."""
        return True

    @abstractmethod
    def state(self, slot: int) -> dict[str, Any]:
        """What the conversation of a slot needs to go on, beside its messages; between outcome and answer.

        Raises:
            EnvError: it cannot be saved, and why.
        """

    def ended_state(self, slot: int) -> dict[str, Any]:
        """What a conversation needs that has ended and waits for others: once loaded, its outcome follows.

        Raises:
            EnvError: it cannot be saved, and why.
        """
        raise EnvError(f"slot {slot}: its outcome waits for other conversations, and {type(self).__name__} saves none.")

    @abstractmethod
    def load(self, slot: int, opening: Opening, messages: Sequence[Message], state: Mapping[str, Any]) -> None:
        """Go on with a conversation that was saved; an empty ``state``: begin it again.

        Raises:
            EnvError: it cannot begin; its slot has none then.
        """

    def clear(self) -> None:  # noqa: B027 - an implementation without groups has nothing to forget
        """Take the conversations out of all slots, for others to be begun or loaded; their groups lack none of them."""


class Conversations(ConversationSlots):
    """Conversations side by side, each in a slot, with unequal numbers of turns.

    An environment (``LLMEnv``, ``ChatEnv``) is made of one, and a collector uses it without TensorDicts in between.

    Attributes:
        source: hands out prompts.
        template: arguments of the chat template, ``tools`` among them; None: prompts are texts or tokens as they are.
        on_wait: to be called, where it is no None, before tools, environments and rewards are waited for, with the
            conversations and their turns, and after that, with none: so that an error about a wait names them.
    """

    source: PromptSource
    template: Mapping[str, Any] | None
    on_wait: Callable[[Sequence[tuple[Origin, int]]], None] | None = None

    @abstractmethod
    def submit(self, answers: Mapping[int, Answer]) -> None:
        """Take answers, by slot; tools and rewards may run meanwhile."""

    @abstractmethod
    def outcomes(self, timeout: float | None = None) -> dict[int, Outcome]:
        """Outcomes since the last call, by slot; waits until there is one.

        Args:
            timeout: seconds to wait at most; 0: only those that are ready; None: until one is there, or a limit of a
                tool or a reward is over.

        Returns:
            Empty where no slot has an answer to follow, where the time is over, or where the slots that were submitted
            wait for others (a reward of a whole group).

        Raises:
            EnvError: something failed in all of them; what fails in one is an :attr:`Outcome.error`.
        """

    def cut(self, slot: int) -> bool:
        """End a conversation whose last outcome left no room for an answer.

        Returns:
            Whether another outcome follows: the last one again, with the rewards of a conversation's end, truncated.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """End processes and threads of tools and rewards. May be called again."""
