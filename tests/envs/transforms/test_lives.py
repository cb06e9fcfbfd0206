"""EndOfLifeTransform on Atari."""

from __future__ import annotations

import gymnasium
import pytest
import torch
from gymnasium import spaces

from rollwright.envs import (
    Compose,
    EndOfLifeTransform,
    FrameSkipTransform,
    GymEnv,
    GymWrapper,
    NoopResetEnv,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from rollwright.errors import EnvError


class Game(gymnasium.Env):
    """Loses a life with every third step; five lives."""

    observation_space = spaces.Discrete(100)
    action_space = spaces.Discrete(2)
    time = 0

    def lives(self):
        return 5 - self.time // 3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return 0, {}

    def step(self, action):
        self.time += 1
        return self.time, 1.0, self.lives() == 0, False, {}


def game(*transforms, **kwargs):
    mark = EndOfLifeTransform(eol_attribute="unwrapped.lives", **kwargs)
    return TransformedEnv(GymWrapper(Game()), Compose(*transforms, mark))


def breakout(*transforms):
    env = GymEnv("ALE/Breakout-v5", obs_type="ram", frameskip=4)
    return TransformedEnv(env, Compose(*transforms, EndOfLifeTransform()))


def test_lives_are_marked_where_one_is_lost():
    td = game().rollout(20, break_when_any_done=False)
    assert td["lives"].tolist() == [5, 5, 5, 4, 4, 4, 3, 3, 3, 2, 2, 2, 1, 1, 1, 5, 5, 5, 4, 4]
    assert td["next", "lives"].tolist() == [5, 5, 4, 4, 4, 3, 3, 3, 2, 2, 2, 1, 1, 1, 0, 5, 5, 4, 4, 4]
    assert td["next", "end-of-life"].flatten().nonzero().flatten().tolist() == [2, 5, 8, 11, 14, 17]
    assert td["end-of-life"].flatten().nonzero().flatten().tolist() == [3, 6, 9, 12, 18]  # of the step before
    assert td["next", "done"].flatten().nonzero().flatten().tolist() == [14]


def test_atari_has_specs_as_torchrl():
    env = breakout()
    check_env_specs(env)
    assert env.observation_spec["lives"].shape == ()
    assert env.observation_spec["lives"].dtype == torch.int64
    assert env.observation_spec["end-of-life"] == env.full_done_spec["done"]


MAKERS = {
    "game": game,
    "skipped": lambda: game(FrameSkipTransform(2), NoopResetEnv(3)),
    "breakout": lambda: breakout(StepCounter(60)),
    "each": lambda: SerialEnv(8, game),
    "of several": lambda: TransformedEnv(
        SerialEnv(2, lambda: GymWrapper(Game())), EndOfLifeTransform(eol_attribute="unwrapped.lives")
    ),
    "of processes": lambda: TransformedEnv(
        ParallelEnv(2, lambda: GymWrapper(Game())), EndOfLifeTransform(eol_attribute="unwrapped.lives")
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_on_arrays_as_on_tensordicts(name, both_paths):
    td = both_paths(MAKERS[name], frames=160, batches=2)
    assert td["next", "end-of-life"].sum() > td["next", "done"].sum() > 1


def test_in_workers():
    with_workers = ParallelEnv(2, game)
    td = with_workers.rollout(20, break_when_any_done=False)
    assert td["next", "lives"][0].tolist() == [5, 5, 4, 4, 4, 3, 3, 3, 2, 2, 2, 1, 1, 1, 0, 5, 5, 4, 4, 4]
    with_workers.close()


def test_a_loss_reads_the_mark():
    class Loss:
        def set_keys(self, **keys):
            self.keys = keys

    loss = Loss()
    EndOfLifeTransform(eol_key="lost").register_keys(loss)
    assert loss.keys == {"done": "lost", "terminated": "lost"}


def test_mistakes_are_named():
    env = TransformedEnv(GymEnv("CartPole-v1"), EndOfLifeTransform())
    with pytest.raises(EnvError, match=r"GymEnv.* has no attribute 'unwrapped.ale.lives'.*eol_attribute="):
        env.observation_spec  # noqa: B018
    with pytest.raises(KeyError, match="done_key='over' is none of the flags"):
        game(done_key="over").observation_spec  # noqa: B018
    with pytest.raises(TypeError, match="eol_attribute: expected a name"):
        EndOfLifeTransform(eol_attribute=3)
