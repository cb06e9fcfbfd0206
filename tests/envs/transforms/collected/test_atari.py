"""The transforms of TorchRL's programs for Atari, on a game, on arrays."""

from __future__ import annotations

import pytest
import torch

from rollwright.envs import (
    CatFrames,
    DoubleToFloat,
    EndOfLifeTransform,
    GrayScale,
    GymEnv,
    NoopResetEnv,
    ParallelEnv,
    RenameTransform,
    Resize,
    RewardSum,
    SignTransform,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
    VecNorm,
    check_env_specs,
)

pytest.importorskip("ale_py")


def game(**options):
    env = GymEnv(
        "BreakoutNoFrameskip-v4", frame_skip=4, from_pixels=True, pixels_only=False, categorical_action_encoding=True
    )
    env = TransformedEnv(env)
    env.append_transform(NoopResetEnv(noops=5, random=True))
    env.append_transform(EndOfLifeTransform())
    return env


def pictures(env, key="pixels"):
    for transform in (
        SignTransform(in_keys=["reward"]),
        ToTensorImage(in_keys=[key], out_keys=["pixels"]),
        GrayScale(),
        Resize(84, 84),
        CatFrames(N=4, dim=-3),
        RewardSum(),
        StepCounter(max_steps=24),
        DoubleToFloat(),
        VecNorm(in_keys=["pixels"]),
    ):
        env.append_transform(transform)
    return env


def test_one_game(both_paths):
    check_env_specs(pictures(game()))
    td = both_paths(lambda: pictures(game()), frames=30, batches=2)
    assert td["pixels"].shape[1:] == (4, 84, 84)
    assert td["next", "done"].any()


def test_games_in_processes(both_paths):
    def make():
        env = TransformedEnv(ParallelEnv(2, game, num_processes=1))
        return pictures(env.append_transform(RenameTransform(["pixels"], ["raw"])), "raw")

    td = both_paths(make, frames=60, batches=1)
    assert td["pixels"].dtype == torch.float32
    assert ("next", "end-of-life") in td.keys(True)
