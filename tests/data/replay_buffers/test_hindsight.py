"""Hindsight: goals are replaced by what was achieved in the same trajectory, rewards are computed again."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import (
    HERReplayBuffer,
    HindsightStrategy,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    SliceSampler,
)

FAR = -1.0


def reached(td):
    return (td["achieved_goal"] == td["desired_goal"]).float()


def episodes(n: int = 30, length: int = 10, start: int = 0) -> TensorDict:
    step = torch.arange(start, start + n)
    return TensorDict(
        {
            "step": step,
            "achieved_goal": step.float().unsqueeze(-1),
            "desired_goal": torch.full((n, 1), FAR),
            "next": {
                "reward": torch.full((n, 1), -5.0),
                "done": (step % length == length - 1).unsqueeze(-1),
                "desired_goal": torch.full((n, 1), FAR),
            },
        },
        [n],
    )


def filled(n: int = 30, storage=None, **options) -> HERReplayBuffer:
    buffer = HERReplayBuffer(
        reached, storage=LazyTensorStorage(100) if storage is None else storage, **{"batch_size": 400, **options}
    )
    buffer.extend(episodes(n))
    return buffer


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.8, 1.0])
def test_a_share_of_each_batch_is_changed(ratio):
    buffer = filled(her_ratio=ratio)
    batch = buffer.sample()
    changed = batch["desired_goal"].squeeze(-1) != FAR
    assert int(changed.sum()) == int(400 * ratio)
    assert torch.equal(batch["next", "desired_goal"], batch["desired_goal"])
    expected = (batch["desired_goal"] == batch["achieved_goal"]).float()
    assert torch.equal(batch["next", "reward"][changed], expected[changed])
    assert bool((batch["next", "reward"][~changed] == -5.0).all())
    assert torch.equal(batch["index"], batch["step"])
    assert bool((buffer[:]["desired_goal"] == FAR).all())  # what is stored stays


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_goals_come_from_where_the_strategy_says(strategy, storage):
    buffer = filled(her_ratio=1.0, strategy=strategy, storage=storage(100))
    batch = buffer.sample()
    step, goal = batch["step"], batch["desired_goal"].squeeze(-1).long()
    same = step // 10 == goal // 10
    if strategy == "random":
        assert not bool(same.all())
        assert set(goal.tolist()) == set(range(30))
        return
    assert bool(same.all())
    if strategy == "final":
        assert torch.equal(goal % 10, torch.full_like(goal, 9))
    elif strategy == "future":
        assert bool((goal >= step).all())
        assert set((goal - step)[step % 10 == 0].tolist()) == set(range(10))
    else:
        assert bool((goal < step).any())
        assert bool((goal > step).any())


def test_an_open_trajectory_ends_with_what_is_stored_and_one_over_the_seam_goes_on():
    buffer = filled(25, storage=LazyTensorStorage(20), her_ratio=1.0, strategy=HindsightStrategy.FINAL)
    batch = buffer.sample()  # steps 5 to 24; 20 to 24 lie over the seam
    last = {0: 9, 1: 19, 2: 24}
    assert batch["desired_goal"].squeeze(-1).tolist() == [float(last[int(s) // 10]) for s in batch["step"]]
    buffer.extend(episodes(3, start=25))
    batch = buffer.sample()
    last[2] = 27
    assert batch["desired_goal"].squeeze(-1).tolist() == [float(last[int(s) // 10]) for s in batch["step"]]
    assert int(batch["step"].min()) == 8


def test_environments_beside_one_another():
    data = torch.stack([episodes(10, 5), episodes(10, 10, start=100)])
    for options in ({}, {"dim_extend": 0}):
        buffer = HERReplayBuffer(
            reached, her_ratio=1.0, strategy="final", storage=LazyTensorStorage(100, ndim=2), batch_size=200, **options
        )
        buffer.extend(data)
        batch = buffer.sample()
        last = {step: 4 if step < 5 else 9 if step < 10 else 109 for step in batch["step"].tolist()}
        assert batch["desired_goal"].squeeze(-1).tolist() == [float(last[step]) for step in batch["step"].tolist()]


@pytest.mark.parametrize("sampler", [SliceSampler(slice_len=5), PrioritizedSampler(100, alpha=0.5, beta=0.5)])
def test_any_sampler_draws(sampler):
    buffer = filled(sampler=sampler, her_ratio=0.5, strategy="final")
    batch = buffer.sample()
    changed = batch["desired_goal"].squeeze(-1) != FAR
    assert int(changed.sum()) == 200
    assert torch.equal(batch["desired_goal"][changed].squeeze(-1) % 10, torch.full((200,), 9.0))


def test_prefetching_shared_and_repeated():
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    one, two = (filled(generator=g, batch_size=16) for g in generators)
    assert bool((one.sample() == two.sample()).all())
    shared = filled(shared=True, prefetch=2, batch_size=16)
    assert int((shared.sample()["desired_goal"] != FAR).sum()) == int(16 * 0.8)
    shared.shutdown()


def test_another_entry_ends_trajectories():
    buffer = HERReplayBuffer(
        reached, end_key="end", her_ratio=1.0, strategy="final", storage=LazyTensorStorage(100), batch_size=50
    )
    data = episodes(10).exclude("next").set("end", torch.arange(10) == 4).set(("next", "reward"), torch.zeros(10))
    buffer.extend(data)
    batch = buffer.sample()
    assert set(batch["desired_goal"].squeeze(-1).tolist()) == {4.0, 9.0}
    assert batch["next", "reward"].shape == (50,)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"her_ratio": 1.5}, ValueError, "her_ratio: expected a number from 0 to 1"),
        ({"strategy": "past"}, ValueError, "strategy: expected one of future, final, episode, random"),
        ({"goal_key": 3}, TypeError, "goal_key: expected a string"),
    ],
)
def test_options_that_are_wrong(options, error, message):
    with pytest.raises(error, match=message):
        HERReplayBuffer(reached, **options)
    with pytest.raises(TypeError, match="reward_fn: expected a callable"):
        HERReplayBuffer(None)


def test_arguments_of_a_service_are_named():
    with pytest.raises(TypeError, match=r"service_backend: .*HERReplayBuffer.*by name, got 1 by position"):
        HERReplayBuffer(reached, storage=LazyTensorStorage, service_backend="process")


def test_data_that_do_not_fit():
    for options, error, message in (
        ({"achieved_goal_key": "other"}, KeyError, "achieved_goal_key: there is no entry 'other'"),
        ({"goal_key": "other"}, KeyError, "goal_key: there is no tensor 'other'"),
        ({"end_key": "other"}, KeyError, "end_key: there is no entry 'other'"),
        ({"achieved_goal_key": "step"}, ValueError, "entries of one shape"),
    ):
        with pytest.raises(error, match=message):
            filled(**options).sample()
    buffer = HERReplayBuffer(lambda td: td["step"][:1], storage=LazyTensorStorage(100), batch_size=10)
    buffer.extend(episodes())
    with pytest.raises(ValueError, match=r"reward_fn: expected a reward for each.*\[8, 1\], got \[1\]"):
        buffer.sample()


def moving(n: int = 30) -> TensorDict:
    """Episodes whose steps say what they led to."""
    data = episodes(n)
    return data.set(("next", "achieved_goal"), data["achieved_goal"] + 1)


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_final_goals_from_before_the_last_action_are_warned_of_once(storage):
    options = {"her_ratio": 1.0, "strategy": "final", "batch_size": 50}
    buffer = HERReplayBuffer(reached, storage=storage(100), **options)
    buffer.extend(moving())
    with pytest.warns(UserWarning, match=r"pass achieved_goal_key=\('next', 'achieved_goal'\)"):
        batch = buffer.sample()
    assert set(batch["desired_goal"].squeeze(-1).tolist()) == {9.0, 19.0, 29.0}
    buffer.sample()  # warnings are errors here
    right = HERReplayBuffer(reached, storage=storage(100), achieved_goal_key=("next", "achieved_goal"), **options)
    right.extend(moving())
    assert set(right.sample()["desired_goal"].squeeze(-1).tolist()) == {10.0, 20.0, 30.0}


@pytest.mark.parametrize("strategy", ["future", "episode", "random"])
def test_goals_of_other_steps_are_not_warned_of(strategy):
    buffer = HERReplayBuffer(reached, strategy=strategy, storage=LazyTensorStorage(100), batch_size=50)
    buffer.extend(moving())
    buffer.sample()
