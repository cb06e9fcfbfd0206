"""``rollwright collect --workers N``: collection in several processes, and its progress."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rich.table import Table
from tensordict import TensorDictBase

from rollwright.cli.policies import load_policy
from rollwright.collectors import Collector, MultiCollector
from rollwright.envs import GymEnv

_EPISODES_PER_BATCH = 8  # complete episodes written at a time, of a long collection
_FRAMES_PER_EPISODE_HELD = 5000  # of --frames, for each of them
_STAGES = ("policy", "env", "write", "weights", "wait")


def make_collector(
    arguments: argparse.Namespace, make_env: Callable[[argparse.Namespace], GymEnv], frames_per_batch: int
) -> MultiCollector:
    """The collector that the arguments ask for, seeded.

    Args:
        arguments: of ``rollwright collect``, with ``workers``.
        make_env: a function of a module; called in each worker.
        frames_per_batch: of all workers where they are in step, else of each.

    Raises:
        WorkerError: an environment or a policy could not be made in a worker.
    """
    options: dict[str, Any] = {"total_frames": arguments.frames}
    if arguments.sync is False:  # until there are so many frames of complete episodes
        per_batch = max(1, min(_EPISODES_PER_BATCH, arguments.frames // _FRAMES_PER_EPISODE_HELD))
        options = {"total_frames": -1, "trajs_per_batch": per_batch, "traj_format": "cat"}
    if arguments.policy != "random":
        options["policy_factory"] = partial(_load_policy, arguments, make_env)
    collector = Collector(
        partial(make_env, arguments),
        num_collectors=arguments.workers,
        sync=arguments.sync is not False,
        frames_per_batch=frames_per_batch,
        max_frames_per_traj=arguments.max_frames_per_traj,
        device=arguments.device,
        **options,
    )
    collector.set_seed(arguments.seed)
    return collector


def _load_policy(arguments: argparse.Namespace, make_env: Callable[[argparse.Namespace], GymEnv]) -> Any:
    env = make_env(arguments)
    try:
        return load_policy(arguments.policy, env)
    finally:
        env.close()


def rows_of(batch: TensorDictBase) -> TensorDictBase:
    """A batch ``[workers, *env, T]`` as the rows of a dataset, ``[environments, T]``; ``[T]`` stays."""
    return batch.flatten(0, -2) if batch.ndim > 2 else batch


# The view ------------------------------------------------------------------------------------------


def table(stats: Mapping[str, Any]) -> Table:
    """What each worker does, and what it has spent its time on.

    Args:
        stats: of a collector with workers.
    """
    shown = Table(box=None, pad_edge=False, header_style="dim")
    shown.add_column("worker", justify="right")
    shown.add_column("state", min_width=14, no_wrap=True)
    for name in ("frames", "episodes", *_STAGES, "restarts"):
        shown.add_column(name, justify="right", no_wrap=True)
    for worker in stats["workers"]:
        state = worker["state"].replace("_", " ") if worker["alive"] else "gone"
        seconds = [worker["seconds"].get(stage, 0.0) for stage in _STAGES]
        whole = sum(seconds)
        shares = [f"{value / whole:.0%}" if whole else "-" for value in seconds]
        counts = (f"{worker['frames']:,}", f"{worker['episodes']:,}")
        shown.add_row(str(worker["index"]), state, *counts, *shares, str(worker["restarts"]))
    return shown
