"""How many frames a second do whole programs collect, beside a loop by hand and beside TorchRL?

`python -m benchmarks.programs` measures all cases on one thread, the sides in turns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import report
from benchmarks.peers.protocol import ROOT, Peer, PeerError
from benchmarks.programs_cases import ALONE, COMPILED, HAND, INSIDE, OURS, PROGRAMS, TORCHRL, Program, find_program
from benchmarks.programs_hand import make_alone, make_hand
from benchmarks.programs_sides import Library, NotThere, make_program
from rollwright.cli.measuring import alternate, rate, ratios, summary

PAIRS = ((OURS, HAND), (COMPILED, HAND), (ALONE, HAND), (OURS, TORCHRL), (INSIDE, TORCHRL))


class Measured(NamedTuple):
    """What came of a program.

    Attributes:
        program: the program.
        rates: frames per second of each side, in order of rounds.
        missing: why the others were not measured, or what was used in place of a name that is not there.
        paths: how our collector ran, from its ``stats()``.
    """

    program: Program
    rates: dict[str, list[float]]
    missing: dict[str, str]
    paths: dict[str, str]


def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.01
    torch.set_num_threads(1)
    programs = [find_program(name) for name in arguments.case] if arguments.case else list(PROGRAMS)
    python = None if arguments.no_peers else arguments.torchrl_python
    results = []
    for program in programs:
        print(f"{program.name} ...", flush=True)
        results.append(measure(program, python, arguments.rounds, arguments.seconds))
    arguments.out.mkdir(parents=True, exist_ok=True)
    raw = {
        result.program.name: {
            "frames_per_second": result.rates,
            "missing": result.missing,
            "paths": result.paths,
        }
        for result in results
    }
    (arguments.out / "programs.json").write_text(json.dumps(raw, indent=1))
    report.write(
        arguments.out,
        "programs.md",
        "Frames per second of whole programs",
        f"Medians of {arguments.rounds} rounds of {arguments.seconds:g} s in turns, one thread; quartiles in brackets. "
        "A ratio is the median over rounds.",
        report.markdown_table(("program", *(f"{side} / {base}" for side, base in PAIRS)), ratio_rows(results)),
        report.markdown_table(("program", "", "frames/s", ""), speed_rows(results)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--case", action="append", metavar="NAME", help="one of the programs (may be repeated; default: all)")
    add("--rounds", type=int, default=7)
    add("--seconds", type=float, default=0.4, help="of each side in each round, at least")
    add("--quick", action="store_true", help="see that everything runs: 1 round of 10 ms")
    add("--no-peers", action="store_true", help="measure no other packages")
    add("--torchrl-python", type=Path, default=ROOT / ".venv-bench-torchrl/bin/python", metavar="PATH")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    return parser


def measure(program: Program, python: Path | None, rounds: int, seconds: float) -> Measured:
    """Measure all sides of a program; those of TorchRL where its Python is given."""
    sides: dict[str, Callable[[], float]] = {}
    missing: dict[str, str] = {}
    paths: dict[str, str] = {}
    with ExitStack() as stack:
        for name in (HAND, ALONE, OURS, COMPILED, *((TORCHRL, INSIDE) if python else ())):
            try:
                if name in (TORCHRL, INSIDE):
                    peer = Peer(python, "benchmarks.peers.torchrl_programs", program.name, name)
                    stack.callback(peer.close)
                    sides[name] = partial(peer.rate, seconds)
                else:
                    collect = _own_side(program, name, stack, paths, missing)
                    sides[name] = partial(rate, collect, seconds=seconds)
            except (PeerError, NotThere, ImportError) as error:
                missing[name] = str(error)
        return Measured(program, alternate(sides, rounds), missing, paths)


def _own_side(
    program: Program, name: str, stack: ExitStack, paths: dict[str, str], missing: dict[str, str]
) -> Callable[[], int]:
    if name in (HAND, ALONE):
        collect, close = (make_hand if name == HAND else make_alone)(program)
        stack.callback(close)
    else:
        options = {"compile_policy": True} if name == COMPILED else {}
        library = Library("rollwright")
        collect, collector = make_program(library, program, **options)
        if library.notes:
            missing[name] = "; ".join(library.notes)
        stack.callback(collector.shutdown)
    collect()  # what happens once, happens here
    if name not in (HAND, ALONE):
        paths[name] = str(collector.stats().get("paths"))
    return collect


# The report -------------------------------------------------------------------------------------------


def ratio_rows(results: list[Measured]) -> list[list[str]]:
    """A row for each program; then the worst, the mean and the best of each ratio."""
    rows = []
    columns: list[list[float]] = [[] for _ in PAIRS]
    for result in results:
        row = [result.program.name]
        for column, (side, base) in zip(columns, PAIRS, strict=True):
            if side in result.rates and base in result.rates:
                ratio = ratios(result.rates[side], result.rates[base])
                column.append(ratio.median)
                row.append(f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
            else:
                row.append("not measured")
        rows.append(row)
    summaries: Mapping[str, Callable[[list[float]], float]] = {
        "**worst**": min,
        "**mean**": lambda values: sum(values) / len(values),
        "**best**": max,
    }
    for name, function in summaries.items():
        rows.append([name, *(f"{function(column):.2f}" if column else "" for column in columns)])
    return rows


def speed_rows(results: list[Measured]) -> list[list[str]]:
    """A row for each side of each program, and the reason where one was not measured."""
    rows = []
    for result in results:
        for name, values in result.rates.items():
            speed = summary(values)
            rows.append([result.program.name, name, f"{speed.median:,.0f}", f"({speed.low:,.0f} to {speed.high:,.0f})"])
        for name, reason in result.missing.items():
            rows.append([result.program.name, name, reason[:150], ""])
    return rows


if __name__ == "__main__":
    main()
