"""Which tests hold which promise: ``pytest -m p4`` runs those of the fourth.

The promises, P1 to P10, are what users may rely on. Files lie under ``tests/``.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PROMISES", "Promise"]


class Promise(NamedTuple):
    """A promise, and the files whose tests fail when it is broken."""

    text: str
    files: tuple[str, ...]


PROMISES = {
    "p1": Promise(
        "a frame's arrays are written once, where the consumer reads them; what is copied is counted",
        (
            "benchmarks/test_counts.py",
            "collectors/delivery/test_blocks.py",
            "collectors/delivery/test_written_once.py",
            "collectors/rollout/test_counts.py",
            "collectors/workers/test_nothing_lost.py",
            "collectors/workers/test_store.py",
        ),
    ),
    "p2": Promise(
        "boundaries of trajectories come from the environment; terminated and truncated are never mixed up",
        (
            "collectors/delivery/test_holes.py",
            "collectors/rollout/test_batches.py",
            "collectors/rollout/test_frames.py",
            "collectors/workers/test_frames.py",
            "data/replay_buffers/samplers/test_slices_property.py",
            "envs/libs/test_gym_parity.py",
            "envs/libs/test_gym_vector.py",
        ),
    ),
    "p3": Promise(
        "every frame names its trajectory and, where tracked, the version of the weights that acted",
        (
            "collectors/delivery/test_ids_of_buffers.py",
            "collectors/rollout/test_trajectories.py",
            "collectors/workers/test_shapes.py",
        ),
    ),
    "p4": Promise(
        "a policy acts with exactly one published version of its weights",
        (
            "collectors/delivery/background/test_weights.py",
            "collectors/workers/test_torn_weights.py",
            "weight_update/test_processes.py",
            "weight_update/test_shared.py",
        ),
    ),
    "p5": Promise(
        "trajs_per_batch gives whole trajectories or nothing, whatever is killed meanwhile",
        ("collectors/delivery/test_trajs_per_batch.py", "collectors/workers/test_storm.py"),
    ),
    "p6": Promise(
        "the same seed gives the same bits, and a restored run goes on bit for bit",
        (
            "collectors/delivery/test_resume.py",
            "collectors/rollout/test_seeds.py",
            "collectors/workers/test_equality.py",
            "collectors/workers/test_resume.py",
            "envs/test_checkpoint.py",
        ),
    ),
    "p7": Promise(
        "a failure is an error and not a hang, and an end leaves nothing behind",
        (
            "collectors/evaluation/test_evaluator_faults.py",
            "collectors/test_forks.py",
            "collectors/test_shutdown.py",
            "collectors/workers/test_exit.py",
            "collectors/workers/test_faults.py",
            "collectors/workers/test_restarts.py",
            "collectors/workers/test_shutdown.py",
            "data/replay_buffers/ledger/test_damage.py",
            "envs/batched/test_async_pool_faults.py",
            "envs/batched/test_parallel_faults.py",
            "processes/test_exits.py",
            "processes/test_forks.py",
        ),
    ),
    "p8": Promise(
        "what runs on arrays equals the plain path, bit for bit",
        (
            "collectors/rollout/paths/test_groups.py",
            "collectors/rollout/paths/test_interplay.py",
            "collectors/rollout/paths/test_options.py",
            "collectors/rollout/paths/test_pairs.py",
            "envs/transforms/test_pairs.py",
            "policies/test_parity.py",
            "policies/test_registration.py",
        ),
    ),
    "p9": Promise(
        "every wait has a limit and says what it waits for",
        (
            "collectors/workers/test_watching.py",
            "data/replay_buffers/ledger/test_locks.py",
            "data/replay_buffers/test_limiter.py",
            "processes/test_channel.py",
            "processes/test_pool.py",
        ),
    ),
    "p10": Promise(
        "figures in the docs come from benchmarks that run",
        ("benchmarks/test_compare.py", "benchmarks/test_replay.py", "benchmarks/test_workers.py"),
    ),
}
