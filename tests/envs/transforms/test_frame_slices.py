"""Frames stored once and joined when they are drawn equal those that the environment joins."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tests.variants import in_turn

from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from rollwright.envs import CatFrames, Compose, GymEnv, TransformedEnv, UnsqueezeTransform

OBS, STACK = "observation", "stack"


def both(padding: str, steps: int = 120) -> TensorDict:
    """Frames of CartPole, single ones and those that the environment has joined."""
    env = TransformedEnv(GymEnv("CartPole-v1"), CatFrames(3, -1, [OBS], [STACK], padding=padding, padding_value=7.0))
    with Collector(env, None, frames_per_batch=steps, total_frames=steps) as collector:
        collector.set_seed(0)
        return collector.next()


@pytest.mark.parametrize(("padding", "span"), in_turn(["same", "constant"], [False, (True, False)]))
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_they_equal_those_of_the_environment(storage, padding, span):
    frames = both(padding)
    frames["number"] = torch.arange(120)
    cat = CatFrames(3, -1, [OBS], [STACK], padding=padding, padding_value=7.0)
    transform, sampler = cat.make_rb_transform_and_sampler(64, span=span)
    buffer = ReplayBuffer(storage=storage(200), sampler=sampler, transform=transform, batch_size=64)
    buffer.extend(frames.exclude(STACK, ("next", STACK)))
    drawn = torch.cat([buffer.sample() for _ in range(20)])
    assert drawn.batch_size == (20 * 64,)
    expected = frames[drawn["number"]]
    for key in (STACK, ("next", STACK), OBS, ("next", OBS), ("next", "done")):
        assert torch.equal(drawn[key], expected[key])
    assert set(drawn.keys(True, True)) == set(frames.keys(True, True))
    ids = frames["collector", "traj_ids"]
    seldom = ids.diff(prepend=ids[:1] - 1) != 0  # first frames of trajectories
    assert bool(seldom[drawn["number"]].any()) == bool(span)


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_what_the_environment_has_joined_is_not_stored(storage):
    frames = both("same")
    transform, sampler = CatFrames(3, -1, [OBS], [STACK]).make_rb_transform_and_sampler(16)
    buffer = ReplayBuffer(storage=storage(200), sampler=sampler, transform=transform, batch_size=16)
    buffer.extend(frames)
    stored = buffer.storage[:]
    there = stored if isinstance(stored, TensorDict) else stored[0]
    assert OBS in set(there.keys())
    assert STACK not in set(there.keys())
    assert STACK not in set(there["next"].keys())
    assert set(frames.keys(True)) >= {STACK, ("next", STACK)}
    batch = buffer.sample()
    assert batch[STACK].shape == batch["next", STACK].shape == (16, 12)
    assert torch.equal(batch[STACK][:, -4:], batch[OBS])


def test_a_collector_that_fills_the_buffer_stores_frames_once():
    env = TransformedEnv(GymEnv("CartPole-v1"), CatFrames(3, -1, [OBS], [STACK]))
    transform, sampler = CatFrames(3, -1, [OBS], [STACK]).make_rb_transform_and_sampler(16)
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), sampler=sampler, transform=transform, batch_size=16)
    with Collector(env, None, frames_per_batch=50, total_frames=100, replay_buffer=buffer) as collector:
        for _ in collector:
            pass
    assert len(buffer) == 100
    assert STACK not in set(buffer.storage[:].keys())
    assert buffer.sample()["next", STACK].shape == (16, 12)


def test_what_rollouts_return_has_the_entries_that_it_had():
    frames = GymEnv("CartPole-v1").rollout(60, break_when_any_done=False)
    transform, sampler = CatFrames(3, -1, [OBS]).make_rb_transform_and_sampler(8, traj_key=("collector", "traj_ids"))
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), sampler=sampler, transform=transform, batch_size=8)
    buffer.extend(frames)
    assert set(buffer.sample().keys(True)) == set(frames.keys(True))


def test_it_stands_among_other_transforms_and_a_batch_of_another_size_may_be_drawn():
    frames = both("same")
    transform, sampler = CatFrames(3, -2, ["row"]).make_rb_transform_and_sampler(8, traj_key=("collector", "traj_ids"))
    rows = UnsqueezeTransform(-2, in_keys=[OBS, ("next", OBS)], out_keys=["row", ("next", "row")])
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(200), sampler=sampler, transform=Compose(rows, transform), batch_size=8
    )
    buffer.extend(frames)
    batch = buffer.sample(5)
    assert batch["row"].shape == batch["next", "row"].shape == (5, 3, 4)
    assert torch.equal(batch["row"].flatten(1), frames[STACK][batch["index"]])
    batch, info = buffer.sample(return_info=True, include_info=True)
    assert batch["index"].shape == (8,)
    assert torch.equal(info["index"], batch["index"])


def test_bad_input():
    cat = CatFrames(3, -1, [OBS])
    with pytest.raises(ValueError, match=r"batch_size: .*0"):
        cat.make_rb_transform_and_sampler(0)
    with pytest.raises(ValueError, match=r"pad_output=True.*Leave"):
        cat.make_rb_transform_and_sampler(4, pad_output=True)
    for span in (True, 1, (True, True), [False, 1]):
        with pytest.raises(ValueError, match=r"span: .*Pass span=\(True, False\)"):
            cat.make_rb_transform_and_sampler(4, span=span)
    with pytest.raises(ValueError, match=r"slice_len: .*N=3"):
        cat.make_rb_transform_and_sampler(4, slice_len=2)
    transform, _ = cat.make_rb_transform_and_sampler(4)
    with pytest.raises(KeyError, match="Give the buffer the sampler"):
        transform(TensorDict({OBS: torch.zeros(4, 2)}, [4]))
    with pytest.raises(TypeError, match="for batches of a replay buffer"):
        TransformedEnv(GymEnv("CartPole-v1"), transform).observation_spec  # noqa: B018


def test_frames_below_next_are_joined_where_they_alone_are_named():
    transform, sampler = CatFrames(2, -1, [("next", OBS)]).make_rb_transform_and_sampler(4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), sampler=sampler, transform=transform, batch_size=4)
    count = torch.arange(6.0).unsqueeze(-1)
    data = {OBS: count, "next": {OBS: count + 1}, "episode": torch.zeros(6)}
    buffer.extend(TensorDict(data, [6]))
    batch = buffer.sample()
    assert torch.equal(batch["next", OBS], torch.cat([batch[OBS], batch[OBS] + 1], -1))
    buffer.empty()
    buffer.extend(TensorDict({OBS: count, "episode": torch.zeros(6)}, [6]))
    with pytest.raises(KeyError, match=r"no entry \('next', 'observation'\)"):
        buffer.sample()


def test_ids_may_have_a_last_dimension_and_data_no_device():
    data = {OBS: torch.arange(4.0).reshape(4, 1), "collector": {"traj_ids": torch.tensor([[0], [0], [1], [1]])}}
    joined = CatFrames(2, -1, [OBS])(TensorDict(data, [4]))
    assert joined[OBS].tolist() == [[0, 0], [0, 1], [2, 2], [2, 3]]
    elsewhere = TensorDict({OBS: torch.zeros(4, 1, device="meta")}, [4])
    elsewhere["next", "done"] = torch.zeros(4, 1, dtype=torch.bool, device="meta")
    assert CatFrames(2, -1, [OBS])(elsewhere)[OBS].shape == (4, 2)
