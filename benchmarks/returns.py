"""Do programs learn the same with our collector, environments and buffer as with TorchRL's?

`python -m benchmarks.returns` trains PPO on CartPole and SAC on Pendulum with TorchRL's losses, the same networks and
five seeds, once with each library's collector, environment and buffer. Each run is a process of TorchRL's environment.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.peers.protocol import ROOT, PeerError, run_once

FRAMES = {"ppo": 102_400, "sac": 12_000}
TITLES = {"ppo": "PPO, CartPole-v1", "sac": "SAC, Pendulum-v1"}
SIDES = ("rollwright", "torchrl")
LIMIT_S = 3600.0


def train(python: Path, seeds: Sequence[int], frames: Mapping[str, int]) -> dict[str, dict[str, list[float]]]:
    """Mean returns of the last quarter of the frames: by algorithm, by side, one a seed.

    Raises:
        PeerError: a run fails.
    """
    found: dict[str, dict[str, list[float]]] = {name: {side: [] for side in SIDES} for name in frames}
    for name, count in frames.items():
        for seed in seeds:
            for side in SIDES:
                answer = run_once(
                    python, "benchmarks.peers.torchrl_returns", side, name, str(seed), str(count), limit_s=LIMIT_S
                )
                found[name][side].append(answer["mean_return"])
                print(f"{TITLES[name]}, seed {seed}, {side}: {answer['mean_return']:.1f}", flush=True)
    return found


def rows(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[list[str]]:
    """By algorithm: means with standard deviations over seeds, and their difference over its standard error."""
    table = []
    for name, sides in found.items():
        ours, theirs = sides["rollwright"], sides["torchrl"]
        table.append([TITLES[name], _summary(ours), _summary(theirs), _difference(ours, theirs)])
    return table


def _summary(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{statistics.mean(values):.1f}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Welch's t: within about 2, the seeds give no sign of a difference."""
    if len(ours) < 2:
        return ""
    error = ((statistics.variance(ours) + statistics.variance(theirs)) / len(ours)) ** 0.5
    return f"{(statistics.mean(ours) - statistics.mean(theirs)) / error:+.1f}" if error else ""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed and few frames: only see that it runs")
    parser.add_argument("--torchrl-python", type=Path, default=ROOT / ".venv-bench-torchrl/bin/python", metavar="PATH")
    parser.add_argument("--out", type=Path, default=report.RESULTS, metavar="DIR")
    arguments = parser.parse_args(argv)
    seeds = range(1 if arguments.quick else arguments.seeds)
    frames = {"ppo": 8_192, "sac": 2_000} if arguments.quick else FRAMES
    title = "Returns of programs that learn"
    try:
        found = train(arguments.torchrl_python, seeds, frames)
    except PeerError as error:
        report.write(arguments.out, "returns.md", title, f"Not measured: {error}")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "returns.json").write_text(json.dumps(found, indent=1))
    report.write(
        arguments.out,
        "returns.md",
        title,
        f"Mean return of episodes in the last quarter of the frames (PPO: {frames['ppo']:,}, SAC: {frames['sac']:,}) "
        f"over {len(seeds)} seeds, with its standard deviation. TorchRL's losses and networks on both sides; "
        "collector, environment and buffer differ. Last column: difference of the means over its standard error.",
        report.markdown_table(("program", "rollwright", "TorchRL", "difference"), rows(found)),
    )


if __name__ == "__main__":
    main()
