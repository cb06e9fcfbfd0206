"""TargetReturn: modes, resets of rows, names."""

from __future__ import annotations

import pytest
import torch

from rollwright.envs import (
    Compose,
    GymEnv,
    RewardScaling,
    SerialEnv,
    StepCounter,
    TargetReturn,
    TransformedEnv,
    check_env_specs,
)
from rollwright.testing.mocking_classes import NestedCountingEnv


def push(td):
    return td.set("action", torch.tensor([0.5]))


def test_numbers_are_those_of_torchrl(seeded):
    td = seeded("Pendulum-v1", TargetReturn(10.0)).rollout(3, push)
    left = [10.0, 18.412059783935547, 27.16314697265625, 36.27537536621094]
    torch.testing.assert_close(td["target_return"].flatten(), torch.tensor(left[:3]))
    torch.testing.assert_close(td["next", "target_return"].flatten(), torch.tensor(left[1:]))
    td = seeded("Pendulum-v1", TargetReturn(10.0, "constant")).rollout(3, push)
    assert td["next", "target_return"].flatten().tolist() == [10, 10, 10]


def test_rows_begin_for_themselves(ladder, do_nothing):
    env = TransformedEnv(ladder([2, 3]), TargetReturn(10.0))
    check_env_specs(env)
    td = env.rollout(4, do_nothing, break_when_any_done=False)
    assert td["target_return"].squeeze(-1).tolist() == [[10, 9, 10, 9], [10, 9, 7, 10]]
    assert td["next", "target_return"].squeeze(-1).tolist() == [[9, 7, 9, 7], [9, 7, 4, 9]]


def test_a_policy_may_set_it():
    env = TransformedEnv(GymEnv("Pendulum-v1"), TargetReturn(10.0))
    td = env.reset().set("target_return", torch.tensor([3.0]))
    td = env.step(push(td))
    torch.testing.assert_close(td["next", "target_return"], 3 - td["next", "reward"])


def test_agents_have_their_own():
    env = TransformedEnv(NestedCountingEnv(), TargetReturn(10.0))
    check_env_specs(env)
    assert ("data", "target_return") in env.reset().keys(True)


MAKERS = {
    "one": lambda: TransformedEnv(
        GymEnv("CartPole-v1"), Compose(TargetReturn(5), RewardScaling(0.1, 3.0), TargetReturn(1.5, out_keys=["own"]))
    ),
    "several": lambda: TransformedEnv(SerialEnv(8, lambda: GymEnv("CartPole-v1")), TargetReturn(5, "constant")),
    "each": lambda: SerialEnv(2, lambda: TransformedEnv(GymEnv("CartPole-v1"), TargetReturn(5))),
    "pendulum": lambda: TransformedEnv(GymEnv("Pendulum-v1"), Compose(TargetReturn(-5.5), StepCounter(13))),
}


@pytest.mark.parametrize("name", MAKERS)
def test_on_arrays_as_on_tensordicts(name, both_paths):
    td = both_paths(MAKERS[name], frames=160)
    assert td["next", "done"].sum() > 3


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"mode: expected one of .*got 'increase'"):
        TargetReturn(1.0, "increase")
    with pytest.raises(ValueError, match="target_return: expected a number, got 'a'"):
        TargetReturn("a")
    with pytest.raises(KeyError, match="no reward 'gain'; it has 'reward'"):
        TransformedEnv(GymEnv("CartPole-v1"), TargetReturn(1, in_keys=["gain"])).observation_spec  # noqa: B018
