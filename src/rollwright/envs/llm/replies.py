"""Environments of the user's own: a class with one method that answers the model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from rollwright.data.llm.content import plain_messages
from rollwright.data.llm.turns import Message
from rollwright.envs.llm.core import NextTurn, Opening
from rollwright.envs.llm.jobs import Finished
from rollwright.envs.llm.rewards import place
from rollwright.errors import EnvError

_METHOD = {False: "reply", True: "respond"}  # of an environment, by whether it writes the first messages


class Environment(Protocol):
    """What answers the model in one conversation.

    It is made for each conversation by a function that gets the row of the dataset. ``reply`` may be a coroutine
    function; a plain one runs in a thread, so that conversations do not wait for each other. It may have ``close()``,
    called when the conversation is over, and ``state_dict()`` and ``load_state_dict()``, for saved collectors.

    Example:
        >>> class Guess:
        ...     def __init__(self, row):
        ...         self.number, self.tries = row["number"], 0
        ...
        ...     def reply(self, messages):
        ...         self.tries += 1
        ...         right = str(self.number) in messages[-1]["content"]
        ...         return "Wrong, guess again.", float(right), right or self.tries == 5
        >>> Guess({"number": 7}).reply([{"role": "assistant", "content": "6?"}])
        ('Wrong, guess again.', 0.0, False)
    """

    def reply(self, messages: list[Message]) -> Any:
        """Follow the last message, an answer of the model.

        Args:
            messages: of the conversation so far; with texts or tokens as prompts, of what followed the prompt. The list
                is a copy. So is each message, one for all turns: what a reply changes in it, later replies see.

        Returns:
            Messages (a string is one of a user, a mapping one message), the reward of the turn (a number, or float32
            ``[response]``, one for each token), and whether the conversation is over. None, or no messages, where it
            is over; else ``""`` is a message without content.
        """


@dataclass(frozen=True)
class Dialogue:
    """How a conversation goes on after an answer without tool calls.

    Args:
        environment: makes the environment of a conversation from its row; None: see ``goes_on``.
        max_turns: answers that a conversation may have, those that call tools among them; the last one truncates it.
            None: no limit.
        timeout_s: seconds that a reply may take.
        goes_on: where there is no environment, the conversation goes on; False: it is over.
        opens: the environment writes the first messages, too. In place of ``reply`` it has ``respond(answer)``, which
            takes an :class:`~rollwright.envs.llm.Answer`, and None first, and returns a :class:`Reply`.
        history: what to do with the tokens of earlier turns where the chat template writes them in another way when
            more messages follow: ``"keep"`` them, or ``"rewrite"``: begin a new sequence.

    Raises:
        ValueError: an argument is out of range.
        TypeError: ``environment`` cannot be called.
    """

    environment: Callable[[Mapping[str, Any]], Any] | None = None
    max_turns: int | None = None
    timeout_s: float = 60.0
    goes_on: bool = False
    history: Literal["keep", "rewrite"] = "keep"
    opens: bool = False

    def __post_init__(self) -> None:
        if self.environment is not None and not callable(self.environment):
            raise TypeError(
                f"environment: expected a class or a function that makes one from a row, got "
                f"{type(self.environment).__name__}. Pass the class itself, for example."
            )
        if self.max_turns is not None and self.max_turns < 1:
            raise ValueError(f"max_turns: expected at least 1, or None for no limit, got {self.max_turns}.")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout_s: expected more than 0, got {self.timeout_s}.")
        if self.history not in ("keep", "rewrite"):
            raise ValueError(f"history: expected 'keep' or 'rewrite', got {self.history!r}.")

    def environment_of(self, opening: Opening) -> Any:
        """The environment of a conversation; None: it has none.

        Raises:
            EnvError: it could not be made from the row, or has no method that answers.
        """
        make, where = self.environment, place(opening.draw.origin)
        try:
            environment = None if make is None else make(opening.draw.row)
        except Exception as error:
            raise EnvError(
                f"{where}: the environment raised {type(error).__name__} when it was made from its row: {error}. "
                "Correct the class, or the row."
            ) from error
        if environment is not None and not callable(getattr(environment, _METHOD[self.opens], None)):
            raise EnvError(
                f"{where}: the environment {type(environment).__name__} has no method reply. Write "
                "reply(self, messages), which returns messages, reward and whether it is over."
            )
        return environment

    def close(self) -> None:
        """End what the environments share, where an object with ``close()`` makes them. May be called again."""
        close = None if isinstance(self.environment, type) else getattr(self.environment, "close", None)
        if callable(close):
            close()


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment returned, checked.

    Attributes:
        messages: that follow the answer.
        reward: of the turn.
        done: whether the conversation is over.
        next: how the next answer is asked for, see :class:`~rollwright.envs.llm.NextTurn`.
        response: the answer's message where it called tools, which the environment makes itself.
    """

    messages: list[Message]
    reward: float | torch.Tensor
    done: bool
    next: NextTurn | None = None
    response: Message | None = None


