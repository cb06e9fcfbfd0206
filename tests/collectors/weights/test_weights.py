"""update_policy_weights_ and receive_weights: every form, versions, all or nothing."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from tests.variants import in_turn
from torch import nn

from rollwright import Collector
from rollwright.envs import GymEnv, TransformedEnv
from rollwright.testing.mocking_classes import CountingEnv

GAIN = -0.5


@pytest.fixture
def collector(make, pendulum_actor):
    return make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(1.0), frames_per_batch=5)


def gain_of(batch):
    return float((batch["action"] / batch["observation"][:, :1]).mean())


def nested_dict(module):
    return {"module": {"weight": module.module.weight.detach().clone()}}


FORMS = {
    "module": lambda policy: policy,
    "TensorDict": lambda policy: TensorDict.from_module(policy).data.clone(),
    "parameters": lambda policy: TensorDict.from_module(policy),
    "flat TensorDict": lambda policy: TensorDict.from_module(policy).data.clone().flatten_keys("."),
    "state_dict": lambda policy: policy.state_dict(),
    "plain dictionary": lambda policy: dict(policy.state_dict()),
    "ordered dictionary": lambda policy: OrderedDict(policy.state_dict()),
    "nested dictionary": nested_dict,
}
WAYS = {
    "positional": lambda c, w: c.update_policy_weights_(w),
    "weights=": lambda c, w: c.update_policy_weights_(weights=w),
    "model_id=": lambda c, w: c.update_policy_weights_(w, model_id="policy"),
    "weights_dict=": lambda c, w: c.update_policy_weights_(weights_dict={"policy": w}),
    "by worker": lambda c, w: c.update_policy_weights_({0: w}),
    "worker_ids=": lambda c, w: c.update_policy_weights_(w, worker_ids=0),
    "worker_ids=[]": lambda c, w: c.update_policy_weights_(w, worker_ids=[0]),
    "received": lambda c, w: c.receive_weights(w),
    "received by name": lambda c, w: c.receive_weights(weights=w),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_every_way(collector, pendulum_actor, form, way):
    assert gain_of(collector.next()) == pytest.approx(1.0)
    WAYS[way](collector, FORMS[form](pendulum_actor(GAIN)))
    assert gain_of(collector.next()) == pytest.approx(GAIN)


@pytest.mark.parametrize("call", ["update_policy_weights_", "receive_weights"])
def test_policy_by_name(collector, pendulum_actor, call):
    getattr(collector, call)(policy=pendulum_actor(GAIN))
    assert gain_of(collector.next()) == pytest.approx(GAIN)


def test_a_plain_module_updates_by_its_own_names(make):
    """A module wrapped by its signature: weights come as those of the module the user holds."""

    class Plain(nn.Module):
        def __init__(self, gain):
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(gain))

        def forward(self, observation):
            return observation[..., :1] * self.gain

    collector = make(lambda: GymEnv("Pendulum-v1"), Plain(1.0), frames_per_batch=5)
    for weights in (Plain(0.25), Plain(0.25).state_dict(), TensorDict.from_module(Plain(0.25)).data.clone()):
        collector.update_policy_weights_(Plain(1.0))
        collector.update_policy_weights_(weights)
        assert gain_of(collector.next()) == pytest.approx(0.25)


def test_training_the_given_policy_acts_at_once(make, pendulum_actor):
    """On one device the policy that was given is the one that acts."""
    policy = pendulum_actor(1.0)
    collector = make(lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=5)
    collector.next()
    with torch.no_grad():
        policy.module.weight.mul_(GAIN)
    assert gain_of(collector.next()) == pytest.approx(GAIN)


def test_an_update_copies_and_does_not_alias(collector, pendulum_actor):
    source = pendulum_actor(GAIN)
    collector.update_policy_weights_(source)
    with torch.no_grad():
        source.module.weight.mul_(100)
    assert gain_of(collector.next()) == pytest.approx(GAIN)


def test_an_update_keeps_the_parameters_the_optimizer_holds(make, pendulum_actor):
    policy = pendulum_actor(1.0)
    collector = make(lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=5)
    weight = policy.module.weight
    collector.update_policy_weights_(pendulum_actor(GAIN))
    assert policy.module.weight is weight
    assert weight.requires_grad


def test_running_statistics_travel_with_the_weights(make):
    def actor(mean):
        norm = nn.BatchNorm1d(3, affine=False).eval()
        norm.running_mean.fill_(mean)
        return TensorDictModule(nn.Sequential(norm, nn.Linear(3, 1)), in_keys=["observation"], out_keys=["action"])

    from rollwright.envs import SerialEnv

    policy = actor(0.0)
    collector = make(SerialEnv(2, lambda: GymEnv("Pendulum-v1")), policy, frames_per_batch=4)
    for weights in (actor(3.0), actor(4.0).state_dict(), TensorDict.from_module(actor(5.0)).data.clone()):
        collector.update_policy_weights_(weights)
        expected = weights.module[0].running_mean if isinstance(weights, TensorDictModule) else None
        if expected is not None:
            assert torch.equal(policy.module[0].running_mean, expected)
    assert float(policy.module[0].running_mean[0]) == 5.0


# Versions.


def test_an_update_returns_its_version(collector, pendulum_actor):
    versions = [
        collector.update_policy_weights_(),
        collector.update_policy_weights_(pendulum_actor(GAIN)),
        collector.update_policy_weights_(weights_dict={"policy": pendulum_actor(1.0)}),
    ]
    assert versions == [1, 2, 3]
    assert collector.stats()["policy_version"] == 3


def test_frames_carry_the_version_that_acted(make, pendulum_actor, stream):
    collector = make(
        lambda: GymEnv("Pendulum-v1"),
        pendulum_actor(1.0),
        frames_per_batch=5,
        total_frames=20,
        track_policy_version=True,
    )
    batches = []
    for number, batch in enumerate(collector):
        batches.append(batch)
        assert batch["policy_version"].dtype == torch.int64
        assert batch["policy_version"].shape == (5,)
        assert batch["next", "policy_version"].shape == (5,)
        assert collector.update_policy_weights_(pendulum_actor(number + 2.0)) == number + 1
    whole = stream(batches)
    expected = torch.arange(4).repeat_interleave(5)
    assert torch.equal(whole["policy_version"], expected)
    assert torch.equal(whole["next", "policy_version"], expected)
    gains = (whole["action"] / whole["observation"][:, :1]).flatten()
    torch.testing.assert_close(gains, expected + 1.0)


def test_versions_of_a_batched_environment(make):
    collector = make(CountingEnv(batch_size=[3]), frames_per_batch=6, track_policy_version=True)
    collector.update_policy_weights_()
    batch = collector.next()
    assert torch.equal(batch["policy_version"], torch.ones(3, 2, dtype=torch.int64))


def test_without_tracking_there_is_no_version(collector):
    assert "policy_version" not in collector.next()


# All or nothing.


def two_layers(first, second):
    layers = [nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)]
    with torch.no_grad():
        layers[0].weight.copy_(torch.eye(3) * first)
        layers[1].weight.copy_(torch.tensor([[second, 0.0, 0.0]]))
    return TensorDictSequential(
        TensorDictModule(layers[0], in_keys=["observation"], out_keys=["hidden"]),
        TensorDictModule(layers[1], in_keys=["hidden"], out_keys=["action"]),
    )


def spoiled(kind):
    state = dict(two_layers(2.0, 2.0).state_dict())
    last = next(reversed(state))
    if kind == "missing":
        del state[last]
    elif kind == "unknown":
        state["other.weight"] = torch.ones(1)
    elif kind == "shape":
        state[last] = torch.ones(7, 3)
    elif kind == "type":
        state[last] = "not a tensor"
    return state


@pytest.mark.parametrize("kind", ["missing", "unknown", "shape", "type"])
def test_weights_that_do_not_fit_change_nothing(make, kind):
    collector = make(lambda: GymEnv("Pendulum-v1"), two_layers(1.0, 1.0), frames_per_batch=5)
    with pytest.raises((ValueError, TypeError)):
        collector.update_policy_weights_(spoiled(kind))
    assert gain_of(collector.next()) == pytest.approx(1.0)
    assert collector.stats()["policy_version"] == 0


def test_several_models_are_updated_together_or_not_at_all(make):
    collector = make(lambda: GymEnv("Pendulum-v1"), two_layers(1.0, 1.0), frames_per_batch=5)
    with pytest.raises(ValueError, match="shape"):
        collector.update_policy_weights_(
            weights_dict={"policy": two_layers(2.0, 2.0), "policy.module[1].module": nn.Linear(7, 1, bias=False)}
        )
    assert gain_of(collector.next()) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="critic"):
        collector.update_policy_weights_(weights_dict={"policy": two_layers(2.0, 2.0), "critic": two_layers(2.0, 2.0)})
    assert gain_of(collector.next()) == pytest.approx(1.0)


def test_a_model_id_may_be_a_path_from_the_collector(make):
    def env(mean):
        from rollwright.envs import ObservationNorm

        norm = ObservationNorm(loc=mean, scale=1.0, in_keys=["observation"])
        return TransformedEnv(GymEnv("Pendulum-v1"), norm)

    collector = make(env(0.0), two_layers(1.0, 1.0), frames_per_batch=5)
    collector.update_policy_weights_(env(5.0).transform, model_id="env.transform")
    left, right = collector.env.transform.state_dict(), env(5.0).transform.state_dict()
    assert left.keys() == right.keys()
    for key, value in right.items():
        torch.testing.assert_close(left[key], value)


def test_actor_and_critic_by_name(make):
    """Reference 002: weights=..., model_id="actor", and several models at once."""

    class ActorCritic(nn.Module):
        def __init__(self, gain):
            super().__init__()
            self.actor, self.critic = nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)
            with torch.no_grad():
                self.actor.weight.copy_(torch.tensor([[gain, 0.0, 0.0]]))
                self.critic.weight.fill_(gain)

        def forward(self, observation):
            return self.actor(observation), self.critic(observation)

    collector = make(lambda: GymEnv("Pendulum-v1"), ActorCritic(1.0), frames_per_batch=5)
    other = ActorCritic(0.5)
    collector.update_policy_weights_(weights=TensorDict.from_module(other.actor).data.clone(), model_id="actor")
    batch = collector.next()
    assert gain_of(batch) == pytest.approx(0.5)
    torch.testing.assert_close(batch["output1"], batch["observation"].sum(-1, keepdim=True))
    collector.update_policy_weights_(weights_dict={"actor": ActorCritic(0.25).actor, "critic": other.critic})
    batch = collector.next()
    assert gain_of(batch) == pytest.approx(0.25)
    torch.testing.assert_close(batch["output1"], 0.5 * batch["observation"].sum(-1, keepdim=True))


# Contradictions.


@pytest.mark.parametrize(
    "arguments",
    [
        {"positional": True, "weights": True},
        {"positional": True, "policy": True},
        {"weights": True, "policy": True},
        {"positional": True, "weights_dict": True},
        {"weights": True, "weights_dict": True},
        {"weights_dict": True, "model_id": "policy"},
    ],
)
def test_contradictions_are_errors_that_name_both(collector, pendulum_actor, arguments):
    actor = pendulum_actor(GAIN)
    values = {"weights": actor.state_dict(), "policy": actor, "weights_dict": {"policy": actor}, "model_id": "policy"}
    keywords = {name: values[name] for name in arguments if name != "positional"}
    positional = (actor,) if "positional" in arguments else ()
    with pytest.raises(ValueError, match="|".join(keywords)):
        collector.update_policy_weights_(*positional, **keywords)
    assert gain_of(collector.next()) == pytest.approx(1.0)


def test_receive_weights_refuses_contradictions(collector, pendulum_actor):
    actor = pendulum_actor(GAIN)
    with pytest.raises(ValueError, match="weights"):
        collector.receive_weights(actor, weights=actor.state_dict())


def test_weights_for_another_worker_are_refused(collector, pendulum_actor):
    actor = pendulum_actor(GAIN)
    for call in (
        lambda: collector.update_policy_weights_({1: actor}),
        lambda: collector.update_policy_weights_({0: actor, 1: actor}),
        lambda: collector.update_policy_weights_(actor, worker_ids=1),
    ):
        with pytest.raises(ValueError, match="worker 0"):
            call()
    assert gain_of(collector.next()) == pytest.approx(1.0)


def test_a_worker_takes_the_weights_of_its_own_index(make, pendulum_actor):
    collector = make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(1.0), frames_per_batch=5, worker_idx=2)
    collector.update_policy_weights_({2: pendulum_actor(GAIN)})
    assert gain_of(collector.next()) == pytest.approx(GAIN)


def test_a_policy_without_weights_says_so(make):
    collector = make(CountingEnv(), frames_per_batch=2)
    with pytest.raises(TypeError, match=r"RandomPolicy.*nn\.Module"):
        collector.update_policy_weights_({"weight": torch.ones(1)})
    assert collector.update_policy_weights_() == 1  # nothing to mirror is no error
    assert collector.receive_weights() is None


class Shifted(nn.Module):
    """Has a buffer that a state_dict leaves out."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, x):
        return self.layer(x - self.mean)


