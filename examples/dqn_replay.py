"""DQN on CartPole-v1, from a replay buffer that is filled in turns with learning, or meanwhile.

    python examples/dqn_replay.py --seed 0 --plot learning_curve.png
    python examples/dqn_replay.py --workers 2 --log-dir runs/dqn

Deep Q-learning (Mnih et al. 2015, https://www.nature.com/articles/nature14236) with double Q-learning (van Hasselt et
al. 2015, https://arxiv.org/abs/1509.06461) and returns of several steps. By default a thread (or workers) collects
while this process learns. The buffer's limiter keeps both at one pace, however fast the machine is. With ``--sync``,
frames are collected and learned from in turns, and in one process two runs with the same seed are equal.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Annotated

import torch
from common import Common, Run, parse
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn import functional

from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, SampleToInsertRatio, TensorDictReplayBuffer
from rollwright.data.postprocs import MultiStep
from rollwright.envs import GymEnv


@dataclass
class Settings(Common):
    """Settings of this example."""

    total_frames: Annotated[int, "stop after this many frames"] = 150_000
    goal: Annotated[float, "stop at this mean return"] = 400.0
    env: Annotated[str, "task of gymnasium"] = "CartPole-v1"
    num_envs: Annotated[int, "environments, in all workers"] = 8
    workers: Annotated[int, "processes that collect; 0: this one"] = 0
    sync: Annotated[bool, "collect and learn in turns"] = False
    frames_per_round: Annotated[int, "frames between two rounds of updates"] = 128
    updates_per_round: Annotated[int, "updates; then the target network and the policy that acts are renewed"] = 32
    batch: Annotated[int, "frames of an update"] = 128
    capacity: Annotated[int, "frames in the buffer"] = 100_000
    warm_up: Annotated[int, "random frames before the first update"] = 2_048
    learning_rate: Annotated[float, "of Adam"] = 1e-3
    gamma: Annotated[float, "discount"] = 0.99
    n_steps: Annotated[int, "rewards that are summed before the value of what follows"] = 3
    double: Annotated[bool, "the network picks the action whose value the target network gives"] = True
    last_epsilon: Annotated[float, "share of random actions in the end"] = 0.01
    epsilon_frames: Annotated[int, "frames until then"] = 10_000
    max_norm: Annotated[float, "of the gradient"] = 10.0


class EpsilonGreedy(nn.Module):
    """The action of the highest value or, with probability epsilon, any; epsilon is published with the weights."""

    def __init__(self, values: nn.Module, actions: int) -> None:
        super().__init__()
        self.values, self.actions = values, actions
        self.register_buffer("epsilon", torch.tensor(1.0))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        best = self.values(observation).argmax(-1)
        explores = torch.rand(best.shape) < self.epsilon
        return torch.where(explores, torch.randint(self.actions, best.shape), best)


def loss_of(batch: TensorDictBase, values: nn.Module, target: nn.Module, settings: Settings) -> torch.Tensor:
    """The error of the values on a batch ``[n]``: none follows a termination; after a truncation, the target's does."""
    outcome = batch["next"]  # of up to n_steps: rewards are summed, the observation is the last one
    discount = batch["gamma"].unsqueeze(-1) if settings.n_steps > 1 else settings.gamma
    with torch.no_grad():
        following = target(outcome["observation"])
        best = (values(outcome["observation"]) if settings.double else following).argmax(-1, keepdim=True)
        wanted = outcome["reward"] + discount * ~outcome["terminated"] * following.gather(-1, best)
    value = values(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
    return functional.smooth_l1_loss(value, wanted)


def make_collector(policy: TensorDictModule, buffer: TensorDictReplayBuffer, settings: Settings) -> Collector:
    name, share = settings.env, settings.num_envs // max(settings.workers, 1)
    frames = settings.frames_per_round if settings.sync else settings.frames_per_round // max(settings.workers, 1)
    return Collector(
        lambda: GymEnv(name, num_envs=share, categorical_action_encoding=True),
        policy,
        frames_per_batch=frames,
        total_frames=settings.in_batches(settings.frames_per_round) if settings.sync else -1,
        replay_buffer=buffer,
        postproc=MultiStep(settings.gamma, settings.n_steps) if settings.n_steps > 1 else None,
        **({"num_collectors": settings.workers, "sync": settings.sync} if settings.workers else {}),
    )


def train(settings: Settings) -> Run:
    torch.manual_seed(settings.seed)
    env = GymEnv(settings.env, categorical_action_encoding=True)
    inputs, actions = env.observation_spec["observation"].shape[-1], env.action_spec.n
    env.close()
    values = nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, actions))
    target, explorer = copy.deepcopy(values), EpsilonGreedy(values, actions)
    optimizer = torch.optim.Adam(values.parameters(), lr=settings.learning_rate, fused=True)
    drawn = settings.updates_per_round * settings.batch
    limiter = SampleToInsertRatio(drawn / settings.frames_per_round, margin=drawn, min_size=settings.warm_up)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(settings.capacity),
        batch_size=settings.batch,
        limiter=None if settings.sync else limiter,
        shared=settings.workers > 0,
    )
    collector = make_collector(TensorDictModule(explorer, ["observation"], ["action"]), buffer, settings)
    parts = {"values": values, "target": target, "optimizer": optimizer, "explorer": explorer, "buffer": buffer}
    run = Run(settings, collector, parts, background=not settings.sync)
    for _ in run:
        if settings.sync and len(buffer) < settings.warm_up:
            continue
        for _ in range(settings.updates_per_round):
            loss = loss_of(buffer.sample(), values, target, settings)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(values.parameters(), settings.max_norm)
            optimizer.step()
        target.load_state_dict(values.state_dict())
        share = run.frames / settings.epsilon_frames
        explorer.epsilon.fill_(max(settings.last_epsilon, 1 - (1 - settings.last_epsilon) * share))
        collector.update_policy_weights_()
    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(0 if train(parse(Settings)).reached else 1)
