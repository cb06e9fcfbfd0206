"""What is learned: tasks and settings, the same for the examples of rollwright and for Stable-Baselines3."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import TransformObservation

SB3, ONE, SYNC, ASYNC = "Stable-Baselines3", "one process", "2 workers, sync", "2 workers, async"
EPISODES = 20  # of a test, without noise
SIDES = (SB3, ONE, SYNC, ASYNC)
PPO = {"epochs": 10, "gamma": 0.99, "gae_lambda": 0.95, "clip": 0.2, "max_norm": 0.5}


@dataclass(frozen=True)
class Task:
    """What is learned, how, and for how long.

    Attributes:
        example: file in ``examples``, without its ending.
        env: of gymnasium.
        settings: of the example; those that others take have the same names there.
    """

    example: str
    env: str
    settings: dict[str, Any] = field(hash=False)


TASKS = {
    "PPO, CartPole": Task(
        "ppo_cartpole",
        "CartPole-v1",
        {**PPO, "total_frames": 40_960, "num_envs": 16, "steps": 128, "minibatch": 256, "learning_rate": 1e-3}
        | {"entropy": 0.01},
    ),
    "PPO, InvertedPendulum": Task(
        "ppo_continuous",
        "InvertedPendulum-v5",
        {**PPO, "total_frames": 32_768, "num_envs": 8, "steps": 256, "minibatch": 256, "learning_rate": 1e-3}
        | {"entropy": 0.0},
    ),
    "Recurrent PPO, CartPole without velocities": Task(
        "recurrent_ppo",
        "PositionsOnlyCartPole-v0",
        {**PPO, "total_frames": 24_576, "num_envs": 16, "steps": 128, "minibatch": 256, "learning_rate": 1e-3}
        | {"entropy": 0.01},
    ),
    "DQN, CartPole": Task(
        "dqn_replay",
        "CartPole-v1",
        {"total_frames": 40_960, "num_envs": 8, "frames_per_round": 256, "updates_per_round": 128, "batch": 64}
        | {
            "warm_up": 1_024,
            "gamma": 0.99,
            "learning_rate": 1e-3,
            "last_epsilon": 0.04,
            "n_steps": 1,
            "double": False,
            "epsilon_frames": 4_096,
        },
    ),
    "SAC, Pendulum": Task(
        "sac_async",
        "Pendulum-v1",
        {"total_frames": 4_096, "num_envs": 4, "frames_per_round": 32, "updates_per_round": 32, "batch": 128}
        | {"warm_up": 512, "gamma": 0.99, "learning_rate": 1e-3, "target_rate": 0.01, "frames_per_test": 10**9},
    ),
}


def positions_only() -> gymnasium.Env:
    """CartPole that shows two of its four numbers, as fractions of their limits."""
    limits, space = np.array([2.4, 0.21], dtype=np.float32), gymnasium.spaces.Box(-np.inf, np.inf, (2,))
    return TransformObservation(gymnasium.make("CartPole-v1"), lambda seen: seen[[0, 2]] / limits, space)


gymnasium.register("PositionsOnlyCartPole-v0", entry_point=positions_only)
