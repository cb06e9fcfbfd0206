"""The protocol of OpenAI's chat completions: requests that are understood, answers and errors as their bodies."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollwright.data.llm.content import text_of
from rollwright.data.llm.turns import Message
from rollwright.modules.llm.engine import Sampling

_MOST_CHOICES = 64
_ROLES = ("system", "developer", "user", "assistant", "tool")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_WITHOUT_EFFECT = (
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
_SUPPORTED = (
    *("chat_template_kwargs", "logprobs", "max_completion_tokens", "max_tokens", "messages", "n", "response_format"),
    *("seed", "stop", "stream", "stream_options", "tool_choice", "tools", "top_logprobs", *_SAMPLING),
)
_VALUES = {  # of parameters of which one value is understood
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "top_logprobs": (0,),
}


class Refusal(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        message: why, and what to do.
        code: for programs.
        param: of the request, that it is about.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        """As the protocol has it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for an answer.

    Attributes:
        model: that it names, which any name may be.
        messages: with plain text, and arguments of calls as mappings.
        template: arguments of the chat template, ``tools`` among them.
        sampling: fields of :class:`~rollwright.modules.llm.Sampling`.
        seed: of the answer; None: it has none.
        n: answers that are asked for.
        stream: as events.
        usage: with an event that counts tokens.
        log_probs: of the tokens are asked for.
        calls: whether calls of tools are looked for.
    """

    model: str
    messages: tuple[Message, ...]
    template: Mapping[str, Any]
    sampling: Mapping[str, Any]
    seed: int | None
    n: int
    stream: bool
    usage: bool
    log_probs: bool
    calls: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """An answer, as it is sent.

    Attributes:
        message: its arguments of calls are JSON.
        finish_reason: ``"stop"``, ``"length"`` or ``"tool_calls"``.
        num_prompt: tokens that the model read.
        num_tokens: that it wrote.
        log_probs: of each token, where they were asked for.
    """

    message: Message
    finish_reason: str
    num_prompt: int
    num_tokens: int
    log_probs: Sequence[Mapping[str, Any]] | None = None


def read_request(body: bytes, ignored: Collection[str] = ()) -> ChatRequest:
    """The request of a body.

    Args:
        body: JSON.
        ignored: parameters that have no effect.

    Raises:
        Refusal: it is none, or asks for something that is not supported; names the parameter.
    """
    given = {name: value for name, value in read_object(body).items() if value is not None and name not in ignored}
    unknown = sorted(given.keys() - {*_SUPPORTED, *_WITHOUT_EFFECT})
    if unknown:
        raise _wrong(
            unknown[0], f"{unknown[0]!r} is not supported here. Leave it out, or name it in ignore= of AgentEnv"
        )
    for name, values in _VALUES.items():
        if given.get(name, values[0]) not in values:
            shown = " or ".join(map(repr, values))
            raise _wrong(
                name, f"{name}: expected {shown}, got {given[name]!r}. Leave it out, or name it in ignore= of AgentEnv"
            )
    n = _whole(given, "n", 1, 1, _MOST_CHOICES)
    has_tools = bool(given.get("tools")) and given.get("tool_choice") != "none"
    template = dict(_mapping(given, "chat_template_kwargs"))
    if has_tools:
        template["tools"] = _tools(given["tools"])
    return ChatRequest(
        str(given.get("model", "")),
        tuple(as_messages(given.get("messages"))),
        template,
        _sampling(given),
        None if "seed" not in given else _whole(given, "seed", 0, -(2**63), 2**64),
        n,
        bool(given.get("stream", False)),
        bool(_mapping(given, "stream_options").get("include_usage", False)),
        bool(given.get("logprobs", False)),
        has_tools,
    )


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {error}. Send a JSON object.") from None
    if not isinstance(found, dict):
        raise Refusal(400, f"the body is a JSON {type(found).__name__}. Send a JSON object.")
    return found


def _wrong(param: str, message: str) -> Refusal:
    return Refusal(400, f"{message}.", code="unsupported_parameter", param=param)


def _whole(given: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _wrong(name, f"{name}: expected a whole number from {least} to {most}, got {value!r}")
    return value


def _mapping(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name, {})
    if not isinstance(value, Mapping):
        raise _wrong(name, f"{name}: expected an object, got {value!r}")
    return value


def _tools(tools: Any) -> list[Any]:
    named = isinstance(tools, list) and all(
        isinstance(tool, Mapping)
        and tool.get("type") == "function"
        and isinstance(tool.get("function"), Mapping)
        and isinstance(tool["function"].get("name"), str)
        for tool in tools
    )
    if not named:
        raise _wrong("tools", f"tools: expected functions with a name, got {repr(tools)[:200]}")
    return list(tools)


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: given[name] for name in _SAMPLING if name in given}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in given:
            found["max_new_tokens"] = _whole(given, name, 0, 1, 2**31)
    if "stop" in given:
        stop = given["stop"]
        found["stop"] = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else stop
    try:
        Sampling(**found)
    except (TypeError, ValueError) as error:
        name = str(error).partition(":")[0]
        raise Refusal(400, str(error), code="unsupported_value", param=name) from None
    return found


def as_messages(messages: Any) -> Iterator[Message]:
    """Messages of a request, each in one form, so that equal ones are equal.

    Raises:
        Refusal: they are no list of messages of text.
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(each, Mapping) for each in messages):
        raise _wrong("messages", f"messages: expected a list of messages, got {repr(messages)[:200]}")
    for place, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise _wrong("messages", f"messages[{place}]: expected a role of {', '.join(_ROLES)}, got {role!r}")
        try:
            text = content if isinstance(content, str) else text_of(content or ())
        except (TypeError, ValueError) as error:
            raise _wrong("messages", f"messages[{place}]: {str(error).rstrip('.')}") from None
        found: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text}
        if role == "assistant" and message.get("tool_calls"):
            found["tool_calls"] = [_call(call, place) for call in message["tool_calls"]]
        for name in ("name", "tool_call_id"):
            if message.get(name) is not None:
                found[name] = str(message[name])
        yield found


