"""Environments for measuring many workers: CartPole whose steps take a given time, and a stack of four images."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds time to each step.

    Args:
        env: what is stepped.
        step_ms: milliseconds.
        busy: compute for that long, by this thread's own clock, so that two of them on one core take twice as long.
            Otherwise sleep, as an environment does that waits for another machine.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], step_ms: float, busy: bool) -> None:
        super().__init__(env)
        self._seconds, self._busy = step_ms / 1e3, busy

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self._busy:
            until = time.thread_time() + self._seconds
            while time.thread_time() < until:
                pass
        else:
            time.sleep(self._seconds)
        return self.env.step(action)


class Images(gymnasium.Env[NDArray[np.uint8], int]):
    """A square that the actions move, on each of the last four images; an episode ends at a side, or after 100 steps.

    Observations are new arrays, uint8 ``[84, 84, 4]``, the newest image last.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium's interface

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.action_space = spaces.Discrete(2)
        self._images = np.zeros((84, 84, 4), np.uint8)
        self._place = self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self._place, self._steps = int(self.np_random.integers(20, 60)), 0
        self._images = np.zeros((84, 84, 4), np.uint8)
        return self._shown(), {}

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        self._place += 2 * int(action) - 1
        self._steps += 1
        return self._shown(), 1.0, not 0 < self._place < 76, self._steps >= 100, {}

    def _shown(self) -> NDArray[np.uint8]:
        images = np.empty_like(self._images)
        images[..., :3] = self._images[..., 1:]
        images[..., 3] = 0
        images[38:46, self._place : self._place + 8, 3] = 255
        self._images = images
        return images
