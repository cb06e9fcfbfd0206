"""Every example runs, is short, and does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def run(name: str, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_short(path):
    assert len(path.read_text().splitlines()) <= 150


def test_ppo_learns_a_little_and_draws_its_curve(tmp_path):
    picture = tmp_path / "curve.png"
    done = run("ppo_cartpole.py", "--seed", "1", "--goal", "40", "--plot", str(picture), timeout=100)
    assert done.returncode == 0, done.stderr
    assert "seed 1: reached a mean return of 40" in done.stdout
    assert picture.read_bytes()[1:4] == b"PNG"


def test_ppo_says_when_the_goal_was_not_reached():
    done = run("ppo_cartpole.py", "--goal", "400", "--total-frames", "2048", timeout=100)
    assert done.returncode == 1
    assert "did not reach a mean return of 400" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ppo_solves_cartpole(seed):
    done = run("ppo_cartpole.py", "--seed", str(seed), timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
