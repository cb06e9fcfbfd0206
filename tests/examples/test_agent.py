"""The example of an agent: it is collected and trained; here on a stand-in for the client of OpenAI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.patience import patient

pytestmark = [pytest.mark.llm, pytest.mark.timeout(110)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.py"
PROGRAM = f"""
import runpy, sys
sys.path[:0] = [{str(Path(__file__).parent / "stand_ins")!r}, {str(EXAMPLE.parent)!r}]
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""
UPDATE = re.compile(r"update (\d+)  reward ([\d.]+)  (\d+) turns")


def test_an_agent_is_collected_and_trained(programs):
    done = programs.run("-W", "error", "-c", PROGRAM, "--seed", 1, "--updates", 3, timeout=patient(100))
    assert not done.stderr
    assert done.returncode == 0
    updates = [(int(number), float(reward), int(turns)) for number, reward, turns in UPDATE.findall(done.stdout)]
    assert [number for number, _, _ in updates] == [1, 2, 3]
    assert all(64 <= turns <= 128 for _, _, turns in updates)
    assert "reward: " in done.stdout
