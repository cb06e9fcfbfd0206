"""Toolset: the tools of a conversation, how calls are read, and what becomes of their errors."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rollwright.data.llm.content import is_parts, text_of
from rollwright.envs.llm.tools.core import ParsedAnswer, Tool, ToolCall, ToolParser
from rollwright.envs.llm.tools.functions import FunctionTool
from rollwright.envs.llm.tools.parsers import parser_of

_SURROGATE = re.compile("[\ud800-\udfff]")


class Toolset:
    """Tools that a model may call between its answers.

    An answer with calls is followed by one ``tool`` message for each, with its result, and the model goes on. An answer
    without calls goes to the environment, or ends the conversation.

    Args:
        tools: functions, or tools such as :class:`PythonInterpreter`. The chat template gets their schemas as
            ``tools``.
        parser: finds the calls: ``"template"`` (``<tool_call>`` and JSON), ``"xml"``, ``"json"``, or a
            :class:`ToolParser`.
        on_error: what becomes of a tool that raises, takes too long or is called wrongly. ``"message"``: the reason
            is its result. ``"raise"``: an error that ends the collection.
        max_rounds: answers with calls that a conversation may have; one more truncates it.
        result_chars: of a result; more is cut off, and the model reads that it was.
        reasoning: marks of a model's reasoning, in which nothing is a call; None: calls are looked for everywhere.

    Raises:
        TypeError: one of ``tools`` is something else.
        ValueError: two tools have one name, or another argument is out of range.

    Example:
        >>> def add(a: int, b: int) -> int:
        ...     '''Add two numbers.'''
        ...     return a + b
        >>> toolset = Toolset([add], on_error="raise", max_rounds=3)
        >>> [schema["function"]["name"] for schema in toolset.schemas]
        ['add']
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tool],
        *,
        parser: str | ToolParser = "template",
        on_error: Literal["message", "raise"] = "message",
        max_rounds: int = 8,
        result_chars: int = 100_000,
        reasoning: tuple[str, str] | None = ("<think>", "</think>"),
    ) -> None:
        if on_error not in ("message", "raise"):
            raise ValueError(f"on_error: expected 'message' or 'raise', got {on_error!r}.")
        if max_rounds < 1:
            raise ValueError(f"max_rounds: expected at least 1, got {max_rounds}.")
        if result_chars < 1:
            raise ValueError(f"result_chars: expected at least 1, got {result_chars}.")
        if reasoning is not None and (len(reasoning) != 2 or not all(isinstance(m, str) and m for m in reasoning)):
            raise ValueError(
                f"reasoning: expected the marks before and behind a model's reasoning, or None, got {reasoning!r}. "
                "Pass ('<think>', '</think>'), for example."
            )
        self.tools = {tool.name: tool for tool in map(_as_tool, tools)}
        if len(self.tools) < len(tools):
            raise ValueError(
                f"tools: expected a name of its own for each, got {[_as_tool(tool).name for tool in tools]}."
            )
        if not self.tools:
            raise ValueError("tools: expected at least one tool, got none. Leave tools out where there are none.")
        self.parser = parser_of(parser)
        self.on_error, self.max_rounds, self.result_chars = on_error, max_rounds, result_chars
        self.reasoning = reasoning

    def parse(self, text: str, prompt: str = "") -> ParsedAnswer:
        """Take an answer apart.

        Args:
            text: of the answer.
            prompt: text before it, which may have begun the model's reasoning.

        Raises:
            ValueError: the parser raised, or returned something else; the message says what, as a phrase.
        """
        return parse_answer(text, prompt, self.parser, self.reasoning)

    def content(self, result: Any) -> str:
        """The content of the message with a result: strings as they are, other values as JSON where they can be.

        Parts of text (``[{"type": "text", "text": ...}]``) are text. Half of a surrogate pair, which is no text,
        becomes U+FFFD.

        Raises:
            ValueError: a part is none of text.
        """
        text = text_of(result) if is_parts(result) else as_text(result)
        if len(text) > self.result_chars:
            text = f"{text[: self.result_chars]}\n[result cut after {self.result_chars} characters]"
        return _SURROGATE.sub("\ufffd", text)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of all tools, for the chat template."""
        return [dict(tool.schema) for tool in self.tools.values()]

    def problem(self, call: ToolCall) -> str | None:
        """Why a call cannot be made; None: it can."""
        if call.error is not None:
            return call.error
        tool = self.tools.get(call.name)
        if tool is None:
            return f"there is no tool {call.name!r}; there are {sorted(self.tools)}"
        parameters = tool.schema["function"].get("parameters", {})
        known = parameters.get("properties", {})
        missing = [name for name in parameters.get("required", []) if name not in call.arguments]
        unknown = [name for name in call.arguments if known and name not in known]
        if missing or unknown:
            return f"{call.name} has the arguments {list(known)}; missing: {missing}, unknown: {unknown}"
        return None


def parse_answer(text: str, prompt: str, parser: ToolParser, reasoning: tuple[str, str] | None) -> ParsedAnswer:
    """Take an answer apart."""
    where = f"the parser {type(parser).__name__}"
    thoughts, rest = ("", text) if reasoning is None else _apart(text, prompt, *reasoning)
    try:
        parsed: Any = parser.parse(rest)
    except Exception as error:
        raise ValueError(f"{where} raised {type(error).__name__}: {error}") from error
    if not isinstance(parsed, ParsedAnswer) or not all(map(_is_call, parsed.calls)):
        raise ValueError(f"{where} returned {repr(parsed)[:200]}, expected a ParsedAnswer with ToolCall objects")
    if thoughts:
        return ParsedAnswer(thoughts + parsed.content if parsed.calls else text, parsed.calls)
    return parsed


def _as_tool(tool: Any) -> Tool:
    return tool if isinstance(tool, Tool) else FunctionTool(tool)


def as_toolset(tools: Any) -> Toolset | None:
    """Tools as a :class:`Toolset`; None or an empty list: there are none."""
    if tools is None or isinstance(tools, Toolset):
        return tools
    if isinstance(tools, Tool) or callable(tools):
        tools = [tools]
    return Toolset(list(tools)) if tools else None


def as_text(result: Any) -> str:
    """Strings as they are, other values as JSON where they can be."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def _apart(text: str, prompt: str, begin: str, end: str) -> tuple[str, str]:
    """The reasoning in an answer, with its marks, and the rest; reasoning without an end goes on to that of the text.

    What stands before an end without a begin is reasoning, too: the template wrote the begin.
    """
    head, found, _ = text.partition(end)
    inside = prompt.rstrip().endswith(begin) or (bool(found) and begin not in head)
    thoughts, rest, place = "", "", 0
    while place < len(text):
        mark = end if inside else begin
        at = text.find(mark, place)
        stop = len(text) if at < 0 else at + (len(end) if inside else 0)
        if inside:
            thoughts += text[place:stop]
        else:
            rest += text[place:stop]
        inside, place = not inside, stop
    return thoughts, rest


def _is_call(call: Any) -> bool:
    return isinstance(call, ToolCall) and isinstance(call.name, str) and isinstance(call.arguments, Mapping)


def call_of(function: Any) -> Any:
    """``function``, called with a mapping of its arguments."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004

        async def acall(arguments: dict[str, Any]) -> Any:
            return await function(**arguments)

        return acall

    def call(arguments: dict[str, Any]) -> Any:
        return function(**arguments)

    return call
