"""What a tool is, and what a parser finds in an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool in an answer.

    Attributes:
        name: of the tool.
        arguments: by name.
        error: why the call cannot be read; None: it can. The model reads it.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An answer taken apart.

    Attributes:
        content: the text without the calls; those that cannot be read stay in it, as the model wrote them.
        calls: in the order of the text.
    """

    content: str
    calls: Sequence[ToolCall] = ()


class ToolParser(ABC):
    """Finds calls of tools in the text of an answer."""

    @abstractmethod
    def parse(self, text: str) -> ParsedAnswer:
        """Take an answer apart. A call that cannot be read has an ``error``; it is not an exception."""


class ToolSession(ABC):
    """A tool within one conversation."""

    @property
    @abstractmethod
    def function(self) -> Callable[..., Any]:
        """Called with the arguments of a call; may be a coroutine function. Its result becomes a message."""

    def close(self) -> None:  # noqa: B027  (most hold nothing)
        """The conversation is over."""


class Tool(ABC):
    """A tool that a model may call.

    Attributes:
        name: by which it is called.
        schema: ``{"type": "function", "function": {"name", "description", "parameters"}}``, for the chat template.
        timeout_s: seconds that a call may take.
        has_state: whether calls of a conversation build on each other, so that it cannot be saved midway.
    """

    name: str
    schema: Mapping[str, Any]
    timeout_s: float
    has_state: bool = False

    @abstractmethod
    def begin(self) -> ToolSession:
        """The tool for a new conversation."""
