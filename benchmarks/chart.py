"""The chart of README.md, from docs/benchmarks.md, on light and on dark pages.

`python -m benchmarks.chart` writes docs/_static/speed.png and docs/_static/speed_dark.png.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLOURS = ("#2a8fd6", "#5fb8f5", "#d9a05b", "#b0b0b0", "#808080")
NUMBER = re.compile(r"\d+\.\d+")


def read_table(text: str) -> tuple[list[str], dict[str, list[float | None]]]:
    """The sides, and the medians of each case that other packages have run, too; None: it was not measured."""
    section = text.split("\n## Compare with other libraries", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    (_, _, *sides), _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    medians = {case: [NUMBER.match(cell) for cell in cells] for case, _, *cells in rows}
    peers = sides.index("TorchRL")
    cases = {case: [float(m[0]) if m else None for m in found] for case, found in medians.items() if found[peers]}
    return [side.replace("compiled", "rollwright, compiled") for side in sides], cases


def draw(sides: list[str], cases: dict[str, list[float | None]], path: Path, *, dark: bool = False) -> None:
    """Draw a group of bars for each case, and a line at 1, the loop by hand."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    page, ink = ("#0d1117", "white") if dark else ("white", "black")
    style = {"figure.facecolor": page, "axes.facecolor": page, "savefig.facecolor": page}
    with pyplot.style.context(["dark_background", style] if dark else style):
        figure, axes = pyplot.subplots(figsize=(10, 3.8), layout="constrained")
        width = 0.8 / len(sides)
        for i, side in enumerate(sides):
            found = [(n + (i - len(sides) / 2 + 0.5) * width, row[i]) for n, row in enumerate(cases.values())]
            bars = [(place, value) for place, value in found if value is not None]
            drawn = axes.bar(*zip(*bars, strict=True), width, label=side, color=COLOURS[i % len(COLOURS)])
            behind = {"facecolor": page, "edgecolor": "none", "pad": 0.5}
            axes.bar_label(drawn, fmt="%.2f", fontsize=7, padding=2, bbox=behind)
        axes.axhline(1.0, color=ink, linewidth=1, linestyle="--", label="loop by hand", zorder=0)
        axes.set_xticks(range(len(cases)), [textwrap.fill(case, 20) for case in cases])
        axes.set_ylabel("frames per second,\nas a multiple of a loop by hand")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, ncols=3, loc="upper right")
        figure.savefig(path, dpi=130, metadata={"Software": None})
        pyplot.close(figure)


if __name__ == "__main__":
    table = read_table((ROOT / "docs" / "benchmarks.md").read_text())
    for name, dark in {"speed.png": False, "speed_dark.png": True}.items():
        draw(*table, ROOT / "docs" / "_static" / name, dark=dark)