def _call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong("messages", f"messages[{place}].tool_calls: expected calls of functions, got {repr(call)[:200]}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            read = None
        arguments = read if isinstance(read, dict) else arguments
    own = {"name": function["name"], "arguments": arguments}
    return {"id": str(call.get("id", "")), "type": "function", "function": own}


def sent(message: Message) -> Message:
    """An answer's message as it is sent: arguments of calls are JSON."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def completion(number: str, request: ChatRequest, choices: Sequence[Choice]) -> dict[str, Any]:
    """The body of an answer."""
    made = [
        {
            "index": index,
            "message": choice.message,
            "finish_reason": choice.finish_reason,
            "logprobs": None if choice.log_probs is None else {"content": choice.log_probs, "refusal": None},
        }
        for index, choice in enumerate(choices)
    ]
    return {**_head(number, request, "chat.completion"), "choices": made, "usage": _usage(choices)}


def events(number: str, request: ChatRequest, choices: Sequence[Choice]) -> bytes:
    """The answer as server-sent events."""
    head = _head(number, request, "chat.completion.chunk")
    chunks: list[dict[str, Any]] = []
    for index, choice in enumerate(choices):
        delta = dict(choice.message)
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        one: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
        if choice.log_probs is not None:
            one["logprobs"] = {"content": choice.log_probs, "refusal": None}
        chunks.append({**head, "choices": [one]})
        end = {"index": index, "delta": {}, "finish_reason": choice.finish_reason}
        chunks.append({**head, "choices": [end]})
    if request.usage:
        chunks.append({**head, "choices": [], "usage": _usage(choices)})
    return "".join([*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]).encode()


def _head(number: str, request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": int(time.time()), "model": request.model or "policy"}


def _usage(choices: Sequence[Choice]) -> dict[str, int]:
    read, wrote = choices[0].num_prompt, sum(choice.num_tokens for choice in choices)
    return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}
