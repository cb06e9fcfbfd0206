"""ActionScaling, and other changes of actions on arrays."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from rollwright.data import Bounded
from rollwright.envs import (
    ActionScaling,
    ClipTransform,
    Compose,
    DoubleToFloat,
    GymEnv,
    GymWrapper,
    ObservationNorm,
    RenameTransform,
    SerialEnv,
    SignTransform,
    StepCounter,
    TransformedEnv,
    UnsqueezeTransform,
    check_env_specs,
)
from rollwright.testing.mocking_classes import CountingEnv


def pendulum(*transforms, **kwargs):
    return TransformedEnv(GymEnv("Pendulum-v1", max_episode_steps=13, **kwargs), Compose(*transforms))


class Doubles(gymnasium.Env):
    """Float64 throughout; the reward is the action."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float64)
    action_space = spaces.Box(np.array([-1.0, 0.0]), np.array([2.0, 5.0]), dtype=np.float64)
    time = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.np_random.random(2), {}

    def step(self, action):
        self.time += 1
        return self.np_random.random(2), float(action.sum()), False, self.time > 4, {}


# TorchRL 0.14.1 gives these numbers.


@pytest.mark.parametrize(
    ("options", "bounds", "given", "back"),
    [
        ({}, (-1, 1), 0.5, 0.125),
        ({"standard_normal": False}, (0, 1), -1.0, 0.5625),
        ({"loc": 1.0, "scale": 2.0}, (-1.5, 0.5), 1.5, -0.375),
    ],
)
def test_numbers_are_those_of_torchrl(options, bounds, given, back):
    env = pendulum(ActionScaling(**options))
    assert (env.action_spec.low.item(), env.action_spec.high.item()) == bounds
    td = TensorDict({"action": torch.tensor([0.25])})
    assert env.transform.inv(td)["action"].item() == given
    assert env.transform(td.clone())["action"].item() == back
    check_env_specs(env)


def test_rewards_are_those_of_torchrl(seeded):
    td = seeded("Pendulum-v1", ActionScaling()).rollout(3, lambda td: td.set("action", torch.tensor([0.5])))
    expected = torch.tensor([-8.412810325622559, -8.714132308959961, -9.01453685760498])
    torch.testing.assert_close(td["next", "reward"].flatten(), expected)
    assert td["action"].flatten().tolist() == [0.5, 0.5, 0.5]


def test_each_dimension_has_its_own_bounds():
    env = TransformedEnv(GymWrapper(Doubles()), ActionScaling())
    assert env.action_spec.dtype == torch.float64
    td = env.step(env.reset().set("action", torch.tensor([-1.0, 1.0], dtype=torch.float64)))
    assert td["next", "reward"].item() == 4
    assert env.transform.denormalize(torch.zeros(2)).tolist() == [0.5, 2.5]
    assert env.transform.normalize(torch.tensor([[2.0, 0.0]])).tolist() == [[1, -1]]


def test_rows_of_a_batch_share_the_numbers():
    env = pendulum(ActionScaling(), num_envs=3)
    check_env_specs(env)
    assert env.transform[0].loc.shape == (1,)
    assert env.action_spec.low.flatten().tolist() == [-1, -1, -1]


def test_another_name():
    env = pendulum(ActionScaling(["action"], ["act"]))
    assert env.action_keys == ["act"]
    assert "action" not in env.rollout(2).keys()  # noqa: SIM118


def test_statistics_of_data():
    by_moments = ActionScaling.from_stats(mean=torch.tensor([1.0, 2.0]), std=torch.tensor([2.0, 0.0]), in_keys_inv=[])
    assert by_moments(TensorDict({"action": torch.tensor([3.0, 2.0])}))["action"].tolist() == [1, 0]
    by_bounds = ActionScaling.from_stats(low=-1.0, high=3.0)
    assert by_bounds.denormalize(torch.tensor([1.0])).tolist() == [3]
    env = pendulum(by_moments)
    assert env.action_spec == env.base_env.action_spec


