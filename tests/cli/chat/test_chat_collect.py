"""chat-collect: each prompt once, whatever is killed; what the trace has, in this process and in workers."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
import torch
from tests import llm_models
from tests.modules.llm.serving.fake_servers import FakeVLLM
from tests.modules.llm.serving.services import lively

from rollwright.data.llm import Trace

PROMPTS = 14
MODULE = """
from pathlib import Path

from tests.collectors.llm.fakes import FakePolicy

def make():
    return FakePolicy(delay_s=float(Path(__file__).with_name("delay").read_text()))

def length(completions, completion_ids, **columns):
    return [float(len(tokens)) for tokens in completion_ids]

class Guess:
    def __init__(self, row):
        self.left = row["number"] % 3

    def reply(self, messages):
        self.left -= 1
        return "again", 1.0, self.left < 0
"""


@pytest.fixture
def chat(module, tmp_path, monkeypatch):
    """``chat(output, delay_s=0, **options)``: arguments of a run on made-up prompts, a fake engine and a reward."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"query": f"say {n}", "number": n}) + "\n" for n in range(PROMPTS))
    )

    name = module(MODULE)

    def arguments(output, *more, delay_s=0.0):
        (tmp_path / "delay").write_text(str(delay_s))
        given = ["chat-collect", "--data", tmp_path / "prompts.jsonl", "--output", output, "--text", "--repeats", 2]
        return [*given, "--engine", f"{name}:make", "--reward", f"{name}:length", "--env", f"{name}:Guess", *more]

    return arguments


def texts(folder):
    """What was said in each conversation, which is there once and has ended."""
    found = {}
    for each in Trace.read(folder).conversations:
        assert each.end == "terminated"
        assert (each.origin.index, each.origin.repeat) not in found
        rewards = [float(turn.extras["next", "rewards", "length"]) for turn in each.turns]
        assert rewards[-1] == sum(len(turn.tokens) - turn.num_prompt for turn in each.turns)
        assert each.total == rewards[-1] + len(each.turns)
        found[each.origin.index, each.origin.repeat] = [turn.response_text for turn in each.turns]
    assert sorted({index for index, _ in found}) == sorted({index for index, repeat in found if repeat == 0})
    return found


@pytest.mark.parametrize("more", [(), ("--workers", 2)])
def test_each_prompt_is_collected_and_a_second_call_has_nothing_to_do(run, chat, tmp_path, more):
    result = run(*chat(tmp_path / "run", "--seed", 3, *more))
    assert result.status == 0, result.err
    assert re.search(
        rf"{2 * PROMPTS} of {2 * PROMPTS} conversations, {2 * PROMPTS} of them new, mean reward \d", result.out
    )
    first = texts(tmp_path / "run")
    assert len(first) == 2 * PROMPTS
    again = run(*chat(tmp_path / "run", "--json", *more))
    assert again.status == 0, again.err
    numbers = json.loads(again.out)
    assert (numbers["conversations"], numbers["total"], numbers["new"]) == (2 * PROMPTS, 2 * PROMPTS, 0)
    assert texts(tmp_path / "run") == first
    other = run(*chat(tmp_path / "other", "--seed", 3))
    assert other.status == 0
    assert texts(tmp_path / "other") == first


@pytest.mark.parametrize("more", [(), ("--workers", 2)])
def test_a_run_that_was_killed_goes_on_and_has_each_prompt_once(run, spawn, chat, tmp_path, more):
    expected = run(*chat(tmp_path / "whole", "--seed", 3))
    assert expected.status == 0, expected.err
    process = spawn(*chat("run", "--seed", 3, *more, delay_s=0.005))
    for line in process.stdout:
        if re.match(r"[1-9]\d* / 28 conversations", line):
            break
    else:
        pytest.fail(process.communicate()[1])
    process.kill()
    process.wait(30)
    killed = Trace.read(tmp_path / "run").conversations
    assert 0 < sum(bool(each.end) for each in killed) < 2 * PROMPTS
    result = run(*chat(tmp_path / "run", *more))
    assert result.status == 0, result.err
    assert texts(tmp_path / "run") == texts(tmp_path / "whole")


def test_ctrl_c_keeps_what_is_there_and_the_same_command_goes_on(run, spawn, chat, tmp_path):
    process = spawn(*chat("run", "--seed", 3, delay_s=0.005))
    for line in process.stdout:
        if "conversations, " in line:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(60)
    assert process.returncode == 130
    assert re.search(r"interrupted: \d+ of 28 conversations, .* the same command goes on", err)
    result = run(*chat(tmp_path / "run"))
    assert result.status == 0, result.err
    assert "\ngoing on with 28 conversations" in result.out
    assert len(texts(tmp_path / "run")) == 2 * PROMPTS


