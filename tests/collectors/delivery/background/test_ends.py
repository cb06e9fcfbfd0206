"""Errors of the thread, shutdown, and programs that exit while it runs."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tests.patience import patient

from rollwright.collectors import Collector
from rollwright.testing.mocking_classes import CountingBatchedEnv, CountingEnv

IDS = ("collector", "traj_ids")


CALLS = ["pause", "update", "next", "iteration", "state_dict", "reset", "start", "shutdown", "async_shutdown"]

# Errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS)
def test_an_error_in_the_thread_is_raised_at_the_next_call_once(tools, started, call):
    error = OSError("the simulator is gone")
    gate = tools.Gate(at=30, error=error)
    collector, buffer = started(CountingEnv(max_steps=9), gate)
    gate.opened.set()
    collector._background.thread._thread.join(tools.LIMIT)
    assert collector.stats()["background"]["error"] == "OSError: the simulator is gone"
    with pytest.raises(OSError, match="the simulator is gone") as caught:
        tools.CALLS[call](collector)
    assert caught.value is error
    assert any(entry.name == "wait" for entry in caught.traceback)  # where it came from
    assert buffer.write_count == 20  # what was written stays
    collector.shutdown()
    assert collector.closed


def test_an_error_is_logged_for_who_only_watches_the_buffer(tools, started, caplog):
    gate = tools.Gate(at=30, error=OSError("the simulator is gone"))
    gate.opened.set()
    collector, _ = started(CountingEnv(max_steps=9), gate)
    collector._background.thread._thread.join(tools.LIMIT)
    assert (
        "collection in the background ended. The next call of the collector, or of its buffer, raises OSError: the"
        in caplog.text
    )
    with pytest.raises(OSError, match="gone"):
        collector.start()


WATCHES = {
    "sample": lambda buffer: buffer.sample(4),
    "len": len,
    "write_count": lambda buffer: buffer.write_count,
    "iterate": lambda buffer: next(iter(buffer)),
}


@pytest.mark.parametrize("watch", WATCHES)
def test_who_only_watches_the_buffer_gets_the_error_once(tools, started, watch):
    gate = tools.Gate(at=30, error=OSError("the simulator is gone"))
    gate.opened.set()
    collector, buffer = started(CountingEnv(max_steps=9), gate)
    buffer.batch_size = 4
    collector._background.thread._thread.join(tools.LIMIT)
    with pytest.raises(OSError, match="gone"):
        WATCHES[watch](buffer)
    assert len(buffer.sample(4)) == 4  # what was written may be used
    assert buffer.write_count == len(buffer) == 20
    collector.shutdown()


def test_an_error_while_somebody_waits_for_a_pause(tools, started):
    gate = tools.Gate(at=30, error=OSError("gone"))
    collector, _ = started(CountingEnv(max_steps=9), gate)
    assert gate.reached.wait(tools.LIMIT)
    threading.Timer(0.05, gate.opened.set).start()
    with pytest.raises(OSError, match="gone"), collector.pause():
        pass


def test_after_an_error_it_can_go_on(tools, started):
    gate = tools.Gate(at=30, error=OSError("once"))
    gate.opened.set()
    collector, buffer = started(CountingEnv(max_steps=9), gate)
    collector._background.thread._thread.join(tools.LIMIT)
    with pytest.raises(OSError, match="once"):
        collector.start()
    collector.start()
    buffer.reach(100)
    collector.async_shutdown()
    assert tools.neighbours(buffer[:])


def test_an_error_of_the_buffer(tools, started):
    class Full(tools.Noted):
        def direct_writes(self):
            return "a test"

        def extend(self, data):
            raise OSError("no space left")

    collector, _ = started(buffer=Full())
    collector._background.thread._thread.join(tools.LIMIT)
    with pytest.raises(OSError, match="no space left"):
        collector.async_shutdown()


@pytest.mark.parametrize("call", ["next", "iteration", "start"])
def test_what_a_running_collector_refuses_at_once(tools, started, call):
    collector, buffer = started()
    with pytest.raises(RuntimeError, match="async_shutdown"):
        tools.CALLS[call](collector)
    with pytest.raises(RuntimeError, match="async_shutdown"):
        collector.rollout()
    buffer.reach(buffer.write_count + 40)


def test_start_without_a_buffer(make):
    with pytest.raises(RuntimeError, match=r"no replay buffer.*replay_buffer="):
        make(CountingEnv(), None, frames_per_batch=4).start()


def test_start_after_shutdown(tools, make):
    collector = make(CountingEnv(), None, frames_per_batch=4, replay_buffer=tools.Noted())
    collector.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.start()


# The end -------------------------------------------------------------------------------------------------------


class Noting(CountingBatchedEnv):
    """Its second step, and so the end of the first, can be waited for."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps, self.stepped = 0, threading.Event()

    def _step(self, tensordict):
        self.steps += 1
        if self.steps == 2:
            self.stepped.set()
        return super()._step(tensordict)


