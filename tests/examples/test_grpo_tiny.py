"""The example of GRPO: rewards are numbers, the same twice, its curve is saved, Ctrl-C ends it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from tests.patience import patient

pytestmark = pytest.mark.llm

COMMAND = ("-W", "error", Path(__file__).parents[2] / "examples" / "grpo_tiny.py")
REWARD = re.compile(r"^reward: ([\d.]+) -> ([\d.]+)$", re.MULTILINE)


def rewards_of(out: str) -> tuple[float, ...]:
    """The mean rewards of the first and of the last 10 updates."""
    return tuple(map(float, REWARD.search(out).groups()))


def test_same_seed_same_rewards_and_draws_its_curve_whether_it_ends_or_is_interrupted(programs, tmp_path):
    pictures = [tmp_path / "whole.png", tmp_path / "interrupted.png"]
    done = programs.run(*COMMAND, "--seed", 3, "--updates", 10, "--plot", pictures[0], timeout=patient(60))
    assert not done.stderr
    assert done.returncode == 0
    begin, end = rewards_of(done.stdout)
    assert begin == end
    assert 0 < begin < 0.5
    program = programs.start(*COMMAND, "--seed", 3, "--updates", 100_000, "--plot", pictures[1])
    assert program.stdout.readline().startswith("update  10")
    program.send_signal(signal.SIGINT)
    out, errors = program.communicate(timeout=patient(30))
    assert not errors
    assert program.returncode == 0
    assert "interrupted" in out
    assert rewards_of(out)[0] == begin
    for picture in pictures:
        assert picture.read_bytes()[1:4] == b"PNG"


def stated() -> dict[int, float]:
    """The rewards that the table in the example's docstring states, by seed."""
    table = re.findall(r"^ +(\d) +0\.\d+ +(0\.\d+)$", COMMAND[-1].read_text(), re.MULTILINE)
    return {int(seed): float(end) for seed, end in table}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns(programs, seed):
    done = programs.run(*COMMAND, "--seed", seed, timeout=580)
    begin, end = map(float, REWARD.search(done.stdout).groups())
    assert end >= begin + 0.3
    assert end >= stated()[seed]
