"""The address of an agent: what it understands, what it refuses, and lost connections."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from urllib.parse import urlsplit

import pytest
from tests.envs.llm.agents.client import Client, Refused
from tests.envs.llm.agents.scripted import ScriptedEngine, collector, records
from tests.patience import patient

pytestmark = pytest.mark.llm
HI = [{"role": "user", "content": "Hi."}]


def collect(agent, **options):
    """The turns of one conversation."""
    made, engine = collector(agent, rows=1, slots=1, trajs_per_batch=1, async_envs=True, **options)
    with made:
        (turns,) = records(made).values()
    return turns, engine


def test_models_and_a_stream_of_events():
    found = {}

    def agent(row, base_url, api_key):
        client = Client(base_url, api_key)
        found["models"] = json.loads(client.ask("models"))
        body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "n": 2}
        found["events"] = client.ask("chat/completions", body).decode()
        found["plain"] = client.chat(HI, logprobs=True)

    turns, engine = collect(agent)
    assert [model["id"] for model in found["models"]["data"]] == ["policy"]
    lines = found["events"].split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    deltas = [choice for chunk in chunks for choice in chunk["choices"]]
    text = engine.tokenizer.decode(engine.wrote[0][:-1])
    assert [(each["index"], each["delta"].get("content"), each["finish_reason"]) for each in deltas] == [
        (0, text, None),
        (0, None, "stop"),
        (1, text, None),
        (1, None, "stop"),
    ]
    written = [len(one["tokens", "response"]) for one in turns]
    assert chunks[-1]["usage"]["prompt_tokens"] == len(turns[0]["tokens", "prompt"])
    assert chunks[-1]["usage"]["completion_tokens"] == sum(written[:2])
    logged = [each["logprob"] for each in found["plain"][0]["logprobs"]["content"]]
    assert logged == pytest.approx(turns[2]["log_probs", "response"].tolist())
    tokens = found["plain"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in tokens[:-1]) == found["plain"][0]["message"]["content"]


REFUSED = {  # what is asked for: status, and what the message names
    "response_format": ({"response_format": {"type": "json_object"}}, 400, "response_format: expected"),
    "unknown": ({"logit_bias": {"1": 2}}, 400, "'logit_bias' is not supported here.*ignore="),
    "range": ({"temperature": -1}, 400, "temperature: expected 0 or more"),
    "kind": ({"top_p": "much"}, 400, "top_p: expected a number"),
    "stop": ({"stop": [1]}, 400, "stop: expected"),
    "n": ({"n": 0}, 400, "n: expected a whole number from 1 to 64, got 0"),
    "tokens": ({"max_tokens": 0}, 400, "max_tokens: expected a whole number"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 3}, 400, "top_logprobs: expected 0, got 3"),
    "tool_choice": ({"tool_choice": "required"}, 400, "tool_choice: expected 'auto' or 'none'"),
    "tools": ({"tools": [{"type": "retrieval"}]}, 400, "tools: expected functions with a name"),
    "no messages": ({"messages": []}, 400, "messages: expected a list of messages"),
    "role": ({"messages": [{"role": "judge", "content": ""}]}, 400, r"messages\[0\]: expected a role of .*'judge'"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "part of type 'image_url'"),
}


def test_what_is_not_supported_is_refused_by_name():
    found = {}

    def agent(row, base_url, api_key):
        client = Client(base_url, api_key)
        for name, (body, *_) in REFUSED.items():
            with pytest.raises(Refused) as caught:
                client.ask("chat/completions", {"messages": HI, **body})
            found[name] = caught.value
        for name, path, body in (
            ("json", "chat/completions", b"{"),
            ("path", "completions", {}),
            ("method", "models", {}),
        ):
            with pytest.raises(Refused) as caught:
                client.ask(path, body)
            found[name] = caught.value
        with pytest.raises(Refused) as caught:
            client.ask("reward", {"reward": "much"})
        found["reward"] = caught.value
        client.chat(HI, user="me", store=False, temperature=None)

    turns, engine = collect(agent)
    others = {"json": (400, "the body is no JSON"), "path": (404, "Use chat/completions"), "method": (405, "POST")}
    others["reward"] = (400, "reward: expected a finite number, got 'much'")
    for name, (status, message) in ({key: tuple(value[1:]) for key, value in REFUSED.items()} | others).items():
        assert found[name].status == status, name
        assert re.search(message, found[name].error["message"]), (name, found[name].error)
        assert found[name].error["type"] == "invalid_request_error"
    assert len(turns) == len(engine.requests) == 1


def test_strangers_are_refused():
    found, first = [], []

    def agent(row, base_url, api_key):
        own = Client(base_url, api_key)
        first.append(own)
        address = base_url.rpartition("/v1")[0].rpartition("/")[0]
        strangers = [
            Client(base_url, "another"),
            Client(f"{address}/77/v1", api_key),
            Client(f"{address}/x/v1", api_key),
        ]
        if len(first) > 1:
            strangers += [first[0], Client(base_url, first[0].api_key)]
        for client in strangers:
            with pytest.raises(Refused) as caught:
                client.chat(HI)
            found.append((caught.value.status, caught.value.error["code"]))
        own.chat(HI)

    made, engine = collector(agent, rows=2, slots=1, trajs_per_batch=1)
    with made:
        assert len(list(made)) == 2
    wrong, gone, nothing = (401, "invalid_api_key"), (410, "conversation_ended"), (404, None)
    assert found == [wrong, nothing, nothing] * 2 + [gone, wrong]
    assert len(engine.requests) == 2


class Held(ScriptedEngine):
    """Writes when it is let."""

    def __init__(self):
        super().__init__()
        self.let, self.asked = threading.Event(), threading.Event()

    def step(self, tokens=1):
        self.asked.set()
        if self.let.wait(0.001):
            super().step(tokens)


@pytest.mark.parametrize("before", [True, False])
def test_a_request_that_comes_again_when_its_line_was_lost_gets_the_same_answer(before):
    engine, found = Held(), []

    def agent(row, base_url, api_key):
        place, body = urlsplit(base_url), json.dumps({"messages": HI}).encode()
        head = f"POST {place.path}/chat/completions HTTP/1.1\r\nAuthorization: Bearer {api_key}\r\n"
        with socket.create_connection((place.hostname, place.port)) as line:
            line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert engine.asked.wait(patient(20))
        client = Client(base_url, api_key)
        if before:  # it comes again before the answer is there
            threading.Timer(0.1, engine.let.set).start()
        else:
            engine.let.set()
            client.ask("models")
        found.append(json.loads(client.ask("chat/completions", body))["choices"][0]["message"]["content"])
        client.chat([*HI, {"role": "assistant", "content": found[0]}, *HI])

    turns, _ = collect(agent, engine=engine)
    assert len(engine.requests) == len(turns) == 2
    assert found[0] == turns[0]["text", "response"].removesuffix("<|im_end|>")
    assert [int(one["sequence"]) for one in turns] == [0, 0]


def test_lines_that_say_something_else_than_http_are_closed():
    said = []

    def agent(row, base_url, api_key):
        place = urlsplit(base_url)
        long = b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000
        chunked = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        for text in (b"\x00\r\n\r\n", long, b"", chunked):
            with contextlib.suppress(ConnectionError), socket.create_connection((place.hostname, place.port)) as line:
                line.sendall(text)
                line.shutdown(socket.SHUT_WR)
                line.settimeout(patient(20))
                said.append(line.recv(1 << 16)[:12])
        Client(base_url, api_key).chat(HI)

    turns, _ = collect(agent)
    assert len(turns) == 1
    assert said[-1] == b"HTTP/1.1 411"
