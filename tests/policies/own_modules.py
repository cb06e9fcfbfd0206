"""Modules as users write them: a matrix of what can be taken apart, and of what must be called whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

EPS = 1e-3
CALLED: list[int] = []

VECTOR = {"a": ((4,), "float32")}
PAIR = {"a": ((4,), "float32"), "b": ((4,), "float32")}


@dataclass(frozen=True)
class Case:
    """A module, its inputs and outputs.

    Attributes:
        make: the module.
        inputs: shape and dtype by key.
        outputs: keys.
        why: part of the reason why it is called whole; None: it is taken apart.
        batched: whether it takes a batch of any size.
    """

    make: Callable[[], nn.Module]
    inputs: Mapping[str, tuple[tuple[int, ...], str]] = field(default_factory=lambda: VECTOR)
    outputs: tuple[str, ...] = ("out",)
    why: str | None = None
    batched: bool = True


class SoftplusHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loc, raw = self.body(x).chunk(2, dim=-1)
        return loc, functional.softplus(raw) + EPS


class Pixels(nn.Module):
    """Channels last, bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
        self.out = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x = x.permute(*range(x.ndim - 3), -1, -3, -2).float() / 255
        return self.out(self.net(x).flatten(-3))


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.double().float()
        x /= 255.0
        x = x[..., :4] * 2 - 1
        return self.layer((1 - x).clamp(-1, 1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.gelu(self.layer(self.norm(x)))


class Residual(nn.Module):
    """Nested, and one part twice."""

    def __init__(self) -> None:
        super().__init__()
        first = Block()
        self.blocks = nn.ModuleList([first, Block(), first])
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.out(x))


class Cell(nn.Module):
    """A GRU cell, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.of_input, self.of_state = nn.Linear(4, 12), nn.Linear(4, 12, bias=False)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        r, z, n = self.of_input(x).chunk(3, -1)
        hr, hz, hn = self.of_state(h).split(4, -1)
        z = torch.sigmoid(z + hz)
        h = (1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * h
        return h.sum(-1), h


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.log_std = nn.Linear(4, 4), nn.Parameter(torch.zeros(2))
        self.register_buffer("low", torch.tensor([-1.0, -2.0]))

    def bounded(self, x: Tensor) -> Tensor:
        return torch.maximum(x, self.low) * float(np.sqrt(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = functional.elu(self.trunk(x))
        out = {}
        out["loc"] = self.bounded(h[..., :2])
        out["scale"] = self.log_std.exp().expand_as(out["loc"])
        return out


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.layer = torch.arange(4.0), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(2).expand(*x.shape[:-1], 2)
        return self.layer(torch.cat([(x - self.mean) / torch.tensor([1.0, 2.0, 3.0, 4.0]), ones], -1)) ** 2


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 4), nn.SiLU(), nn.Dropout(0.5).eval(), nn.Linear(4, 3))

    def forward(self, place: Tensor, direction: Tensor) -> Tensor:
        return self.net(torch.cat([place.flatten(-2).float(), direction.unsqueeze(-1).float()], -1)).log_softmax(-1)


class Shaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        single = x.dim() == 1
        y = self.layer(x[None] if single else x.view(x.shape[0], -1))
        assert y.shape[-1] == 2
        return y.squeeze(0) if single else y


class Parts(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, x[..., :2], x


class Unpacked(nn.Module):
    """Rows by iteration, a weight that is not in a layer, and a function of a partner."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.activation = nn.Parameter(torch.rand(3, 4)), torch.sin

    def forward(self, x: Tensor) -> Tensor:
        first, *_ = self.weight
        return self.activation(x @ self.weight.T) + helper(first).sum()


def helper(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, -x)


class Largest(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best = x.max(-1)
        return best.values, torch.topk(x, 2).indices


class Bounds(nn.Module):
    """Named tuples of torch, and parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        bounds = torch.stack([torch.stack(torch.aminmax(weight)) for weight in self.weights])
        return x * bounds[:, 0].min() + bounds[0, 1:].sum()


@torch.no_grad()
def decorated(self: nn.Module, x: Tensor) -> Tensor:
    return self.layer(x) * 2  # type: ignore[operator,no-any-return]


class Decorated(Shaped):
    forward = decorated


# Called whole -------------------------------------------------------------------------------------


class ByValues(Shaped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


class ReadsItem(Shaped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * x.max().item()


class ThroughNumpy(Shaped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.from_numpy(x.numpy() * 2))


class SetsAttribute(Shaped):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        return self.last


class KeepsList(Shaped):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return self.layer(x) * len(self.seen)


class WritesBuffer(Shaped):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return self.layer(x) + self.steps


class WritesInput(Shaped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(2))


class SetsItems(Shaped):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[..., 0] = x[..., 1]
        return self.layer(y)


def counting() -> nn.Module:
    """A module that changes a variable of its function."""
    _calls = [0]

    class Closed(Shaped):
        def forward(self, x: Tensor) -> Tensor:
            _calls[0] += 1
            return self.layer(x)

    return Closed()


class AddsHook(Shaped):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.register_forward_hook(twice)
        return self.layer(x)


def twice(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 2


class Random(Shaped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.rand(2)


class PythonsRandom(Shaped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if random.random() < 2 else x


class NumpysRandom(Shaped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + float(np.random.rand())


class Global(Shaped):
    def forward(self, x: Tensor) -> Tensor:
        CALLED.append(1)
        return self.layer(x) * len(CALLED[:1])


class Logger:
    def write(self, x: Tensor) -> None:
        self.last = x


class Logs(Shaped):
    def __init__(self) -> None:
        super().__init__()
        self.logger = Logger()

    def forward(self, x: Tensor) -> Tensor:
        self.logger.write(x)
        return self.layer(x)


class Masks(Shaped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x[x > 0].sum()


class Sliced(Shaped):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[..., : x.argmax()]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, 2, 4).transpose(1, 2)).flatten(1)


def hooked() -> nn.Module:
    module = Residual()
    module.out.register_forward_hook(twice)
    return module


IMAGE = {"a": ((8, 8, 3), "uint8")}
OWN: dict[str, Case] = {
    "softplus head": Case(SoftplusHead, outputs=("loc", "scale")),
    "pixels": Case(Pixels, IMAGE),
    "divided": Case(Divided),
    "residual": Case(Residual),
    "a cell": Case(Cell, PAIR, ("total", "h")),
    "a dictionary": Case(Named, outputs=("loc", "scale")),
    "constants": Case(Constants),
    "joined": Case(Joined, {"a": ((2, 2), "uint8"), "b": ((), "int64")}),
    "branch on the shape": Case(Shaped),
    "parts of the input": Case(Parts, outputs=("all", "some", "again")),
    "unpacked": Case(Unpacked),
    "largest": Case(Largest, outputs=("value", "places")),
    "decorated": Case(Decorated),
    "bounds": Case(Bounds),
    "dropout that is off": Case(lambda: Dropped().eval()),
    "statistics that are read": Case(lambda: Normalised().eval(), {"a": ((8,), "float32")}, batched=False),
    "control flow by values": Case(ByValues, why="depends on values of tensors (bool)"),
    "an item": Case(ReadsItem, why="depends on values of tensors (item)"),
    "through NumPy": Case(ThroughNumpy, why="depends on values of tensors (numpy)"),
    "an attribute": Case(SetsAttribute, why="its code sets 'last'"),
    "a list": Case(KeepsList, why="the policy has changed"),
    "a buffer": Case(WritesBuffer, why="a buffer or an entry in place"),
    "its input": Case(WritesInput, why="a buffer or an entry in place"),
    "items": Case(SetsItems, why="(setitem)"),
    "a closure": Case(counting, why="what its code reads"),
    "a hook": Case(AddsHook, why="the policy has changed"),
    "hooks": Case(hooked, why="it has hooks (Linear)"),
    "random numbers": Case(Random, why="it draws random numbers"),
    "random numbers of Python": Case(PythonsRandom, why="its code uses 'random'"),
    "random numbers of NumPy": Case(NumpysRandom, why="its code uses 'random'"),
    "a global": Case(Global, why="what its code reads"),
    "an object": Case(Logs, why="its code uses 'logger', a Logger"),
    "a mask": Case(Masks, why="getitem"),
    "a slice": Case(Sliced, why="it passes a Tensor", batched=False),
    "dropout": Case(Dropped, why="it draws random numbers"),
    "statistics": Case(Normalised, {"a": ((8,), "float32")}, why="in place", batched=False),
}
