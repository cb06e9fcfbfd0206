"""The picture of ``rollwright inspect --plot``. The only module of the command line that imports matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwright.cli.errors import Failure, plain
from rollwright.data.datasets import Episodes
from rollwright.errors import MissingExtraError, require

__all__ = ["draw"]

_MOST_POINTS = 20_000


def draw(path: Path, title: str, episodes: Episodes | None, num_envs: int) -> None:
    """Draw returns and lengths over the frames, with their histograms.

    Args:
        path: of the picture; its suffix says the format.
        title: what the data are.
        episodes: what to draw.
        num_envs: environments that were stepped together, to count frames.

    Raises:
        Failure: there are no episodes, matplotlib is missing, or the picture cannot be written.
    """
    if episodes is None or not len(episodes.lengths):
        raise Failure("--plot: no episode ended, there is nothing to draw.", status=1)
    try:
        Figure = require("matplotlib.figure", extra="plot", purpose="--plot").Figure
    except MissingExtraError as error:
        raise Failure(str(error)) from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    figure.suptitle(f"{title}: {len(episodes.lengths):,} episodes")
    grid = figure.subplots(2, 2, sharex="col", sharey="row", width_ratios=[3, 1])
    order = np.argsort(episodes.ends, kind="stable")
    frames = (episodes.ends[order] + 1) * num_envs
    _row(grid[0], frames, episodes.returns[order], "return")
    _row(grid[1], frames, episodes.lengths[order], "length")
    grid[1][0].set_xlabel("frames")
    grid[1][1].set_xlabel("episodes")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise Failure(f"--plot: cannot write {str(path)!r}: {plain(error)}") from error


def _row(axes: Any, frames: NDArray[Any], values: NDArray[Any], name: str) -> None:
    """Values over frames with their running mean, and their histogram beside."""
    over_time, histogram = axes
    stride = -(-len(values) // _MOST_POINTS)
    over_time.plot(frames[::stride], values[::stride], ".", markersize=3, alpha=0.5)
    over_time.set_ylabel(name)
    if len(values) > 1:
        window = min(100, len(values))
        mean = np.convolve(values, np.ones(window))[: len(values)] / np.arange(1, len(values) + 1).clip(max=window)
        over_time.plot(frames[::stride], mean[::stride], label=f"mean of the last {window}")
        over_time.legend(loc="upper left")
    histogram.hist(values[np.isfinite(values)], bins=40, orientation="horizontal")
