"""Double DQN on CartPole-v1, from a replay buffer that a thread fills in the background.

    python examples/dqn_replay.py --seed 0 --plot learning_curve.png

Deep Q-learning (Mnih et al. 2015, https://www.nature.com/articles/nature14236) with double Q-learning (van Hasselt et
al. 2015, https://arxiv.org/abs/1509.06461). The thread of ``collector.start()`` acts with a copy of the policy, which
changes when the learner publishes new weights; the buffer's limiter keeps thread and learner at one pace, however fast
the machine is: a frame is drawn 32 times on average, and neither is ahead by more than a round. Two runs with the same
seed are alike and not equal, for timing decides with which weights a step is taken. Stops when the mean return of the
last 100 episodes, played with a little exploration, reaches the goal (500 is the most), or at Ctrl-C.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn import functional

from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, SampleToInsertRatio, TensorDictReplayBuffer
from rollwright.data.postprocs import MultiStep
from rollwright.envs import GymEnv

NUM_ENVS, FRAMES_PER_ROUND, UPDATES_PER_ROUND, BATCH, CAPACITY, WARM_UP = 8, 128, 32, 128, 100_000, 2_000
GAMMA, N_STEPS, LEARNING_RATE, TARGET_RATE, MAX_NORM = 0.99, 3, 1e-3, 0.02, 10.0
LEAST_EPSILON, EPSILON_FRAMES = 0.01, 10_000
DRAWN_PER_ROUND = UPDATES_PER_ROUND * BATCH


class EpsilonGreedy(nn.Module):
    """The action of the highest value or, with probability epsilon, any; epsilon is published with the weights."""

    def __init__(self, values: nn.Module) -> None:
        super().__init__()
        self.values = values
        self.register_buffer("epsilon", torch.tensor(1.0))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        best = self.values(observation).argmax(-1)
        explores = torch.rand(best.shape) < self.epsilon
        return torch.where(explores, torch.randint(2, best.shape), best)


def learn(batch: TensorDictBase, values: nn.Module, target: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One update on a batch ``[n]``: no value follows a termination; after a truncation, the target's does."""
    outcome = batch["next"]  # of up to three steps: rewards are summed, the observation is the last one
    with torch.no_grad():
        best = values(outcome["observation"]).argmax(-1, keepdim=True)
        follows = ~outcome["terminated"] * target(outcome["observation"]).gather(-1, best)
        wanted = outcome["reward"] + batch["gamma"].unsqueeze(-1) * follows
    value = values(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
    loss = functional.smooth_l1_loss(value, wanted)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(values.parameters(), MAX_NORM)
    optimizer.step()
    for slow, fast in zip(target.parameters(), values.parameters(), strict=True):
        slow.data.lerp_(fast.data, TARGET_RATE)


def train(seed: int, total_frames: int, goal: float) -> tuple[list[int], list[float], bool]:
    """Frames and mean returns after each round, and whether the goal was reached."""
    torch.manual_seed(seed)
    values = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    target, explorer = copy.deepcopy(values), EpsilonGreedy(values)
    optimizer = torch.optim.Adam(values.parameters(), lr=LEARNING_RATE, fused=True)
    limiter = SampleToInsertRatio(DRAWN_PER_ROUND / FRAMES_PER_ROUND, margin=DRAWN_PER_ROUND, min_size=WARM_UP)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=BATCH, limiter=limiter)
    collector = Collector(
        GymEnv("CartPole-v1", num_envs=NUM_ENVS, categorical_action_encoding=True),
        TensorDictModule(explorer, in_keys=["observation"], out_keys=["action"]),
        frames_per_batch=FRAMES_PER_ROUND,
        replay_buffer=buffer,
        postproc=MultiStep(GAMMA, N_STEPS),
    )
    collector.set_seed(seed)
    start, frames, returns, reached = time.perf_counter(), [0], [0.0], False
    collector.start()
    try:
        while not reached and frames[-1] < total_frames:
            for _ in range(UPDATES_PER_ROUND):
                learn(buffer.sample(), values, target, optimizer)
            explorer.epsilon.fill_(max(LEAST_EPSILON, 1 - buffer.write_count / EPSILON_FRAMES))
            collector.update_policy_weights_()
            stats = collector.stats()
            frames.append(buffer.write_count)
            returns.append(stats["mean_return"] or 0.0)
            reached = stats["episodes"] >= 100 and returns[-1] >= goal
            line = f"{frames[-1]:,} frames, mean return {returns[-1]:.1f}, {time.perf_counter() - start:.0f} s"
            print(line, end="\r", flush=True)
    except KeyboardInterrupt:
        print("\ninterrupted", end="")
    finally:
        collector.async_shutdown()
    print()
    return frames, returns, reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-frames", type=int, default=150_000)
    parser.add_argument("--goal", type=float, default=400.0)
    parser.add_argument("--plot", type=Path, default=None, help="where to leave a picture of the learning curve")
    given = parser.parse_args()
    torch.set_num_threads(1)
    frames, returns, reached = train(given.seed, given.total_frames, given.goal)
    if given.plot is not None:
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        axes.plot(frames, returns)
        axes.set(title="CartPole-v1, double DQN", xlabel="frames", ylabel="mean return of 100 episodes")
        figure.savefig(given.plot, dpi=120)
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
