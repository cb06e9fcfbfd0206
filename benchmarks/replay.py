"""How many rows a second go into a replay buffer, and how many batches come out?

Buffers are full, in memory or in files mapped into memory. Beside other packages and the limit: the same bytes copied
by NumPy. A call of "extend" writes 1000 rows; a batch has 256 frames, or 8 slices of 32. All sides take turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import report
from benchmarks.peers.protocol import ROOT, Peer, PeerError
from benchmarks.replay_cases import (
    CASES,
    CPPRB,
    GROWTH,
    GROWTH_LIMIT,
    LIMIT,
    LIMIT_OUT,
    OPERATIONS,
    OURS,
    SLICES,
    SLICES_CACHED,
    TARGETS,
    TORCHRL,
    TORCHRL_CACHED,
    Case,
    find_case,
)
from benchmarks.replay_sides import make_limits, make_side
from rollwright.cli.measuring import alternate, rate, ratios, summary
from rollwright.data import replay_buffers

PEERS = {
    TORCHRL: ("torchrl", "benchmarks.peers.torchrl_replay"),
    TORCHRL_CACHED: ("torchrl", "benchmarks.peers.torchrl_replay"),
    CPPRB: ("cpprb", "benchmarks.peers.cpprb_replay"),
}
BASES = (TORCHRL, TORCHRL_CACHED, CPPRB, LIMIT, LIMIT_OUT)
QUICK = 10_000  # frames stored, at most


class Measured(NamedTuple):
    """What came of an operation.

    Attributes:
        case: what is stored.
        operation: what is done.
        rates: of each side, in order of rounds: rows written, or batches drawn, per second.
        missing: why the others were not measured.
    """

    case: Case
    operation: str
    rates: dict[str, list[float]]
    missing: dict[str, str]


def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    cases = [find_case(name) for name in arguments.case] or [case for case in CASES if not case.large]
    cases += [case for case in CASES if case.large and arguments.large and case not in cases]
    growth = GROWTH
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.01
        cases, growth = [case for case in cases if case.stored <= QUICK], (1_000, QUICK)
    torch.set_num_threads(1)
    pythons = {"torchrl": arguments.torchrl_python, "cpprb": arguments.cpprb_python}
    results = []
    for case in cases:
        for operation in arguments.operation or case.operations:
            print(f"{case.name}: {operation} ...", flush=True)
            peers = {} if arguments.no_peers else pythons
            results.append(measure(case, operation, peers, arguments.rounds, arguments.seconds))
            _save(arguments.out, results)
    grown = {} if arguments.case or arguments.operation else measure_growth(growth, arguments.rounds, arguments.seconds)
    report.write(
        arguments.out,
        "replay.md",
        "Replay buffers",
        f"Medians of {arguments.rounds} rounds of {arguments.seconds:g} s in turns: rows written or batches drawn per "
        "second. x: our rate as a multiple of another's, the median over rounds. Quartiles in brackets.",
        report.markdown_table(("stored", "operation", OURS, *(f"x {base}" for base in BASES)), table_rows(results)),
        "## As more is stored",
        report.markdown_table(("frames of 16 B", "batches of slices/s", "time, x the smallest"), growth_rows(grown)),
        "## Promises",
        report.markdown_table(
            ("promise", "wanted", "measured", "kept"), [*promise_rows(results), *_growth_kept(grown)]
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--case", action="append", default=[], metavar="NAME", help="one of the cases (may be repeated)")
    add("--operation", action="append", choices=OPERATIONS, help="one of them (may be repeated)")
    add("--rounds", type=int, default=31)
    add("--seconds", type=float, default=0.05, help="of each side in each round, at least")
    add("--large", action="store_true", help="100,000 frames of 28 KiB too: 3 GB of disk for each side")
    add("--quick", action="store_true", help=f"see that it runs: 1 round of 10 ms, at most {QUICK:,} frames stored")
    add("--no-peers", action="store_true", help="measure no other packages")
    add("--torchrl-python", type=Path, default=ROOT / ".venv-bench-torchrl/bin/python", metavar="PATH")
    add("--cpprb-python", type=Path, default=ROOT / ".venv-bench-cpprb/bin/python", metavar="PATH")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    return parser


def _save(folder: Path, results: list[Measured]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    raw = [{**result._asdict(), "case": result.case.name} for result in results]
    (folder / "replay.json").write_text(json.dumps(raw, indent=1))


# Measuring ---------------------------------------------------------------------------------------


def measure(case: Case, operation: str, pythons: Mapping[str, Path], rounds: int, seconds: float) -> Measured:
    """Measure all sides of an operation, those of peers with the Python that ``pythons`` names for each environment.

    Raises:
        RuntimeError: what our side wrote or drew is wrong.
    """
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        own = {OURS: make_side(replay_buffers, case, operation, _folder(stack))}
        own |= make_limits(case, operation, _folder(stack))
        sides = {name: partial(rate, side.call, seconds=seconds) for name, side in own.items()}
        for name in _peers(operation) if pythons else ():
            environment, module = PEERS[name]
            asked = SLICES_CACHED if name == TORCHRL_CACHED else operation
            try:
                peer = Peer(pythons[environment], module, case.name, asked)
            except PeerError as error:
                missing[name] = str(error)
                continue
            stack.callback(peer.close)
            sides[name] = partial(peer.rate, seconds)
        rates = _in_turns(sides, rounds)
        for side in own.values():
            side.check()
    return Measured(case, operation, rates, missing)


def _in_turns(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """As :func:`alternate`, after a round that is not counted: what happens once, happens there."""
    return {name: rates[1:] for name, rates in alternate(sides, rounds + 1).items()}


def _folder(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory()))


def _peers(operation: str) -> Iterator[str]:
    return (name for name in PEERS if name != TORCHRL_CACHED or operation == SLICES)


def measure_growth(stored: tuple[int, ...], rounds: int, seconds: float) -> dict[int, list[float]]:
    """Batches of slices per second of buffers of 16-byte frames, from the smallest to the largest."""
    with ExitStack() as stack:
        own = {
            str(number): make_side(replay_buffers, replace(CASES[0], stored=number), SLICES, _folder(stack))
            for number in stored
        }
        rates = _in_turns({name: partial(rate, side.call, seconds=seconds) for name, side in own.items()}, rounds)
        for side in own.values():
            side.check()
    return {int(name): values for name, values in rates.items()}


# The report -------------------------------------------------------------------------------------------


def table_rows(results: list[Measured]) -> list[list[str]]:
    """A row for each operation of each case."""
    rows = []
    for case, operation, rates, missing in results:
        ours = summary(rates[OURS])
        cells = [case.name, operation, f"{ours.median:,.0f} ({ours.low:,.0f} to {ours.high:,.0f})"]
        rows.append([*cells, *(_multiple(rates, base, missing) for base in BASES)])
    return rows


def _multiple(rates: Mapping[str, list[float]], base: str, missing: Mapping[str, str]) -> str:
    if base not in rates:
        return missing.get(base, "")[:60]
    ratio = ratios(rates[OURS], rates[base])
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def promise_rows(results: list[Measured]) -> list[list[str]]:
    """A row for each target whose operation was to be measured."""
    measured = {(result.case.name, result.operation): result.rates for result in results}
    rows = []
    for case, operation, base, least in ((t.case, t.operation, t.base, t.least) for t in TARGETS):
        rates = measured.get((case, operation), {})
        text = f"{case}: {operation}, x {base}"
        if OURS in rates and base in rates:
            ratio = ratios(rates[OURS], rates[base]).median
            rows.append([text, f"at least {least:.2f}", f"{ratio:.2f}", "yes" if ratio >= least else "no"])
        else:
            rows.append([text, f"at least {least:.2f}", "not measured", ""])
    return rows


def growth_rows(grown: Mapping[int, list[float]]) -> list[list[str]]:
    """A row for each number of frames stored."""
    rows = []
    for number, values in grown.items():
        speed, more = summary(values), ratios(grown[min(grown)], values)
        cells = [f"{number:,}", f"{speed.median:,.0f} ({speed.low:,.0f} to {speed.high:,.0f})"]
        rows.append([*cells, f"{more.median:.2f} ({more.low:.2f} to {more.high:.2f})"])
    return rows


def _growth_kept(grown: Mapping[int, list[float]]) -> list[list[str]]:
    if not grown:
        return []
    smallest, largest = min(grown), max(grown)
    more = ratios(grown[smallest], grown[largest]).median
    text = f"slices at {largest:,} frames, time x that at {smallest:,}"
    return [[text, f"at most {GROWTH_LIMIT:.2f}", f"{more:.2f}", "yes" if more <= GROWTH_LIMIT else "no"]]


if __name__ == "__main__":
    main()
