"""Slices of what a collector gathered: the next observation of a step is the observation of the following one."""

from __future__ import annotations

import pytest
import torch
from tests.variants import in_turn

from rollwright.collectors import Collector
from rollwright.data.replay_buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSliceSampler,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorDictReplayBuffer,
)
from rollwright.envs import GymEnv, SerialEnv


def cart_pole():
    return GymEnv("CartPole-v1")


LAYOUTS = ["flat", "flat, many environments", "two dimensions", "time inside rows"]


@pytest.mark.parametrize(("layout", "kind"), in_turn(LAYOUTS, ["uniform", "once each", "by priority"]))
def test_observations_follow_one_another(layout, kind):
    many = layout != "flat"
    storage = {
        "flat": lambda: LazyTensorStorage(700),
        "flat, many environments": lambda: LazyMemmapStorage(700),
        "two dimensions": lambda: LazyTensorStorage(600, ndim=2),
        "time inside rows": lambda: LazyTensorStorage(720, ndim=2),
    }[layout]()
    options = {"slice_len": 8, "truncated_key": ("next", "truncated")}
    sampler = {
        "uniform": lambda: SliceSampler(**options),
        "once each": lambda: SliceSamplerWithoutReplacement(**options),
        "by priority": lambda: PrioritizedSliceSampler(720, 0.7, 0.5, **options),
    }[kind]()
    dim = 0 if layout == "time inside rows" else None
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=64, dim_extend=dim)
    env = SerialEnv(3, cart_pole) if many else cart_pole()
    collector = Collector(env, frames_per_batch=120, total_frames=1800)  # 2.5 times what is kept
    torch.manual_seed(0)
    num_inner = 0
    for data in collector:
        buffer.extend(data.reshape(-1) if layout.startswith("flat") else data)
        for _ in range(5):
            batch = buffer.sample()
            inside = ~batch["is_init"].flatten()[1:]
            num_inner += int(inside.sum())
            assert torch.equal(batch["next", "observation"][:-1][inside], batch["observation"][1:][inside])
            ids = batch["collector", "traj_ids"]
            assert torch.equal(ids[:-1][inside], ids[1:][inside])
            done, truncated = batch["next", "done"], batch["next", "truncated"]
            assert torch.equal(done, batch["next", "terminated"] | truncated)
            ends = torch.cat([batch["is_init"].flatten()[1:], torch.ones(1, dtype=torch.bool)])
            assert torch.equal(done.flatten(), ends)
    collector.shutdown()
    assert num_inner > 2000
