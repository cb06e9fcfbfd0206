"""The example of a learner beside collectors: it keeps pace with a thread and with processes, ends in time, learns."""

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
LINE = re.compile(r"([\d,]+) frames, mean return (-[\d.]+), \d+ s")
FRAMES_PER_TEST, AHEAD = 500 * 256 // 128, 32_768 // 128  # drawn between two tests, and the limiter's margin


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "error", str(ROOT / "examples" / "sac_async.py"), *arguments]


def run(*arguments: str, timeout: float = 110) -> tuple[int, list[tuple[int, float]]]:
    """The exit status; frames and mean return at each test."""
    done = subprocess.run(command(*arguments), env=ENV, capture_output=True, text=True, timeout=timeout, check=False)
    assert not done.stderr
    return done.returncode, [(int(n.replace(",", "")), float(mean)) for n, mean in LINE.findall(done.stdout)]


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_keeps_pace_and_draws_its_curve(tmp_path, workers):
    picture = tmp_path / "curve.png"
    arguments = ("--workers", str(workers), "--total-frames", "1500", "--goal", "0", "--plot", str(picture))
    status, tests = run(*arguments)
    assert status == 1  # for no episode returns more than 0
    assert len(tests) >= 1
    under_way = 32 * 2 * workers
    for i, (frames, _) in enumerate(tests, 1):
        assert abs(frames - 1024 - i * FRAMES_PER_TEST) <= AHEAD + under_way
    assert picture.read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_can_be_interrupted(workers):
    arguments = command("--workers", str(workers), "--total-frames", "10_000_000", "--goal", "0")
    with subprocess.Popen(arguments, env=ENV, stdout=-1, stderr=-1) as process:
        assert process.stdout is not None
        begun = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=patient(60))
    assert b"frames" in begun
    assert b"interrupted" in rest
    assert not errors
    assert process.returncode == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_learns(workers, seed):
    status, tests = run("--workers", str(workers), "--seed", str(seed), timeout=880)
    assert status == 0
    assert tests[-1][1] >= -200
    assert tests[-1][0] < 30_000
