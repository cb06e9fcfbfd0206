"""Programs with many workers exit within seconds, however they end, and leave no process behind.

Some begin as a user's program does, with a fork server of their own; the rest are forked, with a server that is there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.collectors.workers.processes import alive, burn, descendants, gone, wait_until
from tests.patience import patient
from tests.programs import Program

import rollwright

# Every program says when its last statement is over; from there to its end only seconds may pass.
PROGRAM = """
import rollwright._processes.preload  # as the fork server does, for speed
import os, sys, threading, time
from rollwright.collectors import MultiAsyncCollector, MultiSyncCollector
from rollwright.data import LazyTensorStorage, ReplayBuffer
from tests.collectors.workers.envs import Trouble, gain, makers, one_bad

def main():
    cls = MultiSyncCollector if sys.argv[1] == "sync" else MultiAsyncCollector
    state = sys.argv[2]
    options = {"frames_per_batch": 20}
    envs = makers()
    if state in ("background", "stuck", "background, Ctrl-C", "orphans"):
        options["replay_buffer"] = ReplayBuffer(storage=LazyTensorStorage(100_000), shared=True)
    if state == "stuck":
        envs = one_bad(troubles={"trouble": Trouble("sleep", 50)})
    if state == "failing":
        envs = one_bad(troubles={"trouble": Trouble("raise", 30)})
    collector = cls(envs, gain(), **options)
    print("pids", *[worker["pid"] for worker in collector.stats()["workers"]], flush=True)
    try:
        if state == "in the middle":
            next(iter(collector))
        elif state == "after shutdown":
            next(iter(collector))
            collector.shutdown()
        elif state in ("failing", "error"):
            for _ in collector:
                if state == "error":
                    raise ValueError("no idea")
        elif state == "sys.exit":
            for _ in collector:
                sys.exit(0)
        elif state in ("background", "stuck"):
            collector.start()
            while collector.stats()["frames"] < 60:
                time.sleep(0.01)
        elif state in ("background, Ctrl-C", "orphans"):
            collector.start()
            print("collecting", flush=True)
            time.sleep(1000)
        elif state == "loop, Ctrl-C":
            for number, _ in enumerate(collector):
                if number == 3:
                    print("collecting", flush=True)
        elif state == "caught Ctrl-C":
            try:
                for number, _ in enumerate(collector):
                    if number == 3:
                        print("collecting", flush=True)
            except KeyboardInterrupt:
                collector.shutdown()
                print("saved", collector.stats()["frames"], flush=True)
        elif state == "daemon thread":
            some = threading.Semaphore(0)
            threading.Thread(target=lambda: [some.release() for _ in collector], daemon=True).start()
            for _ in range(3):
                some.acquire()
        elif state == "thread":
            thread = threading.Thread(target=lambda: [collector.next() for _ in range(5)])
            thread.start()
            thread.join()
    finally:
        print("over", time.monotonic(), flush=True)

if __name__ == "__main__":
    main()
