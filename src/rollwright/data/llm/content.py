"""The content of chat messages: a string, or parts, of which those of text are read as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollwright.data.llm.turns import Message

_TEXT = frozenset({"text", "input_text", "output_text"})
_OTHER = frozenset(
    {
        "audio",
        "document",
        "file",
        "image",
        "image_url",
        "input_audio",
        "input_file",
        "input_image",
        "resource",
        "video",
        "video_url",
    }
)


def is_parts(value: Any) -> bool:
    """Whether a value is content in parts: a list of ``{"type": "text", "text": ...}`` and others of known types."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(part, Mapping) and part.get("type") in _TEXT | _OTHER for part in value)
    )


def text_of(parts: Iterable[Any]) -> str:
    """The text of content in parts, one after another.

    Raises:
        ValueError: a part is none of text; the message names it, as a sentence.

    Example:
        >>> text_of([{"type": "text", "text": "2 + 2"}, {"type": "text", "text": " = ?"}])
        '2 + 2 = ?'
    """
    texts = []
    for number, part in enumerate(parts):
        text = part
        if isinstance(part, Mapping):
            kind = part.get("type")
            text = part.get("text") if kind in _TEXT else None
        if not isinstance(text, str):
            kind = repr(kind) if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(
                f"content: expected text, or parts {{'type': 'text', 'text': ...}}, got a part of type {kind} at "
                f"place {number}. Models read text alone here: take it out, or describe it in text."
            )
        texts.append(text)
    return "".join(texts)


def plain_messages(messages: Iterable[Message]) -> list[Message]:
    """Messages whose content is text: those in parts with the text of these, the others as they are.

    Raises:
        ValueError: a part is none of text.

    Example:
        >>> plain_messages([{"role": "user", "content": [{"type": "text", "text": "Hi."}]}])
        [{'role': 'user', 'content': 'Hi.'}]
    """
    return [
        {**message, "content": text_of(content)}
        if isinstance(message, Mapping) and isinstance(content := message.get("content"), list | tuple)
        else message
        for message in messages
    ]
