"""gymnasium's AsyncVectorEnv, an environment a process, and a loop by hand that acts for all of them at once."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from functools import partial

import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from torch import Tensor, nn

from benchmarks.peers.protocol import serve
from benchmarks.workers_cases import find_case, make_gym, make_net
from rollwright.cli.measuring import VectorLoop, categorical

SEED = 0


def draw_any(observation: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Actions 0 and 1 by chance, of which nothing is stored besides."""
    number = len(observation)
    return torch.randint(2, (number,)), torch.zeros(number), (torch.zeros(number, 0),)


def make(name: str, side: str) -> Callable[[], int]:
    torch.set_num_threads(1)
    case = find_case(name)
    env = AsyncVectorEnv(
        [partial(make_gym, case)] * case.workers, autoreset_mode=AutoresetMode.SAME_STEP, shared_memory=True, copy=False
    )
    atexit.register(env.close)
    net = make_net(case)
    act = categorical if net is not None else draw_any
    loop = VectorLoop(env, env.reset(seed=SEED)[0], net or nn.Identity(), act, case.steps)

    def collect() -> int:
        loop.collect()
        return loop.frames

    return collect


if __name__ == "__main__":
    serve(make, unmeasured=2)
