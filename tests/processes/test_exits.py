"""Exits: what is called when a process ends, in every kind of process that a program may start."""

import multiprocessing
import os

import pytest

from rollwright._processes.child import Child, sleep

LIMIT_S = 60.0  # of what never ends without the promise, and takes a second with it

ORDER = """
from rollwright._processes.forks import ExitStage, call_at_exit, cancel_at_exit

def fail():
    print("profiler", flush=True)
    raise ValueError("the disk is full")

def never():
    print("never")

call_at_exit(lambda: print("processes", flush=True), ExitStage.PROCESSES)
call_at_exit(fail, ExitStage.PROFILERS)
call_at_exit(never, ExitStage.THREADS)
call_at_exit(lambda: print("threads", flush=True), ExitStage.THREADS)
cancel_at_exit(never)
"""


def test_profilers_end_first_and_processes_last_whatever_one_of_them_raises(programs):
    done = programs.run("-c", ORDER, timeout=LIMIT_S)
    assert done.stdout.split() == ["profiler", "threads", "processes"]
    assert "ValueError: the disk is full" in done.stderr


def leave_open(say, how):
    """Leave a process that does not listen and a thread that does not end, in a child of multiprocessing."""
    from tests.processes.test_threads import Scripted, until_told

    child = Child(sleep, 1000.0, name="stuck", start_method="fork")
    assert child.channel.recv(LIMIT_S) == "asleep"
    Scripted(until_told).start()
    say.send(child.pid)
    if how == "raise":
        raise ValueError("training failed")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("method", "how", "daemon"),
    [
        ("fork", "raise", False),
        ("fork", "return", True),
        pytest.param("spawn", "raise", False, marks=pytest.mark.slow),
        ("forkserver", "return", True),
    ],
)
def test_children_of_multiprocessing_end_with_what_they_left_open(method, how, daemon, capfd):
    context = multiprocessing.get_context(method)
    told, say = context.Pipe(duplex=False)
    process = context.Process(target=leave_open, args=(say, how), daemon=daemon)
    process.start()
    try:
        assert told.poll(LIMIT_S)
        pid = told.recv()
        process.join(LIMIT_S)
        assert process.exitcode == (how == "raise")
    finally:
        process.kill()
        process.join()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert ("ValueError: training failed" in capfd.readouterr().err) == (how == "raise")
