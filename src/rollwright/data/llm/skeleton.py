"""What a chat template writes between messages, rendered once for each shape of a conversation."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rollwright.data.llm.turns import Message
from rollwright.data.llm.verbatim import Verbatim

_SPACE = "\u2003"  # white space that no template writes itself: shows where a text is stripped
_STAND_IN = re.compile(f"({_SPACE}?)\ue000(\\d+)\ue001({_SPACE}?)")
_MOST_CHATS = 16_384
_LONGEST_REST = 200  # characters

Shape = tuple[Any, ...]


class Between(NamedTuple):
    """What stands behind an answer, and whether the template leaves all before it as it was."""

    text: str
    unchanged: bool


class _Form(NamedTuple):
    pieces: tuple[Any, ...]  # strings, and (place behind the answer, stripped left, stripped right)
    unchanged: bool
    stripped: tuple[bool, bool]  # the answer


class Skeletons:
    """Remembers what a template writes between texts, where it is proved that it writes texts as they are.

    The shape of a message is all of it but its text. A chat of the same shapes is written alike but for its texts, so
    one rendering serves all. The first one of each shape is compared with what the template wrote; after a difference
    nothing is remembered any more.

    Args:
        render: messages as text.
        source: of the template.
        verbatim: which texts it writes as they are; None: nothing is remembered.
    """

    def __init__(self, render: Callable[[Sequence[Message]], str], source: str, verbatim: Verbatim | None) -> None:
        self._render = render
        self._source = source
        self._verbatim = verbatim
        self._chats: dict[tuple[int, Shape], int] = {}  # numbers of chats, by that of the chat before the last message
        self._numbers = itertools.count(1)  # none comes twice: chats in progress may have one that was forgotten
        self._forms: dict[tuple[int, int], _Form] = {}  # by place of the answer, and number of the chat

    def number(self, before: int | None, message: Message) -> int | None:
        """The number of all chats of the same shapes; None: nothing is remembered of them.

        Args:
            before: of the chat without its last message; 0: there is no other one.
            message: the last one.
        """
        shape = None if before is None else self._shape(message)
        if before is None or shape is None:
            return None
        number = self._chats.get((before, shape))
        if number is None:
            if len(self._chats) >= _MOST_CHATS:
                self._chats.clear()
                self._forms.clear()
            number = self._chats[before, shape] = next(self._numbers)
        return number

    def _shape(self, message: Message) -> Shape | None:
        """All of a message but its text; None: nothing is remembered of it."""
        content = message.get("content")
        if self._verbatim is None or not isinstance(content, str) or not self._verbatim.holds(content):
            return None
        if len(message) == 2:
            return (message.get("role"),)
        rest = [(key, value) for key, value in message.items() if key != "content" and key in self._source]
        described = repr(sorted(rest))
        return (described,) if len(described) <= _LONGEST_REST else None

    def between(self, number: int | None, messages: Sequence[Message], place: int) -> Between | None:
        """What the template writes behind the answer ``messages[place]``; None: it must be rendered.

        Args:
            number: of the chat.
            messages: the conversation so far and what follows the answer.
            place: of the answer.
        """
        form = None if number is None else self._forms.get((place, number))
        return None if form is None else _filled(form, messages, place)

    def learn(self, number: int | None, messages: Sequence[Message], place: int, between: Between) -> None:
        """Remember the shape of a conversation, whose rendering is known.

        Args:
            number: of the chat.
            messages: the conversation so far and what follows the answer.
            place: of the answer.
            between: what the template wrote; ``unchanged`` is False where an earlier answer was changed, too.
        """
        if self._verbatim is None or number is None:
            return
        form = self._form(messages, place)
        filled = None if form is None else _filled(form, messages, place)
        # An earlier turn of the conversation may have been changed, which says nothing of this shape.
        same = filled is not None and filled.text == between.text and filled.unchanged >= between.unchanged
        if form is not None and same:
            self._forms[place, number] = form
        else:
            self._verbatim = None
            self._forms.clear()

    def _form(self, messages: Sequence[Message], place: int) -> _Form | None:
        """The rendering of messages whose texts are replaced by marks."""
        marked = [
            {**message, "content": f"{_SPACE}\ue000{number}\ue001{_SPACE}"} for number, message in enumerate(messages)
        ]
        try:
            whole, head = self._render(marked), self._render(marked[:place])
        except ValueError:
            return None
        found = [match for match in _STAND_IN.finditer(whole) if int(match[2]) >= place]
        if [int(match[2]) for match in found] != list(range(place, len(messages))):
            return None
        answer, *following = found
        pieces: list[Any] = []
        end = answer.end()
        for match in following:
            pieces += [whole[end : match.start()], (int(match[2]) - place, not match[1], not match[3])]
            end = match.end()
        pieces.append(whole[end:])
        return _Form(tuple(pieces), whole[: answer.start()] == head, (not answer[1], not answer[3]))


def _filled(form: _Form, messages: Sequence[Message], place: int) -> Between:
    text = "".join(
        [
            piece if isinstance(piece, str) else _stripped(messages[place + piece[0]]["content"], *piece[1:])
            for piece in form.pieces
        ]
    )
    answer = messages[place]["content"]
    return Between(text, form.unchanged and _stripped(answer, *form.stripped) == answer)


def _stripped(text: str, left: bool, right: bool) -> str:
    if left:
        text = text.lstrip()
    return text.rstrip() if right else text
