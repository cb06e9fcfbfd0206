"""Policies that are never copied, such as those that hold an engine of a language model."""

from __future__ import annotations

import copy
import io
import pickle
import time

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from tests.patience import patient
from torch import nn

from rollwright.collectors import Evaluator, MultiSyncCollector
from rollwright.collectors.rollout.policy import copied_policy
from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.testing.mocking_classes import CountingEnv


def wait_until(condition):
    end = time.monotonic() + patient(20)
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


class Engine(nn.Module):
    """Acts with a weight; cannot be copied, nor sent."""

    never_copied = True

    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, observation):
        self.calls += 1
        return self.weight.round().int().expand(observation.shape).clone()

    def __deepcopy__(self, memo):
        raise TypeError("an engine is never copied")

    def __reduce_ex__(self, protocol):
        raise TypeError("an engine is never pickled")


class Wrapper:
    """A callable around an engine."""

    def __init__(self):
        self.engine = Engine()

    def __call__(self, td):
        return td.set("action", self.engine(td["observation"]))


class EngineItself(Engine):
    """An engine that speaks TensorDict."""

    def forward(self, tensordict):
        return tensordict.set("action", super().forward(tensordict["observation"]))


def module():
    return TensorDictModule(Engine(), in_keys=["observation"], out_keys=["action"])


def sequence():
    first = TensorDictModule(nn.Linear(1, 1), in_keys=["reading"], out_keys=["hidden"])
    reading = TensorDictModule(lambda x: x.float(), in_keys=["observation"], out_keys=["reading"])
    return TensorDictSequential(reading, first, module())


def method():
    return Wrapper().__call__


POLICIES = {"itself": EngineItself, "callable": Wrapper, "module": module, "sequence": sequence, "method": method}


def engine_of(policy):
    if isinstance(policy, Engine):
        return policy
    if isinstance(policy, nn.Module):
        return next(part for part in policy.modules() if isinstance(part, Engine))
    return getattr(policy, "__self__", policy).engine


@pytest.fixture(params=POLICIES)
def policy(request):
    return POLICIES[request.param]()


def test_the_engines_of_these_tests_refuse():
    for call in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="never"):
            call(Wrapper())


def test_a_collector_acts_with_the_engine_itself(make, policy):
    collector = make(CountingEnv(max_steps=9), policy, frames_per_batch=5, device="cpu", init_random_frames=5)
    engine = engine_of(policy)
    collector.next()
    with torch.no_grad():
        engine.weight.zero_()
    batch = collector.next()
    assert engine_of(collector.policy) is engine
    assert not batch["action"].any()
    assert int(engine.calls) >= 5


def test_the_thread_acts_with_the_engine_itself(make, policy):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100_000))
    collector = make(CountingEnv(max_steps=9), policy, frames_per_batch=5, total_frames=-1, replay_buffer=buffer)
    engine = engine_of(policy)
    collector.start()
    wait_until(lambda: len(buffer) >= 20)
    assert engine_of(collector.policy) is engine
    with torch.no_grad():
        engine.weight.zero_()  # as an engine does that takes new weights by itself
    count = len(buffer)
    wait_until(lambda: len(buffer) >= count + 20)
    collector.async_shutdown()
    actions = buffer[:]["action"].flatten()
    assert actions[:5].all()
    assert not actions[-5:].any()


def test_what_is_not_the_engine_is_copied():
    policy = sequence()
    copied = copied_policy(policy)
    assert engine_of(copied.policy) is engine_of(policy)
    assert copied.policy is not policy
    assert copied.policy[1].module.weight is not policy[1].module.weight
    assert not copied.shares_modules


def test_a_saved_state_is_without_the_engine(make, policy, request):
    def build(one):
        return make(CountingEnv(max_steps=9), one, frames_per_batch=5, total_frames=100)

    collector = build(policy)
    collector.next()
    state = collector.state_dict()
    keys = list(state.get("policy_state_dict", {}))
    assert not [key for key in keys if "calls" in key]
    assert len(keys) == (2 if isinstance(policy, TensorDictSequential) else 0)
    assert state["unsaved"] == []
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    expected = collector.next()
    fresh = POLICIES[request.node.callspec.params["policy"]]()
    collector = build(fresh)
    engine_of(fresh).calls.fill_(77)
    collector.load_state_dict(state)
    assert int(engine_of(fresh).calls) == 77
    assert torch.equal(collector.next()["observation"], expected["observation"])


def test_an_evaluator_acts_with_the_engine_itself(policy):
    engine = engine_of(policy)
    with Evaluator(CountingEnv, policy, num_trajectories=2, max_steps=4) as evaluator:
        evaluator.evaluate()
    assert int(engine.calls) > 0


def test_an_engine_is_not_sent_to_a_process(policy):
    with pytest.raises(TypeError, match=r"policy: .*Engine.* never copied.*policy_factory"):
        MultiSyncCollector([CountingEnv] * 2, policy, frames_per_batch=10)
    with pytest.raises(TypeError, match=r"policy: .*Engine.* never copied.*policy_factory"):
        Evaluator(CountingEnv, policy, num_trajectories=2, max_steps=4, backend="process")


def test_workers_make_engines_of_their_own(make):
    collector = make(
        [CountingEnv] * 2, cls=MultiSyncCollector, policy_factory=module, frames_per_batch=12, total_frames=24
    )
    for batch in collector:
        assert batch["action"].all()
