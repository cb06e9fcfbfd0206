"""PPO in thousands of environments on one device: agents of VMAS that share a policy learn to balance a package.

    python examples/ppo_vmas.py --num-envs 256 --device cuda

All data stay tensors of the device; the loss is that of examples/ppo_cartpole.py, with the agents as one more dimension
and a Gaussian policy. Needs ``pip install 'rollwright[vmas]'``.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Independent, Normal

from rollwright.collectors import Collector
from rollwright.data import gae
from rollwright.envs import EnvBase, VmasEnv

STEPS, EPOCHS, MINIBATCHES = 64, 5, 8
GAMMA, LAMBDA, CLIP, LEARNING_RATE = 0.99, 0.95, 0.2, 1e-3


class Keys(NamedTuple):
    """Of what the policy reads, writes, and is rewarded by; what it writes besides lies beside the action."""

    seen: tuple[str, ...] = ("agents", "observation")
    action: tuple[str, ...] = ("agents", "action")
    reward: tuple[str, ...] = ("agents", "reward")

    def beside(self, name: str) -> tuple[str, ...]:
        return (*self.action[:-1], name)


class Gaussian(nn.Module):
    """A mean from a network, and a spread of its own."""

    def __init__(self, observations: int, actions: int, device: str) -> None:
        super().__init__()
        self.mean = network(observations, actions, device)
        self.log_scale = nn.Parameter(torch.full((actions,), -0.5, device=device))

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.mean(seen).tanh()
        return mean, self.log_scale.exp().expand_as(mean)


def network(inputs: int, outputs: int, device: str) -> nn.Sequential:
    hidden = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(64, outputs)).to(device)


def spread(loc: torch.Tensor, scale: torch.Tensor) -> Independent:
    return Independent(Normal(loc, scale), 1)


def learn(
    batch: TensorDictBase, keys: Keys, actor: Gaussian, critic: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """One round of PPO on a batch ``[env, T]``."""
    with torch.no_grad():
        value, after = critic(batch[keys.seen]), critic(batch["next", *keys.seen])
        advantage = gae(batch, value, after, gamma=GAMMA, lmbda=LAMBDA, reward_key=keys.reward)
        target = (advantage + value).flatten(0, -2)
        gain_of = ((advantage - advantage.mean()) / (advantage.std() + 1e-8)).flatten()
    seen, action = (batch[key].flatten(0, -2) for key in (keys.seen, keys.action))
    before = batch[keys.beside("action_log_prob")].flatten()
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(seen), device=seen.device).chunk(MINIBATCHES):
            policy = spread(*actor(seen[rows]))
            ratio = (policy.log_prob(action[rows]) - before[rows]).exp()
            gain = torch.min(ratio * gain_of[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * gain_of[rows])
            loss = (critic(seen[rows]) - target[rows]).pow(2).mean() * 0.5 - gain.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
            optimizer.step()


def train(env: EnvBase, keys: Keys, seed: int, total_frames: int, device: str) -> list[float]:
    """The mean reward of a frame in each batch."""
    torch.manual_seed(seed)
    seen, action = env.full_observation_spec[keys.seen].shape[-1], env.full_action_spec[keys.action].shape[-1]
    actor, critic = Gaussian(seen, action, device), network(seen, 1, device)
    loc, scale = keys.beside("loc"), keys.beside("scale")
    policy = TensorDictSequential(
        TensorDictModule(actor, in_keys=[keys.seen], out_keys=[loc, scale]),
        ProbabilisticTensorDictModule(
            in_keys={"loc": loc, "scale": scale},
            out_keys=[keys.action],
            distribution_class=spread,
            return_log_prob=True,
            log_prob_key=keys.beside("action_log_prob"),
        ),
    )
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=LEARNING_RATE)
    frames = env.batch_size[0] * STEPS
    rewards: list[float] = []
    with Collector(env, policy, frames_per_batch=frames, total_frames=-(-total_frames // frames) * frames) as collector:
        collector.set_seed(seed)
        for batch in collector:
            learn(batch, keys, actor, critic, optimizer)
            rewards.append(float(batch["next", *keys.reward].mean()))
            rate = collector.stats()["frames_per_second"]
            print(f"{len(rewards) * frames:>9,} frames, reward {rewards[-1]:7.3f}, {rate:,.0f} frames/s", flush=True)
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", default="balance")
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--total-frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    begun = time.perf_counter()
    options = {"max_steps": 100, "clamp_actions": True, "reset_together": True}
    env = VmasEnv(given.scenario, given.num_envs, device=given.device, **options)
    rewards = train(env, Keys(), given.seed, given.total_frames, given.device)
    last = rewards[-5:]
    print(f"reward {rewards[0]:.3f} -> {sum(last) / len(last):.3f} in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
