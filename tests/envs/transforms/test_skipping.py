"""FrameSkipTransform: rewards, flags, batches."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollwright.data import Bounded
from rollwright.envs import (
    CatFrames,
    Compose,
    FrameSkipTransform,
    GymEnv,
    GymWrapper,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from rollwright.envs.arrays import array_form


def push(action):
    return lambda td: td.set("action", torch.tensor(action))


# TorchRL 0.14.1 gives these numbers.


def test_rewards_are_summed_and_the_last_frame_is_seen(seeded):
    td = seeded("Pendulum-v1", FrameSkipTransform(3)).rollout(2, push([0.5]))
    torch.testing.assert_close(td["next", "reward"].flatten(), torch.tensor([-26.275375366210938, -29.1351261138916]))
    seen = td["next", "observation"][0]
    torch.testing.assert_close(seen, torch.tensor([-0.9963312149047852, -0.08558067679405212, -1.1929445266723633]))


def test_transforms_before_see_each_frame_from_the_same_root(seeded):
    td = seeded("Pendulum-v1", StepCounter(), RewardSum(), FrameSkipTransform(3)).rollout(2, push([0.5]))
    assert td["next", "step_count"].flatten().tolist() == [1, 2]
    sums = td["next", "episode_reward"].flatten()
    torch.testing.assert_close(sums, torch.tensor([-9.112227439880371, -18.92292022705078]))


def test_a_trajectory_that_ends_inside_takes_no_more_frames(seeded):
    env = seeded("CartPole-v1", FrameSkipTransform(4), StepCounter())
    td = env.rollout(8, push([0, 1]), break_when_any_done=False)
    assert td["next", "reward"].flatten().tolist() == [4, 4, 2, 4, 4, 2, 4, 4]
    assert td["next", "step_count"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1, 2]
    plain = seeded("CartPole-v1").rollout(20, push([0, 1]))
    assert len(plain) == 10
    assert torch.equal(td["next", "observation"][2], plain["next", "observation"][9])


# Ours ----------------------------------------------------------------------------------------------------------------


def test_rows_that_end_keep_what_they_had(ladder, do_nothing):
    env = TransformedEnv(ladder([2, 5, 9]), FrameSkipTransform(4))
    td = env.rollout(1, do_nothing)
    assert td["next", "rung"][:, 0, 0].tolist() == [2, 104, 204]
    assert td["next", "reward"].flatten().tolist() == [3, 10, 10]
    assert td["next", "done"].flatten().tolist() == [True, False, False]
    check_env_specs(env)


def test_past_frames_follow_each_frame(seeded):
    env = seeded("Pendulum-v1", CatFrames(3, -1, ["observation"], ["past"]), FrameSkipTransform(3))
    td = env.rollout(2, push([0.5]))
    plain = seeded("Pendulum-v1").rollout(6, push([0.5]))["next", "observation"]
    assert torch.equal(td["next", "past"], torch.stack([plain[:3].flatten(), plain[3:].flatten()]))


def make(limit=30, skip=4):
    return TransformedEnv(
        GymEnv("CartPole-v1", max_episode_steps=limit), Compose(FrameSkipTransform(skip), RewardSum())
    )


MAKERS = {
    "one": make,
    "rows": lambda: TransformedEnv(SerialEnv(3, lambda: make(7, 1)), FrameSkipTransform(3)),
    "on each": lambda: SerialEnv(8, lambda: make(11)),
    "vector": lambda: TransformedEnv(GymEnv("CartPole-v1", num_envs=3), Compose(StepCounter(6), FrameSkipTransform(3))),
}


@pytest.mark.parametrize("name", MAKERS)
def test_on_arrays_as_on_tensordicts(name, both_paths):
    td = both_paths(MAKERS[name], frames=48)
    assert td["next", "done"].sum() > 3


@pytest.mark.parametrize("count", [1, 8])
def test_batches_on_arrays(count):
    env = TransformedEnv(SerialEnv(count, lambda: make(9, 2)), FrameSkipTransform(2))
    form = array_form(env)
    fresh = form.reset(None)
    actions = np.tile(np.array([0, 1]), (count, 1))
    out = form.step({**fresh, "action": actions}, {})
    assert out["reward"].tolist() == [4] * count


class Strict(gymnasium.Env):
    """May not be stepped after its end; numbers its steps of all time."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 9))
        return np.array([self.steps, self.left], np.float32), {}

    def step(self, action):
        assert self.left > 0
        self.steps += 1
        self.left -= 1
        return np.array([self.steps, self.left], np.float32), 1.0, self.left == 0, False, {}


def strict():
    return GymWrapper(Strict())


BATCHES = {
    "serial": lambda: SerialEnv(3, strict),
    "serial of serial": lambda: SerialEnv(2, lambda: SerialEnv(2, strict)),
    "parallel": lambda: ParallelEnv(3, strict, num_processes=2),
    "one in another": lambda: SerialEnv(2, lambda: TransformedEnv(SerialEnv(2, strict), StepCounter())),
    "counted": lambda: TransformedEnv(SerialEnv(3, strict), StepCounter(), auto_unwrap=False),
}


@pytest.mark.parametrize("name", BATCHES)
def test_what_ended_is_not_stepped(name, both_paths):
    transforms = Compose(CatFrames(2, -1, ["observation"], ["past"]), FrameSkipTransform(4), StepCounter())
    td = both_paths(lambda: TransformedEnv(BATCHES[name](), transforms.clone()), frames=120)
    ended = td["next", "done"].squeeze(-1)
    assert (td["next", "observation"][..., 1][ended] == 0).all()
    taken = td["next", "observation"][..., 0] - td["observation"][..., 0]
    assert torch.equal(taken, td["next", "reward"].squeeze(-1))


def test_bounds_of_rewards():
    env = TransformedEnv(GymEnv("CartPole-v1"), FrameSkipTransform(4))
    env.base_env.reward_spec = Bounded(-1.0, 2.0, (1,))
    env.empty_cache()
    assert env.reward_spec == Bounded(-4.0, 8.0, (1,))


@pytest.mark.parametrize("skip", [0, 1.5, True])
def test_mistakes_are_named(skip):
    with pytest.raises(ValueError, match="frame_skip: expected an integer of at least 1"):
        FrameSkipTransform(skip)
