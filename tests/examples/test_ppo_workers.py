"""The example of PPO with workers: it runs with any number of them, is the same twice, learns as in one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.patience import patient
from tests.programs import Program

COMMAND = ("-W", "error", Path(__file__).parents[2] / "examples" / "ppo_workers.py")
LINE = re.compile(r"(\d+) workers: ([\d,]+) frames, mean return ([\d.]+), \d+ s")
Curves = dict[int, list[tuple[int, float]]]


def run(program: Program, timeout: float = 110) -> tuple[int, Curves]:
    """The exit status; by number of workers, frames and mean return after each batch."""
    out, errors = program.communicate(timeout)
    assert not errors
    curves: Curves = {}
    for workers, frames, mean in LINE.findall(out):
        curves.setdefault(int(workers), []).append((int(frames.replace(",", "")), float(mean)))
    return program.wait(), curves


def test_same_seed_same_returns_with_and_without_workers_and_draws_its_curves(programs, tmp_path):
    picture = tmp_path / "curves.png"
    arguments = (*COMMAND, "--seed", "3", "--total-frames", "4096", "--goal", "500")
    first = programs.start(*arguments, "--workers", "0", "2", "--plot", picture)
    second = programs.start(*arguments, "--workers", "2")
    status, curves = run(first, patient(100))
    assert status == 1  # for the goal was not reached
    assert set(curves) == {0, 2}
    for curve in curves.values():
        assert [frames for frames, _ in curve] == [2048, 4096]
    assert picture.read_bytes()[1:4] == b"PNG"
    assert run(second, patient(100)) == (1, {2: curves[2]})


def test_stops_at_the_goal(programs):
    status, curves = run(programs.start(*COMMAND, "--workers", "0", "--goal", "15"))
    assert status == 0
    assert curves[0][-1][1] >= 15  # random actions give 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_learns_as_in_one_process(programs, seed):
    status, curves = run(programs.start(*COMMAND, "--workers", "0", "2", "--seed", seed), timeout=880)
    assert status == 0
    assert all(curve[-1][1] >= 475 for curve in curves.values())
