"""Policies in every form: callables, modules by signature, factories, distributions, compiled."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import distributions, nn

from rollwright.data import Unbounded
from rollwright.envs import ExplorationType, GymEnv, SerialEnv, TensorDictPrimer, TransformedEnv
from rollwright.errors import PolicyKeyError
from rollwright.modules import RandomPolicy
from rollwright.testing.mocking_classes import CountingEnv, MultiKeyCountingEnv

PENDULUM = {"single": lambda: GymEnv("Pendulum-v1"), "batch": lambda: SerialEnv(2, lambda: GymEnv("Pendulum-v1"))}


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, observation):
        return self.linear(observation)


class Several(ByName):
    def forward(self, observation):
        hidden = self.linear(observation)
        return hidden, hidden * 2, hidden * 3


class WithDefault(ByName):
    def forward(self, observation, scale=2.0):
        return self.linear(observation) * scale


class TakesTensorDict(ByName):
    def forward(self, tensordict):
        return tensordict.set("action", self.linear(tensordict["observation"]))


class TakesAnnotated(ByName):
    def forward(self, data: TensorDict):
        return data.set("action", self.linear(data["observation"]))


class TakesSomethingElse(ByName):
    def forward(self, pixels, speed):
        return self.linear(pixels)


@pytest.mark.parametrize("env", PENDULUM)
def test_a_module_is_wrapped_by_its_signature(make, env):
    module = ByName()
    batch = make(PENDULUM[env], module, frames_per_batch=20).next()
    torch.testing.assert_close(batch["action"], module(batch["observation"]).detach())


def test_outputs_are_named_action_output1_output2(make):
    module = Several()
    batch = make(PENDULUM["single"], module, frames_per_batch=5).next()
    for key, value in zip(("action", "output1", "output2"), module(batch["observation"]), strict=True):
        torch.testing.assert_close(batch[key], value.detach())


def test_arguments_with_defaults_are_left_alone(make):
    module = WithDefault()
    batch = make(PENDULUM["single"], module, frames_per_batch=5).next()
    torch.testing.assert_close(batch["action"], module(batch["observation"]).detach())


@pytest.mark.parametrize("cls", [TakesTensorDict, TakesAnnotated])
def test_a_module_that_takes_a_tensordict_is_called_as_it_is(make, cls):
    module = cls()
    batch = make(PENDULUM["single"], module, frames_per_batch=5).next()
    torch.testing.assert_close(batch["action"], module.linear(batch["observation"]).detach())


@pytest.mark.parametrize("module", [nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 1))])
def test_one_argument_of_any_name_is_given_the_one_observation(make, module):
    batch = make(PENDULUM["single"], module, frames_per_batch=5).next()
    torch.testing.assert_close(batch["action"], module(batch["observation"]).detach())


def test_arguments_that_are_no_entries_are_an_error_that_lists_both(make):
    module = TakesSomethingElse()
    with pytest.raises(TypeError) as error:
        make(PENDULUM["single"], module, frames_per_batch=5)
    message = str(error.value)
    for part in ("pixels", "speed", "observation", type(module).__name__, "trust_policy"):
        assert part in message


class Opaque(ByName):
    def forward(self, batch):
        return batch.set("action", self.linear(batch["observation"]))


def test_trust_policy_skips_wrapping(make):
    module = Opaque()
    with pytest.raises(AttributeError, match=r"The module reads 'observation' \[3\]"):
        make(PENDULUM["single"], module, frames_per_batch=5).next()
    batch = make(PENDULUM["single"], module, frames_per_batch=5, trust_policy=True).next()
    torch.testing.assert_close(batch["action"], module.linear(batch["observation"]).detach())


def test_a_plain_module_for_several_actions_is_an_error(make):
    env = MultiKeyCountingEnv()

    class Module(nn.Module):
        def forward(self, observation):
            return observation

    with pytest.raises(TypeError, match=r"several actions.*TensorDictModule"):
        make(env, Module(), frames_per_batch=2)


@pytest.mark.parametrize("form", ["function", "object", "bound method", "tensordict module", "sequence"])
def test_callables_on_tensordicts(make, form, pendulum_actor):
    actor = pendulum_actor(1.5)

    class Object:
        def __call__(self, td):
            return actor(td)

        def method(self, td):
            return actor(td)

    forms = {
        "function": lambda td: actor(td),
        "object": Object(),
        "bound method": Object().method,
        "tensordict module": actor,
        "sequence": TensorDictSequential(
            TensorDictModule(lambda x: x[..., :1], in_keys=["observation"], out_keys=["cosine"]),
            TensorDictModule(lambda x: 1.5 * x, in_keys=["cosine"], out_keys=["action"]),
        ),
    }
    batch = make(PENDULUM["single"], forms[form], frames_per_batch=5).next()
    torch.testing.assert_close(batch["action"], 1.5 * batch["observation"][:, :1])
    assert ("cosine" in batch) is (form == "sequence")


# Factories.


def test_the_factory_is_called_exactly_once(make, pendulum_actor):
    calls = []

    def factory():
        calls.append(1)
        return pendulum_actor(0.5)

    collector = make(PENDULUM["single"], policy_factory=factory, frames_per_batch=5, total_frames=20)
    batches = list(collector)
    assert calls == [1]
    torch.testing.assert_close(batches[0]["action"], 0.5 * batches[0]["observation"][:, :1])


def test_a_policy_beside_the_factory_serves_for_weights_only(make, pendulum_actor):
    learner = pendulum_actor(2.0)
    learner.forward = None  # never called
    collector = make(PENDULUM["single"], learner, policy_factory=lambda: pendulum_actor(0.5), frames_per_batch=5)
    first = collector.next()
    torch.testing.assert_close(first["action"], 0.5 * first["observation"][:, :1])
    collector.update_policy_weights_()
    second = collector.next()
    torch.testing.assert_close(second["action"], 2.0 * second["observation"][:, :1])


# Random policies.


def test_random_policy_draws_from_the_environments_spec(make):
    collector = make(PENDULUM["batch"], RandomPolicy(), frames_per_batch=400)
    action = collector.next()["action"]
    assert action.shape == (2, 200, 1)
    assert -2 <= action.min() < -1.8
    assert 1.8 < action.max() <= 2
    assert collector.env.action_spec.is_in(action[:, 0])


def test_random_policy_for_several_actions(make):
    env = MultiKeyCountingEnv(batch_size=[2])
    batch = make(env, RandomPolicy(), frames_per_batch=40).next()
    for key in env.action_keys:
        assert env.full_action_spec[key].is_in(batch[key][:, 0])
        assert bool((batch[key] != batch[key][:, :1]).any())


# Distributions.


def categorical(**options):
    net = nn.Linear(4, 2)
    with torch.no_grad():
        net.bias.zero_()
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=distributions.OneHotCategorical,
            return_log_prob=True,
            log_prob_key="log_prob",
            **options,
        ),
    )


def test_log_probs_are_those_of_the_actions_taken(make):
    policy = categorical()
    collector = make(lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")), policy, frames_per_batch=200)
    batch = collector.next()
    expected = distributions.OneHotCategorical(logits=batch["logits"]).log_prob(batch["action"].float())
    torch.testing.assert_close(batch["log_prob"], expected)
    torch.testing.assert_close(batch["logits"], policy[0].module(batch["observation"]).detach())
    assert len(batch["action"].flatten(0, 1).unique(dim=0)) == 2


@pytest.mark.parametrize("kind", [ExplorationType.MODE, ExplorationType.DETERMINISTIC])
def test_exploration_type_picks_the_mode(make, kind):
    collector = make(lambda: GymEnv("CartPole-v1"), categorical(), frames_per_batch=100, exploration_type=kind)
    batch = collector.next()
    assert torch.equal(batch["action"].argmax(-1), batch["logits"].argmax(-1))


def test_exploration_is_random_unless_told_otherwise(make):
    batch = make(lambda: GymEnv("CartPole-v1"), categorical(), frames_per_batch=200).next()
    assert not torch.equal(batch["action"].argmax(-1), batch["logits"].argmax(-1))


def test_exploration_type_mean_of_a_gaussian(make):
    policy = ProbabilisticTensorDictSequential(
        TensorDictModule(
            lambda obs: (obs[..., :1], torch.ones_like(obs[..., :1])),
            in_keys=["observation"],
            out_keys=["loc", "scale"],
        ),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"], out_keys=["action"], distribution_class=distributions.Normal
        ),
    )
    batch = make(PENDULUM["single"], policy, frames_per_batch=20, exploration_type=ExplorationType.MEAN).next()
    assert torch.equal(batch["action"], batch["loc"])


def test_the_exploration_type_outside_is_left_alone(make):
    from rollwright.envs import exploration_type, set_exploration_type

    inside = []

    def policy(td):
        inside.append(exploration_type())
        return td.set("action", torch.zeros(1))

    with set_exploration_type(ExplorationType.MEAN):
        make(PENDULUM["single"], policy, frames_per_batch=2, exploration_type=ExplorationType.MODE).next()
        assert exploration_type() is ExplorationType.MEAN
    assert inside == [ExplorationType.MODE] * 2


# Compiled policies.


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("env", PENDULUM)
def test_a_compiled_policy_gives_the_same_data(make, env, same):
    policy = TensorDictModule(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), ["observation"], ["action"])

    def collected(**options):
        collector = make(PENDULUM[env], policy, frames_per_batch=40, total_frames=80, **options)
        collector.set_seed(0)
        return torch.cat(list(collector), -1)

    same(collected(compile_policy={"backend": "eager"}), collected())


def test_a_compiled_policy_acts_with_updated_weights(make, pendulum_actor, weights_of):
    policy = pendulum_actor(1.0)
    collector = make(PENDULUM["single"], policy, frames_per_batch=5, compile_policy={"backend": "eager"})
    collector.next()
    collector.update_policy_weights_(weights_of(pendulum_actor(-0.5)))
    batch = collector.next()
    torch.testing.assert_close(batch["action"], -0.5 * batch["observation"][:, :1])


def test_a_policy_that_cannot_be_compiled_goes_on_with_a_warning(make, pendulum_actor):
    def refuse(graph, inputs):
        raise RuntimeError("this backend knows no linear layer")

    collector = make(
        PENDULUM["single"],
        pendulum_actor(1.0),
        frames_per_batch=5,
        total_frames=10,
        compile_policy={"backend": refuse},
    )
    with pytest.warns(UserWarning, match=r"compile_policy.*uncompiled[\s\S]*knows no linear layer"):
        first = collector.next()
    second = collector.next()  # and once only: warnings are errors here
    for batch in (first, second):
        torch.testing.assert_close(batch["action"], batch["observation"][:, :1])


def test_a_wrong_policy_fails_with_its_own_error_also_compiled(make):
    def policy(td):
        raise ZeroDivisionError("no pole")

    collector = make(PENDULUM["single"], policy, frames_per_batch=5, compile_policy={"backend": "eager"})
    with pytest.raises(ZeroDivisionError, match="no pole"):
        collector.next()


@pytest.mark.parametrize("value", [None, False])
def test_compile_policy_is_off_unless_asked_for(make, monkeypatch, value):
    monkeypatch.setattr(torch, "compile", None)
    make(CountingEnv(), frames_per_batch=2, compile_policy=value).next()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own, on importing its compiler
def test_the_default_compiler(make, pendulum_actor):
    collector = make(PENDULUM["single"], pendulum_actor(1.0), frames_per_batch=5, compile_policy=True)
    batch = collector.next()
    torch.testing.assert_close(batch["action"], batch["observation"][:, :1])


def test_a_state_that_a_policy_keeps_in_one_buffer_is_that_of_its_step(make):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(1))

        def forward(self, state):
            return torch.ones(1, dtype=torch.int8), self.state.copy_(state + 1)

    policy = TensorDictModule(Counts(), in_keys=["h"], out_keys=["action", ("next", "h")])
    env = TransformedEnv(CountingEnv(max_steps=100), TensorDictPrimer(h=Unbounded((1,))))
    batch = make(env, policy, frames_per_batch=4).next()
    assert batch["h"].squeeze(-1).tolist() == [0, 1, 2, 3]
    assert batch["next", "h"].squeeze(-1).tolist() == [1, 2, 3, 4]


def test_a_policy_that_stops_writing_actions_is_an_error_and_repeats_nothing(make):
    steps = iter(range(100))

    def tires(td):
        return td.set("action", torch.ones(1)) if next(steps) < 3 else td

    collector = make(lambda: GymEnv("Pendulum-v1"), tires, frames_per_batch=10)
    with pytest.raises(PolicyKeyError, match="wrote no 'action'"):
        collector.next()


def test_a_policy_may_read_its_last_action(make):
    """It is there from the second step on, for a policy that says it can do without at first."""
    seen = []

    def moves(observation, action=None):
        seen.append(action)
        return torch.full((1,), float(len(seen) % 2))

    policy = TensorDictModule(moves, in_keys=["observation", "action"], out_keys=["action"])
    make(lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=3).next()
    assert [None if action is None else action.item() for action in seen] == [None, 1.0, 0.0]
