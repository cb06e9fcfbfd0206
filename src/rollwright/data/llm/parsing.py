"""From text that a chat template has written back to messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rollwright.data.llm.chat_template import ChatTemplate
from rollwright.data.llm.turns import Message
from rollwright.errors import require

_Render = Callable[..., str]
_CHATML = re.compile(r"<\|im_start\|>([^\n<]+)\n(.*?)(<\|im_end\|>|\Z)\s*", re.DOTALL)
_NAMES = ("chatml_format", "qwen")
_CONTENTS = ("c0nt3nt-one", "c0nt3nt-two", "c0nt3nt-three")  # which no template writes by itself


class _Marks(NamedTuple):
    """What a template writes around the content of a message."""

    start: str
    end: str


def messages_of(
    text: str, *, name: str | None = None, template: str | None = None, tokenizer: Any = None
) -> list[Message]:
    """The messages in a text; the last one has ``is_complete=False`` where its end is missing.

    Args:
        text: as the template writes it.
        name: ``"chatml_format"`` or ``"qwen"``: ``<|im_start|>role``, content, ``<|im_end|>``; the default.
        template: the text of another chat template.
        tokenizer: whose chat template is to be used.

    Raises:
        ValueError: the text is not of that template, or what it writes around messages cannot be found.
    """
    if name is not None and name not in _NAMES:
        raise ValueError(
            f"chat_template_name: expected {' or '.join(map(repr, _NAMES))}, got {name!r}. Pass tokenizer= or "
            "chat_template= for another template."
        )
    if name is None and (template is not None or tokenizer is not None):
        return _by_marks(text, _marks_of(_render_of(template, tokenizer)))
    return _in_chatml(text)


def _in_chatml(text: str) -> list[Message]:
    messages: list[Message] = []
    place = 0
    while place < len(text):
        found = _CHATML.match(text, place)
        if found is None or "<|im_start|>" in found[2]:
            raise _unknown(text[place:], ["<|im_start|>role"])
        messages.append(_message(found[1], found[2], bool(found[3])))
        place = found.end()
    return _some(messages, text)


def _by_marks(text: str, marks: Mapping[str, _Marks]) -> list[Message]:
    starts = sorted(((mark.start, role) for role, mark in marks.items()), key=lambda item: -len(item[0]))
    place = min((at for start, _ in starts if (at := text.find(start)) >= 0), default=0)  # behind what begins a text
    messages: list[Message] = []
    while text[place:].strip():
        start, role = next(((start, role) for start, role in starts if text.startswith(start, place)), ("", ""))
        if not role:
            raise _unknown(text[place:], [start for start, _ in starts])
        content, end, _ = text[place + len(start) :].partition(marks[role].end)
        if any(other in content for other, _ in starts):
            raise _unknown(content, [marks[role].end])
        messages.append(_message(role, content, bool(end)))
        place += len(start) + len(content) + len(end)
        place += len(text[place:]) - len(text[place:].lstrip())
    return _some(messages, text)


def _message(role: str, content: str, is_complete: bool) -> Message:
    message: dict[str, Any] = {"role": role, "content": content}
    return message if is_complete else {**message, "is_complete": False}


def _some(messages: list[Message], text: str) -> list[Message]:
    if not messages:
        raise _unknown(text, ["a message"])
    return messages


def _unknown(rest: str, expected: Sequence[str]) -> ValueError:
    return ValueError(
        f"text: expected {' or '.join(map(repr, expected))}, got {rest[:60]!r}. Pass the chat template that wrote it "
        "(chat_template= or tokenizer=), and text that was decoded with its control tokens (skip_special_tokens=False)."
    )


def _render_of(template: str | None, tokenizer: Any) -> _Render:
    if tokenizer is not None:
        return ChatTemplate(tokenizer, {} if template is None else {"chat_template": template}).render
    utilities = require("transformers.utils.chat_template_utils", extra="llm", purpose="chat templates")

    def render(messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        texts, _ = utilities.render_jinja_template(
            conversations=[messages], chat_template=template, add_generation_prompt=add_generation_prompt
        )
        return str(texts[0])

    return render


def _marks_of(render: _Render) -> dict[str, _Marks]:
    """What a template writes around messages of each role; without those roles that it does not know."""
    one, two, three = _CONTENTS
    user, answer, again = (
        {"role": role, "content": content}
        for role, content in zip(("user", "assistant", "user"), _CONTENTS, strict=True)
    )
    try:
        _, after_user = _cut(render([user], add_generation_prompt=False), one)
        before, rest = _cut(render([user, answer, again], add_generation_prompt=False), one)
        between, rest = _cut(rest, two)
        middle, _ = _cut(rest, three)
        _, after_answer = _cut(render([user, answer], add_generation_prompt=False), two)
        marks = {
            "user": _Marks(_without(middle, after_answer), after_user.rstrip()),
            "assistant": _Marks(_without(between, after_user), after_answer.rstrip()),
        }
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"chat_template: it does not accept messages of user and assistant: {error}") from error
    preamble = before.removesuffix(marks["user"].start)
    for role in ("system", "tool"):
        try:
            marks[role] = _marks_beside(render, role, preamble, marks, (user, answer))
        except Exception:  # it has no such role, or accepts it elsewhere
            continue
    if not all(mark.start and mark.end for mark in marks.values()):
        raise ValueError(f"chat_template: it writes no mark before or behind a message, got {marks}.")
    return marks


def _marks_beside(
    render: _Render, role: str, preamble: str, marks: Mapping[str, _Marks], messages: Sequence[Message]
) -> _Marks:
    user, answer = messages
    other = {"role": role, "content": "c0nt3nt-other"}
    if role == "system":
        before, rest = _cut(render([other, user], add_generation_prompt=False), other["content"])
        start = before.removeprefix(preamble)
        end = _cut(rest, str(user["content"]))[0].removesuffix(marks["user"].start)
    else:
        text = render([user, answer, other, answer], add_generation_prompt=False)
        before, rest = _cut(text, other["content"])
        start = _cut(before, str(answer["content"]))[1].removeprefix(marks["assistant"].end).lstrip()
        end = _cut(rest, str(answer["content"]))[0].removesuffix(marks["assistant"].start)
    if not start or not end.strip():
        raise ValueError(f"{role}: there is nothing around it")
    return _Marks(start, end.rstrip())


def _cut(text: str, content: str) -> tuple[str, str]:
    before, found, behind = text.partition(content)
    if not found:
        raise ValueError(f"chat_template: it does not write the content of a message, got {text[:60]!r}.")
    return before, behind


def _without(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise ValueError(
            "chat_template: it writes the end of a message in another way where messages follow it, so that messages "
            "cannot be found again."
        )
    return text[len(prefix) :]
