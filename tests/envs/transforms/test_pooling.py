"""TimeMaxPool: values, rows, state."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollwright.data import Bounded
from rollwright.envs import (
    Compose,
    GymEnv,
    GymWrapper,
    SerialEnv,
    StepCounter,
    TimeMaxPool,
    TransformedEnv,
    check_env_specs,
)
from rollwright.testing.mocking_classes import NestedCountingEnv


class Film(gymnasium.Env):
    observation_space = spaces.Dict(pixels=spaces.Box(0, 255, (4, 4, 3), np.uint8))
    action_space = spaces.Discrete(2)
    time = 0

    def _seen(self):
        return {"pixels": self.np_random.integers(0, 256, (4, 4, 3), np.uint8)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._seen(), {}

    def step(self, action):
        self.time += 1
        return self._seen(), 0.0, self.time == 5, False, {}


def test_values_are_those_of_torchrl(seeded):
    env = seeded("Pendulum-v1", TimeMaxPool(["observation"], ["pool"], T=3))
    td = env.rollout(5, lambda td: td.set("action", torch.tensor([0.5])))
    expected = [
        [0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0],
        [-0.9670438766479492, -0.1448216438293457, -0.9669447541236877],
        [-0.9794058203697205, -0.08558067679405212, -1.0829020738601685],
        [-0.9894577860832214, -0.026575857773423195, -1.1593283414840698],
        [-0.9963312149047852, 0.029769713059067726, -1.1270619630813599],
    ]
    torch.testing.assert_close(td["pool"], torch.tensor(expected[:5]))
    torch.testing.assert_close(td["next", "pool"], torch.tensor(expected[1:]))


def test_one_value_is_itself(seeded):
    td = seeded("Pendulum-v1", TimeMaxPool(["observation"], ["pool"], T=1)).rollout(3)
    assert torch.equal(td["pool"], td["observation"])


def test_rows_begin_for_themselves(ladder, do_nothing):
    env = TransformedEnv(ladder([2, 9]), TimeMaxPool(["rung"], ["pool"], T=3))
    check_env_specs(env)
    env = TransformedEnv(ladder([2, 9]), TimeMaxPool(["rung"], ["pool"], T=3))
    td = env.rollout(4, do_nothing, break_when_any_done=False)
    assert td["pool"][0].tolist() == [[0, 0], [1, 0], [0, 0], [1, 0]]
    assert td["pool"][1].tolist() == [[100, 0], [101, 0], [102, -100], [103, -101]]


def test_agents_and_bounds():
    check_env_specs(TransformedEnv(NestedCountingEnv(max_steps=3), TimeMaxPool([("data", "states")], T=2)))
    env = TransformedEnv(GymEnv("Pendulum-v1"), TimeMaxPool(T=2))
    env.base_env.observation_spec["observation"] = Bounded(1.0, 2.0, (3,))
    env.empty_cache()
    assert env.observation_spec["observation"] == Bounded(0.0, 2.0, (3,))


def test_the_values_are_state(seeded):
    env, other = (seeded("Pendulum-v1", TimeMaxPool(T=3)) for _ in range(2))
    env.rollout(4)
    other.reset()
    other.transform.load_state_dict(env.transform.state_dict())
    outcome = env.base_env.rand_step()["next"]
    results = [each.transform.transform_step(outcome, outcome.clone())["observation"] for each in (env, other)]
    assert torch.equal(*results)


MAKERS = {
    "one": lambda: TransformedEnv(
        GymEnv("CartPole-v1"), Compose(TimeMaxPool(["observation"], ["pool"], T=3), StepCounter(7))
    ),
    "counts": lambda: TransformedEnv(
        GymEnv("CartPole-v1"), Compose(StepCounter(7), TimeMaxPool(["step_count"], ["c"]))
    ),
    "vector": lambda: TransformedEnv(GymEnv("CartPole-v1", num_envs=8), TimeMaxPool(T=3)),
    "several": lambda: TransformedEnv(SerialEnv(3, lambda: GymEnv("CartPole-v1")), TimeMaxPool(T=2)),
    "images": lambda: TransformedEnv(GymWrapper(Film()), TimeMaxPool(["pixels"], T=2)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_on_arrays_as_on_tensordicts(name, both_paths):
    td = both_paths(MAKERS[name], frames=96)
    assert td["next", "done"].sum() > 3


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="T: expected an integer of at least 1, got 0"):
        TimeMaxPool(T=0)
    with pytest.raises(ValueError, match="one of out_keys for each of in_keys"):
        TimeMaxPool(["a", "b"], ["c"])
    with pytest.raises(RuntimeError, match="TransformedEnv\\(env, TimeMaxPool"):
        TimeMaxPool()(GymEnv("Pendulum-v1").reset())
