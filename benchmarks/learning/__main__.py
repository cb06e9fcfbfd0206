"""Learn, beside Stable-Baselines3 at equal settings: `python -m benchmarks.learning --seeds 5`.

Each side of each task learns in turn, seed by seed; a run that is in the results already is not repeated. The value is
the mean return of 20 test episodes without noise, after the last update. Seconds are those of learning: without the
imports, and with the start of workers. The processor time is that of all processes of the side.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev

from benchmarks import report
from benchmarks.learning.protocol import ROOT, Side
from benchmarks.learning.tasks import SB3, SIDES, TASKS

Found = dict[tuple[str, str], list[dict[str, float]]]


def read(path: Path) -> Found:
    """The runs by task and side, in the order of seeds."""
    found: Found = {}
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in sorted(rows, key=lambda row: row["seed"]):
        found.setdefault((row["task"], row["side"]), []).append(row)
    return found


def measure(path: Path, tasks: list[str], seeds: int, peer: Path) -> None:
    """Run what is not there yet."""
    done = {(row["task"], row["side"], row["seed"]) for rows in read(path).values() for row in rows}
    sides: dict[str, Side] = {}
    for seed in range(seeds):
        for task in tasks:
            for name in SIDES:
                if (task, name, seed) in done:
                    continue
                key = "peer" if name == SB3 else "ours"
                if key not in sides:
                    ours = (Path(sys.executable), "benchmarks.learning.ours")
                    sides[key] = Side(*ours if key == "ours" else (peer, "benchmarks.peers.sb3_learning"))
                row = {"task": task, "side": name, "seed": seed, **sides[key].learn(task, name, seed)}
                with path.open("a") as file:
                    print(json.dumps(row), file=file)
                print(row, flush=True)
    for side in sides.values():
        side.close()


def rows_of(found: Found) -> list[list[str]]:
    """A row for each task and side: returns with their spread, and mean seconds."""
    rows = []
    for task in TASKS:
        for side in SIDES:
            if runs := found.get((task, side)):
                values = [run["return"] for run in runs]
                spread = f" ± {stdev(values):,.0f}" if len(values) > 1 else ""
                seconds = [f"{mean(run[key] for run in runs):,.0f}" for key in ("processor_s", "wall_s")]
                rows.append([task, side, str(len(runs)), f"{mean(values):,.0f}{spread}", *seconds])
    return rows


def draw(found: Found, path: Path, *, dark: bool = False) -> None:
    """For each task the returns of all runs, and below the processor time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    page = "#0d1117" if dark else "white"
    style = {"figure.facecolor": page, "axes.facecolor": page, "savefig.facecolor": page}
    tasks = [task for task in TASKS if any(key[0] == task for key in found)]
    with pyplot.style.context(["dark_background", style] if dark else style):
        figure, axes = pyplot.subplots(
            2, len(tasks), figsize=(2.6 * len(tasks), 5), layout="constrained", squeeze=False
        )
        for column, task in enumerate(tasks):
            for place, side in enumerate(SIDES):
                runs = found.get((task, side), [])
                colour = "#d9a05b" if side == SB3 else "#2a8fd6"
                for row, key in enumerate(("return", "processor_s")):
                    values = [run[key] for run in runs]
                    axes[row, column].scatter([place] * len(values), values, color=colour, s=22, alpha=0.8)
                    if values:
                        axes[row, column].hlines(mean(values), place - 0.3, place + 0.3, color=colour, linewidth=2)
            axes[0, column].set_title(task.replace(", ", "\n").replace(" without", "\nwithout"), fontsize=9)
            axes[0, column].set_xticks([])
            axes[1, column].set_xticks(range(len(SIDES)), [side.replace(", ", ",\n") for side in SIDES], rotation=60)
            axes[1, column].set_ylim(bottom=0)
            for axis in axes[:, column]:
                axis.tick_params(labelsize=8)
                axis.spines[["top", "right"]].set_visible(False)
        axes[0, 0].set_ylabel("mean return of 20 tests")
        axes[1, 0].set_ylabel("processor time, s")
        figure.savefig(path, dpi=130, metadata={"Software": None})
        pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    parser.add_argument("--peer", type=Path, default=ROOT / ".venv-bench-sb3" / "bin" / "python")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--figures", type=Path, help="where to save learning.png and learning_dark.png; default: --out")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "learning.jsonl"
    measure(path, given.tasks, given.seeds, given.peer)
    header = ("task", "side", "seeds", "mean return", "processor, s", "wall, s")
    report.write(given.out, "learning.md", "Learning", report.markdown_table(header, rows_of(read(path))))
    for name, dark in {"learning.png": False, "learning_dark.png": True}.items():
        draw(read(path), (given.figures or given.out) / name, dark=dark)


if __name__ == "__main__":
    main()
