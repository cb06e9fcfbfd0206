"""PPO with continuous actions: tasks of MuJoCo, and thousands of environments of VMAS or Brax on one device.

    python examples/ppo_continuous.py --env HalfCheetah-v5 --log-dir runs/cheetah
    python examples/ppo_continuous.py --env vmas:balance --num-envs 256 --steps 64 --minibatch 8192 --device cuda
    python examples/ppo_continuous.py --env brax:ant --num-envs 2048 --steps 64 --minibatch 16384 --device cuda

The loss is that of ppo_cartpole.py with a Gaussian policy. The agents of a task of VMAS share it, and are one more
dimension of the data. VMAS and Brax need ``pip install 'rollwright[vmas]'`` or ``'rollwright[brax]'``, tasks of MuJoCo
``pip install mujoco``; on a GPU, ``XLA_PYTHON_CLIENT_PREALLOCATE=false`` leaves memory to torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from common import Common, Run, parse
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Independent, Normal

from rollwright.collectors import Collector
from rollwright.data import gae
from rollwright.envs import (
    BraxEnv,
    ClipTransform,
    Compose,
    DoubleToFloat,
    EnvBase,
    GymEnv,
    TransformedEnv,
    VecNorm,
    VmasEnv,
)
from rollwright.modules import ProbabilisticActor


@dataclass
class Settings(Common):
    """Settings of this example."""

    total_frames: Annotated[int, "stop after this many frames"] = 1_000_000
    env: Annotated[str, "task of gymnasium, vmas:SCENARIO or brax:TASK"] = "HalfCheetah-v5"
    num_envs: Annotated[int, "environments, in all workers"] = 8
    steps: Annotated[int, "steps of each environment in a batch"] = 256
    device: Annotated[str, "of simulators and networks"] = "cpu"
    workers: Annotated[int, "processes that collect; 0: this one"] = 0
    sync: Annotated[bool, "take a batch from all workers, not from the first that is ready"] = True
    normalize: Annotated[bool, "observations of gymnasium by their running mean and spread"] = False
    epochs: Annotated[int, "times that each frame is learned from"] = 10
    minibatch: Annotated[int, "rows of an update"] = 256
    learning_rate: Annotated[float, "at the first frame; it falls to 0 at the last"] = 3e-4
    gamma: Annotated[float, "discount"] = 0.99
    gae_lambda: Annotated[float, "of generalized advantage estimation"] = 0.95
    clip: Annotated[float, "how far the ratio of probabilities may be from 1"] = 0.2
    entropy: Annotated[float, "weight of the entropy"] = 0.0
    max_norm: Annotated[float, "of the gradient"] = 0.5


def make_env(name: str, num_envs: int, device: str, normalize: bool) -> EnvBase:
    simulator, _, task = name.rpartition(":")
    if simulator == "vmas":
        return VmasEnv(task, num_envs, device=device, max_steps=100, clamp_actions=True, reset_together=True)
    if simulator == "brax":
        return BraxEnv(task, num_envs, device=device)
    env = GymEnv(name, num_envs=num_envs)
    bounds = env.action_spec.space
    clip = ClipTransform(in_keys_inv=["action"], low=float(bounds.low.max()), high=float(bounds.high.min()))
    norm = [VecNorm(["observation"], decay=1.0)] if normalize else []
    double = env.observation_spec["observation"].dtype == torch.float64  # tasks of MuJoCo
    return TransformedEnv(env, Compose(clip, *([DoubleToFloat(["observation"])] if double else []), *norm))


class Gaussian(nn.Module):
    """A mean from a network, and a spread of its own."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.mean, self.log_scale = network(observations, actions, 0.01), nn.Parameter(torch.zeros(actions))

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.mean(seen)
        return mean, self.log_scale.exp().expand_as(mean)


def network(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def spread(loc: torch.Tensor, scale: torch.Tensor) -> Independent:
    return Independent(Normal(loc, scale), 1)


class Learner:
    """Actor, critic, and a round of PPO on the entries of an environment."""

    def __init__(self, env: EnvBase, settings: Settings) -> None:
        self.settings = settings
        (self.action,), (self.reward,) = env.action_keys, env.reward_keys
        nest = self.action[:-1] if isinstance(self.action, tuple) else ()  # ("agents",) of VMAS
        self.seen, loc, scale, self.log_prob = ((*nest, n) for n in ("observation", "loc", "scale", "action_log_prob"))
        sizes = env.full_observation_spec[self.seen].shape[-1], env.full_action_spec[self.action].shape[-1]
        self.actor = Gaussian(*sizes).to(settings.device)
        self.critic = network(sizes[0], 1, 1.0).to(settings.device)
        self.parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=settings.learning_rate, eps=1e-5)
        self.policy = ProbabilisticActor(
            TensorDictModule(self.actor, in_keys=[self.seen], out_keys=[loc, scale]),
            in_keys={"loc": loc, "scale": scale},
            out_keys=[self.action],
            distribution_class=spread,
            return_log_prob=True,
            log_prob_key=self.log_prob,
        )

    def learn(self, batch: TensorDictBase, share_left: float) -> None:
        """Learn from a batch ``[env, T]``, whose entries may have agents as a third dimension."""
        given = self.settings
        self.optimizer.param_groups[0]["lr"] = given.learning_rate * share_left
        with torch.no_grad():
            value, after = self.critic(batch[self.seen]), self.critic(batch["next", *self.seen])
            options = {"gamma": given.gamma, "lmbda": given.gae_lambda, "reward_key": self.reward}
            advantage = gae(batch, value, after, **options)
        rows = [batch[key].flatten(0, -2) for key in (self.seen, self.action)]
        rows += [column.flatten() for column in (batch[self.log_prob], advantage, advantage + value)]
        for _ in range(given.epochs):
            for chosen in torch.randperm(len(rows[0])).split(given.minibatch):
                self.optimizer.zero_grad()
                self.loss(*(column[chosen] for column in rows)).backward()
                nn.utils.clip_grad_norm_(self.parameters, given.max_norm)
                self.optimizer.step()

    def loss(self, seen: torch.Tensor, action: torch.Tensor, *of_each: torch.Tensor) -> torch.Tensor:
        policy, clip = spread(*self.actor(seen)), self.settings.clip
        before, advantage, target = of_each
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (policy.log_prob(action) - before).exp()
        gain = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        error = (self.critic(seen).squeeze(-1) - target).pow(2)
        return 0.5 * error.mean() - gain.mean() - self.settings.entropy * policy.entropy().mean()


def train(settings: Settings, make=make_env) -> Run:
    torch.manual_seed(settings.seed)
    share = settings.num_envs // max(settings.workers, 1)
    arguments = settings.env, share, settings.device, settings.normalize
    env = make(*arguments)
    learner = Learner(env, settings)
    frames = (settings.num_envs if settings.sync else share) * settings.steps
    total = settings.in_batches(frames)
    options = {"num_collectors": settings.workers, "sync": settings.sync} if settings.workers else {}
    if settings.workers:
        env.close()
        options |= {"cat_results": 0} if settings.sync else {}  # [env, T] with any number of workers
    where = (lambda: make(*arguments)) if settings.workers else env
    collector = Collector(where, learner.policy, frames_per_batch=frames, total_frames=total, **options)
    run = Run(settings, collector, {"actor": learner.actor, "critic": learner.critic, "optimizer": learner.optimizer})
    for batch in run:
        learner.learn(batch, 1 - (run.frames - frames) / total)
        collector.update_policy_weights_()
    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(0 if train(parse(Settings)).reached else 1)
