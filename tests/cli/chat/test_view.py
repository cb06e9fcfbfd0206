"""inspect of a trace: numbers, conversations, and what the model wrote in colour."""

from __future__ import annotations

import json

import pytest
from tests.data.llm.test_trace import turns

from rollwright.data.llm import FinishReason, Origin, TraceWriter


@pytest.fixture
def folder(tmp_path):
    writer = TraceWriter(tmp_path / "run", {})
    for turn in turns(2):
        turn.added = [{"role": "user", "content": " go on "}] if turn.added else ()
        turn.next_prompt_text = "begin0 go on " if turn.number == 0 else ""
        turn.prompt_text = "begin" if turn.number == 0 else "begin0 go on "
        writer.turn(turn, 0, total=1.5)
    other = turns(1, Origin(8, 0, 0, 8, 7))[0]
    other.finish_reason, other.terminated, other.truncated = FinishReason.ERROR, False, True
    other.prompt_text = other.response_text = ""
    writer.turn(other, 1, total=0.0)
    writer.end(other.origin, "failed", "the reward raised")
    writer.end(Origin(9, 0, 0, 9, 7), "dropped")
    return tmp_path / "run"


def test_a_trace_is_described_and_shown(run, folder):
    result = run("inspect", folder)
    assert result.status == 0
    lines = result.out.splitlines()
    assert lines[:3] == [
        "trace           3 conversations: 1 terminated, 1 failed, 1 dropped",
        "turns           3 (2 stop, 1 error)",
        "tokens sampled  9",
    ]
    assert "reward          mean 1.5, from 1.5 to 1.5" in lines
    assert "  right         mean 1, from 1 to 1" in lines
    assert "--- prompt 3 (epoch 0, repeat 1), group 3: terminated, reward 1.5, 2 turns" in lines
    assert "begin0 go on 1" in lines
    assert "--- prompt 8 (epoch 0, repeat 0), group 8: failed (the reward raised), reward 0, 1 turn" in lines
    assert "[100, 101, 102, 103, 104] [105, 106, 107] [error]" in lines
    assert "\x1b[" not in result.out
    assert run("inspect", folder, "--conversations", 1).out.splitlines()[-1].startswith("2 more: --conversations N")
    assert "group 8" in run("inspect", folder, "--prompt", 8).out


def test_what_the_model_wrote_is_in_colour(run, folder, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    out = run("inspect", folder).out
    assert "\x1b[2mbegin\x1b[0m\x1b[1;32m0\x1b[0m\x1b[2m go on \x1b[0m\x1b[1;32m1\x1b[0m" in out
    assert "\x1b[31m[105, 106, 107]\x1b[0m" in out  # nothing of a conversation that failed is trained on


def test_json_and_what_is_not_for_traces(run, folder):
    report = json.loads(run("inspect", folder, "--json").out)
    assert report["ends"] == {"terminated": 1, "failed": 1, "dropped": 1}
    assert report["rewards"]["right"]["mean"] == 1.0
    assert report["policy_versions"] == [2, 2]
    result = run("inspect", folder, "--plot", "x.png")
    assert (result.status, "--plot: is for datasets" in result.err) == (2, True)
    assert "--prompt: expected a prompt of the trace, got 5" in run("inspect", folder, "--prompt", 5).err
    [file] = folder.iterdir()
    file.write_bytes(file.read_bytes().replace(b'"turn":1', b'"turn":'))
    result = run("inspect", folder)
    assert (result.status, "trace: expected JSON in line 3" in result.err) == (1, True)
