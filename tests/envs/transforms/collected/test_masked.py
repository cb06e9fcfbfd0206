"""ActionMask on arrays: random actions among those allowed."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollwright.envs import ActionMask, Compose, GymWrapper, NoopResetEnv, SerialEnv, StepCounter, TransformedEnv


class Doors(gymnasium.Env):
    """Actions that are not allowed raise; nothing is allowed at the end."""

    observation_space = spaces.Dict(
        action_mask=spaces.Box(0, 1, (4,), bool), seen=spaces.Box(-np.inf, np.inf, (2,), np.float32)
    )
    action_space = spaces.Discrete(4)

    def _seen(self):
        self.open = self.np_random.random(4) < 0.4
        self.open[self.np_random.integers(4)] = True
        if self.left == 0:
            self.open[:] = False
        return {"action_mask": self.open.copy(), "seen": self.np_random.random(2, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 7))
        return self._seen(), {}

    def step(self, action):
        assert self.open[action]
        self.left -= 1
        return self._seen(), 1.0, self.left == 0, False, {}


def doors():
    return GymWrapper(Doors(), categorical_action_encoding=True)


MAKERS = {
    "one": lambda: TransformedEnv(doors(), Compose(ActionMask(), StepCounter(5))),
    "one-hot": lambda: TransformedEnv(GymWrapper(Doors()), ActionMask()),
    "several": lambda: TransformedEnv(SerialEnv(3, doors), Compose(StepCounter(4), ActionMask())),
    "after random actions": lambda: TransformedEnv(doors(), Compose(ActionMask(), NoopResetEnv(2, random=False))),
}


@pytest.mark.parametrize("name", MAKERS)
def test_on_arrays_as_on_tensordicts(name, both_paths):
    td = both_paths(MAKERS[name], frames=60)
    assert td["next", "done"].sum() > 5
    assert torch.unique(td["action"]).numel() > 1
