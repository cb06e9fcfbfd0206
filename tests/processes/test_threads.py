"""DaemonThread: its error is raised once, its end is bounded, and it comes before that of processes at exit."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from rollwright._processes.threads import DaemonThread

LIMIT = 60.0


class Scripted(DaemonThread):
    """Does what it is given, and notes what came when."""

    def __init__(self, work):
        super().__init__("scripted")
        self.work, self.notes = work, []

    def _work(self):
        self.work(self)
        self.notes.append("worked")

    def _finish(self):
        assert not self.finished
        self.notes.append("finished")


@pytest.fixture
def run():
    threads = []

    def start(work):
        threads.append(Scripted(work))
        threads[-1].start()
        return threads[-1]

    yield start
    for thread in threads:
        assert thread.stop(LIMIT)


def until_told(thread):
    with thread.condition:
        assert thread.condition.wait_for(lambda: thread.stopping, LIMIT)


def fail(thread):
    raise ValueError("no more")


def test_it_works_until_it_is_told(run):
    thread = run(until_told)
    assert thread.running
    assert not thread.inside
    assert thread.error_text() is None
    assert thread.stop(LIMIT)
    assert not thread.running
    assert thread.finished
    assert not thread._thread.is_alive()
    assert thread.notes == ["worked", "finished"]
    thread.raise_error()


def test_its_error_is_raised_once(run):
    thread = run(fail)
    with thread.condition:
        assert thread.condition.wait_for(lambda: thread.finished, LIMIT)
    assert thread.notes == ["finished"]
    assert thread.error_text() == "ValueError: no more"
    with pytest.raises(ValueError, match="no more"):
        thread.raise_error()
    assert thread.error_text() is None
    thread.raise_error()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_has_ended_even_where_its_end_raises(run):
    thread = run(until_told)
    thread._finish = lambda: fail(thread)
    assert thread.stop(LIMIT)


def test_who_waits_for_its_end_is_told_how_long_it_took(run):
    released = threading.Event()
    thread = run(lambda _: released.wait(LIMIT))
    begun = time.monotonic()
    assert not thread.stop(0.05)
    assert time.monotonic() - begun >= 0.05
    assert thread.running
    released.set()
    assert thread.stop(LIMIT)


def test_it_does_not_wait_for_itself(run):
    found = []
    thread = run(lambda thread: found.append((thread.inside, thread.stop(LIMIT))))
    assert thread.stop(LIMIT)
    assert found == [(True, False)]


def test_one_that_has_not_begun_has_nothing_to_end():
    assert Scripted(until_told).stop(LIMIT)


def test_it_takes_as_many_threads_of_torch_as_its_maker(run):
    found, before = [], torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        thread = run(lambda _: found.append(torch.get_num_threads()))
    finally:
        torch.set_num_threads(before)
    assert thread.stop(LIMIT)
    assert found == [3]


AT_EXIT = """
import threading
from rollwright._processes.threads import DaemonThread
from rollwright._processes.child import Child, echo

class Work(DaemonThread):
    def _work(self):
        with self.condition:
            self.condition.wait_for(lambda: self.stopping, 60.0)
        print("told while the process", "runs" if child.alive else "is gone", flush=True)

class Stuck(DaemonThread):
    def _work(self):
        threading.Event().wait(60.0)

child = Child(echo, name="parrot")
for kind in (Work, Stuck):
    thread = kind(kind.__name__)
    thread.start()
del thread
"""


def test_at_exit_threads_end_before_processes_and_stuck_ones_are_left(programs):
    done = programs.run("-c", AT_EXIT, timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "told while the process runs\n", "")
