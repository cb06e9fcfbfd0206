"""What is measured of many workers, as data. Needs torch and gymnasium only, so that every peer can read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from torch import nn

from benchmarks.cases import make_network
from benchmarks.workers_envs import Images, Slow

ONE, SYNC, ASYNC = "one process", "rollwright, sync", "rollwright, async"
GYMNASIUM = "gymnasium AsyncVectorEnv by hand"
TORCHRL_SYNC, TORCHRL_ASYNC = "TorchRL 0.14.1 MultiSync", "TorchRL 0.14.1 MultiAsync"
SIDES = (ONE, SYNC, ASYNC, GYMNASIUM, TORCHRL_SYNC, TORCHRL_ASYNC)
NUM_WORKERS = (1, 2, 4, 8)
CARTPOLE, PIXELS, PIXELS_RANDOM = "CartPole", "pixels 84x84x4, CNN", "pixels 84x84x4, random actions"


@dataclass(frozen=True)
class Case:
    """An environment for each worker, a policy, and how much is collected at a time.

    Attributes:
        source: ``CARTPOLE``, ``PIXELS`` or ``PIXELS_RANDOM``.
        workers: number of processes, each with one environment.
        steps: of each worker in a batch.
        step_ms: milliseconds that each step takes in addition.
        busy: whether it computes for that long, or sleeps.
    """

    source: str
    workers: int
    steps: int
    step_ms: float = 0
    busy: bool = False

    @property
    def env_name(self) -> str:
        """What the tables call the environment."""
        if not self.step_ms:
            return self.source
        return f"{self.source}, {self.step_ms:g} ms a step {'busy' if self.busy else 'asleep'}"

    @property
    def name(self) -> str:
        """What a peer is sent."""
        return f"{self.env_name}; {self.workers}"


@dataclass(frozen=True)
class Target:
    """A ratio of frames per second that is promised.

    Attributes:
        env_name: of the case.
        workers: of the case.
        side: what is measured.
        base: what it is measured against.
        least: the smallest ratio that keeps the promise.
    """

    env_name: str
    workers: int
    side: str
    base: str
    least: float


def _cases(source: str, steps: int, step_ms: float = 0, busy: bool = False) -> Sequence[Case]:
    return [Case(source, workers, steps, step_ms, busy) for workers in NUM_WORKERS]


CASES = (
    *_cases(CARTPOLE, 500),
    *_cases(CARTPOLE, 100, 1, busy=False),
    *_cases(CARTPOLE, 100, 1, busy=True),
    *_cases(CARTPOLE, 10, 10, busy=False),
    *_cases(CARTPOLE, 10, 10, busy=True),
    *_cases(PIXELS, 250),
    *_cases(PIXELS_RANDOM, 250),
)
TARGETS = (
    *(Target(CARTPOLE, 2, side, ONE, 1.6) for side in (SYNC, ASYNC)),
    *(
        Target(f"{CARTPOLE}, 1 ms a step {how}", 2, side, ONE, 1.8)
        for how in ("asleep", "busy")
        for side in (SYNC, ASYNC)
    ),
    Target(CARTPOLE, 2, SYNC, TORCHRL_SYNC, 5.0),
    Target(CARTPOLE, 2, ASYNC, TORCHRL_ASYNC, 5.0),
    *(Target(source, 1, SYNC, ONE, 0.95) for source in (PIXELS, PIXELS_RANDOM)),
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


def make_gym(case: Case) -> gymnasium.Env[Any, Any]:
    """The environment of a worker."""
    if case.source != CARTPOLE:
        return Images()
    env: gymnasium.Env[Any, Any] = gymnasium.make("CartPole-v1", disable_env_checker=True)
    return Slow(env, case.step_ms, case.busy) if case.step_ms else env


def make_net(case: Case) -> nn.Sequential | None:
    """A network with the same weights every time, which gives logits; None where actions are random."""
    if case.source == CARTPOLE:
        return make_network("categorical")
    if case.source == PIXELS_RANDOM:
        return None
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make_network("pixels")
        net[1] = nn.Conv2d(4, 16, 8, stride=4)
    return net
