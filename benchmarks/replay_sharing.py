"""What do processes that sample a shared replay buffer leave to those who write it, and how long does a write wait?

A writer extends the buffer by 10 rows at a time, or workers of a collector step environments into it, while 0, 1, 2, 4
or 8 processes sample batches of 256 frames without a pause. All share the processors. What a fair scheduler leaves is
measured too: as many processes sample buffers of their own. Sides take turns.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks import report
from benchmarks.replay_cases import Case, fill_ranges, make_rows
from rollwright._memory.segment import Segment
from rollwright.cli.measuring import summary
from rollwright.collectors import MultiAsyncCollector
from rollwright.data import LazyTensorStorage, TensorDictReplayBuffer
from rollwright.envs import GymEnv

SAMPLERS = (0, 1, 2, 4, 8)
STORED, FRAME, BATCH, ROWS = 100_000, "1 KiB", 256, 10
EXTEND, COLLECT = "extend of 10 rows", "collector with 2 workers"
SHARED, OWN = "shared", "own"
LEAST = 0.5  # of the rate without samplers, or of what a fair scheduler leaves where that is less
_REST, _SAMPLE_SHARED, _SAMPLE_OWN, _END = range(4)
_TOTALS = np.zeros(3, np.int64)  # of each: what to do, turns of its loop, batches
_LIMIT_S = 300.0


class Turn(NamedTuple):
    """What a writer did beside samplers.

    Attributes:
        rate: rows a second.
        longest_s: that a write took.
        batches: that were sampled meanwhile, of all samplers, a second.
    """

    rate: float
    longest_s: float
    batches: float


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.seconds, arguments.samplers = 1, 0.05, [0, 1]
    torch.set_num_threads(1)
    results = {}
    for operation in arguments.operation or (EXTEND, COLLECT):
        print(f"{operation} ...", flush=True)
        results[operation] = measure(operation, arguments.samplers, arguments.rounds, arguments.seconds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "replay_sharing.json").write_text(json.dumps(results, indent=1))
    report.write(
        arguments.out,
        "replay_sharing.md",
        "A shared replay buffer: what samplers leave to a writer",
        f"Medians of {arguments.rounds} rounds of {arguments.seconds:g} s in turns, quartiles in brackets; the longest "
        f"write of all rounds. {STORED:,} frames of {FRAME}, batches of {BATCH}. x alone: the writer's rate, as a "
        "multiple of that without samplers; beside others: the same, where each sampler has a buffer of its own.",
        report.markdown_table(
            (
                "",
                "samplers",
                "rows/s",
                "x alone",
                "x alone, beside others",
                "of that",
                "longest write, ms",
                "beside others",
                "batches/s",
            ),
            table_rows(results),
        ),
        "## Promises",
        report.markdown_table(("promise", "wanted", "measured", "kept"), promise_rows(results)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--samplers", type=int, nargs="+", default=list(SAMPLERS), metavar="N", help="how many processes sample")
    add("--operation", action="append", choices=(EXTEND, COLLECT), help="one of them (may be repeated)")
    add("--rounds", type=int, default=7)
    add("--seconds", type=float, default=1.0, help="of each side in each round")
    add("--quick", action="store_true", help="see that it runs: 1 round, at most 1 sampler")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    return parser


# Samplers ----------------------------------------------------------------------------------------------


class Samplers:
    """Processes that sample when they are asked to.

    Args:
        buffer: a shared one, with frames.
        count: of the processes.
    """

    def __init__(self, buffer: TensorDictReplayBuffer, count: int) -> None:
        self._segment = Segment()
        self._segment.grow(_TOTALS.nbytes * (count + 1))
        memory = self._segment.map(0, _TOTALS.nbytes * (count + 1))
        self._words = np.frombuffer(memory, np.int64).reshape(-1, len(_TOTALS))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "tensordict", "rollwright.data"])  # not by each process
        self._processes: list[Any] = [
            context.Process(target=_sample, args=(buffer, self._segment, number), daemon=True)
            for number in range(count)
        ]
        for process in self._processes:
            process.start()
        self._await(range(count), lambda number: self._words[number, 1] > 0)

    def _await(self, numbers: Sequence[int], done: Callable[[int], bool]) -> None:
        until = time.monotonic() + _LIMIT_S
        while not all(done(number) for number in numbers):
            if time.monotonic() > until or not all(process.is_alive() for process in self._processes):
                raise RuntimeError("a process that samples has ended, or does not answer")
            time.sleep(1e-3)

    @contextmanager
    def sampling(self, count: int, which: str) -> Iterator[Callable[[], int]]:
        """Let so many sample in the block; gives a function that says how many batches they had so far."""
        before = self._words[:, 1].copy()
        self._words[:count, 0] = _SAMPLE_SHARED if which == SHARED else _SAMPLE_OWN
        self._await(range(count), lambda number: self._words[number, 1] > before[number] + 1)
        try:
            yield lambda: int(self._words[:, 2].sum())
        finally:
            self._words[:, 0] = _REST
            rest = self._words[:, 1].copy()
            self._await(range(count), lambda number: self._words[number, 1] > rest[number])

    def close(self) -> None:
        """End them."""
        self._words[:, 0] = _END
        for process in self._processes:
            process.join(_LIMIT_S)


def _sample(buffer: TensorDictReplayBuffer, segment: Segment, number: int) -> None:
    torch.set_num_threads(1)
    totals = np.frombuffer(segment.map(_TOTALS.nbytes * number, _TOTALS.nbytes), np.int64)
    own = make_buffer(buffer.storage.max_size, shared=False)
    buffers = {_SAMPLE_SHARED: buffer, _SAMPLE_OWN: own}
    while totals[0] != _END:
        sampled = buffers.get(int(totals[0]))
        if sampled is None:
            time.sleep(5e-3)
        else:
            check(sampled.sample())
            totals[2] += 1
        totals[1] += 1


def make_buffer(stored: int, *, shared: bool) -> TensorDictReplayBuffer:
    """A full one."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(stored), batch_size=BATCH, shared=shared)
    case = Case(stored, FRAME)
    for start, count in fill_ranges(case):
        buffer.extend(TensorDict(make_rows(case, start, count), [count]))
    return buffer


