"""InTurn: the environments of a SyncVectorEnv, stepped one after the other, and reset only when told."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from numpy.typing import NDArray

__all__ = ["InTurn"]


class InTurn(VectorEnv[Any, Any, Any]):
    """Steps what a ``SyncVectorEnv`` holds without its copies and its own resets.

    A reset of some environments touches no others. Every array that is returned is new.

    Args:
        env: whose environments are stepped. Its own counts of what has ended are left as they are.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012 - gymnasium's interface
    takes_seeds = True

    def __init__(self, env: SyncVectorEnv[Any, Any]) -> None:
        self.vector = env
        self.num_envs = env.num_envs
        self.single_observation_space = env.single_observation_space
        self.observation_space = env.observation_space
        self.single_action_space = env.single_action_space
        self.action_space = env.action_space

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step all environments, none of which has ended."""
        n = self.num_envs
        infos: dict[str, Any] = {}
        seen: list[Any] = [None] * n
        rewards, terminated, truncated = np.zeros(n), np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        for i, (env, action) in enumerate(zip(self.vector.envs, iterate(self.action_space, actions), strict=True)):
            seen[i], rewards[i], terminated[i], truncated[i], info = env.step(action)
            if info:
                infos = self.vector._add_info(infos, info, i)
        return self._joined(seen, range(n)), rewards, terminated, truncated, infos

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset what ``options["reset_mask"]`` marks, or all; observations of others mean nothing."""
        rest = {name: value for name, value in (options or {}).items() if name != "reset_mask"} or None
        mask = (options or {}).get("reset_mask")
        rows = list(range(self.num_envs)) if mask is None else np.flatnonzero(mask).tolist()
        infos: dict[str, Any] = {}
        seen = []
        for i in rows:
            first, info = self.vector.envs[i].reset(seed=seed[i] if isinstance(seed, list) else seed, options=rest)
            seen.append(first)
            if info:
                infos = self.vector._add_info(infos, info, i)
        return self._joined(seen, rows), infos

    def _joined(self, seen: list[Any], rows: Any) -> Any:
        """Observations of the environments ``rows`` as those of all."""
        space = self.single_observation_space
        if not isinstance(space, spaces.Box):
            if len(seen) < self.num_envs:
                filled = [seen[0]] * self.num_envs
                for i, value in zip(rows, seen, strict=True):
                    filled[i] = value
                seen = filled
            return concatenate(space, seen, cast(Any, create_empty_array(space, self.num_envs, fn=np.zeros)))
        out = np.zeros((self.num_envs, *space.shape), space.dtype)
        for i, value in zip(rows, seen, strict=True):
            if np.shape(value) != space.shape:
                raise ValueError(
                    f"environment {i} returned an observation of shape {np.shape(value)}, expected "
                    f"{space.shape} as its space says"
                )
            out[i] = value
        return out

    def __repr__(self) -> str:
        return repr(self.vector)
