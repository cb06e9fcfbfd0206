"""Indices that policies write where an environment takes one-hot actions."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictSequential,
)
from tensordict.nn import TensorDictModule as Mod
from tests.variants import in_turn
from torch import distributions, nn

from rollwright.collectors import Collector, MultiSyncCollector
from rollwright.data import Categorical, Composite, OneHot, Unbounded
from rollwright.envs import (
    CategoricalAction,
    EnvBase,
    GymEnv,
    GymWrapper,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from rollwright.errors import EnvError, PolicyError
from rollwright.modules import EGreedyModule, MaskedCategorical, QValueModule


class Echo(gymnasium.Env):
    """Observes the action that it was given, of three."""

    observation_space = gymnasium.spaces.Box(0, 3, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(3, np.float32), {}

    def step(self, action):
        return (
            self.np_random.random(3, np.float32) + np.eye(3, dtype=np.float32)[action],
            float(action),
            False,
            False,
            {},
        )


class OwnEcho(EnvBase):
    """The same, as an environment of a user's own."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((3,)))
        self.action_spec, self.reward_spec = OneHot(3, dtype=torch.int64), Unbounded((1,))

    def _reset(self, tensordict=None, **kwargs):
        return self._found(torch.zeros(1)).exclude("reward")

    def _step(self, tensordict):
        return self._found(tensordict["action"].argmax(-1, keepdim=True).float())

    def _found(self, reward):
        found = self.full_observation_spec.rand()
        return found.update({"reward": reward, "done": torch.zeros(1, dtype=torch.bool)})

    def _set_seed(self, seed):
        torch.manual_seed(seed or 0)


ENVS = {
    "gymnasium": lambda: GymWrapper(Echo()),
    "with transforms": lambda: TransformedEnv(GymWrapper(Echo()), StepCounter(5)),
    "in turn": lambda: SerialEnv(2, lambda: GymWrapper(Echo())),
    "own": OwnEcho,
    "own in turn": lambda: SerialEnv(2, OwnEcho),
}


def values():
    torch.manual_seed(3)
    return Mod(nn.Linear(3, 3), ["observation"], ["action_value"])


def greedy():
    return TensorDictSequential(values(), QValueModule("categorical"))


def exploring():
    return TensorDictSequential(greedy(), EGreedyModule(Categorical(3), eps_init=0.5, eps_end=0.5))


def drawing():
    torch.manual_seed(3)
    logits = Mod(nn.Linear(3, 3), ["observation"], ["logits"])
    options = {"distribution_class": distributions.Categorical, "default_interaction_type": InteractionType.RANDOM}
    draw = ProbabilisticTensorDictModule(["logits"], ["action"], **options)
    return ProbabilisticTensorDictSequential(logits, draw)


def masked():
    torch.manual_seed(3)
    mask = Mod(lambda x: x > x.min(-1, keepdim=True).values, ["observation"], ["mask"])
    logits = Mod(nn.Linear(3, 3), ["observation"], ["logits"])
    options = {"distribution_class": MaskedCategorical, "default_interaction_type": InteractionType.RANDOM}
    draw = ProbabilisticTensorDictModule(["logits", "mask"], ["action"], **options)
    return ProbabilisticTensorDictSequential(mask, logits, draw)


def choosing():
    return TensorDictSequential(values(), Mod(lambda x: x.argmax(-1), ["action_value"], ["action"]))


class Choosing(nn.Module):
    """A module of a user's own that returns an index."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, observation):
        self.calls += 1
        return self.layer(observation).argmax(-1)


POLICIES = {
    "greedy": greedy,
    "exploring": exploring,
    "drawing": drawing,
    "masked": masked,
    "a function": choosing,
    "a module": Choosing,
}


def collect(make, policy, **options):
    env = make()
    env.set_seed(0)
    torch.manual_seed(5)
    with Collector(env, policy, frames_per_batch=16, total_frames=48, **options) as collector:
        batch = torch.cat([each.clone() for each in collector], -1)
        return batch, collector.stats()["paths"]["env"]


@pytest.mark.parametrize(("name", "policy"), in_turn(ENVS, list(POLICIES)))
def test_what_was_written_is_recorded_and_played(name, policy):
    arrays, how = collect(ENVS[name], POLICIES[policy](), init_random_frames=16)
    plain, _ = collect(ENVS[name], POLICIES[policy](), init_random_frames=16, use_buffers=False)
    assert how.startswith("native")
    assert arrays["action"].dtype == torch.int64
    assert arrays["action"].shape == arrays.shape
    assert len(arrays["action"].unique()) > 1
    assert torch.equal(arrays["next", "reward"].squeeze(-1), arrays["action"].float())
    assert set(arrays.keys(True, True)) == set(plain.keys(True, True))
    for key in plain.keys(True, True):
        assert torch.equal(arrays[key], plain[key]), key


def test_workers_have_it_too():
    with MultiSyncCollector([ENVS["gymnasium"]] * 2, greedy(), frames_per_batch=20, total_frames=20) as collector:
        batch = collector.next()
    assert torch.equal(batch["next", "reward"].squeeze(-1), batch["action"].float())


def one_hot_again(index):
    return nn.functional.one_hot(index, 3)


class Around(nn.Module):
    """A module of a user's own around a policy, whose actions it converts."""

    in_keys, out_keys = ("observation",), ("action",)

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, tensordict):
        tensordict = self.policy(tensordict)
        return tensordict.set("action", one_hot_again(tensordict["action"]))


