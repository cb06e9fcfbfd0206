"""The example of a buffer filled in the background: it runs, keeps pace, can be interrupted, learns."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import patient

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
LINE = re.compile(r"([\d,]+) frames, mean return ([\d.]+), \d+ s")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", str(ROOT / "examples" / "dqn_replay.py"), *arguments]


def run(*arguments: str, timeout: float = 100) -> tuple[int, list[tuple[int, float]]]:
    """The exit status; frames and mean return after each round."""
    done = subprocess.run(command(*arguments), env=ENV, capture_output=True, text=True, timeout=timeout, check=False)
    assert not done.stderr
    return done.returncode, [(int(n.replace(",", "")), float(mean)) for n, mean in LINE.findall(done.stdout)]


def test_keeps_pace_and_draws_its_curve(tmp_path):
    picture = tmp_path / "curve.png"
    status, rounds = run("--total-frames", "4800", "--goal", "500", "--plot", str(picture))
    assert status == 1  # for the goal was not reached
    assert len(rounds) >= 20
    for i, (frames, _) in enumerate(rounds):  # the first is of 2,000 frames that are stored before
        assert 2000 + 128 * i <= frames <= 2000 + 128 * (i + 3)
    assert picture.read_bytes()[1:4] == b"PNG"


def test_can_be_interrupted():
    with subprocess.Popen(command("--total-frames", "10_000_000"), env=ENV, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        begun = process.stdout.read(200)  # some rounds
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=patient(60))
    assert b"frames" in begun
    assert b"interrupted" in rest
    assert not errors
    assert process.returncode == 1


def test_stops_at_the_goal():
    status, rounds = run("--goal", "15")
    assert status == 0
    assert rounds[-1][1] >= 15


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns(seed):
    status, rounds = run("--seed", str(seed), timeout=880)
    assert status == 0
    assert rounds[-1][1] >= 400
