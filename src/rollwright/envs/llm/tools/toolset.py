"""Toolset: the tools of a conversation, how calls are read, and what becomes of their errors."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from rollwright.envs.llm.tools.core import Tool, ToolCall, ToolParser
from rollwright.envs.llm.tools.functions import FunctionTool
from rollwright.envs.llm.tools.parsers import parser_of

__all__ = ["Toolset", "as_text", "as_toolset", "call_of"]


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
    ) -> None:
        if on_error not in ("message", "raise"):
            raise ValueError(f"on_error: expected 'message' or 'raise', got {on_error!r}.")
        if max_rounds < 1:
            raise ValueError(f"max_rounds: expected at least 1, got {max_rounds}.")
        self.tools = {tool.name: tool for tool in map(_as_tool, tools)}
        if len(self.tools) < len(tools):
            raise ValueError(
                f"tools: expected a name of its own for each, got {[_as_tool(tool).name for tool in tools]}."
            )
        if not self.tools:
            raise ValueError("tools: expected at least one tool, got none. Leave tools out where there are none.")
        self.parser = parser_of(parser)
        self.on_error, self.max_rounds = on_error, max_rounds

    @property
    def schemas(self) -> list[Any]:
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
    """The content of the message with a result: strings as they are, other values as JSON where they can be."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result)
    except (TypeError, ValueError):
        return str(result)


def call_of(function: Any) -> Any:
    """``function``, called with a mapping of its arguments."""
    if inspect.iscoroutinefunction(function):

        async def acall(arguments: dict[str, Any]) -> Any:
            return await function(**arguments)

        return acall

    def call(arguments: dict[str, Any]) -> Any:
        return function(**arguments)

    return call
