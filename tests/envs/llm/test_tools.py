"""Schemas of functions, parsers of calls, and the limits of the interpreter."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from rollwright.envs.llm.tools import (
    JSONToolParser,
    PythonInterpreter,
    TemplateToolParser,
    Toolset,
    XMLToolParser,
    function_schema,
)


def search(query: str, limit: int = 3, kind: Literal["web", "news"] = "web", tags: list[str] | None = None) -> str:
    """Search for text.

    The newest come first.

    Args:
        query: what to look for,
            in words.
        limit (int): how many.
        kind: where.
        tags: of it.

    Returns:
        What was found.
    """
    return query


def test_the_schema_of_a_function() -> None:
    assert function_schema(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search for text.\n\nThe newest come first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in words."},
                    "limit": {"type": "integer", "description": "how many."},
                    "kind": {"type": "string", "enum": ["web", "news"], "description": "where."},
                    "tags": {"type": "array", "items": {"type": "string"}, "nullable": True, "description": "of it."},
                },
                "required": ["query"],
            },
        },
    }


def test_functions_that_have_no_schema_are_named() -> None:
    def bare(x):  # type: ignore[no-untyped-def]
        return x

    def many(*args: int) -> None: ...

    def odd(x: bytes) -> None: ...

    with pytest.raises(TypeError, match="bare has no annotation for 'x'"):
        function_schema(bare)
    with pytest.raises(TypeError, match="many has the parameter"):
        function_schema(many)
    with pytest.raises(TypeError, match=r"odd\(x\) has the type"):
        function_schema(odd)
    with pytest.raises(ValueError, match="tools: expected a name of its own for each"):
        Toolset([search, search])
    with pytest.raises(ValueError, match="parser: expected a ToolParser or one of"):
        Toolset([search], parser="yaml")
    with pytest.raises(ValueError, match=r"reasoning: expected the marks before and behind .* got '<think>'. Pass"):
        Toolset([search], reasoning="<think>")  # type: ignore[arg-type]


def test_reasoning_that_a_prompt_began_goes_on_to_its_end() -> None:
    toolset = Toolset([search])
    call = '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'
    assert toolset.parse(call, "<|im_start|>assistant\n<think>\n").calls == ()
    assert toolset.parse(call, "<think></think>").content == ""
    both = toolset.parse(f"{call}</think> a <think>{call}</think>{call} b")
    assert (both.content, len(both.calls)) == (f"{call}</think><think>{call}</think>a  b", 1)
    listed = Toolset([search], parser="json").parse('<think>["no"]</think>\n[{"name": "search"}]')
    assert (listed.content, [found.name for found in listed.calls]) == ('<think>["no"]</think>', ["search"])


def test_calls_that_cannot_be_read_stay_in_the_text() -> None:
    good, bad = '{"name": "f"}', '{"name": 3}'
    assert TEMPLATE.parse(f"a <tool_call>{good}</tool_call><tool_call>{bad}</tool_call> b").content == (
        f"a <tool_call>{bad}</tool_call> b"
    )
    assert XML.parse('<tool name="f"></tool><tool>x</tool>').content == "<tool>x</tool>"
    assert JSON.parse(f'{{"message": "So", "tools": [{good}, {bad}]}}').content == f"So\n{bad}"
    assert JSON.parse(f"[{good}, {bad}]").content == bad


def calls_of(parser: Any, text: str) -> Any:
    parsed = parser.parse(text)
    return parsed.content, [(call.name, dict(call.arguments), call.error) for call in parsed.calls]


TEMPLATE, XML, JSON = TemplateToolParser(), XMLToolParser(), JSONToolParser()


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        (TEMPLATE, "no call", ("no call", [])),
        (TEMPLATE, "cut <tool_call>{", ("cut <tool_call>{", [])),
        (
            TEMPLATE,
            'a <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> <tool_call>{"name": "g"}</tool_call>',
            ("a", [("f", {}, None), ("g", {}, None)]),
        ),
        (XML, '<tool name="f">{"x": [1]}</tool>', ("", [("f", {"x": [1]}, None)])),
        (XML, "<tool name='f'></tool> so", ("so", [("f", {}, None)])),
        (JSON, '```json\n[{"name": "f", "arguments": "{}"}]\n```', ("", [("f", {}, None)])),
        (JSON, '{"answer": 3}', ('{"answer": 3}', [])),
        (JSON, "[]", ("[]", [])),
        (JSON, "{3", ("{3", [])),
        (JSON, "[" * 100_000, ("[" * 100_000, [])),
    ],
)
def test_parsers(parser: Any, text: str, expected: Any) -> None:
    assert calls_of(parser, text) == expected


@pytest.mark.parametrize(
    ("parser", "text", "error"),
    [
        (TEMPLATE, "<tool_call>[1]</tool_call>", "a call must be a JSON object"),
        (TEMPLATE, '<tool_call>{"name": 3}</tool_call>', "a call must have a name"),
        (TEMPLATE, '<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "the arguments are no JSON"),
        (TEMPLATE, f"<tool_call>{'[' * 100_000}</tool_call>", "the call is no JSON: maximum recursion depth"),
        (XML, "<tool>{}</tool>", "<tool> must have a name"),
        (XML, '<tool name="f">what</tool>', "expected a JSON object or an element"),
        (XML, '<tool name="f">{what</tool>', "the arguments are no JSON"),
    ],
)
def test_calls_that_cannot_be_read_say_why(parser: Any, text: str, error: str) -> None:
    (call,) = parser.parse(text).calls
    assert error in call.error


@pytest.fixture
def session() -> Iterator[Any]:
    made = PythonInterpreter(timeout_s=1.0, memory_bytes=2**28, output_chars=500).begin()
    yield made
    made.close()


def test_code_that_never_returns_is_killed_within_its_limit(session: Any) -> None:
    session.function("x = 1")
    pid = session.pid
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="took longer than 1 seconds and was stopped; variables are lost"):
        session.function("while True: pass")
    assert time.monotonic() - began < 10.0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "NameError" in session.function("x")


def test_memory_and_output_have_limits(session: Any) -> None:
    assert "MemoryError" in session.function("len(bytearray(2**30))")
    shown = session.function("print('y' * 10**6)")
    assert shown.startswith("y" * 500)
    assert "output cut after 500 characters" in shown
    assert len(shown) < 600


def test_what_code_raises_or_ends_is_shown(session: Any) -> None:
    assert session.function("def f():\n    1 / 0\nf()").endswith("ZeroDivisionError: division by zero\n")
    assert "SystemExit" in session.function("import sys; sys.exit(3)")
    assert "SyntaxError" in session.function("x =")
    with pytest.raises(RuntimeError, match="the interpreter ended with status 5"):
        session.function("import os; os._exit(5)")
    assert session.function("1 + 1") == "2\n"
    session.close()
    with pytest.raises(RuntimeError, match="the conversation is over"):
        session.function("1")
