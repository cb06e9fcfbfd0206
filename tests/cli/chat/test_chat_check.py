"""chat-check: what it prints, and its status."""

from __future__ import annotations

import json

GOOD = """
class Guess:
    def __init__(self, row):
        self.left = 2

    def reply(self, messages):
        self.left -= 1
        return "Again.", float(self.left), not self.left

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]

NUMBER = 3
"""


def test_it_says_what_is_wrong_and_what_is_unusual(run, module, tmp_path):
    name = module(GOOD)
    result = run("chat-check", f"{name}:Guess")
    assert (result.status, result.err) == (0, "")
    assert result.out.splitlines() == ["1 conversation, 2 turns, rewards from 0 to 1", "nothing is wrong"]
    wrong = module(GOOD.replace("not self.left", "'no'"))
    result = run("chat-check", f"{wrong}:Guess")
    assert result.status == 1
    assert "the environment Guess returned done='no', expected True or False" in result.out.splitlines()[1]
    assert result.out.splitlines()[-1] == "1 thing to correct"
    (tmp_path / "rows.jsonl").write_text('{"query": "a"}\n{"query": "b"}\n')
    (tmp_path / "answers.jsonl").write_text('"yes"\n"no"\n')
    given = ["--data", tmp_path / "rows.jsonl", "--answers", tmp_path / "answers.jsonl"]
    report = json.loads(run("chat-check", f"{name}:Guess", *given, "--json").out)
    assert (report["conversations"], report["turns"], report["findings"]) == (2, 4, [])


def test_what_is_asked_wrongly_is_named(run, module, tmp_path):
    name = module(GOOD)
    (tmp_path / "rows.jsonl").write_text('"a"\n')
    for arguments, message in (
        (["Guess"], "ENV: expected MODULE:NAME (such as my_envs:Guess), got 'Guess'"),
        ([f"{name}:Gues"], f"ENV: module '{name}' has no 'Gues'. It has: Guess"),
        ([f"{name}:NUMBER"], "ENV: expected a class with a method reply"),
        ([f"{name}:Guess", "--data", tmp_path / "rows.jsonl"], "--data: expected a JSON object in each line"),
    ):
        result = run("chat-check", *arguments)
        assert result.status == 2
        assert message in result.err
