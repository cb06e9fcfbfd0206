"""Statistics of workers, merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwright.collectors.arguments import WorkerStats, check_worker_stats
from rollwright.collectors.rollout.counts import FrameCounts
from rollwright.collectors.rollout.stats import NUM_EPISODES
from rollwright.collectors.workers.counters import Count, WorkerCounters, WorkerState
from rollwright.collectors.workers.group import WorkerGroup
from rollwright.collectors.workers.schedules.schedule import Schedule

_WAITING = {
    WorkerState.STARTING: "its environment and policy to be made",
    WorkerState.WAITING: "being asked for a rollout",
    WorkerState.PAUSED: "the end of a pause",
    WorkerState.PREPARING: "its pre_collect_hook",
}


def merged_stats(group: WorkerGroup, schedule: Schedule, counts: FrameCounts, version: int) -> dict[str, Any]:
    """What ``stats()`` of a collector reports on its workers.

    Args:
        group: the workers.
        schedule: of their rollouts.
        counts: of the collector.
        version: of the weights that were published last.
    """
    group.look()
    workers = [_of_worker(group, index) for index in range(len(group.workers))]
    counters = [worker.counters for worker in group.workers]
    latest = last_episodes(counters, in_step=schedule.strategy.in_step)
    seconds = {name: sum(worker["seconds"][name] for worker in workers) for name in counters[0].seconds()}
    busiest = max(worker["seconds"]["total"] + worker["seconds"]["wait"] for worker in workers)
    held = schedule.store.num_borrowed
    return {
        "frames": schedule.frames,
        "batches": schedule.batches,
        "total_batches": counts.batches,
        "frames_per_batch": counts.frames,
        "frames_per_second": schedule.frames / busiest if busiest else None,
        "seconds": seconds,
        "episodes": sum(of_worker.counts[Count.EPISODES] for of_worker in counters),
        "mean_return": float(latest[:, 0].mean()) if len(latest) else None,
        "mean_length": float(latest[:, 1].mean()) if len(latest) else None,
        "last_return": float(latest[-1, 0]) if len(latest) else None,
        "policy_version": version,
        "policy_lag": max(version - worker["policy_version"] for worker in workers),
        "frames_stale": schedule.frames_stale,
        "workers": workers,
        "workers_alive": group.num_alive,
        "restarts": sum(worker["restarts"] for worker in workers),
        "env_recreations": sum(of_worker.counts[Count.ENV_RECREATIONS] for of_worker in counters),
        "threads": {"workers": [worker["threads"] for worker in workers]},
        "bytes_held": schedule.store.num_bytes,
        "leases": {
            "held": held,
            "most": schedule.store.most,
            "batches_copied": schedule.num_copied,
            "message": f"the consumer holds {held} batches: further ones are copied"
            if held >= schedule.store.most
            else None,
        },
        "forced": list(group.forced),
        "messages": schedule.rollouts.num_messages,
        "undelivered": schedule.num_undelivered,
        "trajectories_held": len(schedule.trajectories_held),
        "paths": next((worker.ready.how for worker in group.workers if worker.ready is not None), {}),
        "waiting_for": schedule.rollouts.waiting_for,
        **_of_paths([worker.of_path for worker in group.workers]),
    }


def _of_paths(found: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What paths of workers report, at the end of the last rollout of each: numbers summed up, lists joined."""
    merged: dict[str, Any] = {}
    for of_worker in found:
        for name, value in of_worker.items():
            merged[name] = merged[name] + value if name in merged else value
    return merged


def _of_worker(group: WorkerGroup, index: int) -> dict[str, Any]:
    worker = group.workers[index]
    counters, alive = worker.counters, worker.alive
    state = counters.state if alive else WorkerState.ENDED
    return {
        "index": index,
        "alive": alive,
        "pid": worker.pid,
        "state": state.name.lower(),
        "frames": counters.counts[Count.FRAMES],
        "batches": counters.counts[Count.BATCHES],
        "episodes": counters.counts[Count.EPISODES],
        "seconds": counters.seconds(),
        "policy_version": counters.counts[Count.VERSION],
        "restarts": group.restarts.counts.get(index, 0),
        "env_recreations": counters.counts[Count.ENV_RECREATIONS],
        "threads": worker.threads,
        "error": None if worker.error is None else str(worker.error),
        "waiting_for": _WAITING.get(state),
    }


def last_episodes(counters: Sequence[WorkerCounters], *, in_step: bool) -> NDArray[np.float64]:
    """The episodes of all workers that ended last, as many as one process takes means over.

    Args:
        counters: of the workers.
        in_step: whether workers take their steps together, so that the step counts and no clock, as in one process.

    Returns:
        Rows of :meth:`~rollwright.collectors.rollout.stats.EpisodeStats.rows`, the last one at the end.
    """
    rows = np.concatenate([of_worker.episodes for of_worker in counters])
    rows = rows[rows[:, 2] > 0]
    return rows[np.argsort(rows[:, 3 if in_step else 2], kind="stable")[-NUM_EPISODES:]]


def select_workers(found: dict[str, Any], workers: WorkerStats) -> dict[str, Any]:
    """What of :func:`merged_stats` is asked for.

    Args:
        found: all of it.
        workers: see ``stats()``.
    """
    check_worker_stats(workers)
    if workers is True:
        return found
    each = found["workers"]
    chosen = {} if workers == "per_worker" else {name: value for name, value in found.items() if name != "workers"}
    if workers is False:
        return chosen
    chosen |= {"workers": len(each), "workers_alive": found["workers_alive"]}
    if workers != "aggregate":
        chosen |= {f"worker_{i}/{name}": value for i, one in enumerate(each) for name, value in one.items()}
    return chosen
