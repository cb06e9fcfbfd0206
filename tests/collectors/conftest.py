"""Collectors that are shut down after each test, and policies for the environments that tests step."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright.collectors import Collector


@pytest.fixture
def make():
    """``make(env, policy, **options)``: a Collector (or ``cls``) that ends with the test."""
    made = []

    def build(*args, cls=Collector, **options):
        collector = cls(*args, **options)
        made.append(collector)
        return collector

    yield build
    for collector in made:
        collector.shutdown()


class OneHotActor(nn.Module):
    """Deterministic: the argmax of a linear layer, as a one-hot action of two."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        weights = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            self.linear.weight.copy_(weights)
            self.linear.bias.zero_()

    def forward(self, observation):
        return nn.functional.one_hot(self.linear(observation).argmax(-1), 2)


@pytest.fixture
def cartpole_actor():
    """``cartpole_actor(seed)``: a TensorDictModule for CartPole-v1."""

    def build(seed: int = 0):
        return TensorDictModule(OneHotActor(seed), in_keys=["observation"], out_keys=["action"])

    return build


@pytest.fixture
def pendulum_actor():
    """``pendulum_actor(gain)``: a TensorDictModule for Pendulum-v1, torque ``gain * cos(theta)``."""

    def build(gain: float = 1.0):
        linear = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor([[gain, 0.0, 0.0]]))
        return TensorDictModule(linear, in_keys=["observation"], out_keys=["action"])

    return build


@pytest.fixture
def count():
    """``count(env)``: a policy that adds one with every step of a counting environment."""

    def build(env):
        def policy(td):
            return td.set("action", torch.ones_like(env.action_spec.zero()))

        return policy

    return build


@pytest.fixture
def same():
    """``same(left, right)``: two batches have equal entries, apart from those named."""

    def compare(left, right, *, but=()):
        left, right = left.exclude(*but), right.exclude(*but)
        keys = set(left.keys(True, True))
        assert keys == set(right.keys(True, True))
        for key in keys:
            assert left[key].dtype == right[key].dtype, key
            assert torch.equal(left[key], right[key]), key  # no entry of these tests is NaN

    return compare


@pytest.fixture
def stream():
    """``stream(batches)``: batches joined along time."""

    def join(batches):
        batches = list(batches)
        return torch.cat(batches, batches[0].ndim - 1)

    return join


@pytest.fixture
def weights_of():
    """``weights_of(module)``: its parameters as a nested TensorDict."""

    def build(module):
        return TensorDict.from_module(module).data.clone()

    return build