@pytest.mark.parametrize(("kind", "other"), in_turn(["direct", "sync", "async"], [False, True]))
def test_buffers_that_a_state_dict_leaves_out_arrive(kind, other):
    policy = TensorDictModule(Shifted(), ["observation"], ["action"])
    options = {} if kind == "direct" else {"num_collectors": 1, "sync": kind == "sync"}
    with Collector(lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=8, **options) as collector:
        collector.next()
        new = copy.deepcopy(policy) if other else policy
        new.module.mean.add_(1.0)
        version = collector.update_policy_weights_(new)
        for _ in range(3):
            batch = collector.next()
        with torch.no_grad():
            assert torch.allclose(new(batch.clone())["action"], batch["action"], atol=1e-5)
        assert version == 1


BAD = {
    "meta": (torch.zeros(1, device="meta"), ValueError, "'module.bias' is on the device 'meta'"),
    "sparse": (torch.ones(1).to_sparse(), ValueError, "'module.bias' is of torch.sparse_coo"),
}


@pytest.mark.parametrize(("bias", "kind", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("options", [{}, {"num_collectors": 1, "sync": True}], ids=["direct", "worker"])
def test_weights_that_cannot_be_copied_change_nothing(bias, kind, message, options):
    policy = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
    with Collector(lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=8, **options) as collector:
        before = policy.module.weight.detach().clone()
        with pytest.raises(kind, match=message):
            collector.update_policy_weights_({"module.weight": torch.full((1, 3), 5.0), "module.bias": bias})
        assert torch.equal(policy.module.weight, before)
        assert collector.policy_version == 0
        with pytest.raises(TypeError, match=r"expected names of weights, got the keys '0'"):
            collector.update_policy_weights_({0: policy, "module.weight": before})
