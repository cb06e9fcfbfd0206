"""The programs that are measured, as data. Needs torch only, so that every peer can read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

HAND, OURS, COMPILED = "by hand", "rollwright", "rollwright, compiled"
ALONE = "the environments alone"
TORCHRL, INSIDE = "TorchRL 0.14.1", "TorchRL's environment and actor in rollwright"


@dataclass(frozen=True)
class Program:
    """An environment, what is done to its observations, a policy, and how much is collected at a time.

    Attributes:
        name: what the tables call it.
        env_id: of gymnasium; empty for an environment of the user's.
        network: ``"mlp"``, ``"cnn"``, ``"dictionary"`` or ``"gru"``, see :func:`make_network`.
        distribution: ``"tanh_normal"``, ``"independent"`` or ``"categorical"``.
        sizes: of the first entry that the network reads, and of its output.
        steps: of each environment in a batch.
        stack: ``"cast"`` (float64 to float32), ``"own"`` (and a transform of the user's), ``"mujoco"``, ``"atari"``,
            ``"dictionary"``, ``"environment"`` (one of the user's, see ``programs_point.py``) or ``"none"``.
        samples: batches drawn from a buffer for each batch collected.
        num_envs: environments; more than one are stepped in turn.
    """

    name: str
    env_id: str
    network: str
    distribution: str
    sizes: tuple[int, int]
    steps: int
    stack: str = "none"
    samples: int = 0
    num_envs: int = 1

    @property
    def frames_per_batch(self) -> int:
        return self.steps * self.num_envs

    @property
    def in_keys(self) -> list[str]:
        """The entries that the network reads."""
        return {"dictionary": ["image", "direction"], "cnn": ["pixels"]}.get(self.network, ["observation"])


_CHEETAH = "HalfCheetah-v5"
_SINGLE = (
    Program("HalfCheetah, TanhNormal", _CHEETAH, "mlp", "tanh_normal", (17, 12), 500, "cast"),
    Program("HalfCheetah, Independent(Normal)", _CHEETAH, "mlp", "independent", (17, 12), 500, "cast"),
    Program("HalfCheetah, MuJoCo transforms", _CHEETAH, "mlp", "tanh_normal", (17, 12), 500, "mujoco"),
    Program("HalfCheetah, a user's transform", _CHEETAH, "mlp", "tanh_normal", (17, 12), 500, "own"),
    Program("A user's environment", "", "mlp", "tanh_normal", (6, 6), 400, "environment"),
    Program("Pong, eight transforms", "ALE/Pong-v5", "cnn", "categorical", (4, 6), 100, "atari"),
    Program("MiniGrid", "MiniGrid-Empty-8x8-v0", "dictionary", "categorical", (148, 7), 200, "dictionary"),
    Program("CartPole, GRU", "CartPole-v1", "gru", "categorical", (4, 2), 500),
    Program("Pendulum, SAC with a buffer", "Pendulum-v1", "mlp", "tanh_normal", (3, 2), 100, samples=10),
)


def _eight(program: Program) -> Program:
    return Program(**{**program.__dict__, "num_envs": 8, "name": f"8 x {program.name}"})


PROGRAMS = tuple(each for program in _SINGLE for each in (program, _eight(program)))


def find_program(name: str) -> Program:
    """The program of that name.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    for program in PROGRAMS:
        if program.name == name:
            return program
    raise ValueError(f"case: expected one of {', '.join(program.name for program in PROGRAMS)}, got {name!r}.")


class Joined(nn.Module):
    """An image ``[..., 7, 7, 3]`` and a direction ``[...]``, to ``[..., 148]``, through layers."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, image: Tensor, direction: Tensor) -> Tensor:
        return self.layers(torch.cat([image.flatten(-3).float(), direction.unsqueeze(-1).float()], -1))


def make_network(program: Program) -> nn.Module:
    """A network with the same weights every time (of a recurrent policy: what follows the GRU of width 64)."""
    size, out = program.sizes
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if program.network == "gru":
            return nn.Linear(64, out)
        if program.network == "cnn":
            layers = (nn.Conv2d(size, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU())
            last = (nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(-3), nn.Linear(3136, 512), nn.ReLU())
            return nn.Sequential(*layers, *last, nn.Linear(512, out))
        layers = nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out))
        return Joined(layers) if program.network == "dictionary" else layers