def test_a_terminal_shows_how_it_stands_and_the_last_conversation(run, chat, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    result = run(*chat(tmp_path / "run", "--seed", 3))
    assert result.status == 0, result.err
    assert re.search(r"28 / 28, [\d,]+ tokens/s, mean reward \d", result.out)
    said = [turns[-1] for turns in texts(tmp_path / "run").values()]
    assert any(f"\x1b[1;32m{text}" in result.out for text in said)
    assert "\x1b[2msay " in result.out


def test_what_is_asked_wrongly_is_named(run, chat, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    common = ["chat-collect", "--output", tmp_path / "run"]
    cases = [
        (["--data", tmp_path / "prompts.jsonl"], "--model: expected a folder or a name, for --engine transformers"),
        (["--data", tmp_path / "none.jsonl", "--engine", "m:f"], "--data: .*No such file"),
        (["--data", tmp_path / "empty.jsonl", "--engine", "m:f"], "--data: .* has no lines. Write a JSON object"),
        (
            ["--data", tmp_path / "prompts.jsonl", "--engine", "m:f", "--reward", "right"],
            "--reward: expected MODULE:NAME",
        ),
        (
            ["--data", tmp_path / "prompts.jsonl", "--engine", "m:f", "--reward", "no.where:a"],
            "--reward: there is no mod",
        ),
    ]
    for more, message in cases:
        result = run(*common, *more)
        assert result.status == 2
        assert re.search(message, result.err), result.err
    assert run(*chat(tmp_path / "run", "--seed", 3)).status == 0
    result = run(*chat(tmp_path / "run", "--max-turns", 1))
    assert result.status == 2
    assert "holds a run with --max-turns None. Pass the same to go on with it, or another folder." in result.err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    assert "holds something else. Pass a new folder" in run(*chat(tmp_path / "full")).err


@pytest.mark.parametrize("more", [(), ("--workers", 2)])
def test_conversations_that_fail_are_left_out_and_counted(run, chat, module, tmp_path, more):
    name = module("def bad(completions, number, **columns):\n    return [1.0 / (9 - each) for each in number]\n")
    result = run(*chat(tmp_path / "run", "--reward", f"{name}:bad", *more))
    assert result.status == 1
    assert re.search("26 of 28 conversations, 26 of them new", result.out)
    assert "2 conversations failed (ZeroDivisionError: 2); rollwright inspect" in result.err
    ends = {(each.origin.index, each.origin.repeat): each.end for each in Trace.read(tmp_path / "run").conversations}
    assert {place for place, end in ends.items() if end == "failed"} == {(9, 0), (9, 1)}
    assert len(ends) == 2 * PROMPTS
    assert "the reward function 'bad' raised" in run("inspect", tmp_path / "run", "--prompt", 9).out
    again = run(*chat(tmp_path / "run", "--reward", f"{name}:bad", *more))
    assert (again.status, "0 of them new" in again.out) == (1, True)


def test_a_run_may_end_with_the_first_failure(run, chat, module, tmp_path):
    name = module("def bad(completions, number, **columns):\n    return [1.0 / (9 - each) for each in number]\n")
    result = run(*chat(tmp_path / "run", "--reward", f"{name}:bad", "--seed", 1, "--on-error", "raise"))
    assert result.status == 1
    assert "the reward function 'bad' raised ZeroDivisionError" in result.err
    assert re.search(r"\d+ of 28 conversations", result.err.splitlines()[-1])


@pytest.mark.llm
def test_a_server_of_vllm_by_its_address(run, module, tmp_path):
    lively().save_pretrained(tmp_path / "model")
    llm_models.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text("".join(f'{{"query": "What is {n}?"}}\n' for n in range(3)))
    server = FakeVLLM(lively(), tmp_path / "model")
    try:
        given = ["--data", tmp_path / "chats.jsonl", "--output", tmp_path / "run", "--max-new-tokens", 4]
        result = run("chat-collect", *given, "--engine", server.address)
    finally:
        server.close()
    assert result.status == 0, result.err
    found = Trace.read(tmp_path / "run").conversations
    assert sorted(each.origin.index for each in found) == [0, 1, 2]
    assert all(1 <= len(each.turns[0].tokens) - each.turns[0].num_prompt <= 4 for each in found)


@pytest.mark.llm
def test_a_model_of_transformers_on_messages(run, module, tmp_path):
    kind = llm_models.tokenizer()
    llm_models.model(vocab_size=len(kind)).save_pretrained(tmp_path / "model")
    kind.save_pretrained(tmp_path / "model")
    rows = [{"messages": [{"role": "user", "content": f"What is {n}?"}]} for n in range(4)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = module(
        "def short(completions, **columns):\n    return [-float(len(c[0]['content'])) for c in completions]\n"
    )
    given = ["--model", tmp_path / "model", "--data", tmp_path / "chats.jsonl", "--reward", f"{name}:short"]
    result = run(
        "chat-collect", *given, "--output", tmp_path / "run", "--max-new-tokens", 6, "--system-prompt", "Be brief."
    )
    assert result.status == 0, result.err
    found = Trace.read(tmp_path / "run").conversations
    assert sorted(each.origin.index for each in found) == [0, 1, 2, 3]
    for each in found:
        [turn] = each.turns
        assert [message["role"] for message in turn.prompt] == ["system", "user"]
        assert turn.log_probs is not None
        assert torch.isfinite(turn.log_probs).all()
        assert each.total == -float(len(turn.response_text))
    assert "What is 2?" in run("inspect", tmp_path / "run", "--prompt", 2).out