@pytest.mark.parametrize(
    ("make", "policy", "shape"),
    [
        (lambda: GymWrapper(Echo()), Around(greedy()), (3,)),
        (lambda: GymWrapper(Echo()), TensorDictSequential(greedy(), Mod(one_hot_again, ["action"], ["action"])), (3,)),
        (lambda: GymWrapper(Echo()), TensorDictSequential(values(), QValueModule("one_hot")), (3,)),
        (lambda: GymWrapper(Echo(), categorical_action_encoding=True), greedy(), ()),
        (lambda: TransformedEnv(GymWrapper(Echo()), CategoricalAction()), greedy(), ()),
    ],
    ids=["one-hot around", "one-hot in the end", "one-hot", "takes indices", "has it"],
)
def test_it_is_added_only_where_it_is_needed(make, policy, shape):
    batch, _ = collect(make, policy)
    assert batch["action"].shape[1:] == shape
    played = batch["action"].argmax(-1) if shape else batch["action"]
    assert torch.equal(batch["next", "reward"].squeeze(-1), played.float())


def test_specs():
    env = TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), CategoricalAction())
    check_env_specs(env)
    assert env.action_spec == Categorical(2, (2,))
    assert env.base_env.action_spec.shape == (2, 2)


def test_bad_input():
    env = TransformedEnv(GymWrapper(Echo()), CategoricalAction())
    with pytest.raises(EnvError, match="index from 0 to 2 in 'action', got 3"):
        env.step(env.reset().set("action", torch.tensor(3)))
    with pytest.raises(EnvError, match="index from 0 to 2 in 'action', got 0"):
        env.step(env.reset().set("action", torch.tensor(0.5)))
    with pytest.raises(ValueError, match="one-hot action 'action', got Bounded"):
        TransformedEnv(GymEnv("Pendulum-v1"), CategoricalAction()).rand_action()
    with pytest.raises(ValueError, match="one-hot action 'act', there are 'action'"):
        TransformedEnv(GymEnv("CartPole-v1"), CategoricalAction("act")).rand_action()


def test_trying_a_policy_leaves_no_trace():
    """Whether a policy writes indices, a call of a copy shows: its buffers and all generators stay as they were."""
    policy = Choosing()
    torch.manual_seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    with Collector(GymWrapper(Echo()), policy, frames_per_batch=4):
        assert policy.calls == 0
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()


def test_trying_a_compiled_policy_compiles_nothing():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    policy = torch.compile(Choosing(), backend=backend)
    with Collector(GymWrapper(Echo()), policy, frames_per_batch=4) as collector:
        assert not compiled
        assert collector.next()["action"].shape == (4,)
        assert compiled


def test_a_policy_that_says_what_it_writes_is_not_tried():
    called = []
    around = Mod(lambda x: called.append(0) or x, ["observation"], ["seen"])
    with Collector(GymWrapper(Echo()), TensorDictSequential(around, greedy()), frames_per_batch=4):
        assert not called


def test_a_policy_that_zeros_do_not_suit_is_told_what_to_do():
    def choose(observation):
        if not observation.any():
            raise ValueError("zeros")
        return observation.argmax(-1)

    chooser = Mod(choose, ["observation"], ["action"])
    with pytest.raises(PolicyError, match=r"CategoricalAction\(\) around it"):
        collect(ENVS["gymnasium"], chooser)
    batch, _ = collect(lambda: TransformedEnv(GymWrapper(Echo()), CategoricalAction()), chooser)
    assert torch.equal(batch["next", "reward"].squeeze(-1), batch["action"].float())


def test_without_transforms_for_policies_it_is_not_added():
    with pytest.raises(PolicyError, match=r"CategoricalAction\(\) around it"):
        collect(ENVS["gymnasium"], choosing(), auto_register_policy_transforms=False)
