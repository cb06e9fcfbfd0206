"""How long does it take from the construction of a collector with two workers to its first batch?

CartPole with a policy of 64 units, each measurement in a program of its own: the first collector of the program, which
may have to import and to set up what later ones find there, and the second, after the first was shut down.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.peers.protocol import ROOT, PeerError, run_once
from benchmarks.workers_cases import ASYNC, CARTPOLE, CASES, SYNC, TORCHRL_ASYNC, TORCHRL_SYNC, Case, find_case
from benchmarks.workers_clocks import measure_starts
from benchmarks.workers_sides import make_collector
from rollwright.cli.measuring import alternate, ratios, summary

PEERS = {SYNC: TORCHRL_SYNC, ASYNC: TORCHRL_ASYNC}
WHICH = ("first", "second")
MOST = {"first": 0.5, "second": 0.2}  # of TorchRL's seconds


def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    if arguments.measure:
        torch.set_num_threads(1)
        case = find_case(arguments.case)
        print(json.dumps(measure_starts(lambda: make_collector(case, arguments.measure))))
        return
    rounds = 1 if arguments.quick else arguments.rounds
    case = next(case for case in CASES if (case.env_name, case.workers) == (CARTPOLE, arguments.workers))
    seconds, missing = measure(case, None if arguments.no_peers else arguments.torchrl_python, rounds)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "workers_start.json").write_text(json.dumps({"seconds": seconds, "missing": missing}, indent=1))
    report.write(
        arguments.out,
        "workers_start.md",
        f"Seconds to the first batch of {arguments.workers} workers",
        f"Medians of {rounds} programs each, in turns, quartiles in brackets.",
        report.markdown_table(("", "first of a program", "second"), table_rows(seconds)),
        "\n".join(f"- {name} was not measured: {reason}" for name, reason in missing.items()) or "All were measured.",
        "## Promises",
        report.markdown_table(("promise", "at most", "measured", "kept"), promise_rows(seconds)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workers", type=int, default=2)
    add("--rounds", type=int, default=7)
    add("--quick", action="store_true", help="see that everything runs: 1 round")
    add("--no-peers", action="store_true", help="measure nothing but our collectors")
    add("--torchrl-python", type=Path, default=ROOT / ".venv-bench-torchrl/bin/python", metavar="PATH")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    add("--measure", choices=[SYNC, ASYNC], help="measure one side in this program, and print JSON")
    add("--case", help="for --measure")
    return parser


def measure(case: Case, torchrl: Path | None, rounds: int) -> tuple[dict[str, dict[str, list[float]]], dict[str, str]]:
    """Seconds of each side, in order of rounds, of the first collector and of the second; and what is missing, why."""
    missing: dict[str, str] = {}
    seconds: dict[str, dict[str, list[float]]] = {}

    def program(side: str) -> float:
        if side in missing:
            return 0.0
        own = ("benchmarks.workers_start", "--measure", side, "--case", case.name)
        try:
            if side in PEERS:
                answer = run_once(Path(sys.executable), *own)
            else:
                answer = run_once(torchrl or Path(), "benchmarks.peers.torchrl_workers", "start", case.name, side)
        except PeerError as error:
            if side in PEERS:
                raise
            missing[side] = str(error)
            return 0.0
        for which in WHICH:
            seconds.setdefault(side, {}).setdefault(which, []).append(answer[which])
        return answer["first"]

    sides = [*PEERS, *(PEERS.values() if torchrl is not None else ())]
    alternate({side: lambda side=side: program(side) for side in sides}, rounds)
    return {side: times for side, times in seconds.items() if side not in missing}, missing


def table_rows(seconds: Mapping[str, Mapping[str, list[float]]]) -> list[list[str]]:
    """A row for each side."""
    rows = []
    for side, times in seconds.items():
        middles = [summary(times[which]) for which in WHICH]
        rows.append([side, *(f"{m.median:.3f} ({m.low:.3f} to {m.high:.3f})" for m in middles)])
    return rows


def promise_rows(seconds: Mapping[str, Mapping[str, list[float]]]) -> list[list[str]]:
    """A row for each of our collectors, the first and the second."""
    rows = []
    for side, peer in PEERS.items():
        for which, most in MOST.items():
            text = f"{side} / {peer}, {which} of a program"
            if side in seconds and peer in seconds:
                ratio = ratios(seconds[side][which], seconds[peer][which]).median
                rows.append([text, f"{most:.2f}", f"{ratio:.2f}", "yes" if ratio <= most else "no"])
            else:
                rows.append([text, f"{most:.2f}", "not measured", ""])
    return rows


if __name__ == "__main__":
    main()
