"""The loops by hand: one gymnasium environment, many, and EnvPool.

The first two ship with the package, for `rollwright bench`; EnvPool's is here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.cases import MASKED, Case, make_network
from rollwright.cli.measuring import Outcome, SingleLoop, VectorLoop, categorical, gaussian, make_vector

SEED = 0


class MaskedPoolLoop(VectorLoop):
    """EnvPool left to reset by itself, which takes a step in which no action counts: such rows are marked.

    ``batch["valid"]`` is False in them, and :attr:`frames` counts the others.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, _step_as_it_comes)
        self.batch["valid"] = torch.ones_like(self.batch["done"])
        self._ended = np.zeros(self.batch["done"].shape[1], np.bool_)

    def collect(self) -> dict[str, Tensor]:
        batch = super().collect()
        done, valid = batch["done"].numpy(), batch["valid"].numpy()
        valid[0] = ~self._ended
        valid[1:] = ~done[:-1]
        self._ended = done[-1].copy()
        self.frames = int(np.count_nonzero(valid))
        return batch


def _step_as_it_comes(pool: Any, action: NDArray[Any]) -> Outcome:
    observation, reward, terminated, truncated, _ = pool.step(action.astype(np.int32))
    return observation, reward, terminated, truncated, observation


def step_pool(pool: Any, action: NDArray[Any]) -> Outcome:
    """Step an EnvPool, and reset what ended before the pool would spend a step on it."""
    observation, reward, terminated, truncated, _ = pool.step(action.astype(np.int32))
    done = terminated | truncated
    if not done.any():
        return observation, reward, terminated, truncated, observation
    ended = np.flatnonzero(done).astype(np.int32)
    first = observation.copy()
    first[ended] = pool.reset(ended)[0]
    return observation, reward, terminated, truncated, first


def make_pool(env_id: str, num_envs: int) -> Any:
    """An EnvPool with the number of threads that EnvPool chooses."""
    import envpool

    with warnings.catch_warnings():  # EnvPool declares bounds in float64 for float32 spaces
        warnings.filterwarnings("ignore", ".*precision lowered", UserWarning)
        pool = envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, seed=SEED)
        _ = pool.observation_space, pool.action_space  # made, with the warning, when first asked for
    return pool


def make_loop(case: Case, side: str) -> tuple[SingleLoop | VectorLoop, Callable[[], None]]:
    """The loop of a case, and what closes its environment."""
    act = gaussian if case.policy == "gaussian" else categorical
    net = make_network(case.policy)
    env: Any
    if case.source == "envpool":
        env = make_pool(case.env_id, case.num_envs)
        first = env.reset()[0]
        if side == MASKED:
            return MaskedPoolLoop(env, first, net, act, case.steps), env.close
        return VectorLoop(env, first, net, act, case.steps, step_pool), env.close
    if case.num_envs == 1:
        env = gymnasium.make(case.env_id, disable_env_checker=True)
        return SingleLoop(env, env.reset(seed=SEED)[0], net, act, case.steps), env.close
    env = make_vector(case.env_id, case.num_envs)
    return VectorLoop(env, env.reset(seed=SEED)[0], net, act, case.steps), env.close
