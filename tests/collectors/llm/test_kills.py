"""A program that is killed at any moment goes on from its last saved state: no prompt skipped, none delivered twice."""

from __future__ import annotations

import contextlib
import random
import subprocess
from pathlib import Path

import pytest
import torch
from tests.patience import patient

ROOT = Path(__file__).parents[3]


def run(programs, folder, mode, seconds):
    """Run the program until it ends, or for some seconds after it has begun to collect; whether it has ended."""
    process = programs.start("-m", "tests.collectors.llm.killed", folder, mode, cwd=ROOT)
    assert process.stdout.readline() == "running\n", process.stderr.read()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    process.kill()
    return "over" in process.communicate(patient(30))[0]


def kill_at_random_moments(programs, folder, mode, kills, seed):
    draw = random.Random(seed)
    killed = 0
    while killed < kills and not run(programs, folder, mode, draw.uniform(0.0, 0.12)):
        killed += 1
    while not run(programs, folder, mode, 60.0 if killed >= kills else 0.1):
        pass
    done = torch.load(folder / "saved.pt", weights_only=True)["done"]
    assert [len(set(groups)) for groups, _, _ in done] == [1] * len(done)
    assert sorted(groups[0] for groups, _, _ in done) == list(range(40))
    for _, repeats, turns in done:
        begun = [repeat for repeat, turn in zip(repeats, turns, strict=True) if turn == 0]
        assert begun == [0, 1, 2, 3]
    return killed


def test_a_kill(programs, tmp_path):
    assert kill_at_random_moments(programs, tmp_path, "stream", 1, seed=1) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills(programs, tmp_path):
    total = 0
    for seed in range(20):
        folder = tmp_path / str(seed)
        folder.mkdir()
        total += kill_at_random_moments(programs, folder, "stream" if seed % 2 else "lockstep", 6, seed)
        if total >= 50:
            return
    raise AssertionError(f"only {total} kills")
