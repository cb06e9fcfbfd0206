"""cpprb's replay buffers: NumPy arrays in, a dict of NumPy arrays out. It draws no slices of trajectories."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import cpprb
import numpy as np

from benchmarks.peers.protocol import serve
from benchmarks.replay_cases import (
    ALPHA,
    BATCH,
    BETA,
    EXTEND,
    PRIORITIZED,
    PRIORITY_CYCLE,
    ROWS,
    UNIFORM,
    UNIFORM_INDEX,
    UPDATE,
    Case,
    check_rows,
    fill_ranges,
    find_case,
    make_rows,
)

_RANKED = (PRIORITIZED, UPDATE, PRIORITY_CYCLE)


def make_buffer(case: Case, operation: str, folder: Path) -> cpprb.ReplayBuffer:
    shape, dtype = case.observation
    entries = {
        "obs": {"shape": shape, "dtype": dtype},
        "reward": {"dtype": np.float32},
        "episode": {"dtype": np.int32},
    }
    options = {"mmap_prefix": str(folder / "rows")} if case.on_disk else {}
    if operation in _RANKED:
        buffer = cpprb.PrioritizedReplayBuffer(case.stored, entries, alpha=ALPHA, **options)
    else:
        buffer = cpprb.ReplayBuffer(case.stored, entries, **options)
    for start, number in fill_ranges(case):
        buffer.add(**make_rows(case, start, number))
    return buffer


def make(name: str, operation: str) -> Callable[[], int]:
    if operation not in (EXTEND, UNIFORM, UNIFORM_INDEX, *_RANKED):
        raise SystemExit("draws no slices")
    case = find_case(name)
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    np.random.seed(0)
    buffer = make_buffer(case, operation, Path(folder.name))
    check_rows(case, buffer.sample(BATCH))
    rows = make_rows(case, case.stored, ROWS)

    def extend() -> int:
        buffer.add(**rows)
        return ROWS

    def sample() -> int:
        buffer.sample(BATCH)
        return 1

    return _ranked(buffer, case, operation) if operation in _RANKED else {EXTEND: extend}.get(operation, sample)


def _ranked(buffer: cpprb.PrioritizedReplayBuffer, case: Case, operation: str) -> Callable[[], int]:
    generator = np.random.default_rng(0)
    buffer.update_priorities(np.arange(case.stored), generator.random(case.stored, np.float32))
    places = cycle([generator.integers(0, case.stored, BATCH) for _ in range(64)])
    priorities = cycle([generator.random(BATCH, np.float32) for _ in range(64)])

    def sample() -> int:
        buffer.sample(BATCH, beta=BETA)
        return 1

    def update() -> int:
        buffer.update_priorities(next(places), next(priorities))
        return 1

    def learn() -> int:
        batch = buffer.sample(BATCH, beta=BETA)
        buffer.update_priorities(batch["indexes"], next(priorities))
        return 1

    return {PRIORITIZED: sample, UPDATE: update, PRIORITY_CYCLE: learn}[operation]


if __name__ == "__main__":
    serve(make)