def test_shutdown_writes_what_was_taken_and_may_be_called_again(tools, started):
    env = Noting(max_steps=torch.tensor([5, 9]), batch_size=[2])
    collector, buffer = started(env, frames_per_batch=2_000_000, buffer=tools.Noted(3_000_000))
    assert env.stepped.wait(tools.LIMIT)
    with collector.pause():
        assert buffer.write_count == 0
    collector.async_shutdown(timeout=tools.LIMIT)
    assert buffer.write_count == collector.stats()["frames"] > 0
    assert env.is_closed
    for _ in range(3):
        collector.async_shutdown()
        collector.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.next()


class Stuck(CountingEnv):
    """Its fifth step takes as long as it is told."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps, self.stuck, self.go_on = 0, threading.Event(), threading.Event()

    def _step(self, tensordict):
        self.steps += 1
        if self.steps == 5:
            self.stuck.set()
            self.go_on.wait(20.0)
        return super()._step(tensordict)


def test_shutdown_is_bounded_and_names_what_it_waited_for(tools, started):
    env = Stuck(max_steps=9)
    collector, buffer = started(env)
    thread = collector._background.thread._thread
    assert env.stuck.wait(tools.LIMIT)
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match=r"waited 0\.2 s for a step of the environment.*threading"):
        collector.async_shutdown(timeout=0.2)
    assert time.monotonic() - begun < patient(2.0)
    collector.shutdown(timeout=0.1)  # told already
    assert not env.is_closed  # it is in use
    env.go_on.set()
    thread.join(tools.LIMIT)
    assert env.is_closed
    assert buffer.write_count == 5  # what was taken is written
    collector.shutdown()


def test_the_context_manager_ends_the_thread(tools, started):
    buffer = tools.Noted()
    with Collector(CountingEnv(max_steps=9), frames_per_batch=20, replay_buffer=buffer) as collector:
        collector.start()
        buffer.reach(40)
    assert not collector.stats().get("background", {}).get("running", False)
    count = buffer.write_count
    assert threading.Event().wait(0.02) is False
    assert buffer.write_count == count


PROGRAM = """
import threading, time
from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.envs import GymEnv
from rollwright.testing.mocking_classes import CountingEnv

class Slow(CountingEnv):
    def _step(self, td):
        stuck.set()
        threading.Event().wait({stuck})
        return super()._step(td)

stuck = threading.Event()
env = Slow() if {stuck} else GymEnv("CartPole-v1")
buffer = ReplayBuffer(storage=LazyTensorStorage(100_000))
collector = Collector(env, None, frames_per_batch=100, replay_buffer=buffer)
collector.start()
if {stuck}:
    assert stuck.wait(20)
else:
    while not len(buffer):
        time.sleep(0.001)
print("end", time.time(), flush=True)
{last}
"""
ENDS = {
    "without shutdown": ("", 0, 0),
    "after shutdown": ("collector.async_shutdown()", 0, 0),
    "by an error": ("1 / 0", 1, 0),
    "in a step that is stuck": ("", 0, 60),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_exits_within_seconds(programs, end):
    last, code, stuck = ENDS[end]
    done = programs.run("-c", PROGRAM.format(stuck=stuck, last=last), timeout=90)
    exited = time.time()
    assert done.returncode == code, done.stderr
    assert exited - float(done.stdout.split()[1]) < 15.0  # one of them for a thread that is stuck
    assert ("Error" in done.stderr) == (end == "by an error"), done.stderr
    assert "Fatal" not in done.stderr
