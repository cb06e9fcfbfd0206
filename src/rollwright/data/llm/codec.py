"""Text to tokens and back, with control tokens only where a template writes them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from rollwright.data.llm.turns import Message

_BREAK = "\ufdd0"  # a noncharacter: stands inside control tokens that a message spells out; never encoded
_CACHED_TEXTS = 256
_LONGEST_CACHED = 2000  # characters
_TRUSTED_ROLES = frozenset({"system", "developer", "assistant"})
_LOCAL_STEPS = frozenset({"ByteLevel", "Split", "Sequence", "Digits", "NFC"})


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
        self._backend_adds: bool | None = None  # whether the backend puts the same in front; None: not known yet
        self._cache: OrderedDict[str, list[int]] = OrderedDict()
        self._ids = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        self._added = frozenset(self._ids.values())
        local = self._backend is not None and _encodes_pieces_alone(tokenizer, self._backend)
        self._pieces = _any_of(self._ids, group=True) if local else None

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
        if self._pieces is None or not self._backend_is_plain():
            return self._cached(text)
        tokens: list[int] = []
        for number, piece in enumerate(self._pieces.split(text)):
            if number % 2:
                tokens.append(self._ids[piece])
            elif piece:
                tokens.extend(self._cached(piece))
        return tokens

    def is_control(self, token: int) -> bool:
        """Whether a token is special, or was added to the vocabulary."""
        return token in self._added

    def encode_text(self, text: str) -> list[int]:
        """Tokens of a text as it is, with what the tokenizer puts in front of a text."""
        try:
            if self._backend is None or self._backend_adds is False or not self._backend_is_plain():
                return list(self._tokenizer(text)["input_ids"])
            tokens: list[int] = self._backend.encode(text).ids
            if self._backend_adds is None:  # the backend alone takes a third of the time
                expected = list(self._tokenizer(text)["input_ids"])
                self._backend_adds = tokens == expected
                return expected
        except TypeError as error:
            raise _explained(text, error) from error
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, special tokens included."""
        if self._backend is not None and not getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
            text: str = self._backend.decode(tokens, skip_special_tokens=False)
            return text
        return str(self._tokenizer.decode(tokens))

    def _cached(self, text: str) -> list[int]:
        cached = self._cache.get(text)
        if cached is None:
            cached = self._encode(text)
            if len(text) <= _LONGEST_CACHED:
                self._cache[text] = cached
                if len(self._cache) > _CACHED_TEXTS:
                    self._cache.popitem(last=False)
        return cached

    def _backend_is_plain(self) -> bool:
        """Whether nobody left the backend with options that change what it returns."""
        backend: Any = self._backend
        return backend.truncation is None and backend.padding is None and not backend.encode_special_tokens

    def _encode(self, text: str) -> list[int]:
        try:
            if self._backend is not None and self._backend_is_plain():
                tokens: list[int] = self._backend.encode(text, add_special_tokens=False).ids
                return tokens
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        except TypeError as error:
            raise _explained(text, error) from error

    def _protected(self, message: Message) -> dict[str, Any]:
        pattern = self._special if message.get("role") in _TRUSTED_ROLES else self._control
        return {key: _broken(value, pattern) for key, value in message.items() if value is not None}


def _encodes_pieces_alone(tokenizer: Any, backend: Any) -> bool:
    """Whether the text between two added tokens has the same tokens wherever it stands."""
    for token in tokenizer.added_tokens_decoder.values():
        if token.lstrip or token.rstrip or token.single_word or token.normalized or not token.content:
            return False
    steps: set[str] = set()
    for step in (backend.normalizer, backend.pre_tokenizer):
        if step is not None:
            steps.update(re.findall(r'"type":\s*"(\w+)"', step.__getstate__().decode()))
    return steps <= _LOCAL_STEPS


def _explained(text: str, error: TypeError) -> Exception:
    """Why the tokenizer does not take a text."""
    try:
        text.encode()
    except UnicodeEncodeError as found:
        return ValueError(
            f"the text holds half of a surrogate pair, {text[found.start]!r} behind {text[: found.start][-20:]!r}, "
            "which stands for no character; take it out (text.encode('utf-8', 'replace').decode())"
        )
    return error


def _any_of(tokens: Any, group: bool = False) -> re.Pattern[str] | None:
    if not tokens:
        return None
    pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    return re.compile(f"({pattern})" if group else pattern)


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
