"""``rollwright inspect``: describes a dataset, and draws its returns and lengths."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_tuple, leaf_keys
from rollwright.cli.chat.view import inspect_trace
from rollwright.cli.checks import Finding, check_frames
from rollwright.cli.errors import Failure, plain
from rollwright.cli.opening import Found, open_frames
from rollwright.data.datasets import Episodes, episodes_of
from rollwright.data.llm.trace import Trace
from rollwright.errors import MissingExtraError, require

_BARS = 24  # of a histogram
_MOST_POINTS = 20_000  # of a curve


def run(arguments: argparse.Namespace) -> int:
    """Print the report, and draw the picture where one is asked for; returns the exit status."""
    if Trace.is_in(arguments.path):
        return inspect_trace(arguments)
    found = open_frames(arguments.path, allow_pickle=arguments.allow_pickle)
    frames = found.frames
    findings = _check(found) if arguments.check else []
    episodes, unfinished, unknown = _episodes(found.in_order())
    report = {
        "path": str(arguments.path),
        **_about(frames, found.description),
        "buffer": found.buffer,
        "episodes": None if episodes is None else _counts(episodes, unfinished),
    }
    if arguments.check:
        report["findings"] = [asdict(finding) for finding in findings]
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(_text(report, unknown)))
        if arguments.check:
            print("\n".join(_check_lines(findings)))
    if arguments.plot is not None:
        rows = 1 if frames is None else frames.batch_size[:-1].numel()
        _draw(arguments.plot, str(arguments.path), episodes, rows)
        if not arguments.json:
            print(f"\npicture: {arguments.plot}")
    return int(any(finding.is_error for finding in findings))


# The report ----------------------------------------------------------------------------------------


def _episodes(frames: TensorDictBase | None) -> tuple[Episodes | None, int, str]:
    """Episodes, unfinished ones, and why episodes are unknown where they are."""
    if frames is None:
        return None, 0, ""
    if not frames.ndim:
        return None, 0, "there is no dimension of time"
    try:
        return *episodes_of(frames), ""
    except KeyError:
        return None, 0, "there is no flag ('next', 'done')"
    except (RuntimeError, ValueError):
        return None, 0, "frames differ in shape"


def _check(found: Found) -> list[Finding]:
    if found.frames is None:
        return []
    try:
        return check_frames(found.frames, found.order, has_heads=found.has_heads)
    except ValueError as error:
        raise Failure(f"--check: {plain(error)}", status=1) from error


def _about(frames: TensorDictBase | None, description: dict[str, Any] | None) -> dict[str, Any]:
    entries = [] if frames is None else [_entry(frames, key) for key in sorted(leaf_keys(frames), key=as_tuple)]
    return {
        "complete": None if description is None else description["complete"],
        "frames": 0 if frames is None else _num_frames(frames),
        "batch_size": [] if frames is None else list(frames.batch_size),
        "bytes": sum(entry["bytes"] for entry in entries),
        "entries": entries,
        **{name: (description or {}).get(name) for name in ("source", "created", "versions", "left_out")},
    }


def _num_frames(frames: TensorDictBase) -> int:
    return sum(map(_num_frames, frames.unbind(0))) if -1 in frames.batch_size else frames.batch_size.numel()


def _entry(frames: TensorDictBase, key: NestedKey) -> dict[str, Any]:
    entry: dict[str, Any] = {"key": list(as_tuple(key)), "shape": None, "dtype": "object", "bytes": 0}
    try:
        value: Any = frames.get(key)
    except RuntimeError:  # of a lazy stack of different shapes
        return {**entry, "dtype": "varies"}
    if not isinstance(value, torch.Tensor):
        return entry
    dtype = str(value.dtype).removeprefix("torch.")
    return {**entry, "shape": list(value.shape), "dtype": dtype, "bytes": value.numel() * value.element_size()}


def _counts(episodes: Episodes, unfinished: int) -> dict[str, Any]:
    count, terminated = len(episodes.lengths), int(episodes.terminated.sum())
    return {
        "count": count,
        "terminated": terminated,
        "truncated": count - terminated,
        "unfinished": unfinished,
        "return": _distribution(episodes.returns),
        "length": _distribution(episodes.lengths),
    }


def _distribution(values: NDArray[Any] | None) -> dict[str, Any] | None:
    """Mean, range and histogram of what is finite."""
    values = np.asarray([]) if values is None else values[np.isfinite(values)]
    if not len(values):
        return None
    histogram, _ = np.histogram(values, bins=_BARS)
    return {
        "mean": float(values.mean()),
        "min": float(values.min()),
        "max": float(values.max()),
        "histogram": histogram.tolist(),
    }


# Text ----------------------------------------------------------------------------------------------


def _text(report: dict[str, Any], unknown: str) -> list[str]:
    lines = [*_heading(report), ""]
    if report["entries"]:
        lines += [*_table(report["entries"], report["bytes"]), ""]
    counts = report["episodes"]
    if counts is None:
        return [*lines, f"episodes   unknown: {unknown}"] if unknown else lines[:-1]
    lines.append(
        f"episodes   {counts['count']:,} complete ({counts['terminated']:,} terminated, {counts['truncated']:,} "
        f"truncated), {counts['unfinished']:,} unfinished"
    )
    for name in ("return", "length"):
        if counts[name] is not None:
            lines.append(f"{name}s".ljust(11) + _line(counts[name]))
    return lines


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


def _table(entries: list[dict[str, Any]], num_bytes: int) -> list[str]:
    rows = [("entry", "shape", "dtype", "size")]
    for entry in entries:
        shape = "varies" if entry["dtype"] == "varies" else str(entry["shape"] or "-")
        rows.append((".".join(entry["key"]), shape, entry["dtype"], _size(entry["bytes"])))
    rows.append(("total", "", "", _size(num_bytes)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        f"{key:<{widths[0]}}  {shape:<{widths[1]}}  {dtype:<{widths[2]}}  {size:>{widths[3]}}"
        for key, shape, dtype, size in rows
    ]


def _check_lines(findings: list[Finding]) -> list[str]:
    failed = any(finding.is_error for finding in findings)
    lines = [f"check      {'FAILED' if failed else 'passed'}"]
    return lines + [f"  {'error' if finding.is_error else 'note'}: {finding}" for finding in findings]


def _line(values: dict[str, Any]) -> str:
    return f"mean {values['mean']:,.1f}  {values['min']:g} |{_bars(values['histogram'])}| {values['max']:g}"


def _bars(counts: list[int]) -> str:
    """A histogram in one line of text.

    >>> _bars([0, 1, 4, 8]) in (" ▁▄█", " .=#")
    True
    """
    blocks = "▁▂▃▄▅▆▇█" if "utf" in (getattr(sys.stdout, "encoding", None) or "").lower() else ".:-=+*%#"
    top = max(counts)
    return "".join(blocks[max(0, -(-8 * count // top) - 1)] if count else " " for count in counts)


def _size(num_bytes: int) -> str:
    """A number of bytes for people.

    >>> _size(999), _size(1_500), _size(2_000_000)
    ('999 B', '1.5 kB', '2.0 MB')
    """
    if num_bytes < 1000:
        return f"{num_bytes} B"
    size = float(num_bytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


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
