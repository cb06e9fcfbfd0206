"""DQN on Atari from pixels, with a replay buffer that stores single frames and stacks them when they are drawn.

    python examples/dqn_atari.py --env ALE/Pong-v5 --total-frames 1_000_000 --log-dir runs/pong

Deep Q-learning (Mnih et al. 2015, https://www.nature.com/articles/nature14236) with double Q-learning. A frame is 84x84
bytes, and is stored with the frame that follows it: 14 kB for each step; stacks of four would be 56 kB, and 226 kB as
float32. ``ale_py`` skips frames, resizes them, and makes them gray. Needs ``pip install 'rollwright[atari]'``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Annotated

import ale_py
import gymnasium
import torch
from common import Common, Run, parse
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn import functional

from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, TensorDictReplayBuffer
from rollwright.envs import CatFrames, EnvBase, GymWrapper, TransformedEnv

gymnasium.register_envs(ale_py)
STACK = CatFrames(N=4, dim=-3, in_keys=["observation"], out_keys=["stack"])


@dataclass
class Settings(Common):
    """Settings of this example."""

    total_frames: Annotated[int, "stop after this many frames"] = 1_000_000
    env: Annotated[str, "game of the Arcade Learning Environment"] = "ALE/Pong-v5"
    size: Annotated[int, "pixels of a side"] = 84
    frames_per_round: Annotated[int, "frames between two rounds of updates"] = 64
    updates_per_round: Annotated[int, "updates; then the policy that acts is renewed"] = 16
    rounds_per_target: Annotated[int, "rounds until the target network is renewed"] = 32
    batch: Annotated[int, "frames of an update"] = 32
    capacity: Annotated[int, "frames in the buffer"] = 100_000
    warm_up: Annotated[int, "random frames before the first update"] = 10_000
    learning_rate: Annotated[float, "of Adam"] = 1e-4
    gamma: Annotated[float, "discount"] = 0.99
    last_epsilon: Annotated[float, "share of random actions in the end"] = 0.01
    epsilon_frames: Annotated[int, "frames until then"] = 100_000
    max_norm: Annotated[float, "of the gradient"] = 10.0
    device: Annotated[str, "of the network that learns"] = "cpu"


def make_env(name: str, size: int) -> EnvBase:
    """A game whose observations are single frames; the policy reads the stack."""
    shown = {"stack_num": 1, "img_height": size, "img_width": size, "reward_clipping": True}
    env = gymnasium.make_vec(name, num_envs=1, vectorization_mode="vector_entry_point", **shown)
    return TransformedEnv(GymWrapper(env, categorical_action_encoding=True), STACK.clone())


def make_values(actions: int, size: int) -> nn.Sequential:
    layers = [nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()]
    layers += [nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(-3)]  # from the end: the policy sees single stacks, too
    features = nn.Sequential(*layers)(torch.zeros(4, size, size)).numel()
    return nn.Sequential(*layers, nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, actions))


class EpsilonGreedy(nn.Module):
    """The action of the highest value or, with probability epsilon, any."""

    def __init__(self, values: nn.Module, actions: int) -> None:
        super().__init__()
        self.values, self.actions = values, actions
        self.register_buffer("epsilon", torch.tensor(1.0))

    def forward(self, stack: torch.Tensor) -> torch.Tensor:
        best = self.values(stack / 255).argmax(-1)
        explores = torch.rand(best.shape, device=best.device) < self.epsilon
        return torch.where(explores, torch.randint_like(best, self.actions), best)


def loss_of(batch: TensorDictBase, values: nn.Module, target: nn.Module, gamma: float) -> torch.Tensor:
    """The error of the values on a batch ``[n]``: none follows a termination; after a truncation, the target's does."""
    seen, after = batch["stack"] / 255, batch["next", "stack"] / 255
    with torch.no_grad():
        following = target(after).gather(-1, values(after).argmax(-1, keepdim=True))
        wanted = batch["next", "reward"] + gamma * ~batch["next", "terminated"] * following
    return functional.smooth_l1_loss(values(seen).gather(-1, batch["action"].unsqueeze(-1)), wanted)


def train(settings: Settings) -> Run:
    torch.manual_seed(settings.seed)
    env = make_env(settings.env, settings.size)
    actions = env.action_spec.n
    values = make_values(actions, settings.size).to(settings.device)
    target, explorer = copy.deepcopy(values), EpsilonGreedy(values, actions).to(settings.device)
    optimizer = torch.optim.Adam(values.parameters(), lr=settings.learning_rate)
    transform, sampler = STACK.make_rb_transform_and_sampler(settings.batch)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(settings.capacity), sampler=sampler, transform=transform, batch_size=settings.batch
    )
    collector = Collector(
        env,
        TensorDictModule(explorer, in_keys=["stack"], out_keys=["action"]),
        frames_per_batch=settings.frames_per_round,
        total_frames=settings.in_batches(settings.frames_per_round),
        replay_buffer=buffer,
        env_device="cpu",
        storing_device="cpu",
        policy_device=settings.device,
    )
    parts = {"values": values, "target": target, "optimizer": optimizer, "explorer": explorer, "buffer": buffer}
    run = Run(settings, collector, parts)
    for _ in run:
        if run.frames < settings.warm_up:
            continue
        for _ in range(settings.updates_per_round):
            loss = loss_of(buffer.sample().to(settings.device), values, target, settings.gamma)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(values.parameters(), settings.max_norm)
            optimizer.step()
        if run.frames // settings.frames_per_round % settings.rounds_per_target == 0:
            target.load_state_dict(values.state_dict())
        share = run.frames / settings.epsilon_frames
        explorer.epsilon.fill_(max(settings.last_epsilon, 1 - (1 - settings.last_epsilon) * share))
    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(0 if train(parse(Settings)).reached else 1)
