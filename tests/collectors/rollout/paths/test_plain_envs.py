"""An environment on TensorDicts leaves the policy on tensors: the bits of the policy on TensorDicts."""

import pytest
import torch
from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import distributions as D
from torch import nn

from rollwright.collectors import Collector
from rollwright.envs import GymEnv, InitTracker, SerialEnv, Transform, TransformedEnv
from rollwright.modules import GRUModule


class Halved(Transform):
    """A transform that leaves the environment on TensorDicts: it may change what a reset is given."""

    def _apply_transform(self, obs):
        return obs / 2

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    def _reset_env_preprocess(self, tensordict):
        return tensordict


def env_of(num_envs=1, name="CartPole-v1"):
    def make():
        return GymEnv(name, categorical_action_encoding=True)

    base = make() if num_envs == 1 else SerialEnv(num_envs, make)
    return TransformedEnv(base, Halved(in_keys=["observation"]))


def sampling(body, keys, kind):
    draw = ProbabilisticTensorDictModule(keys, ["action"], distribution_class=kind, return_log_prob=True)
    return TensorDictSequential(TensorDictModule(body, ["observation"], keys), draw)


def recurrent():
    gru = GRUModule(4, 8, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(8, 2), ["features"], ["logits"])
    draw = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=D.Categorical)
    return TensorDictSequential(gru, head, draw)


POLICIES = {
    "categorical": lambda: ("CartPole-v1", sampling(nn.Linear(4, 2), ["logits"], D.Categorical)),
    "normal": lambda: (
        "Pendulum-v1",
        sampling(nn.Sequential(nn.Linear(3, 2), NormalParamExtractor()), ["loc", "scale"], D.Normal),
    ),
    "recurrent": lambda: ("CartPole-v1", recurrent()),
    "by signature": lambda: ("Pendulum-v1", nn.Linear(3, 1)),
}


def batches(name, policy, num_envs, **options):
    env = env_of(num_envs, name)
    if "GRU" in str(policy):
        env = TransformedEnv(env, InitTracker())
    torch.manual_seed(0)
    collector = Collector(env, policy, frames_per_batch=60 * num_envs, total_frames=180 * num_envs, **options)
    collector.set_seed(0)
    made = [batch.clone() for batch in collector]
    path = collector.stats()["paths"]
    collector.shutdown()
    return made, path


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("kind", POLICIES)
def test_the_policy_runs_on_tensors_with_the_bits_of_the_plain_path(kind, num_envs):
    name, policy = POLICIES[kind]()
    ours, path = batches(name, policy, num_envs)
    plain, of_plain = batches(name, policy, num_envs, use_buffers=False)
    assert path["env"].startswith("plain: Halved changes what a reset is given")
    assert path["policy"].startswith("native: ")
    assert of_plain["policy"].startswith("plain")
    for one, other in zip(ours, plain, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert all(torch.equal(one[key], other[key]) for key in one.keys(True, True))


def test_new_weights_and_hooks_act_from_the_next_batch_on():
    policy = sampling(nn.Linear(4, 2), ["logits"], D.Categorical)
    collector = Collector(env_of(), policy, frames_per_batch=20, total_frames=80)
    batches = iter(collector)
    next(batches)
    with torch.no_grad():
        policy[0].module.weight.zero_()
        policy[0].module.bias.copy_(torch.tensor([3.0, -3.0]))
    assert torch.equal(next(batches)["logits"], torch.tensor([3.0, -3.0]).expand(20, 2))
    calls = []
    policy[0].module.register_forward_hook(lambda *args: calls.append(1))
    next(batches)
    assert len(calls) >= 20
    collector.shutdown()


def test_weights_that_diverge_are_an_error_of_the_batch():
    policy = sampling(nn.Linear(4, 2), ["logits"], D.Categorical)
    collector = Collector(env_of(), policy, frames_per_batch=20, total_frames=40)
    with torch.no_grad():
        policy[0].module.weight.fill_(float("nan"))
    with pytest.raises(Exception, match=r"NaN|nan|constraint"):
        next(iter(collector))
    collector.shutdown()


@pytest.mark.parametrize("first", [0, 3])
def test_outputs_that_are_no_tensors_are_left_to_the_module(first):
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = 0

        def forward(self, obs):
            self.count += 1
            torch.rand(1)
            return torch.zeros(1), "a note" if self.count > first else torch.zeros(1)

    def collected(**options):
        torch.manual_seed(1)
        policy = TensorDictModule(Text(), ["observation"], ["action", "note"])
        env = TransformedEnv(GymEnv("Pendulum-v1"), Halved(in_keys=["observation"]))
        collector = Collector(env, policy, frames_per_batch=3, total_frames=6, **options)
        collector.set_seed(2)
        made = list(collector)
        collector.shutdown()
        return made, torch.rand(1)

    ours, plain = collected(), collected(use_buffers=False)
    assert ours[0][1]["note"] == plain[0][1]["note"] == ["a note"] * 3
    assert torch.equal(ours[0][1]["observation"], plain[0][1]["observation"])
    if not first:  # later, the call that shows it is made twice
        assert torch.equal(ours[1], plain[1])
