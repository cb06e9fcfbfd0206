"""PPO and SAC with TorchRL's losses: the collector, the environment and the buffer are those of a package."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import OneHotCategorical
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, SACLoss, SoftUpdate
from torchrl.objectives.value import GAE

from benchmarks.peers.protocol import ROOT
from benchmarks.programs_sides import Library

LAST = 0.25  # the share of the frames whose episodes count


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def batches(library: Library, env_id: str, policy: Any, seed: int, **options: Any) -> Iterator[TensorDictBase]:
    """What a collector of the package delivers."""
    make = library.transform
    env = make("TransformedEnv", make("GymEnv", env_id), make("Compose", make("RewardSum"), make("StepCounter")))
    collector = library.find("collectors", "Collector")(env, policy, **options)
    collector.set_seed(seed)
    yield from collector
    collector.shutdown()


def returns_of(batch: TensorDictBase) -> list[float]:
    """Returns of the episodes that end in a batch."""
    ends = batch["next", "done"].reshape(-1)
    found: list[float] = batch["next", "episode_reward"].reshape(-1)[ends].tolist()
    return found


def ppo(library: Library, seed: int, frames: int) -> list[tuple[int, float]]:
    """On CartPole-v1: frames collected so far and return, of each episode."""
    actor = ProbabilisticActor(
        TensorDictModule(network(4, 2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(network(4, 1), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01, critic_coeff=0.5)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    found: list[tuple[int, float]] = []
    for number, batch in enumerate(
        batches(library, "CartPole-v1", actor, seed, frames_per_batch=1024, total_frames=frames)
    ):
        found += [((number + 1) * 1024, value) for value in returns_of(batch)]
        for _ in range(5):
            with torch.no_grad():
                advantage(batch)
            for part in batch.reshape(-1)[torch.randperm(batch.numel())].split(128):
                values = loss(part)
                sum(values[key] for key in ("loss_objective", "loss_critic", "loss_entropy")).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return found


def sac(library: Library, seed: int, frames: int) -> list[tuple[int, float]]:
    """On Pendulum-v1: frames collected so far and return, of each episode."""
    actor = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(network(3, 2), NormalParamExtractor()), in_keys=["observation"], out_keys=["loc", "scale"]
        ),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
    )

    class Value(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(4, 1)

        def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
            return self.net(torch.cat([observation, action], -1))

    value = ValueOperator(Value(), in_keys=["observation", "action"])
    loss = SACLoss(actor, value, num_qvalue_nets=2, action_spec=_pendulum_actions())
    loss.make_value_estimator(gamma=0.99)
    target = SoftUpdate(loss, tau=0.005)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    storage = library.find("data", "LazyTensorStorage")(frames)
    buffer = library.find("data", "TensorDictReplayBuffer")(storage=storage, batch_size=128)
    found: list[tuple[int, float]] = []
    options = {"frames_per_batch": 50, "init_random_frames": 1000, "total_frames": frames}
    for number, batch in enumerate(batches(library, "Pendulum-v1", actor, seed, **options)):
        found += [((number + 1) * 50, each) for each in returns_of(batch)]
        buffer.extend(batch.reshape(-1))
        if (number + 1) * 50 <= options["init_random_frames"]:
            continue
        for _ in range(50):
            values = loss(buffer.sample())
            sum(values[key] for key in ("loss_actor", "loss_qvalue", "loss_alpha")).backward()
            optimizer.step()
            optimizer.zero_grad()
            target.step()
    return found


def _pendulum_actions() -> Any:
    from torchrl.data import Bounded

    return Bounded(-2.0, 2.0, (1,))


def main() -> None:
    package, algorithm, seed, frames = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if package == "rollwright":
        sys.path.append(str(ROOT / "src"))
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    found = {"ppo": ppo, "sac": sac}[algorithm](Library(package), seed, frames)
    last = [value for at, value in found if at > (1 - LAST) * frames]
    print(json.dumps({"mean_return": sum(last) / len(last), "episodes": len(found)}))


if __name__ == "__main__":
    main()
