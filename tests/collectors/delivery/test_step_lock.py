"""Threads that use one collector in one process: each batch is whole, and weights change between two steps."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from tests.collectors.workers.processes import wait_until
from torch import nn

from rollwright import Collector, GymEnv
from rollwright.collectors.delivery import thread as delivery_thread

SIZE = 20_000


class Net(nn.Module):
    """Writes four numbers of its weights, which are alike in each version."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(SIZE)) for _ in range(2))

    def forward(self, obs):
        return torch.stack([self.a[0], self.a[-1], self.b[0], self.b[-1]])


def acting() -> TensorDictSequential:
    still = TensorDictModule(lambda seen: seen[:1] * 0, ["seen"], ["action"])
    return TensorDictSequential(TensorDictModule(Net(), ["observation"], ["seen"]), still)


def beside(work: Callable[[], None], collect: Callable[[], None]) -> None:
    """Do something again and again in another thread, while this one collects."""
    stop, errors = threading.Event(), []

    def run():
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=run)
    other.start()
    try:
        collect()
    finally:
        stop.set()
        other.join(30)
    assert not other.is_alive()
    if errors:
        raise errors[0]


def impossible(batch) -> int:
    """How many transitions CartPole does not make."""
    here, speed, there = (
        batch["observation"][..., 0],
        batch["observation"][..., 1],
        batch["next", "observation"][..., 0],
    )
    return int(((there - (here + 0.02 * speed)).abs() > 1e-5).sum())


@pytest.mark.parametrize("use_buffers", [None, False])
def test_weights_of_another_thread_come_into_force_between_two_steps(use_buffers):
    options = {"frames_per_batch": 100, "track_policy_version": True, "use_buffers": use_buffers}
    collector, versions, mixed = Collector(lambda: GymEnv("Pendulum-v1"), acting(), **options), [], 0

    def publish():
        weights = {f"module.0.module.{name}": torch.full((SIZE,), float(len(versions) + 1)) for name in "ab"}
        versions.append(collector.update_policy_weights_(weights))

    def collect():
        nonlocal mixed
        for _ in range(10):
            batch = collector.next()
            mixed += int((batch["seen"] != batch["policy_version"].reshape(-1, 1)).any(-1).sum())
            if batch["policy_version"].unique().numel() > 1:
                changed_inside.append(True)

    changed_inside: list[bool] = []
    beside(publish, collect)
    collector.shutdown()
    assert mixed == 0
    assert versions == list(range(1, len(versions) + 1))
    assert changed_inside


def test_each_batch_goes_to_one_thread():
    collector = Collector(lambda: GymEnv("CartPole-v1"), frames_per_batch=20, total_frames=2000)
    taken: list[list[int]] = [[], []]

    def take(mine):
        while (batch := collector.next()) is not None:
            assert impossible(batch) == 0
            mine.append(batch.numel())

    threads = [threading.Thread(target=take, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(map(sum, taken)) == 2000 == collector.stats()["frames"]


@pytest.mark.parametrize("control", ["reset", "set_seed", "state_dict", "fake_tensordict"])
def test_calls_of_another_thread_wait_for_the_end_of_the_batch(control):
    collector = Collector(lambda: GymEnv("CartPole-v1", num_envs=2), frames_per_batch=40)
    states, wrong = [], 0

    def call():
        found = getattr(collector, control)(*([0] if control == "set_seed" else []))
        states.append(copy.deepcopy(found))

    def collect():
        nonlocal wrong
        while len(states) < 20:
            wrong += impossible(collector.next())

    beside(call, collect)
    collector.shutdown()
    if control == "state_dict":
        for state in states[:20]:
            other = Collector(lambda: GymEnv("CartPole-v1", num_envs=2), frames_per_batch=40)
            other.load_state_dict(state)
            wrong += impossible(other.next())
            other.shutdown()
    assert wrong == 0


def test_a_hook_that_waits_for_who_publishes_holds_nobody_up():
    published = threading.Event()
    collector = Collector(
        lambda: GymEnv("Pendulum-v1"), acting(), frames_per_batch=10, post_collect_hook=lambda _: published.wait(20)
    )
    inside = threading.Event()
    collector.set_pre_collect_hook(inside.set)

    def publish():
        assert inside.wait(20)
        collector.update_policy_weights_({f"module.0.module.{name}": torch.ones(SIZE) for name in "ab"})
        published.set()

    other = threading.Thread(target=publish)
    other.start()
    collector.next()
    other.join(20)
    assert published.is_set()
    assert collector.policy_version == 1
    collector.shutdown()


def test_a_step_that_does_not_end_is_an_error_for_who_waits(monkeypatch):
    monkeypatch.setattr(delivery_thread, "WAIT_S", 0.1)
    begun, go_on = threading.Event(), threading.Event()

    def stuck(obs):
        begun.set()
        go_on.wait(20)
        return obs[..., :1] * 0

    net = nn.Linear(3, 1)
    policy = TensorDictSequential(
        TensorDictModule(net, ["observation"], ["x"]), TensorDictModule(stuck, ["observation"], ["action"])
    )
    collector = Collector(lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=2)
    other = threading.Thread(target=collector.next)
    other.start()
    try:
        assert begun.wait(20)
        before = net.weight.detach().clone()
        with pytest.raises(TimeoutError, match=r"waited 0\.1 s for a step of another thread to end"):
            collector.update_policy_weights_({key: value + 7 for key, value in policy.state_dict().items()})
    finally:
        go_on.set()
        other.join(20)
    assert torch.equal(net.weight, before)
    assert collector.policy_version == 0
    collector.shutdown()


def test_an_interrupt_in_one_call_of_another_thread_loses_no_other():
    collector, found = Collector(lambda: GymEnv("Pendulum-v1"), acting(), frames_per_batch=2), []
    asked = collector._background.step_lock
    calls = [lambda: found.append("first"), lambda: (_ for _ in ()).throw(KeyboardInterrupt), lambda: found.append(3)]
    rollout = collector._rollout
    with rollout.stepping:  # as in the middle of a batch
        threads = [threading.Thread(target=suppressed, args=(asked.between_steps, call)) for call in calls]
        for number, thread in enumerate(threads, 1):
            thread.start()
            assert wait_until(lambda number=number: len(asked._jobs) == number)
        with pytest.raises(KeyboardInterrupt):
            rollout.interrupted()
        assert not rollout.interrupted()  # the next step
    for thread in threads:
        thread.join(20)
    assert found == ["first", 3]
    assert rollout.interrupted is None
    collector.shutdown()


def suppressed(function, *args):
    with contextlib.suppress(KeyboardInterrupt):
        function(*args)
