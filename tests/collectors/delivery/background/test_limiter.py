"""A limiter between the thread that collects and who samples: both keep pace, and are never stuck."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from tests.patience import patient

from rollwright.collectors import Collector
from rollwright.data import (
    LazyTensorStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SampleToInsertRatio,
    TensorDictReplayBuffer,
)
from rollwright.envs import GymEnv
from rollwright.testing.mocking_classes import CountingEnv

ROLLOUT, BATCH, RATIO, MARGIN, MIN_SIZE = 20, 16, 2.0, 80.0, 60


def limiter_of(**options):
    return SampleToInsertRatio(RATIO, **{"margin": MARGIN, "min_size": MIN_SIZE, **options})


def limited(tools, **options):
    return tools.Noted(batch_size=BATCH, limiter=limiter_of(**options))


def until(condition, limit=20.0):
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < patient(limit)
        threading.Event().wait(0.001)


def waits(collector):
    return collector.stats()["waiting_for"] is not None


def sample_on(buffer):
    while True:
        buffer.sample()


def cut_off(collector):
    """How far the thread may come by itself."""
    return collector.stats()["write_count"] == MIN_SIZE + ROLLOUT * int(MARGIN / RATIO / ROLLOUT)


# In a program where nobody else could go on, since it has no other thread. ------------------------------------

ALONE = """
import time, traceback
import pytest
from tests.collectors.delivery.background import conftest as tools
from tests.collectors.delivery.background.test_limiter import BATCH, MARGIN, RATIO, ROLLOUT, limited, sample_on
from tests.patience import patient
from rollwright.collectors import Collector
from rollwright.envs import GymEnv
from rollwright.testing.mocking_classes import CountingEnv

def the_thread_has_ended():
    buffer = limited(tools)
    collector = Collector(CountingEnv(max_steps=9), frames_per_batch=ROLLOUT, replay_buffer=buffer, total_frames=80)
    collector.start()
    with pytest.raises(RuntimeError, match=r"only thread.*Collector has ended, after 80 frames"):
        sample_on(buffer)
    assert buffer.limiter.sampled == RATIO * 20 + MARGIN - 8  # in whole batches
    collector.async_shutdown()
    with pytest.raises(RuntimeError, match="no collector runs in the background"):
        buffer.sample()

def it_would_wait_for_itself():
    buffer = limited(tools)
    collector = Collector(GymEnv("CartPole-v1"), None, frames_per_batch=ROLLOUT, replay_buffer=buffer)
    for _ in range(5):
        collector.next()
    begun = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"Collector waits to insert 20 .* only thread.*Draw more batches.*start\\(\\)"
    ):
        collector.next()
    assert time.monotonic() - begun < patient(1.0)
    assert buffer.write_count == 100
    for _ in range(3):
        buffer.sample()
    collector.next()
    assert buffer.write_count == 120
    assert tools.neighbours(buffer[:])
    assert bool((buffer[:]["collector", "traj_ids"].diff() >= 0).all())
    collector.shutdown()

for case in (the_thread_has_ended, it_would_wait_for_itself):
    try:
        case()
    except BaseException:
        print(f"{case.__name__} failed: {traceback.format_exc()}")
    else:
        print(f"{case.__name__} passed")
    print(end="\\0")
