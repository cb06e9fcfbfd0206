"""A point that is pushed: an environment of a user's own, for each library and for the loop by hand."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

STEPS, SIZE = 200, 3


class Point:
    """Position and velocity, float32 ``[3]`` each; a trajectory is cut off after 200 steps."""

    def reset(self) -> Tensor:
        self.position, self.velocity, self.count = torch.rand(SIZE) * 2 - 1, torch.zeros(SIZE), 0
        return torch.cat([self.position, self.velocity])

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Observation, reward, and whether the trajectory is cut off."""
        self.velocity = 0.9 * self.velocity + 0.1 * action
        self.position = self.position + 0.1 * self.velocity
        self.count += 1
        return torch.cat([self.position, self.velocity]), -self.position.square().sum(), self.count >= STEPS


class PointGym(gymnasium.Env[NDArray[Any], NDArray[Any]]):
    """The point in gymnasium, which the loop by hand steps."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2 * SIZE,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (SIZE,), np.float32)
        self.point = Point()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[Any], dict[str, Any]]:
        super().reset(seed=seed)
        return self.point.reset().numpy(), {}

    def step(self, action: NDArray[Any]) -> tuple[NDArray[Any], Any, bool, bool, dict[str, Any]]:
        observation, reward, cut = self.point.step(torch.from_numpy(action))
        return observation.numpy(), reward.item(), False, cut, {}


def make_point(library: Any) -> Any:
    """The point as an ``EnvBase`` of a library's; a :class:`~benchmarks.programs_sides.Library` finds its names."""
    base, composite = library.find("envs", "EnvBase"), library.find("data", "Composite")
    unbounded, bounded = library.find("data", "Unbounded"), library.find("data", "Bounded")

    class PointEnv(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(batch_size=())
            self.observation_spec = composite(observation=unbounded((2 * SIZE,)), shape=())
            self.action_spec = bounded(-1.0, 1.0, (SIZE,))
            self.reward_spec = unbounded((1,))
            self.done_spec = library.find("data", "Categorical")(2, shape=(1,), dtype=torch.bool)
            self.add_truncated_keys()
            self.point = Point()

        def _reset(self, tensordict: TensorDictBase | None = None, **options: Any) -> TensorDict:
            return TensorDict({"observation": self.point.reset()}, self.batch_size)

        def _step(self, tensordict: TensorDictBase) -> TensorDict:
            observation, reward, cut = self.point.step(tensordict["action"])
            flags = {"terminated": torch.zeros(1, dtype=torch.bool), "truncated": torch.tensor([cut])}
            found = {"observation": observation, "reward": reward.reshape(1), "done": flags["truncated"].clone()}
            return TensorDict({**found, **flags}, self.batch_size)

        def _set_seed(self, seed: int | None) -> None:
            pass

    return PointEnv()
