"""How many frames a second, beside a loop by hand and beside other packages?

`python -m benchmarks.compare` measures all cases. The sides of a case take turns, the order turning round each time.
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

from benchmarks import hand, ours, report
from benchmarks.cases import (
    CASES,
    COMPILED,
    HAND,
    MASKED,
    OURS,
    SB3,
    TIANSHOU,
    TORCHRL,
    TORCHRL_SERIAL,
    TRANSFORMS,
    Case,
    find_case,
)
from benchmarks.peers.protocol import ROOT, Peer, PeerError
from rollwright.cli.measuring import alternate, rate, ratios, summary

PEERS = {
    TORCHRL: ("torchrl", "benchmarks.peers.torchrl_loop"),
    TORCHRL_SERIAL: ("torchrl", "benchmarks.peers.torchrl_loop"),
    SB3: ("sb3", "benchmarks.peers.sb3_loop"),
    TIANSHOU: ("sb3", "benchmarks.peers.tianshou_loop"),
}
USUAL_PEERS = (TORCHRL, SB3, TIANSHOU)


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
    pythons = {"torchrl": arguments.torchrl_python, "sb3": arguments.sb3_python}
    cases = [find_case(name) for name in arguments.case] if arguments.case else list(CASES)
    results = []
    for case in cases:
        print(f"{case.name} ...", flush=True)
        results.append(measure(case, {} if arguments.no_peers else pythons, arguments.rounds, arguments.seconds))
    arguments.out.mkdir(parents=True, exist_ok=True)
    raw = {case.name: {"frames_per_second": rates, "missing": missing} for case, rates, missing in results}
    (arguments.out / "compare.json").write_text(json.dumps(raw, indent=1))
    report.write(
        arguments.out,
        "compare.md",
        "Frames per second",
        f"Medians of {arguments.rounds} rounds of {arguments.seconds:g} s in turns, quartiles in brackets; the ratio "
        "is the median over rounds.",
        report.markdown_table(("case", "", "frames/s", "", "x by hand", ""), table_rows(results)),
        "## Promises",
        report.markdown_table(("promise", "at least", "measured", "kept"), promise_rows(results)),
    )
    _draw(results, arguments.out / "compare.png")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--case", action="append", metavar="NAME", help="one of the cases (may be repeated; default: all)")
    add("--rounds", type=int, default=11)
    add("--seconds", type=float, default=0.4, help="of each side in each round, at least")
    add("--quick", action="store_true", help="see that everything runs: 1 round of 10 ms")
    add("--no-peers", action="store_true", help="measure no other packages")
    add("--torchrl-python", type=Path, default=ROOT / ".venv-bench-torchrl/bin/python", metavar="PATH")
    add("--sb3-python", type=Path, default=ROOT / ".venv-bench-sb3/bin/python", metavar="PATH")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    return parser


def measure(case: Case, pythons: Mapping[str, Path], rounds: int, seconds: float) -> Measured:
    """Measure all sides of a case, those of peers with the Python that ``pythons`` names for each environment."""
    sides: dict[str, Callable[[], float]] = {}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        for name in (HAND, OURS, *case.sides, *USUAL_PEERS):
            try:
                if name not in PEERS:
                    sides[name] = _own_side(case, name, seconds, stack)
                elif pythons:
                    sides[name] = _peer_side(case, name, pythons, seconds, stack)
            except PeerError as error:
                missing[name] = str(error)
        return Measured(case, alternate(sides, rounds), missing)


def _own_side(case: Case, name: str, seconds: float, stack: ExitStack) -> Callable[[], float]:
    collect: Callable[[], int]
    if name in (HAND, MASKED):
        loop, close = hand.make_loop(case, name)
        stack.callback(close)

        def collect() -> int:
            loop.collect()
            return loop.frames

    else:
        collector = ours.make_collector(case, name)
        stack.callback(collector.shutdown)
        batches = iter(collector)

        def collect() -> int:
            return next(batches).numel()

    collect()  # what happens once, happens here
    return partial(rate, collect, seconds=seconds)


def _peer_side(
    case: Case, name: str, pythons: Mapping[str, Path], seconds: float, stack: ExitStack
) -> Callable[[], float]:
    environment, module = PEERS[name]
    peer = Peer(pythons[environment], module, case.name, name)
    stack.callback(peer.close)
    return partial(peer.rate, seconds)


# The report -------------------------------------------------------------------------------------------


def table_rows(results: list[Measured]) -> list[list[str]]:
    """A row for each side of each case."""
    rows = []
    for case, rates, missing in results:
        for name, values in rates.items():
            speed, ratio = summary(values), ratios(values, rates[HAND])
            rows.append(
                [
                    case.name,
                    name,
                    f"{speed.median:,.0f}",
                    f"({speed.low:,.0f} to {speed.high:,.0f})",
                    f"{ratio.median:.2f}",
                    f"({ratio.low:.2f} to {ratio.high:.2f})",
                ]
            )
        rows.extend([case.name, name, f"not measured: {reason[:100]}", "", "", ""] for name, reason in missing.items())
    return rows


def promise_rows(results: list[Measured]) -> list[list[str]]:
    """A row for each target of each case."""
    rows = []
    for case, rates, _ in results:
        for side, base, least in ((target.side, target.base, target.least) for target in case.targets):
            text = f"{case.name}: {side} / {base}"
            if side in rates and base in rates:
                ratio = ratios(rates[side], rates[base]).median
                rows.append([text, f"{least:.2f}", f"{ratio:.2f}", "yes" if ratio >= least else "no"])
            else:
                rows.append([text, f"{least:.2f}", "not measured", ""])
    return rows


_COLOURS = {
    HAND: "0.4",
    MASKED: "0.7",
    OURS: "tab:blue",
    TRANSFORMS: "tab:cyan",
    COMPILED: "tab:purple",
    TORCHRL: "tab:red",
    TORCHRL_SERIAL: "tab:pink",
    SB3: "tab:orange",
    TIANSHOU: "tab:green",
}


def _draw(results: list[Measured], path: Path) -> None:
    figure = report.new_figure(9, 1.2 + 0.9 * len(results))
    if figure is None:
        return
    names = list(dict.fromkeys(name for result in results for name in result.rates))
    axes = figure.subplots()
    height = 0.85 / len(names)
    for i, name in enumerate(names):
        places, widths, errors = [], [], ([], [])
        for row, result in enumerate(results):
            if name in result.rates:
                ratio = ratios(result.rates[name], result.rates[HAND])
                places.append(row + i * height)
                widths.append(ratio.median)
                errors[0].append(ratio.median - ratio.low)
                errors[1].append(ratio.high - ratio.median)
        axes.barh(places, widths, height, xerr=errors, label=name, color=_COLOURS[name])
    axes.set_yticks([row + 0.4 for row in range(len(results))], [result.case.name for result in results])
    axes.invert_yaxis()
    axes.axvline(1.0, color="0.4", linewidth=0.8)
    axes.set_xlabel("frames per second, as a multiple of the loop by hand")
    axes.legend(fontsize="small")
    report.save_figure(figure, path)


if __name__ == "__main__":
    main()
