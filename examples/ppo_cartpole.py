"""PPO on CartPole-v1 or another task of Discrete actions, in one process or with workers.

    python examples/ppo_cartpole.py --seed 0 --plot learning_curve.png
    python examples/ppo_cartpole.py --workers 2 --log-dir runs/cartpole

Proximal policy optimization (Schulman et al. 2017, https://arxiv.org/abs/1707.06347) with generalized advantage
estimation (Schulman et al. 2015, https://arxiv.org/abs/1506.02438). With workers, the environments are shared out:
a batch is complete when all of them have delivered their part, and weights published after it act in the next one.
With ``--no-sync``, each worker's part is a batch of its own, and the others collect while it is learned from.
Stops when the mean return of the last 100 episodes reaches 475 (500 is the most that an episode can give).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from common import Common, Run, parse
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical

from rollwright.collectors import Collector
from rollwright.data import gae
from rollwright.envs import GymEnv
from rollwright.modules import ProbabilisticActor


@dataclass
class Settings(Common):
    """Settings of this example."""

    total_frames: Annotated[int, "stop after this many frames"] = 600_000
    goal: Annotated[float, "stop at this mean return"] = 475.0
    env: Annotated[str, "task of gymnasium"] = "CartPole-v1"
    num_envs: Annotated[int, "environments, in all workers"] = 16
    steps: Annotated[int, "steps of each environment in a batch"] = 128
    workers: Annotated[int, "processes that collect; 0: this one"] = 0
    sync: Annotated[bool, "take a batch from all workers, not from the first that is ready"] = True
    epochs: Annotated[int, "times that each frame is learned from"] = 10
    minibatch: Annotated[int, "frames of an update"] = 256
    learning_rate: Annotated[float, "at the first frame; it falls to 0 at the last"] = 1e-3
    gamma: Annotated[float, "discount"] = 0.99
    gae_lambda: Annotated[float, "of generalized advantage estimation"] = 0.95
    clip: Annotated[float, "how far the ratio of probabilities may be from 1"] = 0.2
    entropy: Annotated[float, "weight of the entropy"] = 0.01
    max_norm: Annotated[float, "of the gradient"] = 0.5


def network(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Learner:
    """Actor, critic, and a round of PPO."""

    def __init__(self, observations: int, actions: int, settings: Settings) -> None:
        self.settings = settings
        self.actor, self.critic = network(observations, actions, 0.01), network(observations, 1, 1.0)
        self.parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=settings.learning_rate, eps=1e-5)
        self.policy = ProbabilisticActor(
            TensorDictModule(self.actor, in_keys=["observation"], out_keys=["logits"]),
            in_keys=["logits"],
            distribution_class=Categorical,
            return_log_prob=True,
        )

    def learn(self, batch: TensorDictBase, share_left: float) -> None:
        """Learn from a batch ``[env, T]``."""
        self.optimizer.param_groups[0]["lr"] = self.settings.learning_rate * share_left
        with torch.no_grad():
            value, next_value = self.critic(batch["observation"]), self.critic(batch["next", "observation"])
            advantage = gae(batch, value, next_value, gamma=self.settings.gamma, lmbda=self.settings.gae_lambda)
        frames = batch.select("observation", "action", "action_log_prob")
        frames["advantage"], frames["target"] = advantage.squeeze(-1), advantage + value
        frames = frames.reshape(-1)
        for _ in range(self.settings.epochs):
            for part in frames[torch.randperm(len(frames))].split(self.settings.minibatch):
                self.optimizer.zero_grad()
                self.loss(part).backward()
                nn.utils.clip_grad_norm_(self.parameters, self.settings.max_norm)
                self.optimizer.step()

    def loss(self, part: TensorDictBase) -> torch.Tensor:
        policy, clip = Categorical(logits=self.actor(part["observation"])), self.settings.clip
        advantage = (part["advantage"] - part["advantage"].mean()) / (part["advantage"].std() + 1e-8)
        ratio = (policy.log_prob(part["action"]) - part["action_log_prob"]).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        error = (self.critic(part["observation"]) - part["target"]).pow(2)
        return 0.5 * error.mean() - gain.mean() - self.settings.entropy * policy.entropy().mean()


def train(settings: Settings) -> Run:
    torch.manual_seed(settings.seed)
    name, share = settings.env, settings.num_envs // max(settings.workers, 1)
    options = {"num_collectors": settings.workers, "sync": settings.sync} if settings.workers else {}
    if settings.workers and settings.sync:
        options["cat_results"] = 0  # [16, 128] with any number of workers
    env = GymEnv(name, categorical_action_encoding=True)
    learner = Learner(env.observation_spec["observation"].shape[-1], env.action_spec.n, settings)
    env.close()
    frames = (settings.num_envs if settings.sync else share) * settings.steps
    total = settings.in_batches(frames)
    collector = Collector(
        lambda: GymEnv(name, num_envs=share, categorical_action_encoding=True),
        learner.policy,
        frames_per_batch=frames,
        total_frames=total,
        **options,
    )
    run = Run(settings, collector, {"actor": learner.actor, "critic": learner.critic, "optimizer": learner.optimizer})
    for batch in run:
        learner.learn(batch, 1 - (run.frames - frames) / total)
        collector.update_policy_weights_()
    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(0 if train(parse(Settings)).reached else 1)
