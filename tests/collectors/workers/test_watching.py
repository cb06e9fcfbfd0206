"""Workers that are stuck: in a step, in a call, in taking weights."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
from tests.collectors.workers.envs import Trouble, gain, makers, one_bad, perishing
from tests.collectors.workers.frames import check
from tests.collectors.workers.processes import burn, heard, wait_until
from tests.patience import patient
from tests.variants import one_quick

from rollwright.collectors.workers import handles
from rollwright.collectors.workers.counters import WorkerState
from rollwright.collectors.workers.handles import WorkerHandle
from rollwright.errors import WorkerError
from rollwright.testing.mocking_classes import CountingEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*It is replaced:RuntimeWarning")
KINDS = ["sync", "async"]
SECONDS = 15.0  # within which a failure must be known


def run(collector, limit=2000):
    """Iterate until something is raised, or the limit."""
    return [batch for _, batch in zip(range(limit), collector, strict=False)]


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_a_step_that_takes_too_long(make, kind, tmp_path):
    troubles = {"trouble": Trouble("sleep", 30)}
    collector = make(kind, one_bad(troubles=troubles), gain(), frames_per_batch=20, env_step_timeout=0.5)
    begun = time.monotonic()
    with pytest.raises(WorkerError, match=r"worker 1 has.*env_step_timeout=0\.5 s for one step \(number 30 of"):
        run(collector)
    assert time.monotonic() - begun < patient(SECONDS)
    collector.shutdown(raise_on_error=False)
    troubles = {"trouble": Trouble("sleep", 30, str(tmp_path / "once"))}
    collector = make(
        kind,
        one_bad(troubles=troubles),
        gain(),
        frames_per_batch=20,
        total_frames=400,
        env_step_timeout=0.5,
        on_worker_failure="restart",
    )
    assert check(run(collector), gaps=True).frames == 400
    assert collector.stats()["restarts"] == 1


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_a_reset_that_takes_too_long(make, kind):
    envs = one_bad(troubles={"on_reset": Trouble("sleep", 1)})
    collector = make(kind, envs, gain(), frames_per_batch=4, env_step_timeout=0.5)
    collector.set_seed(0)  # the next rollout begins with a reset
    with pytest.raises(WorkerError, match=r"worker 1 has.*env_step_timeout=0\.5 s for one step .*or for the reset"):
        run(collector)


class Gated(CountingEnv):
    """Its first step lasts until a file is there."""

    gate: str

    def _step(self, tensordict):
        assert wait_until(lambda: os.path.exists(self.gate))
        return super()._step(tensordict)


def test_a_worker_that_waits_for_memory_while_the_consumer_is_busy_is_not_stuck(make, tmp_path):
    """The first batch of a worker without an array path is made room for in its first step."""
    gate = str(tmp_path / "gate")

    def gated():
        env = Gated(run_type_checks=True)  # not on arrays
        env.gate = gate
        return env

    collector = make("async", [CountingEnv, gated], frames_per_batch=20, env_step_timeout=20.0)
    collector.next()  # of worker 0
    worker = collector._group.workers[1]
    (tmp_path / "gate").touch()
    assert wait_until(lambda: worker.counters.state is WorkerState.DELIVERING, 5.0)
    beats = collector._group.watch.heartbeats
    assert wait_until(lambda: (collector._group.look(), 1 in beats._last)[1], 5.0)
    beats._last[1] = (beats._last[1][0], *(at - 30.0 for at in beats._last[1][1:]))  # so long has nobody looked
    for _ in range(4):
        assert collector.next() is not None


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_a_call_that_takes_too_long_is_known_to_who_waits_for_a_batch(make, monkeypatch, tmp_path, kind):
    monkeypatch.setattr(handles, "ASIDE_S", 0.5)
    struck = str(tmp_path / "struck")
    collector = make(kind, makers(), perishing(Trouble("sleep", 0, struck)), frames_per_batch=20)
    collector.next()
    raised = []
    thread = threading.Thread(
        target=lambda: raised.append(heard(lambda: collector.map_fn("policy.module.perish"), Exception))
    )
    thread.start()
    assert wait_until(lambda: os.path.exists(struck))
    begun = time.monotonic()
    text = r"worker [01] has taken longer than 0\.5 s to call 'policy\.module\.perish'"
    with pytest.raises(WorkerError, match=text):
        run(collector)
    thread.join(SECONDS)
    assert time.monotonic() - begun < patient(SECONDS)
    assert isinstance(raised[0], WorkerError)
    assert collector.stats()["workers_alive"] == 1


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_a_worker_that_does_not_come_back_from_loading_weights_is_replaced(make, monkeypatch, tmp_path, kind):
    monkeypatch.setattr(handles, "ASIDE_S", 0.5)
    policy = perishing(Trouble("sleep", 0, str(tmp_path / "struck")), loaded=True)
    collector = make(kind, makers(), policy, frames_per_batch=20, on_worker_failure="restart", restart_delay=0.01)
    batches = [collector.next()]
    collector.update_policy_weights_(perishing(Trouble(), 2.0))
    until = time.monotonic() + patient(SECONDS)
    while collector.stats()["restarts"] == 0:
        batches.append(collector.next())
        assert time.monotonic() < until
    [replaced] = [worker["index"] for worker in collector.stats()["workers"] if worker["restarts"]]
    assert "0.5 s to take weights" in str(collector._group.restarts.last_error(replaced))
    batches += [collector.next() for _ in range(6)]
    check(batches, gaps=True)
    assert bool((batches[-1]["action"] == 2.0).all())
    assert collector.stats()["workers_alive"] == 2


def test_calls_that_follow_one_another_are_no_long_call(make, monkeypatch):
    monkeypatch.setattr(handles, "ASIDE_S", 1.0)
    collector = make("sync", makers(), gain(), frames_per_batch=20)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        collector.map_fn("get_distant_attr", [("env.batch_size",)] * 2)
    assert collector.stats()["restarts"] == 0
    assert collector.next() is not None


class Watched:
    """A worker that does not run, a watch over it, and a clock."""

    def __init__(self, step_timeout_s):
        self.now, self.stopped_s = 1000.0, 0.0
        self.watch = handles.Watchdog(step_timeout_s, lambda: self.now)
        counters = SimpleNamespace(pulse=(0, 0), state=WorkerState.WAITING, waits=str)
        connection = SimpleNamespace(stopped_s=lambda: self.stopped_s)
        failed = partial(WorkerHandle.failed, SimpleNamespace(name="worker 0", index=0))
        self.worker = SimpleNamespace(
            index=0, connection=connection, counters=counters, ready=True, failed=failed, remote_clock=lambda: None
        )

    def after(self, seconds, *, state=None, beats=False, every_s=0.2):
        """What the watch finds after looking again and again for a while, in which a worker beats, or not."""
        counters = self.worker.counters
        counters.state = state or counters.state
        until = self.now + seconds
        while self.now < until:
            self.now += every_s
            if beats:
                counters.pulse = (counters.pulse[0], counters.pulse[1] + 1)
            error = self.watch.failure(self.worker)
            if error is not None:
                return str(error)
        return None


@pytest.mark.parametrize(("step_timeout_s", "limit_s"), [(2.0, 12), (None, 120)])
@pytest.mark.parametrize("state", [WorkerState.WAITING, WorkerState.PAUSED])
def test_a_worker_that_waits_gives_signs_of_life(state, step_timeout_s, limit_s):
    watched = Watched(step_timeout_s)
    assert watched.after(1000, state=state, beats=True) is None
    assert watched.after(limit_s - 1) is None
    assert watched.after(2) == f"worker 0 has given no sign of life for {limit_s} s, while it waited to be asked."


@pytest.mark.parametrize("state", [WorkerState.PREPARING, WorkerState.DELIVERING, WorkerState.COLLECTING])
def test_hooks_and_steps_without_a_limit_take_as_long_as_they_like_unless_a_signal_has_stopped_them(state):
    watched = Watched(None)
    assert watched.after(10_000, state=state, every_s=10) is None
    watched.stopped_s = 121.0
    assert watched.after(1) == "worker 0 was stopped by a signal, and did not go on for 120 s."


@pytest.mark.parametrize("state", [WorkerState.WAITING, WorkerState.COLLECTING])
def test_a_program_that_was_stopped_with_its_workers_goes_on_with_them(state):
    watched = Watched(2.0)
    assert watched.after(1, state=state, beats=True) is None
    assert watched.after(3600, every_s=3600) is None
    assert watched.after(0.4) is None
    assert watched.after(1, beats=True) is None
    assert watched.after(3600, every_s=3600) is None
    assert watched.after(20) is not None


@pytest.mark.parametrize("call", ["next", "map_fn"])
def test_a_worker_that_is_frozen_between_rollouts_is_replaced(make, call):
    collector = make("sync", makers(), gain(), frames_per_batch=20, on_worker_failure="restart", restart_delay=0.01)
    batches = [collector.next()]
    collector._group.watch._silence_s = 1.5
    worker = collector._group.workers[1]
    assert wait_until(lambda: worker.counters.state is WorkerState.WAITING)
    burn(worker.pid, signal.SIGSTOP)
    if call == "map_fn":
        with pytest.raises(WorkerError, match=r"worker 1 (has given no sign of life|was stopped by a signal).* 1\.5 s"):
            collector.map_fn("env.rand_action")
    batches += [collector.next() for _ in range(3)]
    check(batches, gaps=True)
    assert [each["restarts"] for each in collector.stats()["workers"]] == [0, 1]
