"""Backend "tcp": Ctrl-C at any moment, and a program that is killed, end everything soon and leave nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.collectors.workers.processes import wait_until
from tests.patience import patient
from tests.variants import in_turn

from rollwright._processes.network.handshake import SECRET

PROGRAM = """
import sys, threading, time
from functools import partial
from rollwright.collectors import MultiAsyncCollector, MultiSyncCollector
from rollwright.testing.transports import frames as of

def main():
    kind, state = sys.argv[1:]
    made = MultiSyncCollector if kind == "sync" else MultiAsyncCollector
    envs = of.factories(4, step_s=0.05 if state == "waiting" else 1e-3)
    launcher = {"launcher": "join"} if state == "nobody joins" else {}
    options = {"backend": "tcp", "backend_options": {"num_workers_per_collector": 2, **launcher}}
    options["frames_per_batch"] = 400 if state == "waiting" else 80
    if state == "trajectories":
        options.update(trajs_per_batch=3, traj_format="cat")
    large = state == "weights"
    print("ready", flush=True)
    policy = of.uniform(10, 1_000_000) if large else of.constant()
    collector = made(envs, None if large else policy, **options,
        **({"policy_factory": partial(of.uniform, 10, 1_000_000)} if large else {}))
    print("constructed", flush=True)
    try:
        for number in range(10**6):
            if state != "waiting":
                collector.update_policy_weights_(policy)
                if large:
                    print("published", flush=True)
            collector.next()
    finally:
        began = time.monotonic()
        collector.shutdown(raise_on_error=False)
        print("shut down", time.monotonic() - began, flush=True)

if __name__ == "__main__":
    main()
"""
BOUND_S = 8.0  # of a program's end
SEED = int(os.environ.get("ROLLWRIGHT_STORM_SEED", "0"))


class Started:
    """A program, and what else runs in its session."""

    def __init__(self, programs, script, *arguments):
        before = self.others(programs.run("-c", "import os; print(os.getsid(0))").stdout)
        self.program = programs.start(script, *arguments, env={SECRET: "a secret of tests, long enough"})
        self.before = before

    def others(self, session):
        """Processes of the session in which programs and their workers run."""
        self.session = int(session)
        return self.in_session()

    def in_session(self):
        found = set()
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                text = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(text[3]) == self.session and text[0] not in "ZX":
                found.add(int(entry))
        return found

    def wait_for(self, line):
        """Read what it prints up to a line."""
        while (found := self.program.stdout.readline()).split()[:1] != [line]:
            assert found, self.program.stderr.read()

    def leaves_nothing(self, limit_s):
        """Whether all of its processes end."""
        return wait_until(lambda: not self.in_session() - self.before, limit_s)


@pytest.fixture
def start(programs, tmp_path):
    """``start(kind, state)``: the program."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return lambda *arguments: Started(programs, script, *arguments)


MOMENTS = {  # by state: the line after which, and seconds after it
    "waiting": ("constructed", 0.5),
    "weights": ("published", 0.02),
    "collecting": ("constructed", 0.3),
    "starting": ("ready", 0.3),
    "nobody joins": ("ready", 0.3),
}


@pytest.mark.parametrize(("state", "kind"), in_turn(MOMENTS, ["sync", "async"]))
def test_ctrl_c(start, kind, state):
    """As a terminal sends it: to all processes."""
    line, after_s = MOMENTS[state]
    started = start(kind, state)
    started.wait_for(line)
    time.sleep(after_s)  # it may be anywhere then
    if line != "ready":
        assert len(started.in_session() - started.before) >= 7  # the program, groups and workers
    pressed = time.monotonic()
    started.program.interrupt_all()
    out, err = started.program.communicate(timeout=patient(BOUND_S))
    took_s = time.monotonic() - pressed
    assert started.program.returncode == -signal.SIGINT, err
    assert err.count("KeyboardInterrupt") == 1, err
    assert started.program.worker_errors() == ""
    assert started.leaves_nothing(5.0)
    print(f"\n{kind}, {state}: ended {took_s:.2f} s after Ctrl-C; {out.strip().splitlines()[-1:]}")


QUICK, LONG = 3, 50
ROUNDS = [
    pytest.param(QUICK, id=f"{QUICK} rounds"),
    pytest.param(LONG, id=f"{LONG} rounds", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
]


@pytest.mark.parametrize("num_rounds", ROUNDS)
def test_killed_learners(start, num_rounds):
    """At random moments, in its construction too: groups and workers end."""
    moments, tally, longest_s = random.Random(SEED), Counter(), 0.0
    for _ in range(num_rounds):
        kind, state = moments.choice(["sync", "async"]), moments.choice(["collecting", "trajectories", "weights"])
        started = start(kind, state)
        started.wait_for("ready")
        time.sleep(moments.uniform(0.0, 2.0))
        started.program.kill()
        killed = time.monotonic()
        out, err = started.program.communicate()
        assert "Traceback" not in err, err
        tally["collecting" if "constructed" in out else "starting"] += 1
        assert started.leaves_nothing(30.0), started.in_session() - started.before
        longest_s = max(longest_s, time.monotonic() - killed)
    print(f"\nkilled learners: {dict(tally)}, all of their processes had ended after {longest_s:.1f} s")
