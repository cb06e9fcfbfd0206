"""Soft actor-critic on Pendulum-v1: collectors fill a replay buffer while the learner draws from it.

    python examples/sac_async.py --seed 0 --workers 2 --plot learning_curve.png

Soft actor-critic with a learned temperature (Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905). A thread of this
process collects, or so many processes as ``--workers`` says. The buffer's limiter keeps both sides at one pace, however
fast the machine is. Two runs with one seed are alike and not equal, for timing decides with which weights a step is
taken. With ``--sync``, frames are collected and learned from in turns, and in one process they are equal. Stops when
test episodes without noise have the mean return of the goal (-150 is about the most).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from common import Common, Run, parse
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn import functional

from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, SampleToInsertRatio, TensorDictReplayBuffer
from rollwright.envs import GymEnv

LARGEST_ACTION, STEPS, TEST_EPISODES = 2.0, 200, 20


@dataclass
class Settings(Common):
    """Settings of this example."""

    total_frames: Annotated[int, "stop after this many frames"] = 60_000
    goal: Annotated[float, "stop at this mean return"] = -200.0
    env: Annotated[str, "task of gymnasium"] = "Pendulum-v1"
    num_envs: Annotated[int, "environments, in all workers"] = 4
    workers: Annotated[int, "processes that collect; 0: this one"] = 0
    sync: Annotated[bool, "collect and learn in turns"] = False
    frames_per_round: Annotated[int, "frames between two rounds of updates"] = 32
    updates_per_round: Annotated[int, "updates; then the policy that acts is renewed"] = 16
    batch: Annotated[int, "frames of an update"] = 256
    capacity: Annotated[int, "frames in the buffer"] = 100_000
    warm_up: Annotated[int, "random frames before the first update"] = 1_024
    learning_rate: Annotated[float, "of Adam"] = 1e-3
    gamma: Annotated[float, "discount"] = 0.99
    target_rate: Annotated[float, "how far the slow critics move in an update"] = 0.01
    frames_per_test: Annotated[int, "frames between two tests"] = 1_000


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

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.actor, self.critics = Actor(), nn.ModuleList([network(4, 1), network(4, 1)])
        self.slow_critics = copy.deepcopy(self.critics)
        self.temperature = nn.ParameterList([torch.zeros(())])  # its logarithm
        modules = {"actor": self.actor, "critics": self.critics, "temperature": self.temperature}
        self.learned = [[*module.parameters()] for module in modules.values()]
        self.optimizer = torch.optim.Adam(
            [{"params": part} for part in self.learned], lr=settings.learning_rate, fused=True
        )
        self.parts = {**modules, "slow_critics": self.slow_critics, "optimizer": self.optimizer}

    def step(self, batch: TensorDictBase) -> None:
        """One update on a batch ``[n]``: no value follows a termination; after a truncation, the slow critics' does."""
        observation, outcome, temperature = batch["observation"], batch["next"], self.temperature[0].detach().exp()
        with torch.no_grad():
            action, log_prob = self.actor(outcome["observation"])
            worth = values(self.slow_critics, outcome["observation"], action).amin(-1, keepdim=True)
            wanted = outcome["reward"] + self.settings.gamma * ~outcome["terminated"] * (worth - temperature * log_prob)
        error = (values(self.critics, observation, batch["action"]) - wanted).pow(2).mean(0).sum()
        action, log_prob = self.actor(observation)
        gain = (values(self.critics, observation, action).amin(-1, keepdim=True) - temperature * log_prob).mean()
        entropy_over = -log_prob.detach().mean() + 1  # the target is -1, for one dimension of action
        for part, loss in zip(self.learned, (-gain, error, self.temperature[0] * entropy_over), strict=True):
            for parameter, gradient in zip(part, torch.autograd.grad(loss, part), strict=True):
                parameter.grad = gradient
        self.optimizer.step()
        for slow, fast in zip(self.slow_critics.parameters(), self.critics.parameters(), strict=True):
            slow.data.lerp_(fast.data, self.settings.target_rate)


def make_collector(learner: Learner, buffer: TensorDictReplayBuffer, settings: Settings) -> Collector:
    name, share = settings.env, settings.num_envs // max(settings.workers, 1)
    return Collector(
        lambda: GymEnv(name, num_envs=share),
        TensorDictModule(learner.actor, in_keys=["observation"], out_keys=["action", "_"]),
        frames_per_batch=settings.frames_per_round // (1 if settings.sync else max(settings.workers, 1)),
        total_frames=settings.in_batches(settings.frames_per_round) if settings.sync else -1,
        init_random_frames=settings.warm_up,
        replay_buffer=buffer,
        **({"num_collectors": settings.workers, "sync": settings.sync} if settings.workers else {}),
    )


def train(settings: Settings) -> Run:
    torch.manual_seed(settings.seed)
    learner, tests = Learner(settings), GymEnv(settings.env, num_envs=TEST_EPISODES)
    best = TensorDictModule(learner.actor.best, in_keys=["observation"], out_keys=["action"])
    drawn = settings.updates_per_round * settings.batch
    ratio = SampleToInsertRatio(drawn / settings.frames_per_round, margin=8 * drawn, min_size=settings.warm_up)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(settings.capacity),
        batch_size=settings.batch,
        limiter=None if settings.sync else ratio,
        shared=settings.workers > 0,
    )

    def test(stats: Mapping[str, Any]) -> float | None:
        last = run.curve[-1][0] if run.curve else settings.warm_up
        if stats["frames"] < last + settings.frames_per_test:
            return None
        tests.set_seed(settings.seed)
        return tests.rollout(STEPS, best)["next", "reward"].sum(1).mean().item()

    run = Run(
        settings,
        collector := make_collector(learner, buffer, settings),
        {**learner.parts, "buffer": buffer},
        measure=test,
        background=not settings.sync,
    )
    for _ in run:
        if settings.sync and len(buffer) < settings.warm_up:
            continue
        for _ in range(settings.updates_per_round):
            learner.step(buffer.sample())
        collector.update_policy_weights_()
    tests.close()
    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(0 if train(parse(Settings)).reached else 1)
