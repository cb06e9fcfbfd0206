"""Parsers of tool calls: as chat templates write them, XML, JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollwright.envs.llm.tools.core import ParsedAnswer, ToolCall, ToolParser

_ATTRIBUTE = re.compile(r"""(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)')""")
_CHILD = re.compile(r"<(\w+)>(.*?)</\1>", re.DOTALL)
_NO_JSON = (ValueError, RecursionError)  # a model may write any number of brackets


def _call_of(value: Any, text: str) -> ToolCall:
    """A call from parsed JSON: name and arguments, under the names that models use."""
    if not isinstance(value, Mapping):
        return ToolCall("", error=f"a call must be a JSON object with name and arguments, got {text[:200]}")
    inner = value.get("function")
    if isinstance(inner, Mapping):
        value = inner
    name = value.get("name", value.get("tool"))
    arguments = value.get("arguments", value.get("args", value.get("parameters", {})))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except _NO_JSON as error:
            return ToolCall(str(name or ""), error=f"the arguments are no JSON: {error}")
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return ToolCall(str(name or ""), error=f"a call must have a name and arguments, got {text[:200]}")
    return ToolCall(name, arguments)


def _call_from(text: str) -> ToolCall:
    try:
        return _call_of(json.loads(text), text)
    except _NO_JSON as error:
        return ToolCall("", error=f"the call is no JSON: {error}: {text[:200]}")


class TemplateToolParser(ToolParser):
    """Calls between two marks, each a JSON object, as the chat templates of Qwen, Hermes and others write them.

    Args:
        begin: mark before a call.
        end: mark behind it.

    Example:
        >>> parsed = TemplateToolParser().parse('So. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        >>> parsed.content, parsed.calls[0].name, parsed.calls[0].arguments
        ('So.', 'add', {'a': 1})
    """

    def __init__(self, begin: str = "<tool_call>", end: str = "</tool_call>") -> None:
        self.begin, self.end = begin, end
        self._pattern = re.compile(re.escape(begin) + r"(.*?)" + re.escape(end), re.DOTALL)

    def parse(self, text: str) -> ParsedAnswer:
        """Take an answer apart. A call that cannot be read has an ``error``; it is not an exception."""
        if self.begin not in text:
            return ParsedAnswer(text)
        return _taken_out(self._pattern, text, lambda found: _call_from(found[1].strip()))


class XMLToolParser(ToolParser):
    """Calls as elements: ``<tool name="add">`` with a JSON object, or one element for each argument, inside.

    Args:
        tag: name of the element.

    Example:
        >>> calls = XMLToolParser().parse('<tool name="add"><a>1</a><b>two</b></tool>').calls
        >>> calls[0].name, calls[0].arguments
        ('add', {'a': 1, 'b': 'two'})
    """

    def __init__(self, tag: str = "tool") -> None:
        self.tag = tag
        self._pattern = re.compile(rf"<{re.escape(tag)}\b([^>]*)>(.*?)</{re.escape(tag)}>", re.DOTALL)

    def parse(self, text: str) -> ParsedAnswer:
        """Take an answer apart. A call that cannot be read has an ``error``; it is not an exception."""
        if f"<{self.tag}" not in text:
            return ParsedAnswer(text)
        return _taken_out(self._pattern, text, lambda found: self._call(found[1], found[2].strip()))

    def _call(self, attributes: str, body: str) -> ToolCall:
        given = {key: first or second for key, first, second in _ATTRIBUTE.findall(attributes)}
        name = given.get("name", "")
        if not name:
            return ToolCall("", error=f"<{self.tag}> must have a name, got <{self.tag}{attributes}>")
        if body.startswith("{"):
            try:
                return _call_of({"name": name, "arguments": json.loads(body)}, body)
            except _NO_JSON as error:
                return ToolCall(name, error=f"the arguments are no JSON: {error}")
        children = _CHILD.findall(body)
        if body and not children:
            return ToolCall(name, error=f"expected a JSON object or an element for each argument, got {body[:200]}")
        return ToolCall(name, {key: _value(value) for key, value in children})


class JSONToolParser(ToolParser):
    """An answer that is JSON as a whole: a call, a list of calls, or ``{"message": ..., "tools": [calls]}``.

    A call has ``name`` (or ``tool``) and ``arguments`` (or ``args``). Any other answer has no calls.

    Example:
        >>> parsed = JSONToolParser().parse('{"message": "So.", "tools": [{"tool": "add", "args": {"a": 1}}]}')
        >>> parsed.content, parsed.calls[0].name
        ('So.', 'add')
    """

    def parse(self, text: str) -> ParsedAnswer:
        """Take an answer apart. A call that cannot be read has an ``error``; it is not an exception."""
        stripped = text.strip()
        if stripped.startswith("```"):
            stripped = re.sub(r"^```\w*\s*|\s*```$", "", stripped)
        if not stripped.startswith(("{", "[")):
            return ParsedAnswer(text)
        try:
            value = json.loads(stripped)
        except _NO_JSON:
            return ParsedAnswer(text)
        said = ""
        if isinstance(value, Mapping) and isinstance(value.get("tools", value.get("tool_calls")), list):
            said, listed = str(value.get("message", "")), value.get("tools", value.get("tool_calls"))
        else:
            listed = value if isinstance(value, list) else [value]
            if not listed or not all(
                isinstance(item, Mapping) and ("name" in item or "tool" in item) for item in listed
            ):
                return ParsedAnswer(text)
        written = [json.dumps(item) for item in listed]
        calls = [_call_of(item, shown) for item, shown in zip(listed, written, strict=True)]
        unread = [shown for shown, call in zip(written, calls, strict=True) if call.error is not None]
        return ParsedAnswer("\n".join([said, *unread]).strip() if unread else said, calls)


def _taken_out(pattern: re.Pattern[str], text: str, read: Callable[[re.Match[str]], ToolCall]) -> ParsedAnswer:
    """The calls that a pattern finds, and the text without those that can be read."""
    calls: list[ToolCall] = []

    def left(found: re.Match[str]) -> str:
        calls.append(read(found))
        return "" if calls[-1].error is None else found[0]

    content = pattern.sub(left, text)
    return ParsedAnswer(content.strip() if calls else text, calls)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except _NO_JSON:
        return text.strip()


_NAMED: dict[str, Callable[[], ToolParser]] = {
    "template": TemplateToolParser,
    "xml": XMLToolParser,
    "json": JSONToolParser,
}


def parser_of(parser: str | ToolParser) -> ToolParser:
    """A parser, or the one of a name.

    Raises:
        ValueError: there is none of that name.
    """
    if isinstance(parser, ToolParser):
        return parser
    if parser not in _NAMED:
        raise ValueError(f"parser: expected a ToolParser or one of {sorted(_NAMED)}, got {parser!r}.")
    return _NAMED[parser]()
