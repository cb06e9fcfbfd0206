"""Our collectors of many workers, as a user would build them, and the one in a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import distributions

from benchmarks.workers_cases import ASYNC, ONE, SYNC, Case, make_gym, make_net
from rollwright.collectors import BaseCollector, Collector
from rollwright.envs import GymWrapper

SEED = 0


def make_env(case: Case) -> GymWrapper:
    return GymWrapper(make_gym(case), categorical_action_encoding=True)


def make_policy(case: Case) -> TensorDictSequential | None:
    net = make_net(case)
    if net is None:
        return None
    return TensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=distributions.Categorical, return_log_prob=True
        ),
    )


def make_collector(case: Case, side: str, policy: Any = None) -> BaseCollector:
    """A collector without an end; ``steps`` frames a worker and batch. None: the policy of the case."""
    options: dict[str, Any] = {}
    if side != ONE:
        options = {"num_collectors": case.workers, "sync": side == SYNC}
    collector = Collector(
        partial(make_env, case),
        make_policy(case) if policy is None else policy,
        frames_per_batch=case.steps * (case.workers if side == SYNC else 1),
        total_frames=-1,
        **options,
    )
    collector.set_seed(SEED)
    return collector


def make_side(case: Case, side: str, stack: ExitStack) -> Callable[[], int]:
    """What collects a batch, of asynchronous workers one of each, and returns the number of frames.

    Asynchronous workers have begun their next batches when one is delivered: by counting one for each of them, what was
    begun before the clock and what is not yet delivered after it are as much.
    """
    collector = make_collector(case, side)
    stack.callback(collector.shutdown)
    batches: Iterator[Any] = iter(collector)
    number = case.workers if side == ASYNC else 1

    def collect() -> int:
        return sum(next(batches).numel() for _ in range(number))

    return collect


def check_batch(batch: Any, steps: int) -> None:
    """Test that a batch is what workers stepped: whole, and continuous within each trajectory.

    Args:
        batch: ``[T]`` or ``[workers, T]``, contiguous in time.
        steps: T.

    Raises:
        RuntimeError: it is not.
    """
    rows = batch.reshape(-1, steps)
    ids, root, after = rows["collector", "traj_ids"], rows["observation"], rows["next", "observation"]
    if bool((ids < 0).any()):
        raise RuntimeError("a batch holds frames that were not stepped")
    if any(set(one.tolist()) & set(other.tolist()) for i, one in enumerate(ids) for other in ids[:i]):
        raise RuntimeError("two workers gave a trajectory the same id")
    follows = ids[:, 1:] == ids[:, :-1]
    if not torch.equal(root[:, 1:][follows], after[:, :-1][follows]):
        raise RuntimeError("frames are missing in the middle of a trajectory")
