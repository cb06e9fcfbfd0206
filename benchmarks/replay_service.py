"""How many frames a second go into a replay service, and come out, beside a buffer that processes share?

Each call of "extend" writes one trajectory of 200 frames; a batch has 256 frames. A frame has 17 observations and
6 actions, or an image of 84 x 84. Writers are 0, 1 or 2 other processes; sides take turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks import report
from rollwright.cli.measuring import summary
from rollwright.data import LazyTensorStorage, TensorDictReplayBuffer

STORED, FRAMES, BATCH = 20_000, 200, 256
SHAPES = {"vectors": ((17,), torch.float32), "images": ((84, 84), torch.uint8)}
_LIMIT_S = 120.0


def trajectory(case: str) -> TensorDict:
    """A trajectory of 200 frames."""
    shape, dtype = SHAPES[case]
    pixels = torch.zeros(FRAMES, *shape, dtype=dtype)
    done = torch.zeros(FRAMES, 1, dtype=torch.bool)
    after = {"observation": pixels.clone(), "reward": torch.zeros(FRAMES, 1), "done": done}
    ids = {"traj_ids": torch.zeros(FRAMES, dtype=torch.int64)}
    return TensorDict(
        {"observation": pixels, "action": torch.zeros(FRAMES, 6), "next": after, "collector": ids}, [FRAMES]
    )


def make(side: str) -> TensorDictReplayBuffer:
    """A buffer that other processes write."""
    options: dict[str, Any] = {"storage": partial(LazyTensorStorage, STORED), "batch_size": BATCH}
    if side == "shared":
        return TensorDictReplayBuffer(shared=True, **options)
    prefetch = 2 if side == "service, prefetch=2" else None
    return TensorDictReplayBuffer(service_backend="process", prefetch=prefetch, **options)


def rate(call: Callable[[], Any], frames: int, seconds: float) -> float:
    """Frames a second."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        call()
        count += frames
    return count / (time.perf_counter() - began)


def write(buffer: TensorDictReplayBuffer, case: str, ready: Any, stop: Any) -> None:
    """Write until told to stop."""
    torch.set_num_threads(1)
    data = trajectory(case)
    buffer.extend(data)
    ready.release()
    while not stop.is_set():
        buffer.extend(data)


def measure(side: str, case: str, seconds: float, writers: int) -> dict[str, float]:
    """Frames a second of one side: extended and sampled alone, and sampled while others write."""
    buffer = make(side)
    data = trajectory(case)
    try:
        for _ in range(STORED // FRAMES):
            buffer.extend(data)
        found = {"extend": rate(lambda: buffer.extend(data), FRAMES, seconds)}
        assert buffer.write_count % FRAMES == 0
        found["sample"] = rate(buffer.sample, BATCH, seconds)
        if writers:
            found |= _with_writers(buffer, case, seconds, writers)
        return found
    finally:
        buffer.shutdown()


def _with_writers(buffer: TensorDictReplayBuffer, case: str, seconds: float, writers: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Semaphore(0), context.Event()
    client = buffer.client() if hasattr(buffer, "as_writer") else buffer
    others = [context.Process(target=write, args=(client, case, ready, stop)) for _ in range(writers)]
    for other in others:
        other.start()
    try:
        for _ in others:
            assert ready.acquire(timeout=_LIMIT_S), "a writer did not start"
        before, began = buffer.write_count, time.perf_counter()
        sampled = rate(buffer.sample, BATCH, seconds)
        written = (buffer.write_count - before) / (time.perf_counter() - began)
    finally:
        stop.set()
        for other in others:
            other.join(_LIMIT_S)
    return {f"written by {writers} others": written, f"sampled beside {writers} writers": sampled}


def _text(values: list[float]) -> str:
    found = summary(values)
    return f"{found.median:,.0f} ({found.low:,.0f} to {found.high:,.0f})"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    sides = ("shared", "service", "service, prefetch=2")
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    for case in SHAPES:
        rates: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
        for number in range(given.rounds):
            for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
                for name, value in measure(side, case, given.seconds, given.writers).items():
                    rates[side].setdefault(name, []).append(value)
        results[case] = rates
        names = list(rates["shared"])
        rows = [[side, *(_text(rates[side][name]) for name in names)] for side in sides]
        print(f"\n{case}, frames/s\n\n{report.markdown_table(['buffer', *names], rows)}")
    print(f"\n{report.machine()}")
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
