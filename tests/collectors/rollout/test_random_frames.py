"""What batches of random actions hold, and what the look at the policy that tells changes: nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Normal

from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.envs import GymEnv
from rollwright.errors import PolicyError

FRAMES = {"frames_per_batch": 4, "init_random_frames": 4}


def pendulum():
    return GymEnv("Pendulum-v1")


def gaussian():
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    draw = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Normal, return_log_prob=True)
    return TensorDictSequential(TensorDictModule(net, ["observation"], ["loc", "scale"]), draw)


def forms(batch):
    return {key: (batch.get(key).shape, batch.get(key).dtype) for key in batch.keys(True, True)}


class Noisy(TensorDictModuleBase):
    """Has all that a call can change: a counter, a buffer, generators of its own, and the global ones."""

    in_keys, out_keys = ["observation"], ["action"]

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("mean", torch.zeros(3))
        self.own, self.other = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def forward(self, td):
        self.calls += 1
        self.seen.append(self.calls)
        self.mean += td["observation"]
        noise = torch.rand(1, generator=self.own) + self.other.random() + random.random() + np.random.random()
        td["noise"] = (noise + torch.rand(1)).float()
        td["mean"], td["calls"] = self.mean.clone(), torch.tensor(self.calls)
        return td.set("action", torch.zeros(1))


def numbers():
    return torch.rand(1).item(), np.random.random(), random.random()


@pytest.mark.parametrize("native", [True, False])
def test_a_module_does_not_notice_the_look(make, native):
    found = []
    for frames in (4, 0):
        policy = Noisy()
        collector = make(pendulum, policy, frames_per_batch=4, init_random_frames=frames, use_buffers=native or None)
        collector.set_seed(0)
        np.random.seed(0)
        random.seed(0)
        if frames:
            batch = collector.next()
            assert (policy.calls, policy.seen, policy.mean.any().item()) == (0, [], False)
            assert not any(batch[key].any() for key in ("noise", "mean", "calls"))
        torch.manual_seed(0)
        found.append(collector.next()["noise"])
        assert policy.calls == 4
    assert torch.equal(*found)


def test_global_generators_are_as_if_nothing_was_called(make):
    drawn = []
    for policy in (Noisy(), None):
        collector = make(pendulum, policy, **FRAMES)
        collector.set_seed(0)
        np.random.seed(0)
        random.seed(0)
        collector.next()
        drawn.append(numbers())
    assert drawn[0] == drawn[1]


def test_modules_that_take_shape_at_their_first_call_take_it_at_construction(make):
    policy = TensorDictModule(nn.LazyLinear(1), ["observation"], ["action"])
    collector = make(pendulum, policy, **FRAMES)
    optimizer = torch.optim.Adam(policy.parameters())
    assert policy.module.weight.shape == (1, 3)
    before = policy.module.weight.clone()
    collector.next()
    assert forms(collector.next()) == forms(collector.next())
    policy(TensorDict(observation=torch.ones(3)))["action"].sum().backward()
    optimizer.step()
    assert not torch.equal(policy.module.weight, before)


def test_zeros_need_not_be_enough_for_modules_to_take_shape(make):
    def checked(observation):
        assert observation.any()
        return observation

    policy = TensorDictModule(nn.Sequential(Called(checked), nn.LazyLinear(1)), ["observation"], ["action"])
    assert make(pendulum, policy, frames_per_batch=2).next().shape == (2,)
    assert policy.module[1].weight.shape == (1, 3)


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


class Agent:
    """Holds what nobody would copy."""

    def __init__(self):
        self.calls, self.norm = 0, nn.BatchNorm1d(3, affine=False)

    def __deepcopy__(self, memo):
        raise AssertionError("copied")

    def act(self, observation):
        self.calls += 1
        return self.norm(observation.expand(2, 3))[0, :1]

    def __call__(self, td):
        return td.set("action", self.act(td["observation"])).set("value", torch.ones(1))


@pytest.mark.parametrize("wrapped", [False, True])
def test_another_object_is_called_once_and_its_modules_do_not_notice(make, wrapped):
    agent = Agent()
    policy = TensorDictModule(agent.act, ["observation"], ["action"]) if wrapped else agent
    collector = make(pendulum, policy, **FRAMES)
    collector.next()
    assert agent.calls == 1
    assert int(agent.norm.num_batches_tracked) == 0
    collector.next()
    assert agent.calls == 5


def test_a_module_that_cannot_be_copied_is_called_itself_and_its_buffers_are_put_back(make):
    class Stubborn(Noisy):
        def __deepcopy__(self, memo):
            raise TypeError("no")

    policy = Stubborn()
    collector = make(pendulum, policy, **FRAMES)
    collector.next()
    assert (policy.calls, policy.mean.any().item()) == (1, False)


@pytest.mark.parametrize("native", [True, False])
def test_objects_and_nests_and_dtypes(make, native):
    def policy(td):
        td["words"], td["few"] = "left", torch.ones(2, dtype=torch.bfloat16)
        td["agents"] = TensorDict({"logits": torch.ones(5, 2)}, [5])
        return td.set("action", torch.zeros(1, dtype=torch.float64))

    collector = make(pendulum, policy, use_buffers=None if native else False, **FRAMES)
    collector.set_seed(0)
    random_, acted = collector.next(), collector.next()
    assert forms(random_.exclude("words")) == forms(acted.exclude("words"))
    assert (random_["words"], acted["words"]) == ([""] * 4, ["left"] * 4)
    assert random_["agents"].batch_size == acted["agents"].batch_size == (4, 5)
    assert random_["action"].dtype == torch.float64
    assert len(random_["action"].unique()) == 4
    assert not random_["few"].any()
    assert not random_["agents", "logits"].any()


def test_actions_are_not_converted_where_that_would_lose_them(make):
    collector = make(pendulum, lambda td: td.set("action", torch.zeros(1, dtype=torch.int64)), **FRAMES)
    batch = collector.next()
    assert batch["action"].dtype == torch.float32
    assert len(batch["action"].unique()) == 4


def test_a_run_that_is_resumed_among_random_frames_goes_on_with_the_same_bits(make, same):
    options = {"frames_per_batch": 4, "init_random_frames": 12}
    first, second = make(pendulum, gaussian(), **options), make(pendulum, gaussian(), **options)
    first.set_seed(0)
    first.next()
    state = first.state_dict()
    expected = [first.next(), first.next(), first.next()]
    second.load_state_dict(state)
    for batch in expected:
        same(second.next(), batch)


def test_what_a_policy_does_wrong_is_raised_before_random_frames_are_taken(make):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    collector = make(pendulum, lambda td: td.set("action", torch.zeros(7)), replay_buffer=buffer, **FRAMES)
    with pytest.raises(PolicyError, match=r"'action' with shape \[7\]"):
        collector.next()
    assert len(buffer) == 0
