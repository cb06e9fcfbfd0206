"""Every example runs, is short, and does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PPO = EXAMPLES / "ppo_cartpole.py"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_short(path):
    assert len(path.read_text().splitlines()) <= 150


def test_ppo_learns_a_little_and_draws_its_curve(programs, tmp_path):
    picture = tmp_path / "curve.png"
    done = programs.run(PPO, "--seed", "1", "--goal", "30", "--plot", picture)
    assert done.returncode == 0, done.stderr
    assert "seed 1: reached a mean return of 30" in done.stdout  # random actions give 20
    assert picture.read_bytes()[1:4] == b"PNG"


def test_ppo_says_when_the_goal_was_not_reached(programs):
    done = programs.run(PPO, "--goal", "400", "--total-frames", "2048")
    assert done.returncode == 1
    assert "did not reach a mean return of 400" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_solves_cartpole(programs, seed):
    done = programs.run(PPO, "--seed", seed, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
