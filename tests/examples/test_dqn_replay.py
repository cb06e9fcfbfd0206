"""The example of a buffer filled in the background: it runs, keeps pace, can be interrupted, learns."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.patience import patient

COMMAND = ("-W", "error", Path(__file__).parents[2] / "examples" / "dqn_replay.py")
LINE = re.compile(r"([\d,]+) frames, mean return ([\d.]+), \d+ s")


def rounds_of(out: str) -> list[tuple[int, float]]:
    """Frames and mean return after each round."""
    return [(int(n.replace(",", "")), float(mean)) for n, mean in LINE.findall(out)]


def rounds_run(done: CompletedProcess[str]) -> list[tuple[int, float]]:
    assert not done.stderr
    return rounds_of(done.stdout)


def test_keeps_pace_until_it_is_interrupted_and_draws_its_curve(programs, tmp_path):
    picture = tmp_path / "curve.png"
    program = programs.start(*COMMAND, "--total-frames", "10_000_000", "--goal", "500", "--plot", picture)
    out = ""
    while len(rounds_of(out)) < 10:
        out += program.stdout.read(20)
    program.send_signal(signal.SIGINT)
    rest, errors = program.communicate(timeout=patient(60))
    assert not errors
    assert program.returncode == 1  # for the goal was not reached
    assert "interrupted" in rest
    for i, (frames, _) in enumerate(rounds_of(out + rest)):  # the first is of 2,000 frames that are stored before
        assert 2000 + 128 * i <= frames <= 2000 + 128 * (i + 3)
    assert picture.read_bytes()[1:4] == b"PNG"


def test_stops_at_the_goal_and_at_the_last_frame(programs):
    done = programs.run(*COMMAND, "--goal", "15")
    assert done.returncode == 0
    assert rounds_run(done)[-1][1] >= 15
    done = programs.run(*COMMAND, "--goal", "500", "--total-frames", "2200")
    assert done.returncode == 1
    assert rounds_run(done)[-1][0] >= 2200


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns(programs, seed):
    done = programs.run(*COMMAND, "--seed", seed, timeout=880)
    assert done.returncode == 0
    assert rounds_run(done)[-1][1] >= 400
