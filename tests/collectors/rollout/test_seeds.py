"""One seed, one stream: whatever the size of batches, and the same as env.rollout."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import distributions, nn

from rollwright.envs import CatFrames, Compose, GymEnv, SerialEnv, TransformedEnv, VecNorm

ENVS = {
    "cartpole": lambda: GymEnv("CartPole-v1"),
    "pendulum": lambda: GymEnv("Pendulum-v1"),
    "serial": lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")),
    "vector": lambda: GymEnv("CartPole-v1", num_envs=2),
}


def sampling_policy():
    net = nn.Linear(4, 2)
    with torch.no_grad():
        net.weight.copy_(torch.linspace(-1, 1, 8).reshape(2, 4))
        net.bias.zero_()
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=distributions.OneHotCategorical),
        # the default exploration type of a collector draws from it
    )


POLICIES = {"random": lambda: None, "sampling": sampling_policy}
CASES = [(env, "random") for env in ENVS] + [(env, "sampling") for env in ENVS if env != "pendulum"]


@pytest.mark.parametrize(("env", "policy"), CASES)
def test_frames_per_batch_does_not_change_the_data(make, same, stream, env, policy):
    """1 and 20 frames an environment give the same stream, ids included."""
    streams = []
    for steps in (1, 20):
        num_envs, most = 2 if env in ("serial", "vector") else 1, 220 if env == "pendulum" else 140
        collector = make(ENVS[env], POLICIES[policy](), frames_per_batch=steps * num_envs, total_frames=most * num_envs)
        collector.set_seed(7)
        streams.append(stream(collector))
    assert int(streams[0]["collector", "traj_ids"].max()) >= (1 if env == "pendulum" else 3)
    same(*streams)


@pytest.mark.parametrize(("env", "policy"), CASES)
def test_the_first_batch_equals_env_rollout(make, same, env, policy):
    other = ENVS[env]()
    policy = POLICIES[policy]()
    collector = make(ENVS[env], policy, frames_per_batch=60 * other.numel())
    collector.set_seed(5)
    batch = collector.next()
    other.set_seed(5)
    with torch.no_grad():
        from rollwright.envs import ExplorationType, set_exploration_type

        with set_exploration_type(ExplorationType.RANDOM):
            rollout = other.rollout(60, policy, break_when_any_done=False)
    other.close()
    same(batch, rollout, but=["collector"])


@pytest.mark.parametrize(("env", "policy"), CASES)
def test_set_seed_in_the_middle_reproduces_the_first_batch(make, same, env, policy):
    collector = make(ENVS[env], POLICIES[policy](), frames_per_batch=40)
    collector.set_seed(3)
    first, second = collector.next(), collector.next()
    collector.set_seed(3)
    again, after = collector.next(), collector.next()
    same(again, first, but=["collector"])
    same(after, second, but=["collector"])
    assert int(again["collector", "traj_ids"].min()) > int(second["collector", "traj_ids"].max())
    assert not torch.equal(first["observation"], second["observation"])


@pytest.mark.parametrize(("env", "policy"), CASES)
def test_two_runs_with_one_seed_are_equal_to_the_bit(make, same, env, policy):
    runs = []
    for _ in range(2):
        collector = make(ENVS[env], POLICIES[policy](), frames_per_batch=50, total_frames=100)
        collector.set_seed(11)
        runs.append(list(collector))
    for left, right in zip(*runs, strict=True):
        same(left, right)


def test_another_seed_gives_other_data(make):
    batches = []
    for seed in (0, 1):
        collector = make(ENVS["cartpole"], frames_per_batch=50)
        collector.set_seed(seed)
        batches.append(collector.next()["observation"])
    assert not torch.equal(*batches)


def test_set_seed_returns_the_seed_of_the_last_environment(make):
    """Reference 003: six environments, seed 1, the last has seed 6."""
    collector = make(lambda: SerialEnv(6, lambda: GymEnv("Pendulum-v1")), frames_per_batch=6)
    assert collector.set_seed(1) == 6
    assert make(ENVS["pendulum"], frames_per_batch=1).set_seed(4) == 4


@pytest.mark.parametrize("env", ["serial", "vector"])
def test_seeds_of_a_batch_rise_unless_static(make, env):
    collector = make(ENVS[env], frames_per_batch=2)
    collector.set_seed(2)
    rising = collector.next()["observation"][:, 0]
    collector.set_seed(3)
    assert torch.equal(collector.next()["observation"][0, 0], rising[1])
    assert not torch.equal(rising[0], rising[1])
    assert collector.set_seed(2, static_seed=True) == 2
    static = collector.next()["observation"][:, 0]
    assert torch.equal(static[0], static[1])
    assert torch.equal(static[0], rising[0])


def test_random_frames_are_seeded_too(make, same, pendulum_actor):
    batches = []
    for _ in range(2):
        collector = make(ENVS["pendulum"], pendulum_actor(), frames_per_batch=10, init_random_frames=10)
        collector.set_seed(0)
        batches.append(collector.next())
    same(*batches)


def test_running_statistics_forget_the_reset_at_construction(make, same):
    """That reset has no seed; two runs are equal all the same, and equal to env.rollout."""

    def normalised():
        transforms = Compose(VecNorm(in_keys=["observation"]), CatFrames(2, -1, in_keys=["observation"]))
        return TransformedEnv(GymEnv("CartPole-v1", num_envs=2), transforms)

    collectors = [make(normalised, frames_per_batch=60) for _ in range(2)]
    batches = []
    for collector in collectors:
        assert collector.set_seed(5) == 6
        batches.append(collector.next())
    same(batches[0], batches[1])
    other = normalised()
    other.set_seed(5)
    same(batches[0].exclude("collector"), other.rollout(30, break_when_any_done=False))


def test_statistics_that_were_loaded_are_not_forgotten(make):
    def normalised():
        return TransformedEnv(GymEnv("CartPole-v1"), VecNorm(in_keys=["observation"]))

    first, second = (make(normalised, frames_per_batch=20) for _ in range(2))
    first.next()
    second.load_state_dict(first.state_dict())
    loaded = {key: value.clone() for key, value in second.env.state_dict().items()}
    assert loaded
    second.set_seed(3)
    assert all(torch.equal(value, loaded[key]) for key, value in second.env.state_dict().items())
