"""TorchRL's RayCollector, on a local cluster of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import ray
import torch
from torchrl.collectors import Collector
from torchrl.collectors.distributed import RayCollector

from benchmarks.peers.protocol import serve
from benchmarks.peers.torchrl_workers import make_env, make_policy
from benchmarks.ray_cases import find_case

shutdowns = ExitStack()


def make(name: str, side: str) -> Callable[[], int]:
    torch.set_num_threads(1)
    case = find_case(name)
    environ = {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    ray.init(address="local", num_cpus=4, include_dashboard=False, runtime_env={"env_vars": environ})
    shutdowns.callback(ray.shutdown)
    collector = RayCollector(
        [partial(make_env, case)] * case.workers,
        make_policy(case),
        frames_per_batch=case.steps * case.workers,
        total_frames=10**12,
        collector_class=Collector,
        sync=True,
        remote_configs={"num_cpus": 1},
    )
    batches = iter(collector)
    return lambda: next(batches).numel()


if __name__ == "__main__":
    with shutdowns:
        serve(make, unmeasured=1)
    os._exit(0)
