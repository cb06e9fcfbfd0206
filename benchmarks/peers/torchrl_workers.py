"""TorchRL's collectors of many processes, with its defaults."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import GymWrapper

from benchmarks.peers.protocol import serve
from benchmarks.workers_cases import CARTPOLE, TORCHRL_SYNC, Case, find_case, make_gym, make_net
from benchmarks.workers_clocks import Stamped, measure_publications, measure_starts

shutdowns = ExitStack()


def make_env(case: Case) -> GymWrapper:
    return GymWrapper(make_gym(case), categorical_action_encoding=True)


def make_policy(case: Case) -> TensorDictSequential | None:
    net = make_net(case)
    if net is None:
        return None
    seen = "pixels" if "pixels" in set(make_env(case).observation_spec.keys()) else "observation"
    return TensorDictSequential(
        TensorDictModule(net, in_keys=[seen], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
    )


def make_collector(case: Case, side: str, policy: Any) -> MultiSyncCollector | MultiAsyncCollector:
    kind, frames = MultiAsyncCollector, case.steps
    if side == TORCHRL_SYNC:
        kind, frames = MultiSyncCollector, case.steps * case.workers
    return kind([partial(make_env, case)] * case.workers, policy, frames_per_batch=frames, total_frames=-1)


def make(name: str, side: str) -> Callable[[], int]:
    torch.set_num_threads(1)
    case = find_case(name)
    collector = make_collector(case, side, make_policy(case))
    shutdowns.callback(collector.shutdown)
    batches = iter(collector)
    number = 1 if side == TORCHRL_SYNC else case.workers
    return lambda: sum(next(batches).numel() for _ in range(number))


def start(name: str, side: str) -> dict[str, Any]:
    case = find_case(name)
    return measure_starts(lambda: make_collector(case, side, make_policy(case)))


def publish(side: str, steps: str, workers: str, num_bytes: str, rounds: str) -> dict[str, Any]:
    case = Case(CARTPOLE, int(workers), int(steps))
    learner = Stamped(int(num_bytes))
    policy, copied = (
        TensorDictModule(module, in_keys=["observation"], out_keys=list(Stamped.out_keys))
        for module in (Stamped(int(num_bytes)), learner)
    )
    collector = make_collector(case, side, policy)
    try:
        update = partial(collector.update_policy_weights_, copied)
        return measure_publications(collector, learner, update, case.workers, int(rounds))
    finally:
        collector.shutdown()


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "start":
        print(json.dumps(start(*sys.argv[2:])), flush=True)
    elif sys.argv[1] == "publish":
        print(json.dumps(publish(*sys.argv[2:])), flush=True)
    else:
        with shutdowns:
            serve(make, unmeasured=2)


if __name__ == "__main__":
    main()
    os._exit(0)  # a finaliser would wait for ever for a thread that it starts while the interpreter exits
