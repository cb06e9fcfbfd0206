"""How long does it take from publishing weights to the first step that acts with them: 1 MB, 100 MB and 1 GB?

Two workers step CartPole while the consumer iterates, changes all weights of a learner of its own, publishes them, and
goes on iterating. Each frame says when it acted, and which stamps were before and behind the weights: a frame whose
two stamps differ has acted with a mixture of two versions.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import TensorDictModule

from benchmarks import report
from benchmarks.peers.protocol import ROOT, PeerError, run_once
from benchmarks.workers_cases import ASYNC, CARTPOLE, SYNC, TORCHRL_ASYNC, TORCHRL_SYNC, Case
from benchmarks.workers_clocks import Stamped, measure_publications
from benchmarks.workers_sides import make_collector
from rollwright.cli.measuring import summary

SIZES = {"1 MB": 10**6, "100 MB": 10**8, "1 GB": 10**9}
SIDES = (SYNC, ASYNC, TORCHRL_SYNC, TORCHRL_ASYNC)
STEPS = 50  # of a worker in a batch: a few milliseconds


def main(argv: list[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    if arguments.measure:
        torch.set_num_threads(1)
        print(json.dumps(measure_own(arguments.measure, arguments.workers, arguments.num_bytes, arguments.rounds)))
        return
    if arguments.quick:
        arguments.size, arguments.rounds = ["1 MB"], 2
    torchrl = None if arguments.no_peers else arguments.torchrl_python
    results: dict[str, dict[str, Any]] = {}
    for size in arguments.size or SIZES:
        for side in SIDES if torchrl else (SYNC, ASYNC):
            print(f"{size}, {side} ...", flush=True)
            try:
                found = measure(side, arguments.workers, SIZES[size], arguments.rounds, torchrl)
            except PeerError as error:
                found = {"missing": str(error)}
            results.setdefault(size, {})[side] = found
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "workers_publish.json").write_text(json.dumps(results, indent=1))
    report.write(
        arguments.out,
        "workers_publish.md",
        f"Milliseconds from publishing weights to {arguments.workers} workers that act with them",
        f"Medians of {arguments.rounds} publications, quartiles in brackets. The learner waits for the call; first and "
        "last are the workers' first steps with the new weights, from the beginning of the call.",
        report.markdown_table(("weights", "", "call", "first", "last", "torn frames"), table_rows(results)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", action="append", choices=list(SIZES), help="of the weights (may be repeated; default: all)")
    add("--workers", type=int, default=2)
    add("--rounds", type=int, default=15, help="publications")
    add("--quick", action="store_true", help="see that everything runs: 2 publications of 1 MB")
    add("--no-peers", action="store_true", help="measure nothing but our collectors")
    add("--torchrl-python", type=Path, default=ROOT / ".venv-bench-torchrl/bin/python", metavar="PATH")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    add("--measure", choices=[SYNC, ASYNC], help="measure one side in this program, and print JSON")
    add("--num-bytes", type=int, help="for --measure")
    return parser


def measure(side: str, workers: int, num_bytes: int, rounds: int, torchrl: Path | None) -> dict[str, Any]:
    """What :func:`measure_publications` finds, in a program of its own.

    Raises:
        PeerError: the program fails.
    """
    numbers = {"--workers": workers, "--num-bytes": num_bytes, "--rounds": rounds}
    if side in (SYNC, ASYNC):
        options = [text for name, value in numbers.items() for text in (name, str(value))]
        return run_once(Path(sys.executable), "benchmarks.workers_publish", "--measure", side, *options, limit_s=600)
    peer = "benchmarks.peers.torchrl_workers"
    texts = [str(value) for value in numbers.values()]
    return run_once(torchrl or Path(), peer, "publish", side, str(STEPS), *texts, limit_s=600)


def measure_own(side: str, workers: int, num_bytes: int, rounds: int) -> dict[str, Any]:
    """What :func:`measure_publications` finds of our collectors, in this program."""
    learner = Stamped(num_bytes)
    policy, copied = (
        TensorDictModule(module, in_keys=["observation"], out_keys=list(Stamped.out_keys))
        for module in (Stamped(num_bytes), learner)
    )
    with make_collector(Case(CARTPOLE, workers, STEPS), side, policy) as collector:
        publish = partial(collector.update_policy_weights_, copied)
        return measure_publications(collector, learner, publish, workers, rounds)


def table_rows(results: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A row for each side of each size."""
    rows = []
    for size, sides in results.items():
        for side, found in sides.items():
            if "missing" in found:
                rows.append([size, side, f"not measured: {found['missing'][:100]}", "", "", ""])
                continue
            middles = [summary([1e3 * value for value in found[name]]) for name in ("call", "first", "last")]
            cells = [f"{m.median:,.2f} ({m.low:,.2f} to {m.high:,.2f})" for m in middles]
            rows.append([size, side, *cells, f"{found['torn']:,} of {found['frames']:,}"])
    return rows


if __name__ == "__main__":
    main()
