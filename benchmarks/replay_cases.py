"""What `benchmarks.replay` stores and does, as data. Needs NumPy only, so that every peer can read it.

A frame has three entries: ``obs``, ``reward`` (float32) and ``episode`` (int32, the id of its trajectory). It carries
its number, in what it observes and in its reward, so that batches can be distinguished from torn ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

OURS, TORCHRL, TORCHRL_CACHED, CPPRB = "rollwright", "TorchRL 0.14.1", "TorchRL 0.14.1, cached", "cpprb 11.0.0"
LIMIT, LIMIT_OUT = "NumPy", "NumPy, out="

EXTEND, UNIFORM, SLICES = "extend", "uniform", "slices"
EXTEND_SLICES = "extend, boundaries kept"
UNIFORM_INDEX = "uniform, with index"
WRITE_AND_SLICE = "write a batch, draw slices"
SLICES_CACHED = "slices, cached"
PRIORITIZED, UPDATE, PRIORITY_CYCLE = "prioritised", "update priorities", "prioritised, then update"
OPERATIONS = (
    EXTEND,
    EXTEND_SLICES,
    UNIFORM,
    UNIFORM_INDEX,
    SLICES,
    WRITE_AND_SLICE,
    PRIORITIZED,
    UPDATE,
    PRIORITY_CYCLE,
)
USUAL = (EXTEND, UNIFORM, SLICES)

ROWS, BATCH, SLICE_LEN, LONGEST = 1000, 256, 32, 200
ALPHA, BETA = 0.7, 0.5
FILL_BYTES = 1 << 26

OBSERVATIONS: dict[str, tuple[tuple[int, ...], type]] = {
    "16 B": ((2,), np.float32),
    "1 KiB": ((254,), np.float32),
    "28 KiB": ((4, 84, 84), np.uint8),
}

Rows = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """A buffer that is full.

    Attributes:
        stored: number of frames.
        frame: a name in :data:`OBSERVATIONS`.
        on_disk: whether rows lie in files that are mapped into memory.
        operations: what is measured.
        large: whether it takes gigabytes of disk for each package, so that it is measured where it is asked for.
    """

    stored: int
    frame: str
    on_disk: bool = False
    operations: tuple[str, ...] = USUAL
    large: bool = False

    @property
    def name(self) -> str:
        """Such as ``"10,000 of 16 B, in memory"``."""
        return f"{self.stored:,} of {self.frame}, {'mapped' if self.on_disk else 'in memory'}"

    @property
    def observation(self) -> tuple[tuple[int, ...], type]:
        """Shape and dtype of ``obs``."""
        return OBSERVATIONS[self.frame]

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame, all entries together."""
        shape, dtype = self.observation
        return int(np.prod(shape)) * np.dtype(dtype).itemsize + 8


CASES = (
    Case(10_000, "16 B", operations=(*USUAL, WRITE_AND_SLICE)),
    Case(100_000, "16 B", operations=OPERATIONS[:6]),
    Case(1_000_000, "16 B", operations=OPERATIONS),
    Case(10_000_000, "16 B", operations=(*USUAL, WRITE_AND_SLICE)),
    Case(10_000, "1 KiB"),
    Case(1_000_000, "1 KiB"),
    Case(10_000, "28 KiB"),
    Case(10_000, "16 B", on_disk=True),
    Case(1_000_000, "16 B", on_disk=True),
    Case(10_000_000, "16 B", on_disk=True),
    Case(10_000, "1 KiB", on_disk=True),
    Case(1_000_000, "1 KiB", on_disk=True),
    Case(10_000, "28 KiB", on_disk=True),
    Case(100_000, "28 KiB", on_disk=True, large=True),
)


@dataclass(frozen=True)
class Target:
    """A ratio of rates that is promised.

    Attributes:
        case: name of a case.
        operation: what is measured.
        base: what our rate is divided by.
        least: the smallest ratio that keeps the promise.
    """

    case: str
    operation: str
    base: str
    least: float