def check(batch: TensorDict) -> None:
    """See that a batch has the right size; a look at all of it would be work that nobody does."""
    if len(batch) != BATCH:
        raise RuntimeError(f"expected a batch of {BATCH} frames, got {len(batch)}")


# Writers -----------------------------------------------------------------------------------------------


def extend(buffer: TensorDictReplayBuffer, seconds: float) -> tuple[float, float]:
    """Rows a second of calls that write some, and the longest of these."""
    rows = TensorDict(make_rows(Case(STORED, FRAME), 0, ROWS), [ROWS])
    longest, count, begin = 0.0, 0, time.perf_counter()
    now = begin
    while now < begin + seconds:
        buffer.extend(rows)
        before, now = now, time.perf_counter()
        longest = max(longest, now - before)
        count += ROWS
    return count / (now - begin), longest


def collect(buffer: TensorDictReplayBuffer, seconds: float) -> tuple[float, float]:
    """Frames a second that arrive in the buffer, and the longest time without any."""
    longest, begin = 0.0, time.perf_counter()
    first = count = buffer.write_count
    last = now = begin
    while now < begin + seconds:
        time.sleep(1e-3)
        now, found = time.perf_counter(), buffer.write_count
        if found != count:
            longest, count, last = max(longest, now - last), found, now
    return (count - first) / (now - begin), max(longest, now - last)


def make_env() -> GymEnv:
    return GymEnv("CartPole-v1")


