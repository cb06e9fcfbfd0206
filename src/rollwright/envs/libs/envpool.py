"""EnvPoolEnv: environments that EnvPool runs in threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from rollwright.envs.libs.building import EnvPoolKeywords
from rollwright.envs.libs.gym import GymWrapper
from rollwright.errors import EnvError, require

# What decides how a pool is stepped; other options go to envpool.make as they are.
_RESERVED = ("batch_size", "env_seed", "env_type", "gym_reset_return_info", "max_num_players")


class EnvPoolEnv(GymWrapper):
    """Environments of EnvPool, stepped together in threads of this process.

    Entries are as in :class:`~rollwright.envs.GymWrapper`. EnvPool spends a step on the reset of an
    ended episode; this class resets it before, so that every transition is one of the task, and
    ``"next"`` holds the true last observation.

    EnvPool takes seeds when a pool is made. After :meth:`set_seed` the next reset of all
    environments makes a new pool; without a seed, seeds come from the operating system (EnvPool
    itself would use 42 every time).

    Args:
        task_id: EnvPool's name of the task.
        num_envs: number of environments; the batch size is ``[num_envs]``.
        seed: same as calling ``set_seed(seed)`` first, but leaves torch's generator alone.
        categorical_action_encoding: discrete actions and observations as integers from 0.
        device: where tensors are put; None leaves them on CPU without naming a device.
        allow_done_after_reset: see :class:`~rollwright.envs.EnvBase`.
        run_type_checks: see :class:`~rollwright.envs.EnvBase`.
        policy: see :class:`~rollwright.envs.EnvBase`.
        **kwargs: go to ``envpool.make``, such as ``num_threads`` or ``max_episode_steps``.

    Raises:
        MissingExtraError: EnvPool is not installed.
        EnvError: EnvPool cannot create the task; its message is repeated.
        ValueError: an option that would change how a pool is stepped.

    Example:
        >>> env = EnvPoolEnv("CartPole-v1", 2)
        >>> env.rollout(3).batch_size
        torch.Size([2, 3])
    """

    def __init__(
        self,
        task_id: str,
        num_envs: int,
        *,
        seed: int | None = None,
        categorical_action_encoding: bool = False,
        device: torch.device | str | int | None = None,
        allow_done_after_reset: bool = False,
        run_type_checks: bool = False,
        policy: Callable[..., Any] | None = None,
        **kwargs: Unpack[EnvPoolKeywords],
    ) -> None:
        if not isinstance(num_envs, int) or isinstance(num_envs, bool) or num_envs < 1:
            raise ValueError(f"num_envs: expected a number of environments of at least 1, got {num_envs!r}.")
        reserved = [name for name in _RESERVED if name in kwargs]
        if reserved:
            raise ValueError(
                f"{', '.join(reserved)}: EnvPoolEnv steps all environments of single players together and "
                "sets this itself. Leave it out; give num_envs, seed and num_threads instead."
            )
        pool = _PoolVectorEnv(task_id, num_envs, kwargs)
        self._setup(pool, "observation", categorical_action_encoding, device, allow_done_after_reset, run_type_checks)
        self._seed_envs(seed, False)

    @property
    def env_name(self) -> str:
        """EnvPool's name of the task."""
        return str(self._env.task_id)


class _PoolVectorEnv(VectorEnv[Any, Any, Any]):
    """An EnvPool with the interface of a gymnasium vector environment that is reset by ``reset_mask``."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012 - gymnasium's interface
    takes_seeds = True

    def __init__(self, task_id: str, num_envs: int, options: Mapping[str, Any]) -> None:
        self.task_id = task_id
        self.num_envs = num_envs
        self._options = options
        entropy = np.random.SeedSequence().generate_state(num_envs) >> 1  # EnvPool's seeds have 31 bits
        self.pool = self._make(entropy.tolist())
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def _make(self, seeds: list[int]) -> Any:
        envpool = require("envpool", extra="envpool", purpose="EnvPoolEnv")
        try:
            with warnings.catch_warnings():  # EnvPool declares bounds in float64 for float32 spaces
                warnings.filterwarnings("ignore", ".*precision lowered", UserWarning)
                pool = envpool.make(
                    self.task_id, env_type="gymnasium", num_envs=self.num_envs, env_seed=seeds, **self._options
                )
                self.single_observation_space = pool.observation_space  # made when first asked for
                self.single_action_space = pool.action_space
                return pool
        except Exception as error:
            raise EnvError(f"EnvPoolEnv({self.task_id!r}): EnvPool raised {type(error).__name__}: {error}") from error

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments, none of which has ended."""
        values: tuple[Any, Any, Any, Any, dict[str, Any]] = self.pool.step(actions)
        return values

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset what ``options["reset_mask"]`` marks, or all; a list of seeds makes a new pool."""
        mask = (options or {}).get("reset_mask")
        if isinstance(seed, list):
            self.pool = self._make([int(one) for one in seed if one is not None])
        if mask is None:
            observation, info = self.pool.reset()
            return observation, info
        observation, info = self.pool.reset(np.flatnonzero(mask).astype(np.int32))
        rows = info["env_id"]
        return _scatter(observation, rows, self.num_envs), _scatter(info, rows, self.num_envs)

    def close_extras(self, **kwargs: Any) -> None:
        """Stop the pool's threads."""
        self.pool.close()

    def __getattr__(self, name: str) -> Any:
        if name == "pool" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.pool, name)

    def __repr__(self) -> str:
        return f"EnvPool({self.task_id}, num_envs={self.num_envs})"


def _scatter(values: Any, rows: NDArray[Any], num_envs: int) -> Any:
    """Values of some environments as values of all, zero elsewhere."""
    if isinstance(values, dict):
        return {key: _scatter(value, rows, num_envs) for key, value in values.items()}
    out = np.zeros((num_envs, *values.shape[1:]), values.dtype)
    out[rows] = values
    return out
