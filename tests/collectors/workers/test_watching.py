"""Workers that are stuck: in a step, in a call, in taking weights."""

from __future__ import annotations

import os
import threading
import time

import pytest
from tests.collectors.workers.envs import Trouble, gain, makers, one_bad, perishing
from tests.collectors.workers.frames import check
from tests.collectors.workers.processes import heard, wait_until
from tests.patience import patient

from rollwright.collectors.workers import watching
from rollwright.collectors.workers.words import State
from rollwright.errors import WorkerError
from rollwright.testing.mocking_classes import CountingEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*It is replaced:RuntimeWarning")
KINDS = ["sync", "async"]
SECONDS = 15.0  # within which a failure must be known


def run(collector, limit=2000):
    """Iterate until something is raised, or the limit."""
    return [batch for _, batch in zip(range(limit), collector, strict=False)]


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_that_takes_too_long(make, kind):
    envs = one_bad(troubles={"on_reset": Trouble("sleep", 1)})
    collector = make(kind, envs, gain(), frames_per_batch=4, env_step_timeout=0.5)
    collector.set_seed(0)  # the next rollout begins with a reset
    with pytest.raises(WorkerError, match=r"worker 1 has.*env_step_timeout=0\.5 s for one step .*or for the reset"):
        run(collector)


class Gated(CountingEnv):
    """Has no array path; its first step lasts until a file is there."""

    gate: str

    def _step(self, tensordict):
        assert wait_until(lambda: os.path.exists(self.gate))
        return super()._step(tensordict)


def test_a_worker_that_waits_for_memory_while_the_consumer_is_busy_is_not_stuck(make, tmp_path):
    """The first batch of a worker without an array path is made room for in its first step."""
    gate = str(tmp_path / "gate")

    def gated():
        env = Gated()
        env.gate = gate
        return env

    collector = make("async", [CountingEnv, gated], frames_per_batch=20, env_step_timeout=20.0)
    collector.next()  # of worker 0
    worker = collector._group.workers[1]
    (tmp_path / "gate").touch()
    assert wait_until(lambda: worker.words.state is State.DELIVERING, 5.0)
    worker.pulse_at -= 30.0  # so long has nobody looked
    for _ in range(4):
        assert collector.next() is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_takes_too_long_is_known_to_who_waits_for_a_batch(make, monkeypatch, tmp_path, kind):
    monkeypatch.setattr(watching, "ASIDE_S", 0.5)
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_does_not_come_back_from_loading_weights_is_replaced(make, monkeypatch, tmp_path, kind):
    monkeypatch.setattr(watching, "ASIDE_S", 0.5)
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
    monkeypatch.setattr(watching, "ASIDE_S", 1.0)
    collector = make("sync", makers(), gain(), frames_per_batch=20)
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        collector.map_fn("get_distant_attr", [("env.batch_size",)] * 2)
    assert collector.stats()["restarts"] == 0
    assert collector.next() is not None
