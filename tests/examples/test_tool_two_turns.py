"""The example of a tool: two turns, their records, and one training sequence of both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.patience import patient

pytestmark = [pytest.mark.llm, pytest.mark.timeout(110)]

COMMAND = ("-W", "error", Path(__file__).parents[2] / "examples" / "tool_two_turns.py")
SAMPLED = re.compile(r"(\d+) tokens, (\d+) of them sampled")


def test_calls_the_calculator_reads_the_result_and_answers(programs):
    done = programs.run(*COMMAND, "--seed", 1, "--steps", 150, "--conversations", 4, timeout=patient(100))
    assert not done.stderr
    assert done.returncode == 0
    assert "turn 0: tool, reward 0.0" in done.stdout
    assert "turn 1: stop, reward " in done.stdout
    (_, first), (length, second), (whole, both) = [tuple(map(int, found)) for found in SAMPLED.findall(done.stdout)]
    assert whole == length
    assert both == first + second
    of = [int(turn) for turn in done.stdout.split("by turn: [")[1].split("]")[0].split(",")]
    assert (len(of), of.count(0), of.count(1)) == (whole, first, second)
    assert "8 turns, 4 conversations" in done.stdout
    assert float(done.stdout.split("mean reward ")[1]) >= 0.5