def as_reply(returned: Any) -> Reply:
    """The messages, reward and end that an environment returned.

    Raises:
        ValueError: it returned something else; the message says what, as a phrase.
    """
    if isinstance(returned, Reply):
        return returned
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise ValueError(f"returned {_shown(returned)}, expected (messages, reward, done)")
    messages, reward, done = returned
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}] if messages or not done else []
    elif isinstance(messages, Mapping):
        messages = [messages]
    elif messages is None:
        messages = []
    if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise ValueError(
            f"returned the messages {_shown(messages)}, expected a string or mappings with role and content"
        )
    try:
        messages = plain_messages(messages)
    except ValueError as error:
        raise ValueError(f"returned messages that no model reads: {str(error).rstrip('.')}") from None
    done = _flag(done)
    if not done and not messages:
        raise ValueError(
            f"returned the messages {_shown(returned[0])} and done=False, so that nothing follows the answer. Return "
            "done=True where the conversation is over, or a message ('' is one without content)"
        )
    if isinstance(reward, torch.Tensor) and reward.ndim == 1:
        reward = reward.detach().to("cpu", torch.float32)
        if not bool(reward.isfinite().all()):
            raise ValueError("returned NaN or infinity among the rewards of the tokens")
        return Reply(messages, reward, done)
    try:
        if isinstance(reward, (str, bytes)):  # which float() would read
            raise TypeError
        number = float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(f"returned the reward {_shown(reward)}, expected a number") from None
    if not math.isfinite(number):
        raise ValueError(f"returned the reward {'NaN' if number != number else number}, expected a finite number")
    return Reply(messages, number, done)


def reply_of(end: Finished, where: str, num_answered: int, *, opens: bool) -> Reply:
    """What an environment has replied.

    Args:
        end: of the call.
        where: conversation, turn and environment, for messages.
        num_answered: tokens of the answer.
        opens: see :class:`Dialogue`.

    Raises:
        EnvError: it raised, took too long, or returned something else.
    """
    if end.error is not None:
        slow = isinstance(end.error, TimeoutError) and "took longer than" in str(end.error)
        what = str(end.error) if slow else f"raised {type(end.error).__name__}: {end.error}"
        wrong = "Correct it" if opens else "Correct its method reply"
        remedy = "Make it faster, or give it more time (reply_timeout_s=)" if slow else wrong
        raise EnvError(f"{where} {what}. {remedy}.") from end.error
    try:
        reply = as_reply(end.value)
    except ValueError as error:
        raise EnvError(f"{where} {error}. Correct its method reply.") from None
    if isinstance(reply.reward, torch.Tensor) and len(reply.reward) != num_answered:
        raise EnvError(
            f"{where} returned {len(reply.reward)} rewards for the {num_answered} tokens of the answer. "
            "Return one number, or one for each token that was sampled."
        )
    return reply


def _flag(done: Any) -> bool:
    """True or False of Python, NumPy or torch, or 1 or 0."""
    value = done
    if callable(getattr(done, "item", None)):
        with contextlib.suppress(ValueError, RuntimeError):  # of more than one element
            value = done.item()
    if not isinstance(value, int) or value not in (0, 1):
        raise ValueError(f"returned done={_shown(done)}, expected True or False")
    return bool(value)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return text if len(text) < 80 else text[:77] + "..."
