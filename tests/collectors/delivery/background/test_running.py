"""start(): a thread that fills the buffer; pauses and control calls while it runs."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tensordict.nn import set_interaction_type
from tests.patience import patient
from torch import nn

from rollwright.envs import ExplorationType, GymEnv, exploration_type
from rollwright.testing.mocking_classes import CountingEnv

IDS = ("collector", "traj_ids")


# Running -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"extend_buffer": False}, {"trajs_per_batch": 1}], ids=str)
def test_the_first_frames_come_within_a_second(tools, started, options):
    begun = time.monotonic()
    collector, buffer = started(GymEnv("CartPole-v1"), **options)
    buffer.reach(1)
    assert time.monotonic() - begun < patient(1.0)
    buffer.reach(500)
    collector.async_shutdown()
    count = buffer.write_count
    assert collector.stats()["write_count"] == count == len(buffer)
    assert tools.neighbours(buffer[:])


def test_the_content_is_that_of_iteration(tools, make, started, cartpole_actor, stream, same):
    plain = make(GymEnv("CartPole-v1"), cartpole_actor(), frames_per_batch=20)
    plain.set_seed(0)
    expected = stream([plain.next() for _ in range(30)])
    buffer = tools.Noted()
    collector = make(GymEnv("CartPole-v1"), cartpole_actor(), frames_per_batch=20, replay_buffer=buffer)
    collector.set_seed(0)
    collector.start()
    buffer.reach(300)
    collector.async_shutdown()
    count = min(len(buffer), 600)
    same(buffer[:count], expected[:count])


def test_the_end_of_total_frames_is_quiet(tools, started):
    collector, buffer = started(total_frames=60)
    buffer.reach(60)
    collector._background.thread._thread.join(tools.LIMIT)
    stats = collector.stats()
    assert stats["completed"]
    assert stats["background"] == {"running": False, "paused": False, "error": None}
    assert list(collector) == []
    assert collector.update_policy_weights_() == collector.policy_version == 1
    collector.start()  # nothing is left to do
    collector.async_shutdown()
    assert buffer.write_count == 60


def test_whole_trajectories_only(started):
    collector, buffer = started(GymEnv("CartPole-v1", num_envs=3), trajs_per_batch=4, frames_per_batch=30)
    buffer.reach(300)
    for _ in range(5):
        with collector.pause():
            data = buffer[:]
        ends = data["next", "done"].flatten()
        assert bool(ends[-1])
        assert torch.equal(ends[:-1], data[IDS][1:] != data[IDS][:-1])


def test_sampling_goes_on_while_it_runs(tools, started):
    collector, buffer = started(GymEnv("CartPole-v1"), buffer=tools.Noted(500))
    buffer.reach(100)
    while buffer.write_count < 2000:
        batch = buffer.sample(64)
        assert int(batch[IDS].min()) >= 0
    collector.async_shutdown()


# Pause ---------------------------------------------------------------------------------------------------------


def test_pause_freezes_and_leaves_no_hole(tools, started):
    collector, buffer = started(GymEnv("CartPole-v1"), extend_buffer=False)
    steps = 0
    for i in range(10):
        buffer.reach(30 * i)
        with collector.pause():
            count = buffer.write_count
            assert collector.stats()["background"]["paused"]
            frozen = threading.Event().wait(0.02)
            assert not frozen
            assert buffer.write_count == count
            steps = max(steps, count)
        buffer.reach(count + 1)
    collector.async_shutdown()
    assert tools.neighbours(buffer[:])
    assert buffer[:][IDS].diff().max() <= 1  # every trajectory is there


def test_pause_is_between_two_steps(tools, started):
    """A batch that takes long does not hold it up."""
    env = CountingEnv(max_steps=9)
    gate = tools.Gate(at=50)
    collector, buffer = started(env, gate, frames_per_batch=10_000)
    assert gate.reached.wait(tools.LIMIT)
    threading.Timer(0.05, gate.opened.set).start()
    with collector.pause():
        assert 50 <= gate.calls < 10_000
        assert buffer.write_count == 0
        calls = gate.calls
    collector.async_shutdown()
    assert calls <= buffer.write_count < 10_000  # what was taken is written


def test_a_mapped_method_ends_no_batch_inside_a_pause(tools, started):
    steps = tools.Steps()
    collector, buffer = started(CountingEnv(max_steps=9), steps, frames_per_batch=10_000)
    steps.reach(50)
    with collector.pause():
        taken = steps.calls
        assert collector.map_fn("get_distant_attr", [("options.replay_buffer.write_count",)]) == 0
        assert collector.map_fn("stats")["frames"] == 0
        for method, args in (("reset", ()), ("state_dict", ()), ("set_seed", (1,))):
            with pytest.raises(RuntimeError, match=r"end of a rollout.*after the pause"):
                collector.map_fn(method, [args])
        assert buffer.write_count == 0
        collector.reset()  # itself, it ends the batch
        assert buffer.write_count == taken
        collector.map_fn("reset")
    assert collector.map_fn("reset") is None
    collector.async_shutdown()
    assert tools.neighbours(buffer[:])


def test_it_goes_on_when_the_body_raises(started):
    collector, buffer = started()
    with pytest.raises(ZeroDivisionError), collector.pause():
        _ = 1 / 0
    buffer.reach(buffer.write_count + 100)


def test_pauses_may_be_nested_and_come_from_several_threads(tools, started):
    collector, buffer = started()
    counts = []

    def pausing():
        for _ in range(20):
            with collector.pause(), collector.pause():
                before = buffer.write_count
                counts.append(buffer.write_count - before)

    threads = [threading.Thread(target=pausing) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(tools.LIMIT)
    assert counts == [0] * 60
    buffer.reach(buffer.write_count + 100)


def test_without_a_thread_pause_does_nothing(make):
    collector = make(CountingEnv(), None, frames_per_batch=4)
    with collector.pause():
        assert collector.next().shape == (4,)


# Control while it runs -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:state_dict. not all can be saved")
def test_control_calls_wait_for_the_end_of_the_batch_and_no_longer(tools, started):
    steps = tools.Steps()
    collector, buffer = started(CountingEnv(max_steps=9), steps, frames_per_batch=100_000, buffer=tools.Noted(400_000))
    steps.reach(50)
    state = collector.state_dict()  # in the middle of a batch, which ends there
    assert 50 <= state["frames"] == buffer.write_count < 100_000
    collector.reset()
    collector.set_seed(3)
    steps.reach(50)
    collector.load_state_dict(state)
    steps.reach(50)
    with collector.pause():
        collector.state_dict()
    collector.async_shutdown()
    assert tools.neighbours(buffer[:])


def test_a_state_saved_while_it_runs_can_be_restored(tools, make, started, cartpole_actor, same):
    collector, buffer = started(GymEnv("CartPole-v1"), cartpole_actor())
    buffer.reach(50)
    with collector.pause():
        state = collector.state_dict()
        count = buffer.write_count
    buffer.reach(count + 100)
    collector.async_shutdown()
    later = tools.Noted()
    second = make(GymEnv("CartPole-v1"), cartpole_actor(), frames_per_batch=20, replay_buffer=later)
    second.load_state_dict(state)
    for _ in range(5):
        second.next()
    same(later[:100], buffer[count : count + 100])


def test_the_generator_of_before_can_go_on_afterwards(tools, make):
    buffer = tools.Noted()
    collector = make(CountingEnv(max_steps=9), None, frames_per_batch=10, total_frames=10_000, replay_buffer=buffer)
    iterating = iter(collector)
    next(iterating)
    collector.start()
    buffer.reach(40)
    with pytest.raises(RuntimeError, match="iteration"):
        next(iterating)


def test_calls_from_inside_the_thread_do_not_wait_for_it(tools, started):
    done = threading.Event()
    results = []

    def hook():
        if not results:
            with collector.pause():
                results.append(collector.update_policy_weights_())
            collector.state_dict()
            done.set()

    buffer = tools.Noted()
    collector, _ = started(CountingEnv(max_steps=9), tools.twins(), buffer=buffer)
    collector.pre_collect_hook = hook
    assert done.wait(tools.LIMIT)
    assert results == [1]
    buffer.reach(buffer.write_count + 60)


def test_shutdown_from_inside_the_thread(tools, started):
    env = CountingEnv(max_steps=9)
    collector, _ = started(env)
    thread = collector._background.thread._thread
    collector.pre_collect_hook = collector.shutdown
    thread.join(tools.LIMIT)
    assert not thread.is_alive()
    assert env.is_closed
    collector.shutdown()


def test_exploration_types_of_threads_do_not_mix(tools, started):
    """Evaluation in the learner's thread, in another mode, does not change what the collector does."""
    seen = set()
    called = threading.Event()

    def policy(td):
        seen.add(exploration_type())
        called.set()
        return td.set("action", torch.ones(1, dtype=torch.int8))

    with set_interaction_type(ExplorationType.MODE):
        collector, buffer = started(CountingEnv(max_steps=9), policy)
        assert called.wait(tools.LIMIT)
        for _ in range(50):
            with set_interaction_type(ExplorationType.MEAN):
                assert exploration_type() is ExplorationType.MEAN
            buffer.reach(buffer.write_count + 1)
        assert exploration_type() is ExplorationType.MODE
        collector.async_shutdown()
    assert seen == {ExplorationType.RANDOM}


class Busy:
    """A policy that multiplies matrices, and notes what CPU time other threads of the process took meanwhile."""

    def __init__(self):
        self.own = self.others = 0.0
        self.measured = threading.Event()
        self.layer, self.x = nn.Linear(256, 256), torch.randn(64, 256)

    def __call__(self, td):
        process, thread = time.process_time(), time.thread_time()
        for _ in range(300):
            self.layer(self.x)
        self.own = time.thread_time() - thread
        self.others = time.process_time() - process - self.own
        self.measured.set()
        return td.set("action", torch.ones(1, dtype=torch.int8))

    def __deepcopy__(self, memo):
        return self


def test_the_thread_uses_as_many_threads_of_torch_as_the_program_does(tools, started):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        policy = Busy()
        with pytest.warns(UserWarning, match="weights that may change"):  # it says that it is its own copy
            collector, _ = started(CountingEnv(max_steps=9), policy, frames_per_batch=2)
        assert policy.measured.wait(tools.LIMIT)
        collector.async_shutdown()
        assert policy.others < 0.3 * policy.own
    finally:
        torch.set_num_threads(before)
