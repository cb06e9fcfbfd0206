"""How much work is a step? Counts, which do not depend on the machine, beside those of the loop by hand.

- Tensor operations: what torch dispatches. What a compiled program does inside is not seen.
- Python calls and C calls: what `sys.setprofile` sees, the environment's own included, which all sides share.
  NumPy's arithmetic (ufuncs) is not seen.
- Bytes moved: the results of tensor operations that only move data (copies, casts, stacks). NumPy's are not seen.

Counts are those of a batch, divided by its steps: what happens once a batch is in them, as are resets.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import hand, ours, report
from benchmarks.cases import CASES, HAND, MASKED, OURS, TORCHRL_SERIAL, Case, find_case

MOVES = {
    "_copy_from",
    "_to_copy",
    "cat",
    "clone",
    "copy_",
    "fill_",
    "full",
    "full_like",
    "index",
    "index_put_",
    "index_select",
    "lift_fresh_copy",
    "masked_fill",
    "masked_fill_",
    "ones",
    "ones_like",
    "stack",
    "zero_",
    "zeros",
    "zeros_like",
}
NOTHING = {"to", "resolve_conj", "resolve_neg"}  # asked by a conversion to NumPy in inference mode


class Counts(NamedTuple):
    """What was done.

    Attributes:
        operations: tensor operations.
        bytes_moved: bytes that tensor operations moved.
        python_calls: calls of functions written in Python.
        c_calls: calls of built-in functions.
    """

    operations: float
    bytes_moved: float
    python_calls: float
    c_calls: float


class OperationCounter(TorchDispatchMode):
    """Counts tensor operations, and the bytes of those that only move data, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.bytes_moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in NOTHING or result is not args[0]:
            self.operations += 1
        if func.overloadpacket.__name__ in MOVES:
            self.bytes_moved += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


class CallCounter:
    """Counts calls while it is entered, without garbage collection; one more call of each kind is its own."""

    def __init__(self) -> None:
        self.events = {"call": 0, "c_call": 0}

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event in self.events:
            self.events[event] += 1

    def __enter__(self) -> CallCounter:
        self._collects_garbage = gc.isenabled()  # a collection runs finalizers of whatever was there before
        gc.disable()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        if self._collects_garbage:
            gc.enable()


def count(collect: Callable[[], object], steps: int, frames: int) -> Counts:
    """Count what ``collect`` does, which is called three times.

    Args:
        collect: collects a batch.
        steps: of a batch; operations and calls are given for each.
        frames: of a batch; bytes are given for each.
    """
    collect()  # what happens once, happens here
    operations = OperationCounter()
    with operations:
        collect()
    calls = CallCounter()
    with calls:
        collect()
    return Counts(
        operations.operations / steps,
        operations.bytes_moved / frames,
        calls.events["call"] / steps,
        calls.events["c_call"] / steps,
    )


def count_side(case: Case, side: str) -> tuple[Counts, dict[str, str]]:
    """Count a batch of our collector, which also says which paths it chose, or of the loop by hand."""
    with ExitStack() as stack:
        torch.manual_seed(0)
        if side == HAND:
            loop, close = hand.make_loop(case, side)
            stack.callback(close)
            return count(loop.collect, case.steps, case.frames_per_batch), {}
        collector = ours.make_collector(case, side)
        stack.callback(collector.shutdown)
        batches = iter(collector)
        counts = count(lambda: next(batches), case.steps, case.frames_per_batch)
        return counts, collector.stats().get("paths", {})


def row_of(case: Case, side: str, counts: Counts) -> list[str]:
    """A row of the table."""
    numbers = (counts.operations, counts.python_calls, counts.c_calls)
    return [case.name, side, *(f"{number:.1f}" for number in numbers), f"{counts.bytes_moved:,.0f}"]


def frame_bytes(case: Case) -> int:
    """Bytes of a frame in the loop by hand."""
    loop, close = hand.make_loop(case, HAND)
    close()
    return math.ceil(sum(tensor.nbytes for tensor in loop.batch.values()) / loop.frames)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", metavar="NAME", help="one of the cases (default: all)")
    parser.add_argument("--out", type=Path, default=report.RESULTS, metavar="DIR")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    cases = [find_case(name) for name in arguments.case] if arguments.case else CASES
    rows, sizes, chosen = [], [], []
    for case in cases:
        own = tuple(side for side in case.sides if side not in (MASKED, TORCHRL_SERIAL))
        for side in (HAND, OURS, *own):
            counts, paths = count_side(case, side)
            rows.append(row_of(case, side, counts))
            chosen += [f"- {case.name}, {side}: {part}: {path}" for part, path in paths.items()]
        sizes.append(f"{case.name}: {frame_bytes(case):,}")
    report.write(
        arguments.out,
        "counts.md",
        "Counts a step",
        report.markdown_table(
            ("case", "", "tensor operations a step", "Python calls a step", "C calls a step", "bytes moved a frame"),
            rows,
        ),
        f"Bytes of a frame as the loop by hand stores it: {'; '.join(sizes)}.",
        "\n".join(chosen or ["The collector does not say which paths it chose."]),
    )


if __name__ == "__main__":
    main()
