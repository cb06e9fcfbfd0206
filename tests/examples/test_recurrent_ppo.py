"""The example of a recurrent policy: it runs, is the same twice, remembers what another policy cannot see."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.patience import patient
from tests.programs import Program

COMMAND = ("-W", "error", Path(__file__).parents[2] / "examples" / "recurrent_ppo.py")
LINE = re.compile(r"^(\S+): ([\d,]+) frames, mean return ([\d.]+), \d+ s$")


def run(program: Program, timeout: float = 100) -> tuple[int, dict[str, tuple[int, float]]]:
    """The exit status and, by policy, frames and mean return at the end."""
    out, errors = program.communicate(timeout)
    assert not errors
    last = (LINE.match(line.rsplit("\r", 1)[-1]) for line in out.splitlines())
    return program.wait(), {m[1]: (int(m[2].replace(",", "")), float(m[3])) for m in last if m}


def test_same_seed_same_returns_of_both_policies_and_draws_their_curves(programs, tmp_path):
    picture = tmp_path / "curves.png"
    arguments = (*COMMAND, "--seed", "3", "--total-frames", "4096", "--goal", "500")
    first = programs.start(*arguments, "--policy", "both", "--plot", picture)
    second = programs.start(*arguments)
    status, last = run(first, patient(100))
    assert status == 1  # for the goal was not reached
    assert {name: frames for name, (frames, _) in last.items()} == {"gru": 4096, "feed-forward": 4096}
    assert picture.read_bytes()[1:4] == b"PNG"
    assert run(second, patient(100)) == (1, {"gru": last["gru"]})


def test_stops_at_the_goal(programs):
    status, last = run(programs.start(*COMMAND, "--policy", "feed-forward", "--goal", "15"))
    assert status == 0
    assert last["feed-forward"][1] >= 15  # random actions give 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_what_it_takes(programs):
    status, last = run(programs.start(*COMMAND, "--policy", "both", "--goal", "400"), timeout=880)
    assert status == 0
    assert last["gru"][1] >= 400
    assert last["feed-forward"][1] < 100
