"""An environment whose observations are images, and whose steps cost next to nothing else."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

ENV_ID = "rollwright-benchmarks/Pixels-v0"


class Pixels(gymnasium.Env[NDArray[np.uint8], int]):
    """A square on an 84x84 RGB image that the actions move left and right; an episode has 100 steps or ends at a side.

    Observations are new arrays, uint8 ``[84, 84, 3]``.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's interface

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)
        self.action_space = spaces.Discrete(2)
        self._place = 0
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._steps = int(self.np_random.integers(20, 60)), 0
        return self._image(), {}

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        self._place += 2 * int(action) - 1
        self._steps += 1
        return self._image(), 1.0, not 0 < self._place < 76, self._steps >= 100, {}

    def _image(self) -> NDArray[np.uint8]:
        image = np.zeros((84, 84, 3), np.uint8)
        image[38:46, max(self._place, 0) : self._place + 8] = 255
        return image


if ENV_ID not in gymnasium.registry:
    gymnasium.register(ENV_ID, entry_point=Pixels)
