"""Buffers, policies and collectors that run in the background, and what can be waited for."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.testing.mocking_classes import CountingEnv

LIMIT = 20.0  # seconds until a test gives up
IDS = ("collector", "traj_ids")


class Noted(ReplayBuffer):
    """A buffer whose growth can be waited for."""

    def __init__(self, size=20_000, **options):
        super().__init__(storage=LazyTensorStorage(size), **options)
        self.grown = threading.Condition()

    def written(self):
        super().written()
        self.tell()

    def add(self, data):
        super().add(data)
        self.tell()

    def tell(self):
        with self.grown:
            self.grown.notify_all()

    def reach(self, count):
        with self.grown:
            assert self.grown.wait_for(lambda: self.write_count >= count, LIMIT), self.write_count


class Gate:
    """A policy that waits at its ``at``-th call until it is let through, and raises ``error`` then."""

    def __init__(self, at, error=None):
        self.at, self.error, self.calls = at, error, 0
        self.reached, self.opened = threading.Event(), threading.Event()

    def wait(self):
        self.calls += 1
        if self.calls == self.at:
            self.reached.set()
            assert self.opened.wait(LIMIT)
            if self.error is not None:
                raise self.error

    def __call__(self, td):
        self.wait()
        return td.set("action", torch.ones(1, dtype=torch.int8))

    def __deepcopy__(self, memo):
        return self


class Steps:
    """A policy whose steps can be waited for."""

    def __init__(self):
        self.calls, self.called = 0, threading.Condition()

    def __call__(self, td):
        with self.called:
            self.calls += 1
            self.called.notify_all()
        return td.set("action", torch.ones(1, dtype=torch.int8))

    def reach(self, more):
        with self.called:
            until = self.calls + more
            assert self.called.wait_for(lambda: self.calls >= until, LIMIT)

    def __deepcopy__(self, memo):
        return self


@pytest.fixture
def started(make):
    """``started(env, policy, **options)``: a collector that runs, and its buffer."""

    def build(env=None, policy=None, *, buffer=None, **options):
        buffer = Noted() if buffer is None else buffer
        env = CountingEnv(max_steps=9) if env is None else env
        collector = make(env, policy, **{"frames_per_batch": 20, "replay_buffer": buffer, **options})
        collector.start()
        return collector, buffer

    return build


def neighbours(data):
    """Whether ``("next", observation)`` is the next observation wherever the trajectory goes on."""
    inside = data[IDS][1:] == data[IDS][:-1]
    assert int(inside.sum()) > 0
    return torch.equal(data["next", "observation"][:-1][inside], data["observation"][1:][inside])


class Twins(nn.Module):
    """Two weights that are always published equal, and both written beside the action."""

    def __init__(self):
        super().__init__()
        self.left = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.right = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.gate = None

    def forward(self, observation):
        left = self.left.expand(*observation.shape[:-1], 1).clone()
        if self.gate is not None:
            self.gate.wait()
        right = self.right.expand(*observation.shape[:-1], 1).clone()
        return torch.ones_like(observation, dtype=torch.int8), left, right


def twins():
    return TensorDictModule(Twins(), in_keys=["observation"], out_keys=["action", "left", "right"])


CALLS = {
    "pause": lambda collector: collector.pause().__enter__(),
    "update": lambda collector: collector.update_policy_weights_(),
    "next": lambda collector: collector.next(),
    "iteration": lambda collector: next(iter(collector)),
    "state_dict": lambda collector: collector.state_dict(),
    "reset": lambda collector: collector.reset(),
    "start": lambda collector: collector.start(),
    "shutdown": lambda collector: collector.shutdown(),
    "async_shutdown": lambda collector: collector.async_shutdown(),
}


@pytest.fixture
def tools():
    """The tables and tools above."""
    return SimpleNamespace(
        Noted=Noted, Gate=Gate, Steps=Steps, neighbours=neighbours, twins=twins, LIMIT=LIMIT, CALLS=CALLS
    )
