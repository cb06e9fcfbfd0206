"""Generalized advantage estimation, against the recursion written out frame by frame."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer, gae
from rollwright.data.layout import split_trajectories, trajectories
from rollwright.envs import GymEnv, SerialEnv


def by_hand(batch, value, next_value, gamma, lmbda):
    """Of each part of a trajectory, from its last frame back."""
    found = torch.zeros_like(value)
    batch = batch.copy()
    batch["place"] = torch.arange(batch.numel()).reshape(batch.batch_size)
    for part in trajectories(batch):
        ahead = torch.zeros(1)
        for frame in reversed(part.unbind(0)):
            at = divmod(int(frame["place"]), batch.shape[-1]) if batch.ndim == 2 else int(frame["place"])
            alive = 1 - frame["next", "terminated"].float()
            delta = frame["next", "reward"] + gamma * alive * next_value[at] - value[at]
            ahead = delta + gamma * lmbda * ahead
            found[at] = ahead
    return found


@pytest.fixture(scope="module")
def batch():
    env = SerialEnv(3, lambda: GymEnv("CartPole-v1", max_episode_steps=15))
    with Collector(env, frames_per_batch=180, total_frames=180) as collector:
        collector.set_seed(0)
        found = collector.next()
    assert found["next", "terminated"].any()
    assert found["next", "truncated"].any()
    return found


def critic(observation):
    return observation.sum(-1, keepdim=True)


@pytest.mark.parametrize(("gamma", "lmbda"), [(0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_equal_the_recursion(batch, gamma, lmbda):
    values = critic(batch["observation"]), critic(batch["next", "observation"])
    found = gae(batch, *values, gamma=gamma, lmbda=lmbda)
    torch.testing.assert_close(found, by_hand(batch, *values, gamma, lmbda))


def test_slices_of_a_buffer_do_not_reach_into_one_another(batch):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(180), sampler=SliceSampler(slice_len=5), batch_size=60)
    buffer.extend(batch.reshape(-1))
    slices = buffer.sample()
    values = critic(slices["observation"]), critic(slices["next", "observation"])
    torch.testing.assert_close(gae(slices, *values), by_hand(slices, *values, 0.99, 0.95))


def test_padding_has_no_advantage_and_changes_none(batch):
    padded = split_trajectories(batch, prefix="collector")
    values = critic(padded["observation"]), critic(padded["next", "observation"])
    found, mask = gae(padded, *values), padded["collector", "mask"]
    assert not found[~mask].any()
    flat = gae(batch, critic(batch["observation"]), critic(batch["next", "observation"]))
    torch.testing.assert_close(found[mask].sum(), flat.sum())


def test_flags_of_agents_end_the_sums_of_each():
    flags = torch.zeros(1, 3, 2, 1, dtype=torch.bool)
    flags[0, 1, 0] = True  # the first agent ends in the second step, the other one goes on
    outcome = {"agents": {"reward": torch.ones(1, 3, 2, 1), "done": flags, "terminated": flags}}
    whole = torch.zeros(1, 3, 1, dtype=torch.bool)
    batch = TensorDict({"next": {**outcome, "done": whole, "terminated": whole}}, [1, 3])
    zero = torch.zeros(1, 3, 2, 1)
    found = gae(batch, zero, zero, gamma=1.0, lmbda=1.0, reward_key=("agents", "reward"))
    assert found[0, ..., 0].T.tolist() == [[2, 1, 1], [3, 2, 1]]
    del batch["next", "agents", "done"], batch["next", "agents", "terminated"]
    found = gae(batch, zero, zero + 5, gamma=1.0, lmbda=1.0, reward_key=("agents", "reward"))
    assert found[0, 2].tolist() == [[6], [6]]  # the flags of all count


def test_a_value_of_another_shape_is_refused(batch):
    value = critic(batch["observation"])
    with pytest.raises(ValueError, match=r"next_value: expected the shape of the reward, \[3, 60, 1\], got \[3, 60\]"):
        gae(batch, value, value.squeeze(-1))


def test_a_batch_without_flags_is_refused():
    batch = TensorDict({"next": {"reward": torch.ones(2, 1)}, "collector": {"traj_ids": torch.zeros(2).long()}}, [2])
    with pytest.raises(KeyError, match="Keep 'terminated'"):
        gae(batch, torch.zeros(2, 1), torch.zeros(2, 1))
