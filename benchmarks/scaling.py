"""What does a frame cost as environments are added, from 1 to 1024?

CartPole in gymnasium's vector environment and in EnvPool; our collector and the loop by hand take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.cases import HAND, OURS, Case
from benchmarks.compare import measure
from rollwright.cli.measuring import ratios, summary

NUM_ENVS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FRAMES_PER_BATCH = 4096
SOURCES = {"gym": "gymnasium", "envpool": "EnvPool"}


def make_case(source: str, num_envs: int) -> Case:
    """CartPole, in batches of about the same size for any number of environments."""
    steps = max(16, min(1000, FRAMES_PER_BATCH // num_envs))
    return Case(f"{num_envs} CartPole, {SOURCES[source]}", "CartPole-v1", num_envs, "categorical", steps, source)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=7)
    add("--seconds", type=float, default=0.2, help="of each side in each round, at least")
    add("--num-envs", type=int, action="append", metavar="N", help="a number (may be repeated; default: 1 to 1024)")
    add("--quick", action="store_true", help="see that everything runs: 1 round of 10 ms")
    add("--out", type=Path, default=report.RESULTS, metavar="DIR")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.01
    torch.set_num_threads(1)
    costs: dict[tuple[str, str], dict[int, float]] = {}
    rows = []
    for source in SOURCES:
        for num_envs in arguments.num_envs or NUM_ENVS:
            rates = measure(make_case(source, num_envs), {}, arguments.rounds, arguments.seconds).rates
            for side, values in rates.items():
                costs.setdefault((SOURCES[source], side), {})[num_envs] = 1e6 / summary(values).median
            rows.append([f"{SOURCES[source]}, {num_envs}", *_cells(rates)])
            print(rows[-1], flush=True)
    report.write(
        arguments.out,
        "scaling.md",
        "Microseconds a frame",
        f"Medians of {arguments.rounds} rounds of {arguments.seconds:g} s in turns; the ratio is that of frames per "
        "second, with its quartiles.",
        report.markdown_table(("environments", "by hand", "rollwright", "x by hand", ""), rows),
    )
    _draw(costs, arguments.out / "scaling.png")


def _cells(rates: Mapping[str, list[float]]) -> list[str]:
    ratio = ratios(rates[OURS], rates[HAND])
    costs = [f"{1e6 / summary(rates[side]).median:.2f}" for side in (HAND, OURS)]
    return [*costs, f"{ratio.median:.2f}", f"({ratio.low:.2f} to {ratio.high:.2f})"]


def _draw(costs: Mapping[tuple[str, str], Mapping[int, float]], path: Path) -> None:
    figure = report.new_figure(7, 5)
    if figure is None:
        return
    axes = figure.subplots()
    for (source, side), values in costs.items():
        style = "--" if side == HAND else "-"
        colour = "tab:blue" if source == SOURCES["gym"] else "tab:orange"
        axes.plot(list(values), list(values.values()), style, color=colour, marker=".", label=f"{source}, {side}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("environments")
    axes.set_ylabel("microseconds a frame")
    axes.legend()
    report.save_figure(figure, path)


if __name__ == "__main__":
    main()