def test_the_numbers_are_state():
    env = pendulum(ActionScaling())
    env.rollout(1)
    other = ActionScaling()
    other.load_state_dict(env.transform[0].state_dict())
    assert other.denormalize(torch.tensor([1.0])).item() == 2


MAKERS = {
    "scaled": lambda: pendulum(ActionScaling(standard_normal=False), StepCounter()),
    "scaled twice": lambda: pendulum(ActionScaling(), ActionScaling(["action"], ["act"], loc=0.5, scale=0.1)),
    "scaled vector": lambda: pendulum(ActionScaling(), num_envs=8),
    "scaled serial": lambda: TransformedEnv(SerialEnv(3, pendulum), ActionScaling()),
    "scaled in serial": lambda: SerialEnv(3, lambda: pendulum(ActionScaling())),
    "cheetah": lambda: TransformedEnv(GymEnv("HalfCheetah-v5", max_episode_steps=9), ActionScaling()),
    "doubles": lambda: TransformedEnv(GymWrapper(Doubles()), DoubleToFloat()),
    "scaled doubles": lambda: TransformedEnv(GymWrapper(Doubles()), Compose(ActionScaling(), DoubleToFloat())),
    "clipped": lambda: pendulum(ClipTransform(in_keys_inv=["action"], low=-0.5, high=0.5)),
    "signs": lambda: pendulum(SignTransform(in_keys_inv=["action"])),
    "renamed": lambda: pendulum(RenameTransform(["observation"], ["seen"], ["action"], ["move"])),
    "longer": lambda: pendulum(UnsqueezeTransform(-1, in_keys_inv=["action"])),
    "shifted": lambda: pendulum(ObservationNorm(0.2, 3.0, [], in_keys_inv=["action"])),
}


@pytest.mark.parametrize("name", MAKERS)
def test_on_arrays_as_on_tensordicts(name, both_paths):
    td = both_paths(MAKERS[name], frames=48, batches=3)
    assert td["next", "done"].sum() > 3


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ActionScaling(["a", "b"]), ValueError, "in_keys_inv: expected one action, got 'a', 'b'"),
        (lambda: ActionScaling(loc=1.0), ValueError, "loc, scale: expected both or neither"),
        (lambda: ActionScaling(loc=1.0, scale=0.0), ValueError, "scale: expected numbers other than 0"),
        (lambda: ActionScaling([]), ValueError, "in_keys_inv: expected an action, whose bounds"),
        (
            lambda: ActionScaling.from_stats(mean=torch.zeros(3), std=torch.ones(2)),
            ValueError,
            r"mean, std: .* got shapes \[3\] and \[2\]",
        ),
        (
            lambda: ActionScaling.from_stats(low=torch.zeros(3), high=torch.ones(1)),
            ValueError,
            r"low, high: .* got shapes \[3\] and \[1\]",
        ),
        (
            lambda: ActionScaling(loc=torch.zeros(3), scale=torch.ones(1)),
            ValueError,
            r"loc, scale: .* got shapes \[3\] and \[1\]",
        ),
        (lambda: ActionScaling.from_stats(mean=1.0), ValueError, "expected mean and std, or low and high"),
        (lambda: pendulum(ActionScaling("act")).action_spec, KeyError, "no action 'act'; there are 'action'"),
        (
            lambda: TransformedEnv(GymEnv("CartPole-v1"), ActionScaling()).action_spec,
            ValueError,
            "expected a continuous action",
        ),
        (lambda: ActionScaling().normalize(torch.zeros(1)), RuntimeError, "has no loc and scale yet"),
        (
            lambda: ActionScaling(loc=torch.zeros(2), scale=torch.ones(2)).normalize(torch.zeros(3)),
            ValueError,
            r"of length 2, as loc has, got shape \(3,\)",
        ),
    ],
)
def test_mistakes_are_named(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("ends", [(-2.0, torch.finfo(torch.float32).max), (-3e38, 3e38)])
def test_bounds_that_bound_nothing_are_refused(ends):
    env = CountingEnv()
    env.action_spec = Bounded(*ends, (1,))
    with pytest.raises(ValueError, match="expected finite bounds"):
        TransformedEnv(env, ActionScaling()).action_spec  # noqa: B018
