"""The sides of `benchmarks.replay` that are written in terms of TensorDicts, and those of NumPy.

rollwright and TorchRL have the same classes and arguments here, so one function measures both.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from benchmarks.replay_cases import (
    ALPHA,
    BATCH,
    BETA,
    EXTEND,
    EXTEND_SLICES,
    LIMIT,
    LIMIT_OUT,
    PRIORITIZED,
    PRIORITY_CYCLE,
    ROWS,
    SLICE_LEN,
    SLICES,
    SLICES_CACHED,
    UNIFORM,
    UNIFORM_INDEX,
    UPDATE,
    WRITE_AND_SLICE,
    Case,
    Rows,
    check_rows,
    check_slices,
    fill_ranges,
    make_rows,
)

_SLICED = (SLICES, SLICES_CACHED, WRITE_AND_SLICE, EXTEND_SLICES)
_RANKED = (PRIORITIZED, UPDATE, PRIORITY_CYCLE)


class Side(NamedTuple):
    """What is measured.

    Attributes:
        call: does it once; returns the number of rows written, or of batches drawn.
        check: tests what it has done; raises RuntimeError where that is wrong.
    """

    call: Callable[[], int]
    check: Callable[[], object]


# TensorDicts -------------------------------------------------------------------------------------


def make_side(package: ModuleType, case: Case, operation: str, folder: Path) -> Side:
    """An operation on a buffer that is full.

    Args:
        package: ``rollwright.data.replay_buffers`` or ``torchrl.data.replay_buffers``.
        case: what the buffer holds.
        operation: a name of :mod:`benchmarks.replay_cases`.
        folder: an empty one, for files.
    """
    torch.manual_seed(0)
    buffer = _make_buffer(package, case, operation, folder)
    for start, number in fill_ranges(case):
        buffer.extend(_batch(case, start, number))
    if operation in _RANKED:
        return _ranked(buffer, case, operation)
    return _plain(buffer, case, operation)


def _make_buffer(package: ModuleType, case: Case, operation: str, folder: Path) -> Any:
    storage = package.LazyTensorStorage(case.stored)
    if case.on_disk:
        storage = package.LazyMemmapStorage(case.stored, scratch_dir=str(folder / "rows"))
    if operation in (EXTEND, UNIFORM):  # the class that knows least about elements, in both packages
        return package.ReplayBuffer(storage=storage, batch_size=BATCH)
    sampler = None
    if operation in _SLICED:
        # No marks but is_init, where the package writes any: the least that either can do.
        sampler = package.SliceSampler(
            slice_len=SLICE_LEN,
            traj_key="episode",
            strict_length=True,
            truncated_key=None,
            cache_values=operation == SLICES_CACHED,
        )
    elif operation in _RANKED:
        sampler = package.PrioritizedSampler(case.stored, alpha=ALPHA, beta=BETA)
    return package.TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH)


def _batch(case: Case, start: int, number: int) -> TensorDict:
    rows = {name: torch.from_numpy(value) for name, value in make_rows(case, start, number).items()}
    return TensorDict(rows, [number])


def _arrays(batch: TensorDictBase) -> Rows:
    return {name: batch.get(name).numpy() for name in ("obs", "reward", "episode")}


def _plain(buffer: Any, case: Case, operation: str) -> Side:
    rows = _batch(case, case.stored, ROWS)
    written = rows[:BATCH]

    def extend() -> int:
        buffer.extend(rows)
        return ROWS

    def sample() -> int:
        buffer.sample()
        return 1

    def write_and_sample() -> int:
        buffer.extend(written)
        buffer.sample()
        return 1

    def check_written() -> None:
        buffer.extend(rows)
        for start, number in fill_ranges(case):
            check_rows(case, _arrays(buffer[start : start + number]), number)

    def check_drawn() -> None:
        (check_slices if operation in _SLICED else check_rows)(case, _arrays(buffer.sample()))

    calls = {EXTEND: extend, EXTEND_SLICES: extend, WRITE_AND_SLICE: write_and_sample}
    checks = {EXTEND: check_written, EXTEND_SLICES: check_drawn}
    return Side(calls.get(operation, sample), checks.get(operation, check_drawn))


def _ranked(buffer: Any, case: Case, operation: str) -> Side:
    generator = np.random.default_rng(0)
    buffer.update_priority(torch.arange(case.stored), torch.from_numpy(generator.random(case.stored, np.float32)))
    drawn = [torch.from_numpy(generator.integers(0, case.stored, BATCH)) for _ in range(64)]
    places = cycle(drawn)
    priorities = cycle([torch.from_numpy(generator.random(BATCH, np.float32)) for _ in range(64)])

    def sample() -> int:
        buffer.sample()
        return 1

    def update() -> int:
        buffer.update_priority(next(places), next(priorities))
        return 1

    def learn() -> int:
        batch = buffer.sample()
        buffer.update_priority(batch.get("index").reshape(-1), next(priorities))
        return 1

    def check() -> None:
        batch = buffer.sample()
        check_rows(case, _arrays(batch))
        weights = batch.get("priority_weight")
        if len(weights) != BATCH or not ((weights > 0) & (weights <= 1.001)).all():
            raise RuntimeError(f"{case.name}: expected weights from 0 to 1, got {weights.min()} to {weights.max()}.")

    return Side({PRIORITIZED: sample, UPDATE: update, PRIORITY_CYCLE: learn}[operation], check)


# NumPy -------------------------------------------------------------------------------------------


def make_limits(case: Case, operation: str, folder: Path) -> dict[str, Side]:
    """The bytes of an operation moved by NumPy, and nothing else; empty where an operation is more than that.

    Rows are taken into new arrays, as a batch is new; with ``"NumPy, out="`` into arrays that are there already.
    """
    if operation not in (EXTEND, EXTEND_SLICES, UNIFORM, UNIFORM_INDEX, SLICES):
        return {}
    stored = _allocate(case, folder)
    for start, number in fill_ranges(case):
        for name, value in make_rows(case, start, number).items():
            stored[name][start : start + number] = value
    if operation in (EXTEND, EXTEND_SLICES):
        return {LIMIT: _copies(case, stored)}
    return {name: _takes(case, stored, operation == SLICES, name == LIMIT_OUT) for name in (LIMIT, LIMIT_OUT)}


def _allocate(case: Case, folder: Path) -> Rows:
    stored: Rows = {}
    for name, value in make_rows(case, 0, 1).items():
        shape = (case.stored, *value.shape[1:])
        if case.on_disk:
            stored[name] = np.asarray(np.memmap(folder / name, value.dtype, "w+", shape=shape))
        else:
            stored[name] = np.empty(shape, value.dtype)
    return stored


def _copies(case: Case, stored: Rows) -> Side:
    rows = make_rows(case, case.stored, ROWS)
    number = min(ROWS, case.stored)
    turns = count()

    def copy() -> int:
        at = next(turns) * number % (case.stored - number + 1)
        for name, value in rows.items():
            np.copyto(stored[name][at : at + number], value[:number])
        return number

    return Side(copy, lambda: check_rows(case, stored, case.stored))


def _takes(case: Case, stored: Rows, sliced: bool, reuse: bool) -> Side:
    generator = np.random.default_rng(0)
    step = np.arange(SLICE_LEN)
    batch: Rows = {name: np.empty((BATCH, *value.shape[1:]), value.dtype) for name, value in stored.items()}

    def index() -> NDArray[np.int64]:
        if not sliced:
            return generator.integers(0, case.stored, BATCH)
        first = generator.integers(0, case.stored - SLICE_LEN + 1, BATCH // SLICE_LEN)
        return (first[:, None] + step).reshape(-1)

    def take() -> int:
        where = index()
        for name, value in stored.items():
            if reuse:
                value.take(where, axis=0, out=batch[name], mode="clip")  # out= alone goes through another copy
            else:
                batch[name] = value.take(where, axis=0)
        return 1

    return Side(take, lambda: check_rows(case, batch))
