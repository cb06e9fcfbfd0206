"""Lines to processes that host environments, when they are full: nobody is lost, and nothing takes longer for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tests.patience import patient

from rollwright._processes.channel import Channel
from rollwright.data import Categorical, Composite, Unbounded
from rollwright.envs import AsyncEnvPool, EnvBase, GymEnv
from rollwright.envs.batched import host
from rollwright.envs.batched.processes import EnvProcesses


class Growing(EnvBase):
    """Observes more than a line takes; in its process, whoever sends gives up soon unless told to be patient."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(x=Unbounded((-1,)))
        self.action_spec = Categorical(2, shape=())

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return TensorDict({"x": torch.zeros(3)})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        impatient: Any = Channel.send
        impatient.__defaults__ = (0.01,)
        return TensorDict({"x": torch.ones(500_000), "reward": 0.0, "terminated": False})

    def _set_seed(self, seed: int | None) -> None: ...


def test_answer_waits_until_it_is_read() -> None:
    pool: Any = AsyncEnvPool([Growing], backend="multiprocessing", stack="lazy")
    pool.async_step_send(pool.rand_action(pool.reset()))
    ended = pool._slots._processes._pool.by_place[0].sentinel
    assert wait([ended], timeout=0.5) == []
    assert pool.async_step_recv()["next", "x"].sum() == 500_000
    pool.close()


def fill(channel: Channel) -> None:
    try:
        while True:
            channel._socket.send(bytes(1 << 16))
    except BlockingIOError:
        pass


def test_end_has_one_limit_for_all() -> None:
    makers: list[Callable[[], EnvBase]] = [lambda: GymEnv("CartPole-v1")] * 4
    processes = EnvProcesses(makers, 4, describe=host.describe)
    for child in processes._pool.connections.values():
        os.kill(child.pid, signal.SIGSTOP)
        fill(child.channel)
    begun = time.monotonic()
    processes.end(0.5)
    assert time.monotonic() - begun < patient(1.5)
    assert processes.pids() == [None] * 4
