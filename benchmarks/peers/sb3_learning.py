"""Stable-Baselines3 (and sb3-contrib, for recurrent PPO) learns the tasks of benchmarks.learning, as they are asked."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from torch import nn

from benchmarks.learning.protocol import answer
from benchmarks.learning.tasks import EPISODES, TASKS, Task


def on_policy(task: Task, env: Any, seed: int) -> BaseAlgorithm:
    given, recurrent = task.settings, task.example == "recurrent_ppo"
    network: dict[str, Any] = {"net_arch": [64, 64], "activation_fn": nn.Tanh}
    if recurrent:  # a recurrent layer each for actor and critic, as in the example
        network = {"net_arch": [], "lstm_hidden_size": 64, "enable_critic_lstm": True}
    return (RecurrentPPO if recurrent else PPO)(
        "MlpLstmPolicy" if recurrent else "MlpPolicy",
        env,
        n_steps=given["steps"],
        n_epochs=given["epochs"],
        batch_size=given["minibatch"],
        learning_rate=lambda left: given["learning_rate"] * left,
        gamma=given["gamma"],
        gae_lambda=given["gae_lambda"],
        clip_range=given["clip"],
        ent_coef=given["entropy"],
        max_grad_norm=given["max_norm"],
        policy_kwargs=network,
        seed=seed,
        device="cpu",
    )


def off_policy(task: Task, env: Any, seed: int) -> BaseAlgorithm:
    given = task.settings
    shared = {
        "train_freq": given["frames_per_round"] // given["num_envs"],
        "gradient_steps": given["updates_per_round"],
        "batch_size": given["batch"],
        "buffer_size": 100_000,
        "learning_starts": given["warm_up"],
        "gamma": given["gamma"],
        "learning_rate": given["learning_rate"],
        "seed": seed,
        "device": "cpu",
    }
    if task.example == "sac_async":
        return SAC("MlpPolicy", env, tau=given["target_rate"], policy_kwargs={"net_arch": [128, 128]}, **shared)
    return DQN(
        "MlpPolicy",
        env,
        target_update_interval=given["frames_per_round"],
        exploration_fraction=given["epsilon_frames"] / given["total_frames"],
        exploration_final_eps=given["last_epsilon"],
        max_grad_norm=10.0,
        policy_kwargs={"net_arch": [128, 128]},
        **shared,
    )


def learn(name: str, side: str, seed: int) -> dict[str, float]:
    task = TASKS[name]
    env = make_vec_env(task.env, n_envs=task.settings["num_envs"], seed=seed)
    begun, processor = time.perf_counter(), time.process_time()
    model = (on_policy if "steps" in task.settings else off_policy)(task, env, seed)
    model.learn(task.settings["total_frames"])
    seconds = {"wall_s": time.perf_counter() - begun, "processor_s": time.process_time() - processor}
    tests = make_vec_env(task.env, seed=1_000 + seed)
    value, _ = evaluate_policy(model, tests, n_eval_episodes=EPISODES, deterministic=True)
    env.close()
    return {"return": float(value), "frames": model.num_timesteps, **seconds}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    answer(learn)
