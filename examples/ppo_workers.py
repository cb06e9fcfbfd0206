"""PPO on CartPole-v1 with environments in processes of their own, beside the same in one process.

    python examples/ppo_workers.py --workers 0 1 2 --seed 0 --plot learning_curves.png

Proximal policy optimisation (Schulman et al. 2017, https://arxiv.org/abs/1707.06347). Sixteen environments are shared
out over the workers; a batch is complete when all of them have delivered their part, which they wrote where the batch
is read: nothing is sent or stacked. Weights published after a batch act in all of the next one, so that the learner
sees the policy's own frames, and two runs with the same seed are equal. Training stops when the mean return of the
last 100 episodes, played by the learning policy itself, reaches the goal (500 is the most that an episode can give).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical

from rollwright.collectors import BaseCollector, Collector
from rollwright.data import gae
from rollwright.envs import GymEnv

NUM_ENVS, STEPS, EPOCHS, MINIBATCH = 16, 128, 10, 256
GAMMA, LAMBDA, CLIP, ENTROPY, LEARNING_RATE = 0.99, 0.95, 0.2, 0.01, 1e-3
FRAMES = NUM_ENVS * STEPS  # of a batch


def network(out_features: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out_features))


def learn(batch: TensorDictBase, actor: nn.Module, critic: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One round of PPO on a batch ``[env, T]``."""
    with torch.no_grad():
        value, next_value = critic(batch["observation"]), critic(batch["next", "observation"])
        advantage = gae(batch, value, next_value, gamma=GAMMA, lmbda=LAMBDA)
    frames = batch.select("observation", "action", "action_log_prob")
    frames["advantage"] = ((advantage - advantage.mean()) / (advantage.std() + 1e-8)).squeeze(-1)
    frames["target"] = advantage + value
    frames = frames.reshape(-1)
    for _ in range(EPOCHS):
        for part in frames[torch.randperm(len(frames))].split(MINIBATCH):
            policy = Categorical(logits=actor(part["observation"]))
            ratio = (policy.log_prob(part["action"]) - part["action_log_prob"]).exp()
            gain = torch.min(ratio * part["advantage"], ratio.clamp(1 - CLIP, 1 + CLIP) * part["advantage"])
            error = (critic(part["observation"]) - part["target"]).pow(2)
            loss = 0.5 * error.mean() - gain.mean() - ENTROPY * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
            optimizer.step()


def make_collector(actor: nn.Module, workers: int, batches: int) -> BaseCollector:
    policy = TensorDictSequential(
        TensorDictModule(actor, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )
    num_envs = NUM_ENVS // max(workers, 1)  # of each worker
    options = {"num_collectors": workers, "sync": True, "cat_results": 0} if workers else {}
    return Collector(
        lambda: GymEnv("CartPole-v1", num_envs=num_envs, categorical_action_encoding=True),
        policy,
        frames_per_batch=FRAMES,
        total_frames=batches * FRAMES,
        **options,
    )


def train(workers: int, seed: int, total_frames: int, goal: float) -> tuple[list[int], list[float], bool]:
    """Frames and mean returns after each batch, and whether the goal was reached."""
    torch.manual_seed(seed)
    actor, critic, batches = network(2), network(1), -(-total_frames // FRAMES)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=LEARNING_RATE)
    collector = make_collector(actor, workers, batches)
    collector.set_seed(seed)
    start, frames, returns, reached = time.perf_counter(), [], [], False
    with collector:
        for i, batch in enumerate(collector):  # [16, 128] with any number of workers
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - i / batches)
            learn(batch, actor, critic, optimizer)
            collector.update_policy_weights_()
            stats = collector.stats()
            frames.append(stats["frames"])
            returns.append(stats["mean_return"] or 0.0)
            reached = stats["episodes"] >= 100 and returns[-1] >= goal
            line = f"{frames[-1]:,} frames, mean return {returns[-1]:.1f}, {time.perf_counter() - start:.0f} s"
            ends = reached or i + 1 == batches
            print(f"{workers} workers: {line}", end="\n" if ends else "\r", flush=True)
            if reached:
                break
    return frames, returns, reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    workers = {"type": int, "nargs": "+", "choices": [0, 1, 2, 4, 8, 16], "metavar": "N"}
    parser.add_argument(
        "--workers", **workers, default=[2], help="processes; 0: in this one; several: one run for each"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-frames", type=int, default=600_000)
    parser.add_argument("--goal", type=float, default=475.0)
    parser.add_argument("--plot", type=Path, default=None, help="where to leave a picture of the learning curves")
    given = parser.parse_args()
    torch.set_num_threads(1)
    curves = {number: train(number, given.seed, given.total_frames, given.goal) for number in given.workers}
    if given.plot is not None:
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for number, (frames, returns, _) in curves.items():
            axes.plot(frames, returns, label=f"{number} workers" if number else "one process")
        axes.set(title="CartPole-v1, PPO", xlabel="frames", ylabel="mean return of 100 episodes")
        axes.legend()
        figure.savefig(given.plot, dpi=120)
    return 0 if all(reached for *_, reached in curves.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
