"""PPO on a CartPole whose velocities are hidden: a GRU remembers what a feed-forward policy cannot see.

    python examples/recurrent_ppo.py --policy both --seed 0 --plot memory.png

The environment shows where cart and pole are, and not how they move. Both policies are trained by the same code: pieces
of at most 32 steps lie one after the other in a flat batch, nothing is padded, and the GRU begins each piece with the
state that was stored at its first step. Training stops when the mean return of the last 100 episodes, played by the
learning policy itself, reaches the goal (500 is the most that an episode can give).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import TransformObservation
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical

from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, SliceSamplerWithoutReplacement, TensorDictReplayBuffer, gae
from rollwright.envs import GymEnv
from rollwright.modules import GRUModule, set_recurrent_mode

NUM_ENVS, STEPS, EPOCHS, PIECE, MINIBATCH = 16, 128, 8, 32, 512
GAMMA, LAMBDA, CLIP, ENTROPY, LEARNING_RATE = 0.99, 0.95, 0.2, 0.01, 1e-3
REWARD_SCALE = 0.05  # actor and critic share a body, and the critic's errors must not drown the actor's


def positions_only() -> gymnasium.Env:
    """CartPole that shows two of its four numbers, as fractions of their limits."""
    limits, space = np.array([2.4, 0.21], dtype=np.float32), gymnasium.spaces.Box(-np.inf, np.inf, (2,))
    return TransformObservation(gymnasium.make("CartPole-v1"), lambda seen: seen[[0, 2]] / limits, space)


gymnasium.register("PositionsOnlyCartPole-v0", entry_point=positions_only)


def actor_critic(memory: bool) -> tuple[nn.Module, nn.Module]:
    """What acts, and what learns: a body that makes features, with a memory or without, and heads that read them."""
    body = GRUModule(2, 64, in_key="observation", out_key="features")
    if not memory:
        layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        body = TensorDictModule(layers, in_keys=["observation"], out_keys=["features"])
    actor = TensorDictModule(nn.Linear(64, 2), in_keys=["features"], out_keys=["logits"])
    critic = TensorDictModule(nn.Linear(64, 1), in_keys=["features"], out_keys=["value"])
    draw = ProbabilisticTensorDictModule(
        in_keys=["logits"], out_keys=["action"], distribution_class=Categorical, return_log_prob=True
    )
    return TensorDictSequential(body, actor, draw), TensorDictSequential(body, actor, critic)


def add_targets(batch: TensorDictBase, model: nn.Module) -> None:
    """Write advantages and targets of the critic."""
    with torch.no_grad():  # each frame is one step from the recurrent state that was stored with it
        value, next_value = model(batch.copy())["value"], model(batch["next"].copy())["value"]
    batch["next", "reward"] *= REWARD_SCALE
    advantage = gae(batch, value, next_value, gamma=GAMMA, lmbda=LAMBDA)
    batch["target"] = advantage + value
    batch["advantage"] = ((advantage - advantage.mean()) / (advantage.std() + 1e-8)).squeeze(-1)


def learn(batch: TensorDictBase, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One round of PPO on a batch ``[env, T]``; every piece is drawn once in each epoch."""
    add_targets(batch, model)
    batch["piece"] = batch["collector", "traj_ids"] * STEPS + torch.arange(STEPS) // PIECE
    frames = batch.exclude("next").reshape(-1)
    sampler = SliceSamplerWithoutReplacement(slice_len=PIECE, traj_key="piece")
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(len(frames)), sampler=sampler, batch_size=MINIBATCH)
    buffer.extend(frames)
    for _ in range(EPOCHS):
        for part in buffer:  # [n], pieces one after the other; is_init is True where each begins
            with set_recurrent_mode("recurrent"):
                model(part)
            policy = Categorical(logits=part["logits"])
            ratio = (policy.log_prob(part["action"]) - part["action_log_prob"]).exp()
            gain = torch.min(ratio * part["advantage"], ratio.clamp(1 - CLIP, 1 + CLIP) * part["advantage"])
            error = (part["value"] - part["target"]).pow(2)
            loss = 0.5 * error.mean() - gain.mean() - ENTROPY * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


def train(name: str, seed: int, total_frames: int, goal: float) -> tuple[list[int], list[float], bool]:
    """Frames and mean returns after each batch, and whether the goal was reached."""
    torch.manual_seed(seed)
    policy, model = actor_critic(memory=name == "gru")
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    collector = Collector(
        GymEnv("PositionsOnlyCartPole-v0", num_envs=NUM_ENVS, categorical_action_encoding=True),
        policy,  # what a GRU reads of the environment (its state, is_init) is added by the collector
        frames_per_batch=NUM_ENVS * STEPS,
        total_frames=-(-total_frames // (NUM_ENVS * STEPS)) * NUM_ENVS * STEPS,
    )
    collector.set_seed(seed)
    start, frames, returns, reached = time.perf_counter(), [], [], False
    with collector:
        for batch in collector:
            learn(batch, model, optimizer)
            stats = collector.stats()
            frames.append(stats["frames"])
            returns.append(stats["mean_return"] or 0.0)
            reached = stats["episodes"] >= 100 and returns[-1] >= goal
            line = f"{name}: {frames[-1]:,} frames, mean return {returns[-1]:.1f}, {time.perf_counter() - start:.0f} s"
            print(line, end="\n" if reached or frames[-1] >= total_frames else "\r", flush=True)
            if reached:
                break
    return frames, returns, reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", choices=["gru", "feed-forward", "both"], default="gru")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-frames", type=int, default=200_000, help="of each policy, at most")
    parser.add_argument("--goal", type=float, default=450.0)
    parser.add_argument("--plot", type=Path, default=None, help="where to leave a picture of the learning curves")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = ["gru", "feed-forward"] if given.policy == "both" else [given.policy]
    curves = {name: train(name, given.seed, given.total_frames, given.goal) for name in names}
    if given.plot is not None:
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for name, (frames, returns, _) in curves.items():
            axes.plot(frames, returns, label=name)
        axes.set(title="CartPole-v1 without velocities", xlabel="frames", ylabel="mean return of 100 episodes")
        axes.legend()
        figure.savefig(given.plot, dpi=120)
    return 0 if curves[names[0]][2] else 1


if __name__ == "__main__":
    raise SystemExit(main())
