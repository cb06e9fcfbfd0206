"""The example of a learner beside collectors: it keeps pace with a thread and with processes, ends in time, learns."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from tests.patience import patient

COMMAND = ("-W", "error", Path(__file__).parents[2] / "examples" / "sac_async.py")
LINE = re.compile(r"([\d,]+) frames, mean return (-[\d.]+), \d+ s")
FRAMES_PER_TEST, AHEAD = 500 * 256 // 128, 32_768 // 128  # drawn between two tests, and the limiter's margin


def rounds_of(out: str) -> list[tuple[int, float]]:
    """Frames and mean return at each test."""
    return [(int(n.replace(",", "")), float(mean)) for n, mean in LINE.findall(out)]


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_keeps_pace_until_it_is_interrupted_and_draws_its_curve(programs, tmp_path, workers):
    picture = tmp_path / "curve.png"
    options = ("--total-frames", "10_000_000", "--goal", "0", "--plot", picture)  # no episode returns more than 0
    program = programs.start(*COMMAND, "--workers", workers, *options)
    begun = program.stdout.readline()
    program.send_signal(signal.SIGINT)
    rest, errors = program.communicate(timeout=patient(60))
    assert not errors
    assert program.returncode == 1  # for the goal was not reached
    assert "interrupted" in rest
    tests = rounds_of(begun + rest)
    assert len(tests) >= 1
    under_way = 32 * 2 * workers
    for i, (frames, _) in enumerate(tests, 1):
        assert abs(frames - 1024 - i * FRAMES_PER_TEST) <= AHEAD + under_way
    assert picture.read_bytes()[1:4] == b"PNG"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_ends_after_the_last_frame(programs, workers):
    done = programs.run(*COMMAND, "--workers", workers, "--total-frames", "1500", "--goal", "0")
    assert not done.stderr
    assert done.returncode == 1
    assert rounds_of(done.stdout)[-1][0] >= 1500


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_learns(programs, workers, seed):
    done = programs.run(*COMMAND, "--workers", workers, "--seed", seed, timeout=880)
    assert not done.stderr
    assert done.returncode == 0
    tests = rounds_of(done.stdout)
    assert tests[-1][1] >= -200
    assert tests[-1][0] < 30_000