@contextmanager
def writing(operation: str) -> Iterator[tuple[TensorDictReplayBuffer, Callable[[float], tuple[float, float]]]]:
    """A buffer, and what writes to it for some seconds."""
    if operation == EXTEND:
        buffer = make_buffer(STORED, shared=True)
        yield buffer, lambda seconds: extend(buffer, seconds)
        return
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(STORED), batch_size=BATCH, shared=True)
    collector = MultiAsyncCollector([make_env] * 2, None, frames_per_batch=20, replay_buffer=buffer)
    try:
        collector.start()
        until = time.monotonic() + _LIMIT_S
        while buffer.write_count < 10 * BATCH and time.monotonic() < until:
            time.sleep(0.05)
        yield buffer, lambda seconds: collect(buffer, seconds)
    finally:
        collector.shutdown()


def measure(
    operation: str, numbers: Sequence[int], rounds: int, seconds: float
) -> dict[str, dict[str, list[tuple[float, float, float]]]]:
    """Turns of a writer, by number of samplers and by what these sample."""
    sides = [(number, which) for number in numbers for which in (SHARED, OWN) if number or which == SHARED]
    turns: dict[str, dict[str, list[tuple[float, float, float]]]] = {str(number): {} for number in numbers}
    with writing(operation) as (buffer, write):
        samplers = Samplers(buffer, max(numbers))
        try:
            for n in range(rounds):
                for number, which in sides[:: 1 if n % 2 == 0 else -1]:
                    with samplers.sampling(number, which) as batches:
                        before = batches()
                        rate, longest = write(seconds)
                        turns[str(number)].setdefault(which, []).append(
                            Turn(rate, longest, (batches() - before) / seconds)
                        )
        finally:
            samplers.close()
    return turns


# The report --------------------------------------------------------------------------------------------

Results = Mapping[str, Mapping[str, Mapping[str, Sequence[Sequence[float]]]]]


def _shares(turns: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], number: str, which: str) -> list[float]:
    """Rates as multiples of those without samplers, round by round."""
    return [_ratio(turn[0], alone[0]) for turn, alone in zip(turns[number][which], turns["0"][SHARED], strict=True)]


def _ratio(one: float, other: float) -> float:
    return one / max(other, 1e-3)  # nothing may have come in a short turn


def _text(values: Sequence[float]) -> str:
    found = summary(values)
    return f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"


def table_rows(results: Results) -> list[list[str]]:
    """A row for each operation and number of samplers."""
    rows = []
    for operation, turns in results.items():
        for number, sides in turns.items():
            longest = {which: f"{1e3 * max(turn[1] for turn in sides[which]):.1f}" for which in sides}
            rate = f"{summary([turn[0] for turn in sides[SHARED]]).median:,.0f}"
            if number == "0":
                rows.append([operation, number, rate, "1", "", "", longest[SHARED], "", ""])
                continue
            shared, own = _shares(turns, number, SHARED), _shares(turns, number, OWN)
            kept = [_ratio(one, other) for one, other in zip(shared, own, strict=True)]
            batches = f"{summary([turn[2] for turn in sides[SHARED]]).median:,.0f}"
            texts = [_text(shared), _text(own), _text(kept)]
            rows.append([operation, number, rate, *texts, longest[SHARED], longest[OWN], batches])
    return rows


def promise_rows(results: Results) -> list[list[str]]:
    """Whether samplers leave a writer at least half of what as many other processes leave it."""
    rows = []
    for operation, turns in results.items():
        for number in [number for number in turns if number != "0"]:
            pairs = zip(_shares(turns, number, SHARED), _shares(turns, number, OWN), strict=True)
            least = summary([_ratio(one, min(1.0, other)) for one, other in pairs])
            name = f"{operation}, {number} samplers: x what as many processes with buffers of their own leave"
            rows.append([name, f">= {LEAST}", f"{least.median:.2f}", "yes" if least.median >= LEAST else "NO"])
    return rows


if __name__ == "__main__":
    main()