_SMALL, _PIXELS = Case(100_000, "16 B").name, Case(10_000, "28 KiB").name
_MAPPED = Case(10_000, "28 KiB", on_disk=True).name
TARGETS = (
    Target(_SMALL, SLICES, TORCHRL, 5.0),
    Target(_SMALL, SLICES, TORCHRL_CACHED, 5.0),
    Target(_SMALL, UNIFORM, TORCHRL, 2.0),
    Target(_SMALL, UNIFORM_INDEX, TORCHRL, 2.0),
    Target(_SMALL, EXTEND, TORCHRL, 1.0),
    Target(_SMALL, EXTEND_SLICES, TORCHRL, 1.0),
    *(Target(case, operation, LIMIT, 0.7) for case in (_PIXELS, _MAPPED) for operation in USUAL),
)
GROWTH = (10_000, 1_000_000, 10_000_000)
GROWTH_LIMIT = 1.2  # slices of the largest buffer of GROWTH, times those of the smallest


def find_case(name: str) -> Case:
    """The case of that name.

    Raises:
        ValueError: there is none; the message lists the names.
    """
    for case in CASES:
        if case.name == name:
            return case
    raise ValueError(f"case: expected one of {'; '.join(case.name for case in CASES)}, got {name!r}.")


# Frames ------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _episodes(count: int) -> NDArray[np.int32]:
    """Ids of frames whose trajectories have lengths drawn uniformly from 1 to :data:`LONGEST`."""
    lengths = np.random.default_rng(0).integers(1, LONGEST + 1, 2 * count // LONGEST + 1000)
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    while len(ids) < count:
        ids = np.append(ids, ids + ids[-1] + 1)
    return ids[:count]


def make_rows(case: Case, start: int, count: int) -> Rows:
    """The frames of numbers ``start <= n < start + count``, of which there are ``case.stored + ROWS``."""
    number = np.arange(start, start + count)
    shape, dtype = case.observation
    obs = np.full((count, *shape), 1, dtype)
    flat = obs.reshape(count, -1)
    if dtype is np.uint8:
        flat[:, :4] = flat[:, -4:] = number.astype(np.int32)[:, None].view(np.uint8)
    else:
        flat[:] = number[:, None]
    ids = _episodes(case.stored + ROWS)[start : start + count].copy()
    return {"obs": obs, "reward": (number / 2).astype(np.float32), "episode": ids}


def fill_ranges(case: Case) -> list[tuple[int, int]]:
    """Starts and numbers of the rows that a buffer is filled with, a piece at a time."""
    piece = max(1, min(case.stored, FILL_BYTES // case.frame_bytes))
    return [(start, min(piece, case.stored - start)) for start in range(0, case.stored, piece)]


def check_rows(case: Case, rows: Mapping[str, NDArray[Any]], count: int = BATCH) -> NDArray[np.int64]:
    """Test that rows are whole; returns their numbers.

    Raises:
        RuntimeError: they are not so many, or the parts of one are not from one frame.
    """
    flat = np.ascontiguousarray(rows["obs"]).reshape(len(rows["obs"]), -1)
    first, last = flat[:, :1], flat[:, -1:]
    if flat.dtype == np.uint8:
        first, last = (np.ascontiguousarray(part).view(np.int32) for part in (flat[:, :4], flat[:, -4:]))
    number = first[:, 0].astype(np.int64)
    reward, episode = rows["reward"].reshape(-1), rows["episode"].reshape(-1)
    same = (number == last[:, 0]) & (reward == (number / 2).astype(np.float32))
    if len(flat) != count or not same.all() or (episode != _episodes(case.stored + ROWS)[number]).any():
        raise RuntimeError(f"{case.name}: expected {count} whole frames, got {len(flat)}, {same.sum()} of them whole.")
    return number


def check_slices(case: Case, rows: Mapping[str, NDArray[Any]]) -> None:
    """Test that a batch is slices, each of consecutive frames of one trajectory.

    Raises:
        RuntimeError: it is not.
    """
    number = check_rows(case, rows).reshape(-1, SLICE_LEN)
    episode = rows["episode"].reshape(-1, SLICE_LEN)
    if (np.diff(number) != 1).any() or np.diff(episode).any():
        raise RuntimeError(f"{case.name}: a slice crosses from a trajectory to another.")
