"""Every way in which a policy reads a module that learns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

__all__ = ["WAYS", "Learned", "every_way", "one_way"]


class Learned(nn.Module):
    """Acts with its one weight."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def act(self, observation: torch.Tensor) -> torch.Tensor:
        """A constant action."""
        return self.value.expand(*observation.shape[:-1], 1)

    forward = act


class _Agent:
    """No module, with one in a dictionary."""

    def __init__(self, learned: Learned) -> None:
        self.parts = {"actor": [learned]}

    def act(self, observation: torch.Tensor) -> torch.Tensor:
        """A constant action."""
        action: torch.Tensor = self.parts["actor"][0](observation)
        return action

    __call__ = act


class _Hides(nn.Module):
    """A module with weights of its own, and one that it does not register."""

    def __init__(self, learned: Learned) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(1, 1), (learned,)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """A constant action."""
        return self.others[0].act(observation)


def _closure(learned: Learned) -> Callable[..., Any]:
    return lambda observation: learned.act(observation)


def _default(learned: Learned) -> Callable[..., Any]:
    def act(observation: torch.Tensor, net: Learned = learned) -> torch.Tensor:
        return net.act(observation)

    return act


def _wrapped(learned: Learned) -> Callable[..., Any]:
    call: Callable[..., Any] = torch.no_grad()(_closure(learned))
    return call


def _parameter(learned: Learned) -> Callable[..., Any]:
    value = learned.value
    return lambda observation: value.expand(*observation.shape[:-1], 1)


_learned = Learned(-1.0)  # as a process finds it that imports this module


def _reads_a_global(observation: torch.Tensor) -> torch.Tensor:
    return _learned.act(observation)


WAYS: dict[str, Callable[[Learned], Callable[..., Any]]] = {
    "module": lambda learned: learned,
    "bound method": lambda learned: learned.act,
    "bound method of an object": lambda learned: _Agent(learned).act,
    "object": _Agent,
    "closure": _closure,
    "second closure": _closure,
    "partial": lambda learned: partial(Learned.act, learned),
    "default": _default,
    "wrapped function": _wrapped,
    "parameter": _parameter,
    "global variable": lambda learned: _reads_a_global,
    "hidden submodule": _Hides,
}
"""By name: makes a call on observations that reads a module."""


def one_way(name: str, value: float) -> tuple[TensorDictModule, Learned]:
    """A policy that acts with a value, and the module whose ``value`` it is."""
    learned = Learned(value)
    return TensorDictModule(WAYS[name](learned), in_keys=["observation"], out_keys=["action"]), learned


def every_way(value: float) -> tuple[TensorDictSequential, list[Learned]]:
    """A policy that writes a value under the name of each way, and the modules with it; two closures share one."""
    learned = {name: Learned(value) for name in WAYS}
    learned["second closure"], learned["global variable"] = learned["closure"], _learned
    with torch.no_grad():
        _learned.value.fill_(value)
    made = {name: way(learned[name]) for name, way in WAYS.items()}
    calls = [TensorDictModule(call, in_keys=["observation"], out_keys=[name]) for name, call in made.items()]
    acts = TensorDictModule(_zeros, in_keys=["observation"], out_keys=["action"])
    return TensorDictSequential(*calls, acts), list(learned.values())


def _zeros(observation: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*observation.shape[:-1], 1)
