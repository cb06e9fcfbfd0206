"""Python functions as tools, with a JSON schema from signature and docstring."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, Union, get_args, get_origin

from rollwright.envs.llm.tools.core import Tool, ToolSession

_PLAIN = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
}
_ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_SECTION = re.compile(r"^\s*(Returns?|Raises|Yields?|Examples?|Notes?|Attributes)\s*:\s*$")


def function_schema(function: Callable[..., Any], name: str | None = None) -> dict[str, Any]:
    """The JSON schema of a function, as chat templates expect tools.

    The description is the docstring up to its arguments; those of the arguments stand below ``Args:``.

    Args:
        function: or an object that is called as one. Its parameters have annotations: str, int, float, bool, list,
            dict, Literal, or a union of these.
        name: of the tool; None: the function's.

    Raises:
        TypeError: a parameter has no annotation, or one that JSON has no type for.

    Example:
        >>> def add(a: int, b: int = 0) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: the first.
        ...     '''
        ...     return a + b
        >>> schema = function_schema(add)["function"]
        >>> schema["name"], schema["description"], schema["parameters"]["required"]
        ('add', 'Add two numbers.', ['a'])
        >>> schema["parameters"]["properties"]["a"]
        {'type': 'integer', 'description': 'the first.'}
    """
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    called = getattr(function, "__name__", None) or getattr(inner, "__name__", type(inner).__name__)
    description, described = _docstring(inspect.getdoc(inner) or "")
    try:
        hints = typing.get_type_hints(inner if inspect.isroutine(inner) else type(inner).__call__)
    except NameError as error:
        raise TypeError(
            f"tools: an annotation of {called} cannot be read: {error}. Write it with a name of its module, or pass "
            "FunctionTool(..., schema=)."
        ) from None
    properties: dict[str, Any] = {}
    required: list[str] = []
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(
                f"tools: {called} has the parameter {parameter}, which a model cannot name. Use plain ones."
            )
        if key not in hints:
            raise TypeError(f"tools: {called} has no annotation for {key!r}. Write {key}: str, for example.")
        properties[key] = _type_schema(hints[key], f"{called}({key})")
        if key in described:
            properties[key]["description"] = described[key]
        if parameter.default is parameter.empty:
            required.append(key)
    parameters = {"type": "object", "properties": properties, "required": required}
    tool = {"name": name or called, "description": description, "parameters": parameters}
    return {"type": "function", "function": tool}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    head: list[str] = []
    arguments: dict[str, str] = {}
    inside, current, indent = "", "", 0
    for line in text.splitlines():
        if re.match(r"^\s*(Args|Arguments|Parameters)\s*:\s*$", line):
            inside = "args"
        elif _SECTION.match(line):
            inside = "other"
        elif not inside:
            head.append(line)
        elif inside == "args" and line.strip():
            found = _ARGUMENT.match(line)
            if found and (not current or len(line) - len(line.lstrip()) <= indent):
                current, indent = found.group(1), len(line) - len(line.lstrip())
                arguments[current] = found.group(2).strip()
            elif current:
                arguments[current] += " " + line.strip()
    return "\n".join(head).strip(), arguments


def _type_schema(hint: Any, where: str) -> dict[str, Any]:
    if hint is Any:
        return {}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        kinds = {type(value) for value in arguments}
        kind = {"type": _PLAIN[kinds.pop()]} if len(kinds) == 1 else {}
        return kind | {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        rest = [item for item in arguments if item is not types.NoneType]
        options = [_type_schema(item, where) for item in rest]
        made = options[0] if len(options) == 1 else {"anyOf": options}
        return made | ({"nullable": True} if len(rest) < len(arguments) else {})
    if origin in (list, tuple, set) or hint in (list, tuple):
        items = _type_schema(arguments[0], where) if arguments else {}
        return {"type": "array"} | ({"items": items} if items else {})
    if origin is dict or hint is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return {"type": "object"}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    raise TypeError(
        f"tools: {where} has the type {hint}, which JSON does not have. Use str, int, float, bool, list or Literal."
    )


class FunctionTool(Tool):
    """A Python function as a tool.

    Args:
        function: plain or ``async``. A plain one runs in a thread, beside those of other conversations.
        name: None: the function's.
        timeout_s: seconds that a call may take. The function itself cannot be stopped; its thread is left to it.
        schema: None: of its signature and docstring, see :func:`function_schema`.

    Example:
        >>> def shout(text: str) -> str:
        ...     '''Write in capitals.'''
        ...     return text.upper()
        >>> tool = FunctionTool(shout)
        >>> tool.name, tool.begin().function(text="hello")
        ('shout', 'HELLO')
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        timeout_s: float = 30.0,
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"tools: expected functions or tools, got {type(function).__name__}.")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s: expected more than 0, got {timeout_s}.")
        self._function = function
        self.schema = function_schema(function, name) if schema is None else schema
        self.name = name or str(self.schema["function"]["name"])
        self.timeout_s = timeout_s

    def begin(self) -> ToolSession:
        """The tool for a new conversation."""
        return _Stateless(self._function)


class _Stateless(ToolSession):
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def function(self) -> Callable[..., Any]:
        return self._function
