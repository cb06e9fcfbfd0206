"""Environments and policies of the CPU while torch's default device is another one: ``meta``, which has no numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, PrioritizedSampler, SliceSampler, TensorDictReplayBuffer
from rollwright.envs import (
    AsyncEnvPool,
    CatFrames,
    Compose,
    GymEnv,
    InitTracker,
    ObservationNorm,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
)
from rollwright.modules import OneHotCategorical, ProbabilisticActor


def cartpole(**options):
    return GymEnv("CartPole-v1", **options)


def transformed():
    changes = Compose(
        StepCounter(5),
        RewardSum(),
        InitTracker(),
        ObservationNorm(0.0, 1.0, in_keys=["observation"]),
        CatFrames(2, dim=-1, in_keys=["observation"]),
        VecNorm(in_keys=["observation"]),
    )
    return TransformedEnv(SerialEnv(2, cartpole), changes)


ENVS = {
    "one": cartpole,
    "categorical": partial(cartpole, categorical_action_encoding=True),
    "continuous": lambda: GymEnv("Pendulum-v1"),
    "vector": partial(cartpole, num_envs=2),
    "serial": lambda: SerialEnv(2, cartpole),
    "parallel": lambda: ParallelEnv(2, cartpole, num_processes=1),
    "pool": lambda: AsyncEnvPool([cartpole] * 2),
    "transformed": transformed,
}
OPTIONS = {
    "arrays": {},
    "TensorDicts": {"use_buffers": False},
    "compact": {"compact_obs": True},
    "split": {"split_trajs": True},
    "trajectories": {"trajs_per_batch": 2, "max_frames_per_traj": 5},
    "resets": {"reset_at_each_iter": True},
}


@pytest.fixture(autouse=True)
def _default_device():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def check(batch) -> None:
    for key, value in batch.items(True, True):
        assert value.device.type == "cpu", key


def collect(env, policy=None, **options):
    collector = Collector(env, policy, frames_per_batch=16, total_frames=32, **options)
    batches = [batch for batch in collector if batch is not None]
    if not isinstance(env, AsyncEnvPool):  # whose state cannot be saved
        collector.load_state_dict(collector.state_dict())
    collector.shutdown()
    for batch in batches:
        check(batch)


@pytest.mark.parametrize("name", ENVS)
def test_rollouts_and_resets(name):
    env = ENVS[name]()
    env.set_seed(0)
    check(env.rollout(8, break_when_any_done=False))
    check(env.fake_tensordict())
    check(env.rand_action(env.reset()))
    env.close()


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize("options", ["arrays", "TensorDicts"])
def test_batches_of_random_actions(name, options):
    if name != "pool" or options == "arrays":
        collect(ENVS[name](), **OPTIONS[options])


@pytest.mark.filterwarnings("ignore:.*split_trajs=True pads")
@pytest.mark.parametrize("options", OPTIONS)
def test_batches_of_a_policy(options):
    linear = nn.Linear(4, 2, device="cpu")

    def act(observation: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(linear(observation).argmax(-1), 2)

    policy = TensorDictModule(act, ["observation"], ["action"])
    collect(SerialEnv(2, cartpole), policy, init_random_frames=16, **OPTIONS[options])


@pytest.mark.parametrize("options", ["arrays", "TensorDicts"])
def test_versions_and_drawn_actions(options):
    logits = TensorDictModule(nn.Linear(4, 2, device="cpu"), ["observation"], ["logits"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
    collect(SerialEnv(2, cartpole), actor, track_policy_version=True, **OPTIONS[options])


@pytest.mark.parametrize("extend_buffer", [True, False])
@pytest.mark.parametrize("sampler", [SliceSampler(slice_len=2), PrioritizedSampler(60, 0.7, 0.5)])
def test_batches_into_a_buffer(extend_buffer, sampler):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(60), sampler=sampler, batch_size=6)
    collect(SerialEnv(2, cartpole), replay_buffer=buffer, extend_buffer=extend_buffer)
    check(buffer.sample())


@pytest.mark.parametrize("sync", [True, False])
def test_batches_of_workers(sync):
    collector = Collector([cartpole] * 2, None, num_collectors=2, sync=sync, frames_per_batch=16, total_frames=32)
    for batch in collector:
        check(batch)
    collector.shutdown()
