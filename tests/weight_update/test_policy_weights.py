"""Which modules a policy reads, under which names, and what it does not read."""

from __future__ import annotations

import functools
import pickle
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from tests.policy_ways import WAYS, Learned, every_way
from torch import nn

from rollwright._processes.channel import dumps
from rollwright.envs import GymEnv
from rollwright.weight_update.forms import flat_state, prepare
from rollwright.weight_update.policy_weights import JoinedWeights, weights_of

net = nn.Linear(1, 1)


def reads(x):
    return net(x)


def around(call, out="action"):
    return TensorDictModule(call, in_keys=["observation"], out_keys=[out])


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("module", "hidden submodule", "global variable")])
def test_weights_of_one_module_have_its_names(way):
    learned = Learned(1.0)
    policy = around(WAYS[way](learned))
    assert list(flat_state(policy, "policy")) == ["value"]
    prepare(policy, {"value": torch.tensor(3.0)}, "policy")()
    assert learned.value.item() == 3.0


def test_a_module_that_reads_no_other_is_itself():
    policy = TensorDictSequential(around(nn.Linear(2, 1)), around(lambda x: nn.functional.relu(x)))
    assert weights_of(policy) is policy


def test_global_variables_and_those_of_methods():
    assert weights_of(reads) is net

    class Agent:
        def act(self, x):
            return self.helper(x)

        def helper(self, x):
            return net(x)

    class Module(nn.Module):
        def forward(self, x):
            return net(x)

    assert weights_of(around(Agent().act)) is net
    assert weights_of(around(Module())) is net
    assert weights_of(lambda agent: agent.net) is None  # an attribute of that name is no variable


def test_weights_of_several_follow_the_path_to_them():
    agent = SimpleNamespace(actor=nn.Linear(1, 1, bias=False))
    head, scale = nn.Linear(1, 1, bias=False), nn.Parameter(torch.ones(1))
    policy = TensorDictSequential(
        around(nn.Linear(1, 1, bias=False)),
        around(lambda x: head(agent.actor(x)) * scale),
        around(functools.partial(torch.mul, scale)),
    )
    names = ["module.0.module.weight", "module.1.module.agent.actor.weight", "module.1.module.head.weight"]
    found = weights_of(policy)
    assert isinstance(found, JoinedWeights)
    assert list(found.state_dict()) == [*names, "module.1.module.scale"]
    found.load_state_dict({name: value + 1 for name, value in found.state_dict().items()})
    assert scale.item() == 2.0
    assert {name for name, _ in found.named_parameters()} == set(found.state_dict())
    with pytest.raises(ValueError, match=r"Missing: 'module.1.module.head.weight'.*Pass the policy itself"):
        prepare(policy, {name: v for name, v in found.state_dict().items() if "head" not in name}, "policy")


def test_the_module_around_others_that_are_read_gives_the_names():
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Linear(1, 1), nn.Linear(1, 1)

        def act(self, x):
            return self.head(x)

    agent = Agent()
    assert weights_of(TensorDictSequential(around(agent.encoder, "x"), around(agent.act))) is agent


def test_environments_and_optimizers_are_not_searched():
    env, learned = GymEnv("CartPole-v1"), Learned(1.0)
    env.critic = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())

    def act(td):
        return env.action_spec, optimizer, learned.act(td["observation"])

    assert weights_of(act) is learned


def test_functions_without_any_weights():
    assert weights_of(lambda td: td) is None
    assert weights_of(around(lambda x: -x)) is None
    stateless = around(nn.Tanh())
    assert weights_of(stateless) is stateless
    with pytest.raises(TypeError, match="expected a module, a TensorDict or a state_dict, got int"):
        flat_state(3, "policy")


def test_a_pickle_keeps_what_functions_share():
    policy, _ = every_way(2.0)
    copied = pickle.loads(dumps(policy))
    assert list(weights_of(copied).state_dict()) == list(weights_of(policy).state_dict())
    with torch.no_grad():
        for parameter in weights_of(copied).parameters():
            parameter.fill_(5.0)
    td = copied(TensorDict(observation=torch.zeros(3)))
    assert all(td[way].max().item() == 5.0 for way in WAYS)
