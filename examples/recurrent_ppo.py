"""PPO on a CartPole whose velocities are hidden: an LSTM remembers what a feed-forward policy cannot see.

    python examples/recurrent_ppo.py --seed 0 --plot memory.png
    python examples/recurrent_ppo.py --no-memory

The environment shows where cart and pole are, and not how they move. Both policies are trained by the same code: pieces
of at most 32 steps lie one after the other in a flat batch, nothing is padded, and the LSTM begins each piece with the
state that was stored at its first step. Stops when the mean return of the last 100 episodes reaches the goal (500 is
the most that an episode can give).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import gymnasium
import numpy as np
import torch
from common import Common, Run, parse
from gymnasium.wrappers import TransformObservation
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical

from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, SliceSamplerWithoutReplacement, TensorDictReplayBuffer, gae
from rollwright.envs import GymEnv, GymWrapper
from rollwright.modules import LSTMModule, ProbabilisticActor, set_recurrent_mode


@dataclass
class Settings(Common):
    """Settings of this example."""

    total_frames: Annotated[int, "stop after this many frames"] = 200_000
    goal: Annotated[float, "stop at this mean return"] = 450.0
    memory: Annotated[bool, "an LSTM, or a feed-forward network"] = True
    num_envs: Annotated[int, "environments, in all workers"] = 16
    steps: Annotated[int, "steps of each environment in a batch"] = 128
    workers: Annotated[int, "processes that collect; 0: this one"] = 0
    sync: Annotated[bool, "take a batch from all workers, not from the first that is ready"] = True
    epochs: Annotated[int, "times that each frame is learned from"] = 10
    piece: Annotated[int, "most steps that gradients go back in time"] = 32
    minibatch: Annotated[int, "frames of an update"] = 256
    learning_rate: Annotated[float, "at the first frame; it falls to 0 at the last"] = 1e-3
    gamma: Annotated[float, "discount"] = 0.99
    gae_lambda: Annotated[float, "of generalized advantage estimation"] = 0.95
    clip: Annotated[float, "how far the ratio of probabilities may be from 1"] = 0.2
    entropy: Annotated[float, "weight of the entropy"] = 0.01
    max_norm: Annotated[float, "of the gradient"] = 0.5


def make_env(num_envs: int) -> GymEnv:
    """CartPole that shows two of its four numbers, as fractions of their limits."""
    limits, space = np.array([2.4, 0.21], dtype=np.float32), gymnasium.spaces.Box(-np.inf, np.inf, (2,))

    def make_one() -> gymnasium.Env:
        return TransformObservation(gymnasium.make("CartPole-v1"), lambda seen: seen[[0, 2]] / limits, space)

    return GymWrapper(gymnasium.vector.SyncVectorEnv([make_one] * num_envs), categorical_action_encoding=True)


def body(name: str, memory: bool) -> nn.Module:
    """Makes features of observations, with a memory or without."""
    if memory:
        state = [f"{name}_h", f"{name}_c"]
        keys = {"in_keys": ["observation", *state], "out_keys": [name, *[("next", key) for key in state]]}
        return LSTMModule(2, 64, **keys)
    layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    return TensorDictModule(layers, in_keys=["observation"], out_keys=[name])


class Learner:
    """Actor, critic, and a round of PPO."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        logits = TensorDictModule(nn.Linear(64, 2), in_keys=["actor"], out_keys=["logits"])
        value = TensorDictModule(nn.Linear(64, 1), in_keys=["critic"], out_keys=["value"])
        self.actor = TensorDictSequential(body("actor", settings.memory), logits)
        self.critic = TensorDictSequential(body("critic", settings.memory), value)
        actor = ProbabilisticActor(self.actor, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
        self.policy = TensorDictSequential(actor, self.critic)  # so that the states of both are stored
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=settings.learning_rate, eps=1e-5)

    def learn(self, batch: TensorDictBase, share_left: float) -> None:
        """Learn from a batch ``[env, T]``; every piece is drawn once in each epoch."""
        given, steps = self.settings, torch.arange(batch.shape[-1])
        self.optimizer.param_groups[0]["lr"] = given.learning_rate * share_left
        with torch.no_grad():  # one step from the state that was stored with the next observation
            value, next_value = batch["value"], self.critic(batch["next"].copy())["value"]
            advantage = gae(batch, value, next_value, gamma=given.gamma, lmbda=given.gae_lambda)
        frames = batch.exclude("next", "value")
        frames["advantage"], frames["target"] = advantage.squeeze(-1), advantage + value
        frames["piece"] = batch["collector", "traj_ids"] * given.steps + steps // given.piece
        frames = frames.reshape(-1)
        sampler = SliceSamplerWithoutReplacement(slice_len=given.piece, traj_key="piece")
        storage = LazyTensorStorage(len(frames))
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=given.minibatch)
        buffer.extend(frames)
        for _ in range(given.epochs):
            for part in buffer:  # [n], pieces one after the other; is_init is True where each begins
                self.optimizer.zero_grad()
                self.loss(part).backward()
                nn.utils.clip_grad_norm_(self.policy.parameters(), given.max_norm)
                self.optimizer.step()

    def loss(self, part: TensorDictBase) -> torch.Tensor:
        with set_recurrent_mode("recurrent"):
            self.actor(part), self.critic(part)
        policy, clip = Categorical(logits=part["logits"]), self.settings.clip
        advantage = (part["advantage"] - part["advantage"].mean()) / (part["advantage"].std() + 1e-8)
        ratio = (policy.log_prob(part["action"]) - part["action_log_prob"]).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        error = (part["value"] - part["target"]).pow(2)
        return 0.5 * error.mean() - gain.mean() - self.settings.entropy * policy.entropy().mean()


def train(settings: Settings) -> Run:
    torch.manual_seed(settings.seed)
    share, learner = settings.num_envs // max(settings.workers, 1), Learner(settings)
    frames = (settings.num_envs if settings.sync else share) * settings.steps
    total = settings.in_batches(frames)
    options = {"num_collectors": settings.workers, "sync": settings.sync} if settings.workers else {}
    if settings.workers and settings.sync:
        options["cat_results"] = 0  # [16, 128] with any number of workers
    collector = Collector(
        lambda: make_env(share),
        learner.policy,  # what an LSTM reads of the environment (its state, is_init) is added by the collector
        frames_per_batch=frames,
        total_frames=total,
        **options,
    )
    run = Run(settings, collector, {"policy": learner.policy, "optimizer": learner.optimizer})
    for batch in run:
        learner.learn(batch, 1 - (run.frames - frames) / total)
        collector.update_policy_weights_()
    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(0 if train(parse(Settings)).reached else 1)
