"""The example of PPO with workers: it runs with any number of them, is the same twice, learns as in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
LINE = re.compile(r"(\d+) workers: ([\d,]+) frames, mean return ([\d.]+), \d+ s")


def run(*arguments: str, timeout: float = 110) -> tuple[int, dict[int, list[tuple[int, float]]]]:
    """The exit status; by number of workers, frames and mean return after each batch."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "ppo_workers.py"), *arguments]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=timeout, check=False)
    assert not done.stderr
    curves: dict[int, list[tuple[int, float]]] = {}
    for workers, frames, mean in LINE.findall(done.stdout):
        curves.setdefault(int(workers), []).append((int(frames.replace(",", "")), float(mean)))
    return done.returncode, curves


def test_runs_with_and_without_workers_and_draws_their_curves(tmp_path):
    picture = tmp_path / "curves.png"
    arguments = ("--workers", "0", "1", "2", "--total-frames", "10240", "--goal", "15", "--plot", str(picture))
    status, curves = run(*arguments)
    assert status == 0  # random actions give 20
    assert set(curves) == {0, 1, 2}
    for curve in curves.values():
        assert [frames for frames, _ in curve] == [2048 * (i + 1) for i in range(len(curve))]
    assert picture.read_bytes()[1:4] == b"PNG"


def test_same_seed_same_returns():
    with ThreadPoolExecutor() as both:
        arguments = ("--seed", "3", "--total-frames", "4096", "--goal", "500")
        first, second = (both.submit(run, *arguments) for _ in range(2))
    assert first.result() == second.result()
    status, curves = first.result()
    assert status == 1  # for the goal was not reached
    assert len(curves[2]) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_learns_as_in_one_process(seed):
    status, curves = run("--workers", "0", "2", "--seed", str(seed), timeout=880)
    assert status == 0
    assert all(curve[-1][1] >= 475 for curve in curves.values())
