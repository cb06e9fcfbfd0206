"""What is measured, as data. Needs torch and gymnasium only, so that every peer can read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import pixels

HAND, OURS, TRANSFORMS, COMPILED = "by hand", "rollwright", "rollwright, transforms", "rollwright, compiled"
MASKED = "by hand, masked"
TORCHRL, TORCHRL_SERIAL = "TorchRL 0.14.1", "TorchRL 0.14.1, SerialEnv"
SB3, TIANSHOU = "Stable-Baselines3 2.9.2", "Tianshou 2.0.1"


@dataclass(frozen=True)
class Target:
    """A ratio of frames per second that is promised.

    Attributes:
        side: what is measured.
        base: what it is measured against.
        least: the smallest ratio that keeps the promise.
    """

    side: str
    base: str
    least: float


@dataclass(frozen=True)
class Case:
    """An environment, a policy, and how much is collected at a time.

    Attributes:
        name: what the tables call it.
        env_id: of gymnasium or of EnvPool.
        num_envs: environments stepped together; 1 is a single one, not a vector of one.
        policy: ``"categorical"``, ``"gaussian"`` or ``"pixels"``, see :func:`make_network`.
        steps: of each environment in a batch.
        source: ``"gym"`` (vectors are stepped in turn, in this process) or ``"envpool"``.
        sides: what is measured beside the loop by hand, our collector, and each peer in its usual form.
        targets: what is promised.
    """

    name: str
    env_id: str
    num_envs: int
    policy: str
    steps: int
    source: str = "gym"
    sides: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()

    @property
    def frames_per_batch(self) -> int:
        return self.steps * self.num_envs


def _pool(num_envs: int, steps: int, *targets: Target) -> Case:
    name = f"{num_envs} CartPole, EnvPool"
    return Case(name, "CartPole-v1", num_envs, "categorical", steps, "envpool", (MASKED,), targets)


CASES = (
    Case(
        "1 CartPole",
        "CartPole-v1",
        1,
        "categorical",
        1000,
        sides=(TRANSFORMS, COMPILED),
        targets=(
            Target(OURS, HAND, 0.9),
            Target(COMPILED, HAND, 2.5),
            Target(OURS, TORCHRL, 5.0),
            Target(OURS, SB3, 3.0),
            Target(TRANSFORMS, OURS, 0.85),
        ),
    ),
    Case("8 CartPole", "CartPole-v1", 8, "categorical", 250, sides=(COMPILED, TORCHRL_SERIAL)),
    Case(
        "64 CartPole",
        "CartPole-v1",
        64,
        "categorical",
        100,
        sides=(COMPILED, TORCHRL_SERIAL),
        targets=(
            Target(OURS, HAND, 0.9),
            Target(COMPILED, HAND, 1.1),
            Target(OURS, TORCHRL_SERIAL, 10.0),
            Target(OURS, SB3, 1.2),
        ),
    ),
    _pool(64, 200),
    _pool(256, 100, Target(OURS, HAND, 0.85)),
    _pool(1024, 50),
    Case("Pendulum", "Pendulum-v1", 1, "gaussian", 1000, targets=(Target(OURS, HAND, 0.9),)),
    Case("Pixels 84x84x3", pixels.ENV_ID, 1, "pixels", 250),
)


def find_case(name: str) -> Case:
    """The case of that name.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"case: expected one of {', '.join(case.name for case in CASES)}, got {name!r}.")


class ToImage(nn.Module):
    """From uint8 ``[..., height, width, channels]`` to float32 ``[..., channels, height, width]`` in [0, 1]."""

    def forward(self, observation: Tensor) -> Tensor:
        return observation.movedim(-1, -3).float() / 255


def make_network(policy: str) -> nn.Sequential:
    """A network with the same weights every time: the last layer gives logits, or means and raw deviations."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if policy == "pixels":
            return nn.Sequential(
                ToImage(),
                nn.Conv2d(3, 16, 8, stride=4),
                nn.ReLU(),
                nn.Conv2d(16, 32, 4, stride=2),
                nn.ReLU(),
                nn.Flatten(-3),
                nn.Linear(32 * 9 * 9, 64),
                nn.Tanh(),
                nn.Linear(64, 2),
            )
        size = {"categorical": 4, "gaussian": 3}[policy]
        return nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
