"""``rollwright inspect``: describes a dataset, and draws its returns and lengths."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwright.cli.chat.view import inspect_trace
from rollwright.cli.errors import Failure, plain
from rollwright.cli.reading.checks import Finding, check_frames
from rollwright.cli.reading.opening import Found, open_frames
from rollwright.cli.reading.page import page_of
from rollwright.data.datasets import Episodes, Summary, summarize
from rollwright.data.llm.trace import Trace
from rollwright.errors import MissingExtraError, require

_MOST_POINTS = 20_000  # of a curve


def run(arguments: argparse.Namespace) -> int:
    """Print the report, and draw the picture where one is asked for; returns the exit status."""
    if Trace.is_in(arguments.path):
        return inspect_trace(arguments)
    found = open_frames(arguments.path, allow_pickle=arguments.allow_pickle)
    frames = found.frames
    findings = _check(found) if arguments.check else []
    summary = summarize(frames, found.in_order())
    report = {"path": str(arguments.path), **_about(summary, found.description), "buffer": found.buffer}
    if arguments.check:
        report["findings"] = [asdict(finding) for finding in findings]
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_text(report, summary)))
        if arguments.check:
            print("\n".join(_check_lines(findings)))
    if arguments.html is not None:
        tested = findings if arguments.check else None
        page = page_of(str(arguments.path), _heading(report), summary, found.in_order(), tested)
        try:
            arguments.html.write_text(page, encoding="utf-8")
        except OSError as error:
            raise Failure(f"--html: cannot write {str(arguments.html)!r}: {plain(error)}") from error
        if not arguments.json:
            print(f"\npage: {arguments.html}")
    if arguments.plot is not None:
        rows = 1 if frames is None else frames.batch_size[:-1].numel()
        _draw(arguments.plot, str(arguments.path), summary.ended, rows)
        if not arguments.json:
            print(f"\npicture: {arguments.plot}")
    return int(any(finding.is_error for finding in findings))


# The report ----------------------------------------------------------------------------------------


def _check(found: Found) -> list[Finding]:
    if found.frames is None:
        return []
    try:
        return check_frames(found.frames, found.order, has_heads=found.has_heads)
    except ValueError as error:
        raise Failure(f"--check: {plain(error)}", status=1) from error


def _about(summary: Summary, description: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "complete": None if description is None else description["complete"],
        **summary.as_dict(),
        **{name: (description or {}).get(name) for name in ("source", "created", "versions", "left_out")},
    }


# Text ----------------------------------------------------------------------------------------------


def _text(report: dict[str, Any], summary: Summary) -> list[str]:
    return [*_heading(report), "", *summary.lines()]


def _heading(report: dict[str, Any]) -> list[str]:
    state = {None: "", True: ", complete", False: ", INCOMPLETE: the collection was cut short"}[report["complete"]]
    lines = [f"{report['path']}: {report['frames']:,} frames {report['batch_size']}{state}"]
    if report["buffer"]:
        lines.append(
            "  " + ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in report["buffer"].items())
        )
    source = report["source"]
    if source:
        shown = {name: value for name, value in source.items() if not (value is None or value is False or value == {})}
        lines.append("  " + ", ".join(f"{name} {value}" for name, value in shown.items()))
    if report["versions"]:
        versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        lines.append(f"  written {report['created']} by {versions}")
    if report["left_out"]:
        lines.append(f"  left out, since they are no tensors: {', '.join(map('.'.join, report['left_out']))}")
    return lines


def _check_lines(findings: list[Finding]) -> list[str]:
    failed = any(finding.is_error for finding in findings)
    lines = [f"check      {'FAILED' if failed else 'passed'}"]
    return lines + [f"  {'error' if finding.is_error else 'note'}: {finding}" for finding in findings]


# The picture ---------------------------------------------------------------------------------------


def _draw(path: Path, title: str, episodes: Episodes | None, num_envs: int) -> None:
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
    _draw_row(grid[0], frames, episodes.returns[order], "return")
    _draw_row(grid[1], frames, episodes.lengths[order], "length")
    grid[1][0].set_xlabel("frames")
    grid[1][1].set_xlabel("episodes")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise Failure(f"--plot: cannot write {str(path)!r}: {plain(error)}") from error


def _draw_row(axes: Any, frames: NDArray[Any], values: NDArray[Any], name: str) -> None:
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
