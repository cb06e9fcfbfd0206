"""How many frames a second come from 1, 2, 4 and 8 workers, beside one process and beside other packages?

Each worker steps one environment: CartPole with a policy of 64 units, with steps that take 0, 1 and 10 ms longer
(asleep, or computing), and stacks of images. All sides take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import report
from benchmarks.peers.protocol import ROOT, Peer, PeerError
from benchmarks.workers_cases import (
    CASES,
    GYMNASIUM,
    NUM_WORKERS,
    ONE,
    SIDES,
    TARGETS,
    TORCHRL_ASYNC,
    TORCHRL_SYNC,
    Case,
)
from benchmarks.workers_sides import make_side
from rollwright.cli.measuring import alternate, rate, ratios, summary

PEERS = {
    GYMNASIUM: ("own", "benchmarks.peers.gymnasium_workers"),
    TORCHRL_SYNC: ("torchrl", "benchmarks.peers.torchrl_workers"),
    TORCHRL_ASYNC: ("torchrl", "benchmarks.peers.torchrl_workers"),
}
_REST_S = 0.5  # asynchronous workers, ours and others', go on with up to two batches each after their turn
ENV_NAMES = tuple(dict.fromkeys(case.env_name for case in CASES))


class Measured(NamedTuple):
    """What came of a case.

    Attributes:
        case: the case.
        rates: frames per second of each side, in order of rounds.
        missing: why the others were not measured.
    """

    case: Case
    rates: dict[str, list[float]]
    missing: dict[str, str]


def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.01
    torch.set_num_threads(1)
    wanted_workers = arguments.workers or ((1, 2) if arguments.quick else NUM_WORKERS)
    pythons = {} if arguments.no_peers else {"own": Path(sys.executable), "torchrl": arguments.torchrl_python}
    results = []
    for case in CASES:
        if case.env_name in (arguments.env or ENV_NAMES) and case.workers in wanted_workers:
            print(f"{case.name} ...", flush=True)
            results.append(measure(case, pythons, arguments.rounds, arguments.seconds))
            _save(arguments.out, results)
    report.write(
        arguments.out,
        "workers.md",
        "Frames per second of many workers",
        f"Medians of {arguments.rounds} rounds of {arguments.seconds:g} s in turns, quartiles in brackets. Ratios are "
        "those of frames per second to one process, medians over rounds.",
        report.markdown_table(("environment", "workers", f"{ONE}, frames/s", *SIDES[1:]), table_rows(results)),
        "\n".join(_notes(results)) or "All sides were measured.",
        "## Promises",
        report.markdown_table(("promise", "at least", "measured", "kept"), promise_rows(results)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--env", action="append", choices=ENV_NAMES, help="one of the environments (may be repeated; default: all)")
    add("--workers", action="append", type=int, choices=NUM_WORKERS, help="a number (may be repeated; default: all)")
    add("--rounds", type=int, default=7)
    add("--seconds", type=float, default=1.0, help="of each side in each round, at least")
    add("--quick", action="store_true", help="see that everything runs: 1 and 2 workers, 1 round of 10 ms")
    add("--no-peers", action="store_true", help="measure nothing but our collectors")
    add("--torchrl-python", type=Path, default=ROOT / ".venv-bench-torchrl/bin/python", metavar="PATH")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    return parser


def _save(folder: Path, results: list[Measured]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    raw = {case.name: {"frames_per_second": rates, "missing": missing} for case, rates, missing in results}
    (folder / "workers.json").write_text(json.dumps(raw, indent=1))


def measure(case: Case, pythons: Mapping[str, Path], rounds: int, seconds: float) -> Measured:
    """Measure all sides of a case, those of peers with the Python that ``pythons`` names for each environment."""
    sides: dict[str, Callable[[], float]] = {}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        for name in SIDES:
            try:
                if name not in PEERS:
                    sides[name] = _own_rate(make_side(case, name, stack), seconds)
                elif pythons:
                    sides[name] = _peer_rate(case, name, pythons, seconds, stack)
            except PeerError as error:
                missing[name] = str(error)
        return Measured(case, alternate(sides, rounds, rest_s=min(_REST_S, seconds)), missing)


def _own_rate(collect: Callable[[], int], seconds: float) -> Callable[[], float]:
    collect()  # what happens once, happens here

    def measured() -> float:
        for _ in range(2):  # what was collected while others had their turn, and caches
            collect()
        return rate(collect, seconds=seconds)

    return measured


def _peer_rate(
    case: Case, name: str, pythons: Mapping[str, Path], seconds: float, stack: ExitStack
) -> Callable[[], float]:
    environment, module = PEERS[name]
    peer = Peer(pythons[environment], module, case.name, name)
    stack.callback(peer.close)
    return lambda: peer.rate(seconds)


# The report -------------------------------------------------------------------------------------------


def table_rows(results: Sequence[Measured]) -> list[list[str]]:
    """A row for each case: the rate of one process, and the others as multiples of it."""
    rows = []
    for case, rates, _ in results:
        one = summary(rates[ONE])
        cells = [case.env_name, str(case.workers), f"{one.median:,.0f} ({one.low:,.0f} to {one.high:,.0f})"]
        for side in SIDES[1:]:
            ratio = ratios(rates[side], rates[ONE]) if side in rates else None
            cells.append("" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")
        rows.append(cells)
    return rows


def _notes(results: Sequence[Measured]) -> list[str]:
    """What was not measured, and why; each once."""
    reasons = {(side, reason) for result in results for side, reason in result.missing.items()}
    return [f"- {side} was not measured everywhere: {reason[:200]}" for side, reason in sorted(reasons)]


def promise_rows(results: Sequence[Measured]) -> list[list[str]]:
    """A row for each target whose case was measured."""
    measured = {(result.case.env_name, result.case.workers): result.rates for result in results}
    rows = []
    for target in TARGETS:
        rates = measured.get((target.env_name, target.workers))
        if rates is None:
            continue
        text = f"{target.env_name}, {target.workers} workers: {target.side} / {target.base}"
        if target.side in rates and target.base in rates:
            ratio = ratios(rates[target.side], rates[target.base]).median
            rows.append([text, f"{target.least:.2f}", f"{ratio:.2f}", "yes" if ratio >= target.least else "no"])
        else:
            rows.append([text, f"{target.least:.2f}", "not measured", ""])
    return rows


if __name__ == "__main__":
    main()
