"""A tokenizer with its chat template: messages to text, text to tokens, tokens to text."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollwright.data.llm.turns import Message
from rollwright.errors import require

__all__ = ["ChatTemplate"]

_BREAK = "\ufdd0"  # a noncharacter: stands inside control tokens that a message spells out; never encoded
_CACHED_TEXTS = 64
_TRUSTED_ROLES = frozenset({"system", "developer", "assistant"})


class ChatTemplate:
    """A tokenizer of transformers with its chat template.

    Text of messages cannot become control tokens: the special tokens of the tokenizer, and the tokens that the
    template itself writes, such as ``</tool_response>``, are ordinary text where a user's or a tool's message spells
    them. In messages of system and assistant only special tokens are.

    Args:
        tokenizer: of transformers.
        arguments: of the template: ``tools``, ``chat_template`` (text, or the name of one of the tokenizer's), and what
            the template itself knows, such as ``enable_thinking``.

    Attributes:
        tokenizer: the same.
        source: the text of the template.
        codec: text to tokens and back.

    Raises:
        ValueError: there is no chat template.
        MissingExtraError: transformers is not installed.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        options = dict(arguments or {})
        tools = options.pop("tools", None)
        chosen = options.pop("chat_template", None)
        if chosen is None and getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__!r} has no chat "
                "template, so that chat messages cannot be written as tokens; give one "
                "(template={'chat_template': '...'}, or tokenizer.chat_template = '...'), or use an environment of "
                "text or tokens (template=None)"
            )
        self.tokenizer = tokenizer
        self.source: str = tokenizer.get_chat_template(chosen, tools)
        utilities = require("transformers.utils.chat_template_utils", extra="llm", purpose="chat templates")
        self._render: Callable[..., tuple[list[str], Any]] = utilities.render_jinja_template
        self._arguments = {**tokenizer.special_tokens_map, **options}
        self._tools = _schemas(tools, utilities)
        self.codec = Codec(tokenizer, self.source)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Messages as text.

        Raises:
            ValueError: the template does not accept them.
        """
        try:
            texts, _ = self._render(
                conversations=[messages],
                tools=self._tools,
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                **self._arguments,
            )
        except Exception as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"the chat template does not accept messages with the roles {roles}: {error}; change the messages, or "
                "give another template (template={'chat_template': '...'})"
            ) from error
        return str(texts[0])


class Codec:
    """Text to tokens and back, with control tokens only where a template writes them."""

    def __init__(self, tokenizer: Any, source: str = "") -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if hasattr(backend, "encode") else None
        added = [token for token in tokenizer.added_tokens_decoder.values() if len(token.content) > 1]
        special = [token.content for token in added if token.special]
        written = [token.content for token in added if token.content in source and not token.content.isspace()]
        self._special = _any_of(special)
        self._control = _any_of({*special, *written})
        self._cache: OrderedDict[str, list[int]] = OrderedDict()

    def protect(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages with a noncharacter inside each control token that they spell; the others as they are."""
        return [self._protected(message) for message in messages]

    def protect_text(self, text: str) -> str:
        """The same of a text of a user or a tool."""
        return str(_broken(text, self._control))

    @staticmethod
    def plain(text: str) -> str:
        """A protected text as it was."""
        return text.replace(_BREAK, "")

    def encode(self, text: str) -> list[int]:
        """Tokens of a protected text; nothing is added in front."""
        if _BREAK in text:
            return [token for piece in text.split(_BREAK) for token in self._encode(piece)]
        cached = self._cache.get(text)
        if cached is None:
            cached = self._cache[text] = self._encode(text)
            if len(self._cache) > _CACHED_TEXTS:
                self._cache.popitem(last=False)
        return cached

    def encode_text(self, text: str) -> list[int]:
        """Tokens of a text as it is, with what the tokenizer puts in front of a text."""
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, special tokens included."""
        if self._backend is not None and not getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
            text: str = self._backend.decode(tokens, skip_special_tokens=False)
            return text
        return str(self._tokenizer.decode(tokens))

    def _encode(self, text: str) -> list[int]:
        backend = self._backend
        if (
            backend is not None
            and backend.truncation is None
            and backend.padding is None
            and not backend.encode_special_tokens
        ):
            tokens: list[int] = backend.encode(text, add_special_tokens=False).ids
            return tokens
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _protected(self, message: Message) -> dict[str, Any]:
        pattern = self._special if message.get("role") in _TRUSTED_ROLES else self._control
        return {key: _broken(value, pattern) for key, value in message.items() if value is not None}


def _schemas(tools: Any, utilities: Any) -> list[Any] | None:
    """JSON schemas of tools, functions among them; made once."""
    return (
        None
        if tools is None
        else [tool if isinstance(tool, dict) else utilities.get_json_schema(tool) for tool in tools]
    )


def _any_of(tokens: Any) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


def _broken(value: Any, pattern: re.Pattern[str] | None) -> Any:
    """``value`` with :data:`_BREAK` behind the first character of each match, in strings at any depth."""
    if isinstance(value, str):
        while pattern is not None and pattern.search(value):
            value = pattern.sub(lambda match: f"{match[0][0]}{_BREAK}{match[0][1:]}", value)
        return value
    if isinstance(value, Mapping):
        return {_broken(key, pattern): _broken(item, pattern) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_broken(item, pattern) for item in value]
    return value