"""


@pytest.fixture(scope="module")
def cases_alone(programs_of_all):
    """What the program above says, by case."""
    done = programs_of_all.run("-c", ALONE, timeout=patient(60.0))
    assert done.returncode == 0, done.stderr
    return dict(report.split(" ", 1) for report in done.stdout.split("\0") if report)


@pytest.fixture
def alone(cases_alone):
    """``alone(case)``: fail with what a case of that program says, unless it passed."""

    def look(case):
        assert cases_alone[case.replace(" ", "_")] == "passed\n"

    return look


# The thread ----------------------------------------------------------------------------------------------------


def test_the_thread_waits_for_the_learner_and_says_so(tools, started):
    collector, buffer = started(buffer=limited(tools))
    until(lambda: waits(collector))
    assert cut_off(collector)
    stats = collector.stats()
    assert stats["waiting_for"] == "samples: 40 more items must be drawn before 20 are inserted"
    [line] = stats["limiter"]["waiting"]
    assert line.startswith("Collector waits to insert 20 items until 40 more are drawn (100 inserted, 0 drawn")
    assert json.loads(json.dumps(stats)) == stats
    for _ in range(3):
        buffer.sample()
    buffer.reach(120)
    until(lambda: waits(collector))
    assert buffer.write_count == 120


def test_both_sides_keep_pace(tools, started):
    collector, buffer = started(GymEnv("CartPole-v1"), buffer=limited(tools))
    balances = []
    for _ in range(400):
        buffer.sample()
        balances.append(buffer.limiter.balance)
    collector.async_shutdown()
    assert min(balances) >= -MARGIN
    assert max(balances) <= MARGIN
    assert buffer.limiter.sampled == 400 * BATCH
    assert abs(RATIO * (buffer.write_count - MIN_SIZE) - 400 * BATCH) <= MARGIN
    assert tools.neighbours(buffer[:])


@pytest.mark.parametrize("options", [{"trajs_per_batch": 1}, {"extend_buffer": False}])
def test_other_ways_of_writing_are_limited_too(tools, started, options):
    collector, buffer = started(buffer=limited(tools), **options)
    until(lambda: waits(collector))
    count = buffer.write_count
    for _ in range(100):
        buffer.sample()
    until(lambda: waits(collector))
    collector.async_shutdown()
    assert RATIO * (buffer.write_count - count) == pytest.approx(100 * BATCH, abs=2 * MARGIN)
    assert tools.neighbours(buffer[:])


@pytest.mark.parametrize("whole", [True, False])
def test_members_of_an_ensemble_share_its_limiter(tools, make, whole):
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(1000)) for _ in range(2)]
    limiter = limiter_of()
    buffers = ReplayBufferEnsemble(*members, batch_size=BATCH, limiter=limiter)
    collectors = [
        make(
            CountingEnv(max_steps=9),
            None,
            frames_per_batch=ROLLOUT,
            replay_buffer=buffers if whole else members[n],
            worker_idx=n,
        )
        for n in range(2)
    ]
    for collector in collectors:
        collector.start()
    for _ in range(50):
        buffers.sample()
        assert limiter.balance <= MARGIN + RATIO * ROLLOUT  # what the other one had under way
    assert buffers.write_count > MIN_SIZE + 300
    for collector in collectors:
        collector.async_shutdown()


# What is served while it waits ---------------------------------------------------------------------------------


def test_a_thread_that_waits_serves_every_call_at_once(tools, started):
    collector, buffer = started(CountingEnv(max_steps=9), tools.twins(), buffer=limited(tools))
    until(lambda: waits(collector))
    begun = time.monotonic()
    with collector.pause():
        assert collector.stats()["background"]["paused"]
    state = collector.state_dict()
    assert state["frames"] == buffer.write_count
    assert collector.update_policy_weights_() == 1
    until(lambda: collector.stats()["policy_version_acting"] == 1)
    collector.set_seed(1)
    collector.reset()
    collector.load_state_dict(state)
    assert waits(collector)
    assert cut_off(collector)
    collector.async_shutdown()
    assert time.monotonic() - begun < patient(2.0)


def test_a_state_loaded_meanwhile_decides_what_follows(tools, started):
    """It says that all frames are stepped: no rollout begins."""
    collector, buffer = started(buffer=limited(tools), total_frames=400)
    until(lambda: waits(collector))
    state = collector.state_dict()
    state["frames"] = 400
    collector.load_state_dict(state)
    until(lambda: not collector.stats()["background"]["running"])
    assert cut_off(collector)
    assert buffer.sample() is not None


@pytest.mark.parametrize("pauses", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_pause_is_no_time_of_waiting(tools, started, pauses):
    collector, buffer = started(buffer=limited(tools, timeout_s=0.8))
    for _ in range(pauses):
        until(lambda: waits(collector))
        with collector.pause():
            assert collector.is_running()
            assert not threading.Event().wait(1.2)
        for _ in range(10):
            buffer.sample()
    assert collector.stats()["background"]["error"] is None


# Waits that are in vain ----------------------------------------------------------------------------------------


def test_a_learner_that_stopped_is_named(tools, started):
    collector, _ = started(buffer=limited(tools, timeout_s=0.05))
    assert not Collector(CountingEnv(), frames_per_batch=10).is_running()
    until(lambda: not collector.is_running())
    with pytest.raises(TimeoutError, match=r"waited 0\.05 s in vain: Collector waits to insert 20 items.*40 more"):
        collector.update_policy_weights_()


def test_who_samples_gets_the_error_of_the_thread_at_once(tools, started):
    gate = tools.Gate(at=30, error=ZeroDivisionError("in the policy"))
    _, buffer = started(CountingEnv(max_steps=9), gate, buffer=limited(tools))
    over = threading.Event()
    other = threading.Thread(target=over.wait, daemon=True)  # which might insert, as far as anyone knows
    other.start()
    threading.Timer(0.05, gate.opened.set).start()
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="in the policy"):
        buffer.sample()
    assert time.monotonic() - begun < patient(5.0)
    over.set()
    other.join(tools.LIMIT)


def test_who_samples_learns_that_the_thread_has_ended(alone):
    alone("the thread has ended")


def test_a_slow_thread_is_named_with_what_it_does(tools, started):
    gate = tools.Gate(at=30)
    _, buffer = started(CountingEnv(max_steps=9), gate, buffer=limited(tools, timeout_s=0.1))
    assert gate.reached.wait(tools.LIMIT)
    with pytest.raises(TimeoutError, match="thread of Collector is in a call of the policy"):
        buffer.sample()
    gate.opened.set()


# By hand -------------------------------------------------------------------------------------------------------


def test_iteration_that_would_wait_for_itself_fails_at_once_and_can_go_on(alone):
    alone("it would wait for itself")


def test_iteration_waits_for_another_thread_that_samples(tools, make):
    buffer = limited(tools)
    collector = make(CountingEnv(max_steps=9), None, frames_per_batch=ROLLOUT, replay_buffer=buffer)
    learner = threading.Thread(target=lambda: [buffer.sample() for _ in range(100)])
    learner.start()
    for _ in range(42):  # as many as 100 batches take
        collector.next()
    learner.join(tools.LIMIT)
    assert not learner.is_alive()
    assert buffer.limiter.sampled == 1600


def test_a_balanced_loop_by_hand_never_waits(tools, make):
    buffer = limited(tools, min_size=ROLLOUT)
    collector = make(CountingEnv(max_steps=9), None, frames_per_batch=24, replay_buffer=buffer, total_frames=1200)
    for _ in collector:
        for _ in range(3):  # 48 items for 24 frames
            buffer.sample()
    assert buffer.limiter.sampled == 50 * 3 * BATCH


# Construction --------------------------------------------------------------------------------------------------


def test_rollouts_that_would_wait_for_ever_are_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=BATCH, limiter=limiter_of())
    with pytest.raises(ValueError, match=r"margin: expected at least .* = \(16 \+ 2 \* 100\) / 2 = 108, got 80"):
        Collector(CountingEnv(), None, frames_per_batch=100, replay_buffer=buffer)
    Collector(CountingEnv(), None, frames_per_batch=72, replay_buffer=buffer).shutdown()


def test_without_a_limiter_nothing_is_limited(started):
    collector, buffer = started()
    buffer.reach(1000)
    assert "limiter" not in collector.stats()
    assert collector.stats()["waiting_for"] is None
    assert torch.is_tensor(buffer.sample(2)["observation"])
