"""Summary: what frames hold, for people; entries, episodes, returns and lengths."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright.data.datasets.episodes import Episodes, episodes_of
from rollwright.data.entries import entries_of, table_of

_BARS = 24  # of a histogram


@dataclass(frozen=True)
class Summary:
    """What frames hold. ``print`` shows it as text, and so does a notebook.

    Attributes:
        frames: how many there are.
        batch_size: of the frames.
        entries: key, shape, dtype and bytes of each.
        ended: the episodes that ended; None where they are not known.
        unfinished: episodes that did not end.
        unknown: why they are not known.
    """

    frames: int
    batch_size: list[int]
    entries: list[dict[str, Any]]
    ended: Episodes | None
    unfinished: int
    unknown: str

    def as_dict(self) -> dict[str, Any]:
        """The same, as JSON knows it."""
        return {
            "frames": self.frames,
            "batch_size": self.batch_size,
            "bytes": sum(entry["bytes"] for entry in self.entries),
            "entries": self.entries,
            "episodes": None if self.ended is None else _counts(self.ended, self.unfinished),
        }

    def lines(self) -> list[str]:
        """Entries and episodes, in lines of text."""
        lines = [*table_of(self.entries), ""] if self.entries else []
        if self.ended is None:
            return [*lines, f"episodes   unknown: {self.unknown}"] if self.unknown else lines[:-1]
        counts = _counts(self.ended, self.unfinished)
        lines.append(
            f"episodes   {counts['count']:,} complete ({counts['terminated']:,} terminated, "
            f"{counts['truncated']:,} truncated), {counts['unfinished']:,} unfinished"
        )
        for name in ("return", "length"):
            if counts[name] is not None:
                lines.append(f"{name}s".ljust(11) + _line(counts[name]))
        return lines

    def __str__(self) -> str:
        return "\n".join([f"{self.frames:,} frames {self.batch_size}", "", *self.lines()])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def summarize(frames: TensorDictBase | None, in_order: TensorDictBase | None = None) -> Summary:
    """What a batch, or the frames of a dataset, hold: entries, episodes, returns and lengths.

    Args:
        frames: ``[*env, T]``; None: there are none.
        in_order: the same, with the frames of each trajectory together, where they are not.

    Example:
        >>> from rollwright import Collector
        >>> with Collector("CartPole-v1", frames_per_batch=200) as collector:
        ...     print(str(summarize(collector.next())).splitlines()[0])
        200 frames [200]
    """
    ended, unfinished, unknown = _episodes(frames if in_order is None else in_order)
    return Summary(
        0 if frames is None else _num_frames(frames),
        [] if frames is None else list(frames.batch_size),
        [] if frames is None else entries_of(frames),
        ended,
        unfinished,
        unknown,
    )


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


def _num_frames(frames: TensorDictBase) -> int:
    return sum(map(_num_frames, frames.unbind(0))) if -1 in frames.batch_size else frames.batch_size.numel()


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
