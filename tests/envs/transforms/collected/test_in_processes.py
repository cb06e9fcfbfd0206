"""Transforms of a ParallelEnv, and inside its processes and those of collectors."""

from __future__ import annotations

import pytest
import torch

from rollwright.collectors import MultiSyncCollector
from rollwright.envs import (
    CatFrames,
    Compose,
    FrameSkipTransform,
    GymEnv,
    NoopResetEnv,
    ParallelEnv,
    RewardSum,
    StepCounter,
    TargetReturn,
    TimeMaxPool,
    TransformedEnv,
    VecNorm,
)


def pendulum(*transforms):
    return TransformedEnv(GymEnv("Pendulum-v1", max_episode_steps=11), Compose(*transforms))


def pole():
    return GymEnv("CartPole-v1")


def skipping():
    return pendulum(FrameSkipTransform(2), NoopResetEnv(3), CatFrames(2, -1, ["observation"]))


AROUND = {
    "frames": lambda: Compose(CatFrames(3, -1, ["observation"], ["past"]), VecNorm(["observation"])),
    "skips": lambda: Compose(FrameSkipTransform(4), StepCounter(9), RewardSum()),
    "targets": lambda: Compose(TargetReturn(3.0), TimeMaxPool(T=2)),
}


@pytest.mark.parametrize("name", AROUND)
def test_around_a_batch_in_processes(name, both_paths):
    td = both_paths(lambda: TransformedEnv(ParallelEnv(3, pole), AROUND[name]()), frames=120, batches=2)
    assert td["next", "done"].sum() > 3


def test_inside_its_processes(both_paths):
    td = both_paths(lambda: ParallelEnv(2, skipping), frames=60, batches=2)
    assert td["next", "done"].sum() > 3


@pytest.mark.parametrize("env_groups", [1, 2])
def test_groups_that_take_turns(env_groups, both_paths):
    def make():
        return TransformedEnv(ParallelEnv(4, pendulum), Compose(FrameSkipTransform(3), StepCounter(3), RewardSum()))

    td = both_paths(make, frames=60, batches=2, env_groups=env_groups)
    assert td["next", "done"].sum() > 3


def test_in_workers_as_in_one_process():
    found = []
    for _ in range(2):
        collector = MultiSyncCollector([skipping, skipping], None, frames_per_batch=40, total_frames=80)
        collector.set_seed(4)
        found.append(torch.stack([batch.clone() for batch in collector]))
        collector.shutdown()
    assert (found[0] == found[1]).all()
    assert found[0]["next", "done"].sum() > 2
