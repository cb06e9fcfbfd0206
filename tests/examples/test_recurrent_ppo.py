"""The example of a recurrent policy: it runs, is the same twice, remembers what another policy cannot see."""

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
LINE = re.compile(r"^(\S+): ([\d,]+) frames, mean return ([\d.]+), \d+ s$")


def run(*arguments: str, timeout: float = 100) -> tuple[int, dict[str, tuple[int, float]]]:
    """The exit status and, by policy, frames and mean return at the end."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "recurrent_ppo.py"), *arguments]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=timeout, check=False)
    assert not done.stderr
    last = (LINE.match(line.rsplit("\r", 1)[-1]) for line in done.stdout.splitlines())
    return done.returncode, {m[1]: (int(m[2].replace(",", "")), float(m[3])) for m in last if m}


def test_trains_both_policies_and_draws_their_curves(tmp_path):
    picture = tmp_path / "curves.png"
    status, last = run("--policy", "both", "--total-frames", "8192", "--goal", "15", "--plot", str(picture))
    assert status == 0  # random actions give 20
    assert {name: frames for name, (frames, _) in last.items()} == {"gru": 4096, "feed-forward": 4096}
    assert picture.read_bytes()[1:4] == b"PNG"


def test_same_seed_same_returns():
    with ThreadPoolExecutor() as both:
        arguments = ("--seed", "3", "--total-frames", "4096", "--goal", "500")
        first, second = (both.submit(run, *arguments) for _ in range(2))
    assert first.result() == second.result()
    status, last = first.result()
    assert status == 1  # for the goal was not reached
    assert last["gru"][0] == 4096


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_what_it_takes():
    status, last = run("--policy", "both", "--goal", "400", timeout=880)
    assert status == 0
    assert last["gru"][1] >= 400
    assert last["feed-forward"][1] < 100
