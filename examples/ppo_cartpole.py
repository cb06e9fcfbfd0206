"""PPO on CartPole-v1: collect with rollwright, learn with thirty lines of torch.

    python examples/ppo_cartpole.py --seed 0 --plot learning_curve.png

Proximal policy optimisation (Schulman et al. 2017, https://arxiv.org/abs/1707.06347) with generalised advantage
estimation (Schulman et al. 2015, https://arxiv.org/abs/1506.02438). Stops when the mean return of the last 100
episodes, played by the learning policy itself, reaches 475 (500 is the most that an episode can give).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical

from rollwright.collectors import Collector
from rollwright.data import gae
from rollwright.envs import GymEnv

NUM_ENVS, STEPS, EPOCHS, MINIBATCH = 16, 128, 10, 256
GAMMA, LAMBDA, CLIP, ENTROPY, LEARNING_RATE = 0.99, 0.95, 0.2, 0.01, 1e-3


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


def train(seed: int, total_frames: int, goal: float) -> tuple[list[int], list[float], bool]:
    """Frames and mean returns after each batch, and whether the goal was reached."""
    torch.manual_seed(seed)
    actor, critic = network(2), network(1)
    policy = TensorDictSequential(
        TensorDictModule(actor, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=LEARNING_RATE)
    collector = Collector(
        GymEnv("CartPole-v1", num_envs=NUM_ENVS, categorical_action_encoding=True),
        policy,
        frames_per_batch=NUM_ENVS * STEPS,
        total_frames=-(-total_frames // (NUM_ENVS * STEPS)) * NUM_ENVS * STEPS,
    )
    collector.set_seed(seed)
    frames, returns = [], []
    shown = TextColumn(
        "{task.fields[fps]:>6.0f} frames/s  {task.fields[episodes]:>5} episodes  return {task.fields[mean]:.0f}"
    )
    with collector, Progress(TextColumn("PPO"), BarColumn(), shown, TimeElapsedColumn()) as progress:
        task = progress.add_task("", total=total_frames, fps=0, episodes=0, mean=0)
        for i, batch in enumerate(collector):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - i / len(collector))
            learn(batch, actor, critic, optimizer)
            stats = collector.stats()
            frames.append(stats["frames"])
            returns.append(stats["mean_return"] or 0.0)
            progress.update(
                task,
                completed=frames[-1],
                fps=stats["frames_per_second"],
                episodes=stats["episodes"],
                mean=returns[-1],
            )
            if stats["episodes"] >= 100 and returns[-1] >= goal:
                return frames, returns, True
    return frames, returns, False


def plot(path: Path, frames: list[int], returns: list[float], seed: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(frames, returns, label=f"PPO, seed {seed}")
    axes.axhline(475, linestyle="--", color="grey", label="solved: 475")
    axes.set(xlabel="frames", ylabel="mean return of the last 100 episodes", title="CartPole-v1", ylim=(0, 520))
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-frames", type=int, default=600_000)
    parser.add_argument("--goal", type=float, default=475.0)
    parser.add_argument("--plot", type=Path, default=None, help="where to leave a picture of the learning curve")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    frames, returns, reached = train(arguments.seed, arguments.total_frames, arguments.goal)
    seconds = time.perf_counter() - start
    outcome = "reached" if reached else "did not reach"
    print(
        f"seed {arguments.seed}: {outcome} a mean return of {arguments.goal:g} over 100 episodes "
        f"({returns[-1]:.1f}) after {frames[-1]:,} frames in {seconds:.0f} s"
    )
    if arguments.plot is not None:
        plot(arguments.plot, frames, returns, arguments.seed)
        print(f"learning curve: {arguments.plot}")
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
