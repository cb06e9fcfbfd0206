"""Slices of data that MultiStep rewrote: its flags are those of later frames, and bound no trajectory."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tests.variants import in_turn

from rollwright.collectors import Collector
from rollwright.data.postprocs import MultiStep
from rollwright.data.replay_buffers import (
    LazyTensorStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from rollwright.envs import GymEnv

DONE = ("next", "done")


def collected(n_steps, sampler):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=64)
    postproc = MultiStep(0.99, n_steps) if n_steps else None
    collector = Collector(
        lambda: GymEnv("CartPole-v1"), frames_per_batch=200, total_frames=800, replay_buffer=buffer, postproc=postproc
    )
    collector.set_seed(0)
    for _ in collector:
        pass
    return buffer


OPTIONS = [{}, {"end_key": DONE}, {"end_key": ("next", "terminated")}]


@pytest.mark.parametrize(("kind", "options"), in_turn(["uniform", "once each", "by priority"], OPTIONS))
def test_batches_are_as_full_as_without(kind, options):
    def sampler():
        if kind == "by priority":
            return PrioritizedSliceSampler(1000, 0.7, 0.5, slice_len=4, **options)
        return (SliceSampler if kind == "uniform" else SliceSamplerWithoutReplacement)(slice_len=4, **options)

    plain, rewritten = collected(0, sampler()), collected(3, sampler())
    assert int(rewritten[:][DONE].sum()) > 2 * int(plain[:][DONE].sum()) > 0
    assert len(plain) == len(rewritten) == 800
    for seed in range(20):
        torch.manual_seed(seed)
        expected = plain.sample()
        torch.manual_seed(seed)
        batch = rewritten.sample()
        assert batch["index"].tolist() == expected["index"].tolist()
        ids = batch["collector", "traj_ids"]
        inside = ~batch["is_init"].squeeze(-1)[1:]
        assert torch.equal(ids[1:][inside], ids[:-1][inside])


def test_without_ids_the_flags_count():
    done = torch.tensor([False, True, True, False])
    data = TensorDict({"next": {"done": done[:, None]}, "steps_to_next_obs": torch.tensor([2, 2, 1, 2])}, [4])
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=4), batch_size=400)
    buffer.extend(data)
    lengths = buffer.sample()["is_init"].squeeze(-1).nonzero().squeeze(-1).diff().unique().tolist()
    assert lengths == [1, 2]


def test_a_flag_that_is_not_of_the_next_step_still_counts():
    last = torch.tensor([False, True, False, False])
    data = TensorDict(
        {
            "last": last,
            "collector": {"traj_ids": torch.zeros(4, dtype=torch.int64)},
            "steps_to_next_obs": torch.full((4,), 2),
        },
        [4],
    )
    sampler = SliceSampler(slice_len=2, end_key="last", strict_length=True)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=100)
    buffer.extend(data)
    assert set(buffer.sample()["index"][::2].tolist()) == {0, 2}
