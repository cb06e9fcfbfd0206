"""PromptFormat: from a row of the dataset to what the model reads first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollwright.data.llm.content import is_parts, plain_messages, text_of
from rollwright.data.llm.turns import InputMode, Message
from rollwright.envs.llm.core import Opening, PromptDraw
from rollwright.envs.llm.rewards import place
from rollwright.errors import EnvError


@dataclass(frozen=True)
class PromptFormat:
    """Which column of a row is the prompt, and in which form.

    Args:
        mode: ``"history"``: messages, or a string, which becomes the message of a user; the chat template writes them.
            Their content is a string, or parts of text, which are joined.
            ``"text"``: a string, which is read as it is. ``"tokens"``: token ids, which are read as they are; where
            the row has an ``attention_mask``, those that it marks.
        key: of the column; None: ``"query"``, ``"prompt"``, ``"messages"`` or ``"text"`` (``"tokens"`` or
            ``"input_ids"`` in tokens mode), the first that the row has.
        system_prompt: content of a first message, in history mode; a row that has one keeps its own.
        system_role: of that message.
        user_role: of a prompt that is a string.

    Example:
        >>> from rollwright.data.llm.turns import Origin
        >>> draw = PromptDraw(Origin(0, 0, 0, 0, 0), {"query": "2 + 2?"})
        >>> PromptFormat(system_prompt="Be brief.").opening(draw).messages
        [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '2 + 2?'}]
    """

    mode: InputMode = "history"
    key: str | None = None
    system_prompt: str | None = None
    system_role: str = "system"
    user_role: str = "user"

    def __post_init__(self) -> None:
        if self.mode not in ("history", "text", "tokens"):
            raise ValueError(f"input_mode: expected 'history', 'text' or 'tokens', got {self.mode!r}.")
        if self.system_prompt is not None and not isinstance(self.system_prompt, str):
            raise TypeError(f"system_prompt: expected a string, got {type(self.system_prompt).__name__}. Pass a text.")
        if self.system_prompt is not None and self.mode != "history":
            raise ValueError(
                f"system_prompt: a prompt of {self.mode} is read as it is. Use input_mode='history', or write it into "
                "the data."
            )

    def opening(self, draw: PromptDraw) -> Opening:
        """How the conversation of a draw begins.

        Raises:
            EnvError: the row has no such column, or something else in it.
        """
        key = self._key(draw)
        value = draw.row[key]
        try:
            if is_parts(value):
                value = text_of(value)
            elif self.mode == "history" and _are_messages(value):
                value = plain_messages(value)
        except ValueError as error:
            raise EnvError(f"{place(draw.origin)}: the column {key!r}: {error}") from None
        if self.mode == "tokens":
            return Opening(draw, tokens=_tokens(value, draw.row.get("attention_mask"), draw, key))
        if self.mode == "text":
            if not isinstance(value, str):
                raise _wrong(draw, key, value, "a string", "Pass input_mode='history' for messages.")
            return Opening(draw, text=value)
        return Opening(draw, messages=self._messages(value, draw, key))

    def _key(self, draw: PromptDraw) -> str:
        if self.mode == "tokens":
            usual: tuple[str, ...] = ("tokens", "input_ids", "prompt")
        else:
            usual = ("query", "prompt", "messages", "text")
        keys = usual if self.key is None else (self.key,)
        key = next((key for key in keys if key in draw.row), None)
        if key is None:
            raise EnvError(
                f"{place(draw.origin)}: the row has no column {' or '.join(map(repr, keys))}; it has "
                f"{sorted(map(str, draw.row))}. Pass data_key= with the name of the column."
            )
        return key

    def _messages(self, value: Any, draw: PromptDraw, key: str) -> list[Message]:
        if isinstance(value, str):
            messages: list[Message] = [{"role": self.user_role, "content": value}]
        elif _are_messages(value):
            messages = list(value)
        else:
            raise _wrong(draw, key, value, "a string or a list of messages with role and content", "Correct the row.")
        if self.system_prompt is not None and messages[0]["role"] != self.system_role:
            messages.insert(0, {"role": self.system_role, "content": self.system_prompt})
        return messages


def _are_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)


def _tokens(value: Any, mask: Any, draw: PromptDraw, key: str) -> torch.Tensor:
    try:
        tokens = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise _wrong(draw, key, value, "token ids", "Pass from_text=True for strings.") from None
    if tokens.ndim != 1 or not tokens.numel() or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise _wrong(draw, key, value, "a list of token ids", "Correct the row.")
    if mask is not None:
        tokens = tokens[torch.as_tensor(mask).bool()]
    return tokens.to("cpu", torch.int64)


def _wrong(draw: PromptDraw, key: str, value: Any, expected: str, remedy: str) -> EnvError:
    shown = f"{type(value).__name__} of shape {list(value.shape)}" if hasattr(value, "shape") else type(value).__name__
    if isinstance(value, (list, tuple)) and not value:
        shown, remedy = f"{shown} without elements", "Take empty rows out of the dataset."
    return EnvError(f"{place(draw.origin)}: the column {key!r} is a {shown}, expected {expected}. {remedy}".rstrip())
