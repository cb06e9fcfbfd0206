"""``rollwright inspect --html``: a dataset as one page that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._video import gif_of
from rollwright.cli.reading.checks import Finding
from rollwright.cli.reading.opening import image_key, images_of
from rollwright.data.datasets import Summary, episodes_of
from rollwright.data.entries import size_of
from rollwright.errors import MissingExtraError

_MOST_POINTS = 2_000  # of a drawing
_MOST_ROWS = 200  # of the table of episodes
_MOST_ENVS = 32  # drawn with their boundaries
_MOST_IMAGES = 300
_WIDTH, _HEIGHT = 640, 180
_STYLE = """
:root { color-scheme: light dark; --line: #2a6fb0; --soft: #8884; --end: #2a9d5c; --cut: #d9822b; --open: #999; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; padding: 0; list-style: none; }
.cards li { border: 1px solid var(--soft); border-radius: .5rem; padding: .4rem .9rem; }
.cards b { display: block; font-size: 1.25rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
th, td { text-align: right; padding: .15rem .8rem; border-bottom: 1px solid var(--soft); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: currentColor; }
.end { fill: var(--end); } .cut { fill: var(--cut); } .open { fill: var(--open); }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; } .key:first-child { margin-left: 0; }
.error { color: #c33; } img { max-width: 100%; image-rendering: pixelated; min-width: 12rem; }
"""


def page_of(
    title: str,
    facts: Sequence[str],
    summary: Summary,
    frames: TensorDictBase | None,
    findings: Sequence[Finding] | None,
) -> str:
    """The page.

    Args:
        title: what the data are.
        facts: lines below it.
        summary: of the frames.
        frames: ``[*env, T]``, with the frames of each trajectory together.
        findings: of ``--check``; None: nothing was tested.
    """
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(fact)}</p>" for fact in facts), _cards(summary)]
    if findings is not None:
        parts += ["<h2>Check</h2>", *_findings(findings)]
    ended = summary.ended
    if ended is not None and frames is not None and len(ended.lengths):
        num_envs = frames.batch_size[:-1].numel()
        order = np.argsort(ended.ends, kind="stable")
        at = (ended.ends[order] + 1) * num_envs
        parts += ["<h2>Returns</h2>", _curve(at, ended.returns[order], "return")]
        parts += ["<h2>Lengths</h2>", _curve(at, ended.lengths[order].astype(float), "length")]
        rows = _rows(frames)
        parts += ["<h2>Boundaries</h2>", _boundaries(rows, num_envs, frames.batch_size[-1])]
        parts += ["<h2>Episodes</h2>", _episodes(rows)]
    elif summary.unknown:
        parts.append(f"<p>Episodes are unknown: {escape(summary.unknown)}.</p>")
    if frames is not None:
        parts += _images(frames)
    parts += ["<h2>Entries</h2>", _entries(summary)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _cards(summary: Summary) -> str:
    found = summary.as_dict()
    cards = {"frames": f"{found['frames']:,}", "batch size": str(found["batch_size"]), "size": size_of(found["bytes"])}
    episodes = found["episodes"]
    if episodes is not None:
        for name in ("count", "terminated", "truncated", "unfinished"):
            cards["episodes" if name == "count" else name] = f"{episodes[name]:,}"
        for name in ("return", "length"):
            if episodes[name] is not None:
                cards[f"mean {name}"] = f"{episodes[name]['mean']:,.4g}"
    items = (f"<li><b>{escape(value)}</b>{escape(name)}</li>" for name, value in cards.items())
    return f'<ul class="cards">{"".join(items)}</ul>'


def _findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return ["<p>Passed.</p>"]
    lines = (f'<li class="{"error" if each.is_error else "note"}">{escape(str(each))}</li>' for each in findings)
    return [f"<ul>{''.join(lines)}</ul>"]


def _curve(at: NDArray[Any], values: NDArray[Any], name: str) -> str:
    """Values over frames as points, and the mean of the last 100."""
    good = np.isfinite(values)
    at, values = at[good], values[good]
    if not len(values):
        return "<p>None is finite.</p>"
    window = min(100, len(values))
    mean = np.convolve(values, np.ones(window))[: len(values)] / np.arange(1, len(values) + 1).clip(max=window)
    low, high = float(values.min()), float(values.max())
    stride = -(-len(values) // _MOST_POINTS)
    xs = 50 + (_WIDTH - 60) * at / max(1, at.max())
    span = (high - low) or 1.0

    def ys(of: NDArray[Any]) -> NDArray[Any]:
        found: NDArray[Any] = _HEIGHT - 25 - (_HEIGHT - 40) * (of - low) / span
        return found

    points = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6" opacity=".45"/>'
        for x, y in zip(xs[::stride], ys(values)[::stride], strict=True)
    )
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs[::stride], ys(mean)[::stride], strict=True))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}s over frames">{points}'
        f'<polyline points="{line}" fill="none" stroke="var(--line)" stroke-width="2"/>'
        f'<text x="45" y="{ys(np.array([high]))[0] + 4:.0f}" text-anchor="end">{high:g}</text>'
        f'<text x="45" y="{ys(np.array([low]))[0] + 4:.0f}" text-anchor="end">{low:g}</text>'
        f'<text x="50" y="{_HEIGHT - 4}">0</text>'
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 4}" text-anchor="end">{int(at.max()):,} frames; line: mean of the last '
        f"{window}</text></svg>"
    )


def _rows(frames: TensorDictBase) -> list[list[tuple[int, int, float, str]]]:
    """Of the first environments their episodes: first frame, frame behind the last, return, and how it ended."""
    flat = frames.unsqueeze(0) if frames.ndim == 1 else frames if frames.ndim == 2 else frames.flatten(0, -2)
    rows = []
    for row in flat[:_MOST_ENVS].unbind(0):
        ended, _ = episodes_of(row)
        each = zip(ended.ends.tolist(), ended.lengths.tolist(), ended.returns.tolist(), ended.terminated, strict=True)
        rows.append(
            [
                (end + 1 - length, end + 1, total, "terminated" if is_end else "truncated")
                for end, length, total, is_end in each
            ]
        )
    return rows


def _boundaries(rows: list[list[tuple[int, int, float, str]]], num_envs: int, steps: int) -> str:
    kinds = {"terminated": "end", "truncated": "cut"}
    height = 14 * len(rows)
    scale = (_WIDTH - 10) / max(1, steps)
    drawn = []
    for y, row in enumerate(rows):
        drawn.append(f'<rect class="open" opacity=".35" x="5" y="{14 * y + 2}" width="{_WIDTH - 10}" height="10"/>')
        for start, stop, total, kind in row[:_MOST_POINTS]:
            width = max(0.6, (stop - start) * scale - 0.6)
            label = f"frames {start:,} to {stop - 1:,}, return {total:.4g}, {kind}"
            place = f'x="{5 + max(0, start) * scale:.2f}" y="{14 * y + 2}" width="{width:.2f}" height="10"'
            drawn.append(f'<rect class="{kinds[kind]}" {place}><title>{label}</title></rect>')
    legend = "".join(
        f'<span class="key" style="background:var(--{color})"></span>{name}'
        for color, name in (("end", "terminated"), ("cut", "truncated"), ("open", "not ended"))
    )
    more = "" if num_envs <= len(rows) else f"<p>The first {len(rows)} of {num_envs:,} environments.</p>"
    return f'<p>{legend}</p><svg viewBox="0 0 {_WIDTH} {height + 4}" role="img">{"".join(drawn)}</svg>{more}'


def _episodes(rows: list[list[tuple[int, int, float, str]]]) -> str:
    each = [(env, *episode) for env, row in enumerate(rows) for episode in row]
    lines = "".join(
        f"<tr><td>{i}</td><td>{env}</td><td>{start:,}</td><td>{stop - start:,}</td><td>{total:,.4g}</td>"
        f"<td>{kind}</td></tr>"
        for i, (env, start, stop, total, kind) in enumerate(each[:_MOST_ROWS])
    )
    more = "" if len(each) <= _MOST_ROWS else f"<p>The first {_MOST_ROWS} of {len(each):,} episodes.</p>"
    names = ("episode", "environment", "first frame", "length", "return", "end")
    return f'<div class="scroll"><table><tr>{"".join(map("<th>{}</th>".format, names))}</tr>{lines}</table></div>{more}'


def _images(frames: TensorDictBase) -> list[str]:
    """The first images of the first environment, moving."""
    key = image_key(frames)
    if key is None:
        return []
    try:
        data = gif_of(images_of(frames[(0,) * (frames.ndim - 1)][:_MOST_IMAGES], key), 30)
    except MissingExtraError as error:
        return ["<h2>Images</h2>", f"<p>{escape(str(error))}</p>"]
    return [
        "<h2>Images</h2>",
        f'<img alt="first frames" src="data:image/gif;base64,{base64.b64encode(data).decode()}">',
    ]


def _entries(summary: Summary) -> str:
    lines = "".join(
        f"<tr><td>{escape('.'.join(entry['key']))}</td><td>{entry['shape'] or '-'}</td><td>{entry['dtype']}</td>"
        f"<td>{size_of(entry['bytes'])}</td></tr>"
        for entry in summary.entries
    )
    names = "".join(map("<th>{}</th>".format, ("entry", "shape", "dtype", "size")))
    return f'<div class="scroll"><table><tr>{names}</tr>{lines}</table></div>'
