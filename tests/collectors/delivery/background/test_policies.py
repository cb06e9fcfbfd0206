"""Policies that are no modules: what of them the thread copies, and what update_policy_weights_() publishes."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from tests.policy_ways import WAYS, every_way
from torch import nn

from rollwright.envs import GymEnv
from rollwright.testing.mocking_classes import CountingEnv


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def act(self, td):
        td.set("action", torch.ones(1, dtype=torch.int8))
        return td.set("w", self.w.detach().clone())

    def acts(self, observation):
        return torch.ones(1, dtype=torch.int8), self.w.detach().clone()


class Uncopied(Net):
    def __deepcopy__(self, memo):
        raise TypeError("never")


class Around:
    def __init__(self, net):
        self.parts = {"net": [net]}

    def __call__(self, td):
        return self.parts["net"][0].act(td)

    def act(self, td):
        return self(td)


class Two(Around):
    def __init__(self, net):
        super().__init__(net)
        self.other = nn.Linear(1, 1)


WORLD = {}


def reads_globals(td):
    return WORLD["net"].act(td)


COPIED = {
    "bound method": lambda net: net.act,
    "object": Around,
    "bound method of an object": lambda net: Around(net).act,
    "partial": lambda net: functools.partial(Net.act, net),
    "several modules": Two,
    "globals": lambda net: WORLD.update(net=net) or reads_globals,
    "closure": lambda net: lambda td: net.act(td),
    "closure of a closure": lambda net: torch.no_grad()(lambda td: (lambda: net.act(td))()),
    "list in a closure": lambda net, boxed=None: (lambda boxed: lambda td: boxed[0].act(td))([net]),
    "defaults": lambda net: lambda td, boxed=(net,): boxed[0].act(td),
    "partial of a function": lambda net: functools.partial(lambda td: net.act(td)),
    "parameter in a closure": lambda net, w=None: (lambda w: lambda td: Net.act(Reads(w), td))(net.w),
    "two modules around one agent": lambda net: TensorDictSequential(
        TensorDictModule(lambda seen: net.w.detach() * 0 + seen.sum() * 0, ["observation"], ["zero"]),
        TensorDictModule(net.acts, ["observation"], ["action", "w"]),
    ),
    "hidden in a module": lambda net: HidesIt(net),
}


class Reads:
    def __init__(self, w):
        self.w = w


class HidesIt(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.own, self.hidden = nn.Linear(1, 1), [net]

    def forward(self, td):
        return self.hidden[0].act(td)


def around_a_lock(net, lock):
    def act(td):
        with lock:
            return net.act(td)

    return act


def newest(buffer):
    return float(buffer[-1]["w"])


@pytest.mark.parametrize("kind", COPIED)
def test_the_modules_in_it_are_copied_and_published(started, kind):
    net = Net()
    policy = COPIED[kind](net)
    collector, buffer = started(CountingEnv(max_steps=9), policy, track_policy_version=True)
    buffer.reach(20)
    with torch.no_grad():
        net.w.fill_(5.0)
    buffer.reach(buffer.write_count + 60)
    assert newest(buffer) == 0.0
    assert collector.update_policy_weights_() == 1
    buffer.reach(buffer.write_count + 60)
    collector.async_shutdown()
    found = buffer[:]
    assert (found["w"].flatten() == 5.0 * found["policy_version"].flatten()).all()
    assert newest(buffer) == 5.0


def test_weights_of_its_only_module_may_be_given(started):
    net = Net()
    collector, buffer = started(CountingEnv(max_steps=9), net.act)
    collector.update_policy_weights_({"w": torch.full((1,), 3.0)})
    buffer.reach(100)
    collector.async_shutdown()
    assert newest(buffer) == 3.0


def test_what_cannot_be_copied_is_said(started):
    policy = around_a_lock(Uncopied(), threading.Lock())
    with pytest.warns(UserWarning, match="weights that may change in the middle"):
        collector, _ = started(CountingEnv(max_steps=9), policy)
    assert collector.update_policy_weights_() == 1
    collector.async_shutdown()


def test_a_copied_function_shares_what_leads_to_no_weights(started):
    net, seen = Net(), []

    def policy(td):
        seen.append(1)
        return net.act(td)

    collector, buffer = started(CountingEnv(max_steps=9), policy)
    buffer.reach(20)
    collector.async_shutdown()
    assert len(seen) >= 20


def test_nothing_to_publish_is_an_error_and_counts_no_version(started):
    def policy(td):
        return td.set("action", torch.ones(1, dtype=torch.int8))

    collector, _ = started(CountingEnv(max_steps=9), policy)
    with pytest.raises(RuntimeError, match=r"no module in the policy \(function\)"):
        collector.update_policy_weights_()
    assert collector.policy_version == 0
    assert collector.increment_version() == 1
    collector.async_shutdown()


def test_versions_go_on_from_a_state_that_is_loaded(started, tools):
    policy = tools.twins()
    collector, buffer = started(CountingEnv(max_steps=9), policy, track_policy_version=True)
    for version in (1, 2, 3):
        assert collector.update_policy_weights_() == version
    state = collector.state_dict()
    restored, buffer = started(CountingEnv(max_steps=9), tools.twins(), track_policy_version=True)
    restored.load_state_dict(state)
    assert restored.policy_version == 3
    assert restored.update_policy_weights_() == 4
    buffer.reach(buffer.write_count + 60)
    restored.async_shutdown()
    assert int(buffer[-1]["policy_version"]) == 4


def test_a_thread_and_a_state_in_one_process_have_the_weights_of_every_way(started):
    policy, learned = every_way(0.0)
    collector, buffer = started(GymEnv("Pendulum-v1"), policy)
    with torch.no_grad():
        for module in learned:
            module.value.fill_(4.0)
    buffer.reach(buffer.write_count + 60)
    assert {float(buffer[-1][way].max()) for way in WAYS} == {0.0}
    collector.update_policy_weights_()
    buffer.reach(buffer.write_count + 60)
    collector.async_shutdown()
    assert {float(buffer[-1][way].max()) for way in WAYS} == {4.0}
    state = copy.deepcopy(collector.state_dict())
    restored, buffer = started(GymEnv("Pendulum-v1"), every_way(0.0)[0])
    restored.load_state_dict(state)
    buffer.reach(buffer.write_count + 60)
    restored.async_shutdown()
    assert {float(buffer[-1][way].max()) for way in WAYS} == {4.0}


def test_of_a_state_in_one_process(make):
    policy, learned = every_way(0.0)
    collector = make(GymEnv("Pendulum-v1"), policy, frames_per_batch=4)
    with torch.no_grad():
        for module in learned:
            module.value.fill_(4.0)
    batch = collector.next()
    assert {float(batch[way].max()) for way in WAYS} == {4.0}
    state = copy.deepcopy(collector.state_dict())
    other = make(GymEnv("Pendulum-v1"), every_way(0.0)[0], frames_per_batch=4)
    other.load_state_dict(state)
    batch = other.next()
    assert {float(batch[way].max()) for way in WAYS} == {4.0}
