"""state_dict and load_state_dict: counters, ids, weights and transforms go on where they were."""

from __future__ import annotations

import io

import pytest
import torch

from rollwright.envs import GymEnv, RewardSum, TransformedEnv, VecNorm
from rollwright.testing.mocking_classes import CountingEnv


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def cartpole():
    return TransformedEnv(GymEnv("CartPole-v1"), VecNorm(in_keys=["observation"]))


def test_entries(make, cartpole_actor):
    state = make(cartpole, cartpole_actor(), frames_per_batch=10, total_frames=50).state_dict()
    assert {"policy_state_dict", "env_state_dict", "traj_pool"} <= set(state)


def test_a_restored_collector_delivers_what_was_left(make, cartpole_actor):
    first = make(cartpole, cartpole_actor(), frames_per_batch=10, total_frames=50)
    first.next()
    first.next()
    state = through_a_file(first.state_dict())
    second = make(cartpole, cartpole_actor(1), frames_per_batch=10, total_frames=50)
    second.load_state_dict(state)
    assert second.stats()["frames"] == 20
    assert second.stats()["batches"] == 2
    assert len(list(second)) == 3


def test_a_restored_finished_collector_yields_nothing_more(make):
    first = make(CountingEnv(), frames_per_batch=10, total_frames=20)
    list(first)
    second = make(CountingEnv(), frames_per_batch=10, total_frames=20)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert list(second) == []
    assert second.next() is None
    assert second.completed


def test_ids_go_on_above_the_saved_ones(make, count):
    env = CountingEnv(max_steps=1)
    first = make(env, count(env), frames_per_batch=10, total_frames=40)
    used = int(first.next()["collector", "traj_ids"].max())
    state = through_a_file(first.state_dict())
    second = make(CountingEnv(max_steps=1), count(env), frames_per_batch=10, total_frames=40)
    second.load_state_dict(state)
    assert int(second.next()["collector", "traj_ids"].min()) > used


def test_ids_are_never_given_twice_when_an_older_state_is_loaded(make, count):
    env = CountingEnv(max_steps=1)
    collector = make(env, count(env), frames_per_batch=10, total_frames=40)
    state = through_a_file(collector.state_dict())
    used = int(collector.next()["collector", "traj_ids"].max())
    collector.load_state_dict(state)
    assert int(collector.next()["collector", "traj_ids"].min()) > used


def test_weights_are_restored(make, pendulum_actor):
    first = make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(0.25), frames_per_batch=5)
    second = make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(1.0), frames_per_batch=5)
    second.load_state_dict(through_a_file(first.state_dict()))
    batch = second.next()
    torch.testing.assert_close(batch["action"], 0.25 * batch["observation"][:, :1])


def test_statistics_of_transforms_are_restored(make):
    first = make(cartpole, frames_per_batch=200)
    first.next()
    second = make(cartpole, frames_per_batch=200)
    second.load_state_dict(through_a_file(first.state_dict()))
    left, right = first.env.state_dict(), second.env.state_dict()
    assert left.keys() == right.keys()
    assert left
    for key, value in left.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, right[key]), key


def test_the_policy_version_is_kept(make, pendulum_actor):
    first = make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(), frames_per_batch=5, track_policy_version=True)
    for _ in range(3):
        first.update_policy_weights_()
    second = make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(), frames_per_batch=5, track_policy_version=True)
    second.load_state_dict(through_a_file(first.state_dict()))
    assert bool((second.next()["policy_version"] == 3).all())
    assert second.update_policy_weights_() == 4


def test_state_dict_in_the_middle_of_iteration_changes_nothing(make, same, stream):
    streams = []
    for save in (False, True):
        collector = make(lambda: GymEnv("CartPole-v1"), frames_per_batch=20, total_frames=100)
        collector.set_seed(0)
        batches = []
        for batch in collector:
            batches.append(batch)
            if save:
                collector.state_dict()
        streams.append(stream(batches))
    same(*streams)


def test_loading_begins_new_trajectories(make, count):
    env = TransformedEnv(CountingEnv(max_steps=100), RewardSum())
    collector = make(env, count(env), frames_per_batch=4)
    collector.next()
    collector.load_state_dict(collector.state_dict())
    batch = collector.next()
    assert batch["collector", "traj_ids"].tolist() == [1] * 4


@pytest.mark.parametrize("state", [{}, {"policy_state_dict": {}}, {"anything": 1}])
def test_a_state_of_something_else_is_named(make, state):
    with pytest.raises(KeyError, match="env_state_dict"):
        make(CountingEnv(), frames_per_batch=4).load_state_dict(state)


def test_load_state_dict_passes_strict_on(make, pendulum_actor):
    collector = make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(0.25), frames_per_batch=5)
    state = collector.state_dict()
    state["policy_state_dict"] = {**state["policy_state_dict"], "new.weight": torch.ones(1)}
    with pytest.raises(RuntimeError, match=r"new\.weight"):
        collector.load_state_dict(state)
    collector.load_state_dict(state, strict=False)
