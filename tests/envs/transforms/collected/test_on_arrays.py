"""Transforms on arrays: the bits, and the state left behind, of those on TensorDicts."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rollwright.collectors import Collector
from rollwright.envs import (
    CatFrames,
    Compose,
    DoubleToFloat,
    EndOfLifeTransform,
    FrameSkipTransform,
    GrayScale,
    GymEnv,
    GymWrapper,
    NoopResetEnv,
    ObservationNorm,
    Resize,
    RewardSum,
    SerialEnv,
    SignTransform,
    StepCounter,
    ToTensorImage,
    TransformedEnv,
    VecNorm,
)


class Movie(gymnasium.Env):
    """Small images, drawn by the seed; three lives."""

    observation_space = spaces.Dict(pixels=spaces.Box(0, 255, (12, 10, 3), np.uint8))
    action_space = spaces.Discrete(3)
    time = 0

    def lives(self):
        return 3 - self.time // 4

    def _seen(self):
        return {"pixels": self.np_random.integers(0, 256, (12, 10, 3), np.uint8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = int(self.np_random.integers(3))
        return self._seen(), {}

    def step(self, action):
        self.time += 1
        return self._seen(), float(self.np_random.normal()), self.lives() == 0, False, {}


def pendulum(*transforms, num_envs=None):
    env = GymEnv("Pendulum-v1", num_envs=num_envs, max_episode_steps=13)
    return TransformedEnv(env, Compose(*transforms))


def stack(frames="same"):
    return CatFrames(3, -1, ["observation"], ["past"], padding=frames, padding_value=0.5)


def norm(**options):
    return VecNorm(["observation", "reward"], ["observation", "scaled"], decay=0.99, **options)


def poles(env):
    chain = Compose(stack(), norm(), CatFrames(2, -1, ["past"]), VecNorm(["past"], ["common"], decay=1.0), RewardSum())
    return TransformedEnv(env, chain)


def frozen():
    transform = VecNorm(["observation"])
    transform(TensorDict({"observation": torch.arange(12.0).view(4, 3)}, [4]))
    return transform.freeze()


def atari():
    """The transforms of TorchRL's programs for Atari."""
    return Compose(
        FrameSkipTransform(2),
        NoopResetEnv(4),
        EndOfLifeTransform(eol_attribute="unwrapped.lives"),
        SignTransform(in_keys=["reward"]),
        ToTensorImage(),
        GrayScale(),
        Resize(8, 8),
        CatFrames(N=4, dim=-3),
        RewardSum(),
        StepCounter(max_steps=4500),
        DoubleToFloat(),
        VecNorm(in_keys=["pixels"]),
    )


ENVS = {
    "frames": lambda: pendulum(stack()),
    "frames of constants": lambda: pendulum(stack("constant"), CatFrames(2, -1, ["past"])),
    "frames of a vector": lambda: pendulum(StepCounter(7), stack(), num_envs=3),
    "frames of counts": lambda: pendulum(StepCounter(7), CatFrames(2, -1, ["step_count"], ["counts"])),
    "frames of several": lambda: TransformedEnv(SerialEnv(3, lambda: pendulum(RewardSum())), stack()),
    "frames in several": lambda: SerialEnv(8, lambda: pendulum(stack())),
    "statistics": lambda: pendulum(norm()),
    "statistics of a vector": lambda: pendulum(StepCounter(5), norm(), num_envs=8),
    "statistics of several": lambda: TransformedEnv(SerialEnv(3, lambda: pendulum(StepCounter(6))), norm()),
    "statistics in several": lambda: SerialEnv(3, lambda: pendulum(norm())),
    "statistics of counts": lambda: pendulum(StepCounter(6), VecNorm(["step_count"], ["share"])),
    "statistics of doubles": lambda: TransformedEnv(
        GymEnv("HalfCheetah-v5", max_episode_steps=9), Compose(VecNorm(decay=0.99999, eps=1e-2), DoubleToFloat())
    ),
    "statistics after skips": lambda: pendulum(norm(), FrameSkipTransform(3), NoopResetEnv(4), stack(), RewardSum()),
    "rows that end for themselves": lambda: poles(GymEnv("CartPole-v1", num_envs=8)),
    "several that end for themselves": lambda: poles(SerialEnv(3, lambda: GymEnv("CartPole-v1"))),
    "frozen": lambda: pendulum(frozen()),
    "fixed": lambda: pendulum(ObservationNorm(0.1, 0.3, ["observation"]), stack()),
    "atari": lambda: TransformedEnv(GymWrapper(Movie()), atari()),
    "atari in several": lambda: SerialEnv(2, lambda: TransformedEnv(GymWrapper(Movie()), atari())),
    "mujoco": lambda: TransformedEnv(
        GymEnv("HalfCheetah-v5", max_episode_steps=9),
        Compose(VecNorm(["observation"], decay=0.99999, eps=1e-2), RewardSum(), StepCounter(), DoubleToFloat()),
    ),
}


@pytest.mark.parametrize("name", ENVS)
def test_bits_and_state_are_those_on_tensordicts(name, both_paths):
    td = both_paths(ENVS[name], frames=144)
    assert td["next", "done"].sum() > 3


def test_the_state_that_arrays_leave_goes_on_on_tensordicts():
    def make():
        return pendulum(stack(), norm(), num_envs=2)

    env, other = make(), make()
    env.set_seed(0)
    with Collector(env, frames_per_batch=20, total_frames=20) as collector:
        next(iter(collector))
        assert collector.stats()["paths"]["env"] == "native: NumPy arrays"
    other.transform.load_state_dict({key: value.clone() for key, value in env.transform.state_dict().items()})
    outcome = TensorDict({"observation": torch.rand(2, 3), "reward": torch.rand(2, 1)}, [2])
    found = [each.transform.transform_step(outcome.empty(), outcome.clone()) for each in (env, other)]
    assert (found[0] == found[1]).all()
    assert (found[0]["past"][:, :6] != 0).all()


def test_what_was_handed_out_stays_when_a_state_is_loaded():
    env = pendulum(stack())
    env.set_seed(0)
    collector = Collector(env, frames_per_batch=3, total_frames=9)
    next(iter(collector))
    past = env.transform[0].frames_0
    value = past.clone()
    env.transform.load_state_dict({"transforms.0.frames_0": torch.zeros_like(past)})
    assert torch.equal(past, value)
    collector.shutdown()