"""
BOUND_S = 8.0
ROOT = Path(__file__).parents[3]


COLD = ("loop, Ctrl-C", "orphans")


@pytest.fixture
def start(programs, tmp_path):
    """Starts the program for a kind of collector and a state."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    def call(kind, state):
        if state not in COLD:
            return programs.start("-W", "error", script, kind, state)
        source = str(Path(rollwright.__file__).parents[1])
        return subprocess.Popen(
            [sys.executable, "-W", "error", str(script), kind, state],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([source, str(ROOT)]), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return call


def pids_of(process):
    line = process.stdout.readline().split()
    assert line, process.stderr.read()
    assert line[0] == "pids"
    return [int(pid) for pid in line[1:]]


def end_all(process, number):
    """Send a signal to a program and to all processes that it has started, as a terminal does."""
    if isinstance(process, Program):
        process.interrupt_all() if number == signal.SIGINT else process.send_signal(number)
    else:
        os.killpg(process.pid, number)


def errors_of(process, err):
    """What a program that has ended, and its workers, have written to standard error."""
    return err + (process.worker_errors() if isinstance(process, Program) else "")


def finish(process):
    """Output, errors, and seconds from the last statement to the end of the process."""
    try:
        out, err = process.communicate(timeout=patient(30))
    except subprocess.TimeoutExpired:  # of one that was started cold
        end_all(process, signal.SIGKILL)
        raise
    ended = time.monotonic()
    over = [line for line in out.splitlines() if line.startswith("over")]
    assert over, err
    return out, errors_of(process, err), ended - float(over[-1].split()[1])


def each_in_turn(states):
    """Each state with one kind of collector; with the other one, too, where tests may be slow."""
    found = []
    for number, state in enumerate(states):
        for kind in ("sync", "async"):
            quick = kind == ("sync", "async")[number % 2] and state not in ("failing", "sys.exit", "thread")
            found.append(pytest.param(state, kind, id=f"{state}-{kind}", marks=[] if quick else [pytest.mark.slow]))
    return found


ENDS = {
    "in the middle": (0, ""),
    "after shutdown": (0, ""),
    "failing": (1, "WorkerError"),
    "error": (1, "ValueError: no idea"),
    "sys.exit": (0, ""),
    "background": (0, ""),
    "stuck": (0, ""),
    "thread": (0, ""),
    "daemon thread": (0, ""),
}


@pytest.mark.parametrize(("state", "kind"), each_in_turn(ENDS))
def test_programs_exit_within_seconds(start, state, kind):
    process = start(kind, state)
    workers = pids_of(process)
    before = descendants(process.pid)
    _, err, seconds = finish(process)
    code, text = ENDS[state]
    assert process.returncode == code, err
    assert text in err if text else err == ""
    assert seconds < patient(BOUND_S)
    assert gone(workers + [child.pid for child in before], 2.0)


@pytest.mark.parametrize(("state", "kind"), each_in_turn(["loop, Ctrl-C", "caught Ctrl-C", "background, Ctrl-C"]))
def test_control_c_reaches_all_processes_and_one_of_them_decides(start, state, kind):
    process = start(kind, state)
    workers = pids_of(process)
    assert process.stdout.readline() == "collecting\n"
    end_all(process, signal.SIGINT)
    out, err, seconds = finish(process)
    assert seconds < patient(BOUND_S)
    assert gone(workers, 2.0)
    if state == "caught Ctrl-C":
        assert process.returncode == 0, err
        assert err == ""
        assert "saved" in out
    else:
        assert process.returncode != 0
        assert err.count("KeyboardInterrupt") == 1, err
        assert "WorkerError" not in err


@pytest.mark.parametrize("kind", ["async"])
def test_workers_whose_parent_is_killed_end(start, kind):
    process = start(kind, "orphans")
    workers = pids_of(process)
    assert process.stdout.readline() == "collecting\n"
    others = [child.pid for child in descendants(process.pid)]
    burn(process.pid)
    process.communicate(timeout=patient(30))
    assert gone(workers, BOUND_S)
    assert wait_until(lambda: not any(alive(pid) for pid in others), BOUND_S)


CHILDREN = """
import multiprocessing, sys, time
from rollwright._processes.child import Child, echo
from rollwright.collectors import Collector, Evaluator, MultiSyncCollector
from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.envs import AsyncEnvPool, ParallelEnv
from tests.collectors.workers.envs import gain, makers

def leave_open(kind):
    global kept
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000), shared=True)
    if kind == "workers":
        kept = MultiSyncCollector(makers(), gain(), frames_per_batch=20)
        kept.next()
    elif kind == "background":
        kept = MultiSyncCollector(makers(), gain(), frames_per_batch=20, replay_buffer=buffer)
        kept.start()
    elif kind == "thread":
        kept = Collector(makers(1)[0], gain(), frames_per_batch=20, replay_buffer=buffer)
        kept.start()
    elif kind == "parallel":
        kept = ParallelEnv(2, makers(1)[0])
        kept.reset()
    elif kind == "evaluator":
        kept = Evaluator(makers(1)[0], gain(), num_trajectories=1, max_steps=3, backend="process")
        kept.trigger_eval()
    else:
        kept = AsyncEnvPool(makers(), backend=kind)
        kept.reset()
    raise ValueError(f"{kind}: no idea")

Child(echo, name="first")  # the server runs from here on
kinds = ["workers", "background", "thread", "parallel", "evaluator", "threading", "multiprocessing"]
context = multiprocessing.get_context("fork")
children = [context.Process(target=leave_open, args=(kind,)) for kind in kinds]
for child in children:
    child.start()
for child in children:
    child.join()
"""


@pytest.mark.timeout(240)
def test_what_children_of_multiprocessing_leave_open_ends_with_them_and_their_error_is_told(programs, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(CHILDREN)
    err = programs.run(script, timeout=200).stderr
    for kind in ("workers", "background", "thread", "parallel", "evaluator", "threading", "multiprocessing"):
        assert f"ValueError: {kind}: no idea" in err, err
    assert err.count("Traceback") == 7, err
