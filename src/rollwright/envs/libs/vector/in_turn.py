"""InTurn: steps the environments of a SyncVectorEnv one by one, and resets them only on request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        self._discrete = isinstance(env.single_action_space, spaces.Discrete)

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step all environments, none of which has ended."""
        # A single environment takes a Python integer, as GymWrapper gives it one.
        each = actions.tolist() if self._discrete else iterate(self.action_space, actions)
        stepped = [env.step(action) for env, action in zip(self.vector.envs, each, strict=True)]
        seen, rewards, terminated, truncated, infos = zip(*stepped, strict=True)
        flags = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        return self._joined(seen, None), np.array(rewards, np.float64), *flags, self._merged(infos, range(len(infos)))

    def _merged(self, infos: Sequence[dict[str, Any]], rows: Iterable[int]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        if any(infos):
            for i, info in zip(rows, infos, strict=True):
                merged = self.vector._add_info(merged, info, i)
        return merged

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset what ``options["reset_mask"]`` marks, or all; observations of others mean nothing."""
        rest = {name: value for name, value in (options or {}).items() if name != "reset_mask"} or None
        mask = (options or {}).get("reset_mask")
        rows = list(range(self.num_envs)) if mask is None else np.flatnonzero(mask).tolist()
        seeds = seed if isinstance(seed, list) else [seed] * self.num_envs
        begun = [self.vector.envs[i].reset(seed=seeds[i], options=rest) for i in rows]
        seen, infos = zip(*begun, strict=True)
        return self._joined(seen, None if mask is None else rows), self._merged(infos, rows)

    def _joined(self, seen: Sequence[Any], rows: list[int] | None) -> Any:
        """Observations of the environments ``rows`` (None: all of them) as those of all.

        Raises:
            ValueError: one does not have the shape of its space.
        """
        space = self.single_observation_space
        if not isinstance(space, spaces.Box):
            if rows is not None:
                filled = [seen[0]] * self.num_envs
                for i, value in zip(rows, seen, strict=True):
                    filled[i] = value
                seen = filled
            return concatenate(space, seen, cast(Any, create_empty_array(space, self.num_envs, fn=np.zeros)))
        try:
            joined = np.array(seen).astype(space.dtype, casting="same_kind", copy=False)
        except ValueError:  # of several shapes
            joined = np.empty(0)
        if joined.shape != (len(seen), *space.shape):
            wrong = next(np.shape(value) for value in seen if np.shape(value) != space.shape)
            raise ValueError(f"an observation has the shape {wrong}, and its space says {space.shape}")
        if rows is None:
            return joined
        out = np.zeros((self.num_envs, *space.shape), space.dtype)
        out[rows] = joined
        return out

    def __repr__(self) -> str:
        return repr(self.vector)
