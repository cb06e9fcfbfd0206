"""How much work is it to hand a batch over from workers? Counts, which do not depend on the machine.

- Messages a batch: what this process sends to workers and receives from them, and their bytes.
- Bytes moved a frame: the results of tensor operations in this process that only move data, while batches are taken.
- Idle: processor time of all workers in a second in which nobody takes a batch.
"""

from __future__ import annotations

import argparse
import os
import pickle
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import report
from benchmarks.counts import OperationCounter
from benchmarks.workers_cases import ASYNC, CARTPOLE, CASES, ONE, PIXELS_RANDOM, SYNC, Case
from benchmarks.workers_sides import check_batch, make_collector
from rollwright._processes.channel import Channel
from rollwright._processes.connection import NOTHING

BATCHES = 8


class Counts(NamedTuple):
    """What was done.

    Attributes:
        messages: a batch.
        message_bytes: a batch.
        bytes_moved: a frame, in this process.
        frame_bytes: of a frame as it is delivered.
        idle_ms: milliseconds of processor time in a second.
    """

    messages: float
    message_bytes: float
    bytes_moved: float
    frame_bytes: float
    idle_ms: float


class MessageCounter:
    """Counts messages that this process sends and receives, and their bytes, on lines made while it is entered."""

    def __init__(self) -> None:
        self.messages = self.num_bytes = 0
        self._undo = ExitStack()

    def _count(self, message: Any) -> None:
        self.messages += 1
        self.num_bytes += len(pickle.dumps(message, 5))

    def __enter__(self) -> MessageCounter:
        post, take, count = Channel.post, Channel.take, self._count

        def counted_post(channel: Channel, message: Any) -> None:
            count(message)
            post(channel, message)

        def counted_take(channel: Channel, timeout_s: float = 0.0) -> Any:
            message = take(channel, timeout_s)
            if message is not NOTHING:
                count(message)
            return message

        Channel.post, Channel.take = counted_post, counted_take
        self._undo.callback(setattr, Channel, "post", post)
        self._undo.callback(setattr, Channel, "take", take)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()


def count(case: Case, side: str, batches: int = BATCHES, idle_s: float = 1.0) -> Counts:
    """Count what it takes to hand over ``batches`` batches.

    Raises:
        RuntimeError: what a batch holds is wrong.
    """
    operations, messages = OperationCounter(), MessageCounter()
    with messages, make_collector(case, side) as collector:
        taken = iter(collector)
        for _ in range(2 * case.workers):  # what happens once, happens here
            batch = next(taken)
        check_batch(batch, case.steps)
        frame_bytes = sum(value.nbytes for value in batch.values(True, True)) / batch.numel()
        del batch  # and its memory is released
        frames = messages.messages = messages.num_bytes = 0
        with operations:
            for _ in range(batches):
                frames += next(taken).numel()
        return Counts(
            messages.messages / batches,
            messages.num_bytes / batches,
            operations.bytes_moved / frames,
            frame_bytes,
            _idle_ms(collector, idle_s) if side != ONE else 0.0,
        )


def _idle_ms(collector: Any, seconds: float) -> float:
    """Processor time of the workers in a second in which nobody takes a batch."""
    pids = [worker["pid"] for worker in collector.stats()["workers"]]
    time.sleep(0.5)  # what was begun is done
    before, start = sum(map(_cpu_s, pids)), time.perf_counter()
    time.sleep(seconds)
    return 1e3 * (sum(map(_cpu_s, pids)) - before) / (time.perf_counter() - start)


def _cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", action="append", type=int, help="a number (may be repeated; default: 1, 2, 4)")
    parser.add_argument("--out", type=Path, default=report.RESULTS, metavar="DIR")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    wanted = arguments.workers or [1, 2, 4]
    rows = []
    for case in CASES:
        if case.env_name in (CARTPOLE, PIXELS_RANDOM) and case.workers in wanted:
            for side in (ONE, SYNC, ASYNC) if case.workers == min(wanted) else (SYNC, ASYNC):
                rows.append(row_of(case, side, count(case, side)))
                print(rows[-1], flush=True)
    report.write(
        arguments.out,
        "workers_counts.md",
        "Counts of handing over",
        report.markdown_table(
            (
                "environment",
                "workers",
                "",
                "messages a batch",
                "their bytes",
                "bytes moved a frame",
                "bytes of a frame",
                "ms of processor a second, idle",
            ),
            rows,
        ),
    )


def row_of(case: Case, side: str, counts: Counts) -> list[str]:
    """A row of the table."""
    workers = "" if side == ONE else str(case.workers)
    return [case.env_name, workers, side, f"{counts.messages:.1f}", *(f"{value:,.0f}" for value in counts[1:])]


if __name__ == "__main__":
    main()
