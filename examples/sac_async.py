"""Soft actor-critic on Pendulum-v1: collectors fill a replay buffer while the learner draws from it.

    python examples/sac_async.py --seed 0 --workers 2 --plot learning_curve.png

Soft actor-critic with a learned temperature (Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905). A thread of this
process collects, or so many processes as ``--workers`` says. The buffer's limiter keeps both sides at one pace, however
fast the machine is: a frame is drawn ``SAMPLES_PER_INSERT`` times on average. Two runs with one seed are alike and not
equal, for timing decides with which weights a step is taken. Stops when test episodes without noise have the mean
return of the goal (-150 is about the most), or at Ctrl-C.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from pathlib import Path

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn import functional

from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, SampleToInsertRatio, TensorDictReplayBuffer
from rollwright.envs import GymEnv

NUM_ENVS, FRAMES_PER_ROLLOUT, BATCH, CAPACITY, WARM_UP = 4, 32, 256, 100_000, 1_024
SAMPLES_PER_INSERT, MARGIN, UPDATES_PER_PUBLICATION, UPDATES_PER_TEST = 128.0, 32_768.0, 16, 500
GAMMA, LEARNING_RATE, TARGET_RATE, LARGEST_ACTION, STEPS, TEST_EPISODES = 0.99, 1e-3, 0.01, 2.0, 200, 20


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


class Actor(nn.Module):
    """A normal distribution, squeezed by tanh into the limits of the action."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network(3, 2)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions ``[..., 1]`` and the logarithms of their densities ``[..., 1]``."""
        mean, spread = self.layers(observation).chunk(2, -1)
        normal = torch.distributions.Normal(mean, spread.clamp(-5, 2).exp(), validate_args=False)
        raw = normal.rsample()
        slope = 2 * (math.log(2) - raw - functional.softplus(-2 * raw))  # log(1 - tanh(raw) ** 2)
        return LARGEST_ACTION * raw.tanh(), normal.log_prob(raw) - slope

    def best(self, observation: torch.Tensor) -> torch.Tensor:
        return LARGEST_ACTION * self.layers(observation).chunk(2, -1)[0].tanh()


def values(critics: nn.ModuleList, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    return torch.cat([critic(torch.cat([observation, action], -1)) for critic in critics], -1)


class Learner:
    """An actor, two critics with slow copies, the temperature, and how they learn."""

    def __init__(self) -> None:
        self.actor, self.critics = Actor(), nn.ModuleList([network(4, 1), network(4, 1)])
        self.slow_critics, self.log_temperature = copy.deepcopy(self.critics), nn.Parameter(torch.zeros(()))
        self.parts = [[*self.actor.parameters()], [*self.critics.parameters()], [self.log_temperature]]
        self.optimizer = torch.optim.Adam([{"params": part} for part in self.parts], lr=LEARNING_RATE, fused=True)

    def step(self, batch: TensorDictBase) -> None:
        """One update on a batch ``[n]``: no value follows a termination; after a truncation, the slow critics' does."""
        observation, outcome, temperature = batch["observation"], batch["next"], self.log_temperature.detach().exp()
        with torch.no_grad():
            action, log_prob = self.actor(outcome["observation"])
            worth = values(self.slow_critics, outcome["observation"], action).amin(-1, keepdim=True)
            wanted = outcome["reward"] + GAMMA * ~outcome["terminated"] * (worth - temperature * log_prob)
        error = (values(self.critics, observation, batch["action"]) - wanted).pow(2).mean(0).sum()
        action, log_prob = self.actor(observation)
        gain = (values(self.critics, observation, action).amin(-1, keepdim=True) - temperature * log_prob).mean()
        entropy_over = -log_prob.detach().mean() + 1  # the target is -1, for one dimension of action
        for part, loss in zip(self.parts, (-gain, error, self.log_temperature * entropy_over), strict=True):
            for parameter, gradient in zip(part, torch.autograd.grad(loss, part), strict=True):
                parameter.grad = gradient
        self.optimizer.step()
        for slow, fast in zip(self.slow_critics.parameters(), self.critics.parameters(), strict=True):
            slow.data.lerp_(fast.data, TARGET_RATE)


def train(seed: int, workers: int, total_frames: int, goal: float) -> tuple[list[int], list[float], bool]:
    """Frames and mean returns at each test, and whether the goal was reached."""
    torch.manual_seed(seed)
    learner, tests = Learner(), GymEnv("Pendulum-v1", num_envs=TEST_EPISODES)
    best = TensorDictModule(learner.actor.best, in_keys=["observation"], out_keys=["action"])
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        batch_size=BATCH,
        limiter=SampleToInsertRatio(SAMPLES_PER_INSERT, margin=MARGIN, min_size=WARM_UP),
        shared=workers > 0,
    )
    collector = Collector(
        lambda: GymEnv("Pendulum-v1", num_envs=NUM_ENVS),
        TensorDictModule(learner.actor, in_keys=["observation"], out_keys=["action", "_"]),
        frames_per_batch=FRAMES_PER_ROLLOUT,
        init_random_frames=WARM_UP,
        replay_buffer=buffer,
        **({"num_collectors": workers, "sync": False} if workers else {}),
    )
    collector.set_seed(seed)
    start, frames, returns = time.perf_counter(), [0], [-math.inf]
    collector.start()
    try:
        while returns[-1] < goal and frames[-1] < total_frames:
            for i in range(UPDATES_PER_TEST):
                learner.step(buffer.sample())  # waits until the collector has stored what is to be drawn
                if i % UPDATES_PER_PUBLICATION == 0:
                    collector.update_policy_weights_()
            tests.set_seed(seed)
            frames.append(buffer.write_count)
            returns.append(tests.rollout(STEPS, best)["next", "reward"].sum(1).mean().item())
            line = f"{frames[-1]:,} frames, mean return {returns[-1]:.1f}, {time.perf_counter() - start:.0f} s"
            print(line, flush=True)
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        collector.async_shutdown()
    return frames[1:], returns[1:], returns[-1] >= goal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes that collect; 0: a thread of this process")
    parser.add_argument("--total-frames", type=int, default=60_000)
    parser.add_argument("--goal", type=float, default=-200.0)
    parser.add_argument("--plot", type=Path, default=None, help="where to leave a picture of the learning curve")
    given = parser.parse_args()
    torch.set_num_threads(1)
    frames, returns, reached = train(given.seed, given.workers, given.total_frames, given.goal)
    if given.plot is not None:
        from matplotlib import pyplot as plt

        plt.plot(frames, returns)
        plt.title("Pendulum-v1, SAC: mean return by frames")
        plt.savefig(given.plot, dpi=120)
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
