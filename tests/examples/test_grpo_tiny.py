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


def test_same_seed_same_rewards_and_draws_its_curve(programs, tmp_path):
    picture = tmp_path / "curve.png"
    found = []
    for more in (("--plot", picture), ()):
        done = programs.run(*COMMAND, "--seed", 3, "--updates", 10, *more, timeout=patient(60))
        assert not done.stderr
        assert done.returncode == 0
        found.append(tuple(map(float, REWARD.search(done.stdout).groups())))
    assert found[0] == found[1]
    assert 0 < found[0][0] < 0.5
    assert picture.read_bytes()[1:4] == b"PNG"


def test_an_interrupt_ends_it_and_saves_the_curve(programs, tmp_path):
    picture = tmp_path / "curve.png"
    program = programs.start(*COMMAND, "--updates", 100_000, "--plot", picture)
    assert program.stdout.readline().startswith("update  10")
    program.send_signal(signal.SIGINT)
    out, errors = program.communicate(timeout=patient(30))
    assert not errors
    assert program.returncode == 0
    assert "interrupted" in out
    assert picture.read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns(programs, seed):
    done = programs.run(*COMMAND, "--seed", seed, timeout=580)
    begin, end = map(float, REWARD.search(done.stdout).groups())
    assert end >= begin + 0.3
