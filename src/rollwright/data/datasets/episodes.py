"""Episodes in a stream of frames, their ends, lengths and returns; a summary of frames for people."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from rollwright._keys import NestedKey, as_tuple
from rollwright.data.entries import entries_of, table_of
from rollwright.data.layout import DONE, TERMINATED, TRAJ_IDS, TRUNCATED, deciding_groups, done_groups
from rollwright.data.layout.boundaries import any_of, find_mask

_CHUNK = 1_000_000  # frames read at once from data that may be larger than memory


class Episodes(NamedTuple):
    """Episodes that ended, in order of environments, then of time.

    Attributes:
        returns: float64 ``[episodes]``, sums of rewards.
        lengths: int64 ``[episodes]``.
        terminated: bool ``[episodes]``; the others were truncated, or had no such flag.
        ends: int64 ``[episodes]``, the time of each last frame.
    """

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    ends: NDArray[np.int64]


class FrameColumns(NamedTuple):
    """Columns from which the boundaries and returns of a batch are read, each ``[rows, T]``.

    Attributes:
        rewards: float64; zeros where the batch has no ``("next", "reward")``.
        done: bool, the last frame of an episode.
        terminated: bool.
        ids: int64 trajectory ids, None where the batch has none.
        taken: bool, False on padding and on frames that an interrupted rollout did not take.
        has_rewards: whether the batch has rewards.
    """

    rewards: NDArray[np.float64]
    done: NDArray[np.bool_]
    terminated: NDArray[np.bool_]
    ids: NDArray[np.int64] | None
    taken: NDArray[np.bool_]
    has_rewards: bool

    @classmethod
    def of(cls, batch: TensorDictBase) -> FrameColumns:
        """Read them from a batch ``[*env, T]``.

        Raises:
            KeyError: the batch has no ``done`` flag below ``"next"``.
        """
        outcome = batch.get("next", None)
        names = (DONE, TERMINATED, TRUNCATED)
        keys = [] if outcome is None else [key for key in outcome.keys(True, True) if as_tuple(key)[-1] in names]
        groups = done_groups(keys)
        if outcome is None or not any(as_tuple(key)[-1] == DONE for key in keys):
            raise KeyError(
                "batch: expected a flag ('next', 'done') that says where episodes end, and there is none. Pass frames "
                "as a collector or rollout() delivers them."
            )
        groups = deciding_groups(groups)
        done = _any_flag(outcome, [group.done for group in groups], batch)
        rewards = outcome.get("reward", None)
        ids = batch.get(TRAJ_IDS, None)
        mask = next((found for place in ("collector", None) if (found := find_mask(batch, place)) is not None), None)
        taken = np.ones_like(done)
        if ids is not None:
            ids = _rows(ids, batch)[..., 0]
            taken &= ids >= 0
        if mask is not None:
            taken &= _rows(mask, batch)[..., 0].astype(bool)
        return cls(
            np.zeros(done.shape) if rewards is None else _rows(rewards, batch).sum(-1, dtype=np.float64),
            done,
            _any_flag(outcome, [group.terminated for group in groups], batch),
            ids,
            taken,
            rewards is not None,
        )


def _rows(value: Tensor, batch: TensorDictBase) -> NDArray[Any]:
    """``[rows, T, features]``."""
    return value.detach().cpu().reshape(-1, batch.batch_size[-1], value.shape[batch.ndim :].numel()).numpy()


def _any_flag(outcome: TensorDictBase, keys: list[NestedKey], batch: TensorDictBase) -> NDArray[np.bool_]:
    """Bool ``[rows, T]``: any of the flags is set, of those that there are."""
    flags = [flag for key in keys if (flag := outcome.get(key, None)) is not None]
    return _rows(any_of(flags, outcome, batch.ndim), batch)[..., 0].astype(bool)


class EpisodeScan:
    """Finds the episodes that end in frames ``[rows, T]``, given piece by piece along time.

    An episode ends after a frame that is done. Where trajectory ids change without that, what was
    begun counts as unfinished.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> done = torch.tensor([[False, True, False, False]])
        >>> scan = EpisodeScan()
        >>> piece = TensorDict({"next": {"reward": torch.ones(1, 4), "done": done}}, [1, 4])
        >>> scan.update(FrameColumns.of(piece)).returns, scan.update(FrameColumns.of(piece)).returns
        (array([2.]), array([4.]))
        >>> scan.unfinished
        1
    """

    def __init__(self) -> None:
        self._open_return: NDArray[np.float64] = np.zeros(0)
        self._open_length: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._last_id: NDArray[np.int64] | None = None
        self._abandoned = self._time = 0

    @property
    def unfinished(self) -> int:
        """Number of episodes that were begun and did not end."""
        return self._abandoned + int((self._open_length > 0).sum())

    def update(self, frames: FrameColumns) -> Episodes:
        """The episodes that end in the next piece."""
        num_rows, steps = frames.done.shape
        if not len(self._open_return):
            self._open_return = np.zeros(num_rows)
            self._open_length = np.zeros(num_rows, dtype=np.int64)
        self._begin(frames)
        ends = frames.done & frames.taken
        starts_anew = np.ones((num_rows, steps), dtype=bool)
        starts_anew[:, 1:] = ends[:, :-1] | (frames.taken[:, 1:] != frames.taken[:, :-1])
        if frames.ids is not None:
            starts_anew[:, 1:] |= frames.ids[:, 1:] != frames.ids[:, :-1]
        # Sums by segment, not differences of running sums: one NaN must not spoil every later return.
        starts = np.flatnonzero(starts_anew)
        stops = np.append(starts[1:], num_rows * steps) - 1
        returns = np.add.reduceat(np.where(frames.taken, frames.rewards, 0.0).ravel(), starts)
        lengths = np.add.reduceat(frames.taken.ravel().astype(np.int64), starts)
        first, last = starts % steps == 0, stops % steps == steps - 1
        returns[first] += self._open_return
        lengths[first] += self._open_length
        ended = ends.ravel()[stops]
        self._open_return = np.where(ended[last], 0.0, returns[last])
        self._open_length = np.where(ended[last], 0, lengths[last])
        self._abandoned += int((~ended & ~last & (lengths > 0)).sum())
        ends_at = self._time + stops[ended] % steps
        self._time += steps
        return Episodes(returns[ended], lengths[ended], frames.terminated.ravel()[stops][ended], ends_at)

    def _begin(self, frames: FrameColumns) -> None:
        """Drop what was open where the new piece belongs to another trajectory."""
        other = ~frames.taken[:, 0]
        if frames.ids is not None:
            if self._last_id is not None:
                other |= self._last_id != frames.ids[:, 0]
            self._last_id = frames.ids[:, -1].copy()
        self._abandoned += int((other & (self._open_length > 0)).sum())
        self._open_return[other] = 0.0
        self._open_length[other] = 0


def pieces(batch: TensorDictBase) -> Iterator[TensorDictBase]:
    """The batch ``[*env, T]`` in pieces along time that fit into memory."""
    steps = max(1, _CHUNK // max(1, batch.batch_size[:-1].numel()))
    for start in range(0, batch.batch_size[-1], steps):
        yield batch[..., start : start + steps]


class Totals:
    """Counts over all episodes of a stream, without a list of them.

    Example:
        >>> totals, zeros = Totals(), np.zeros(2, dtype=np.int64)
        >>> episodes = Episodes(np.array([1.0, 3.0]), np.array([1, 2]), np.array([True, False]), zeros)
        >>> totals.add(episodes, has_rewards=True)
        >>> totals.summary()["return"], totals.summary()["truncated"]
        ({'mean': 2.0, 'min': 1.0, 'max': 3.0}, 1)
    """

    def __init__(self) -> None:
        self._count = self._terminated = 0
        self._sums = {"return": 0.0, "length": 0.0}
        self._ranges = {"return": (np.inf, -np.inf), "length": (np.inf, -np.inf)}
        self._has_rewards = True

    def add(self, episodes: Episodes, *, has_rewards: bool) -> None:
        """Count episodes; without rewards their returns mean nothing."""
        self._has_rewards = has_rewards
        if not len(episodes.lengths):
            return
        self._count += len(episodes.lengths)
        self._terminated += int(episodes.terminated.sum())
        for name, values in {"return": episodes.returns, "length": episodes.lengths}.items():
            low, high = self._ranges[name]
            self._sums[name] += float(values.sum())
            self._ranges[name] = (min(low, float(values.min())), max(high, float(values.max())))

    def summary(self) -> dict[str, Any]:
        """Counts, and mean and range of ``return`` and ``length``, None where there is nothing to take them from."""
        out: dict[str, Any] = {
            "count": self._count,
            "terminated": self._terminated,
            "truncated": self._count - self._terminated,
        }
        for name, (low, high) in self._ranges.items():
            out[name] = None
            if self._count and (name == "length" or self._has_rewards):
                values = {"mean": self._sums[name] / self._count, "min": low, "max": high}
                out[name] = {key: value if np.isfinite(value) else None for key, value in values.items()}
        return out


def episodes_of(batch: TensorDictBase) -> tuple[Episodes, int]:
    """All episodes of a batch, and how many were begun and did not end.

    Args:
        batch: ``[*env, T]``, frames in order of time along the last dimension.

    Raises:
        KeyError: the batch has no ``done`` flag below ``"next"``.
        ValueError: its rows have different lengths.

    Example:
        >>> from rollwright.envs import GymEnv
        >>> env = GymEnv("CartPole-v1")
        >>> episodes, unfinished = episodes_of(env.rollout(500))
        >>> bool(episodes.returns[0] == episodes.lengths[0]), unfinished
        (True, 0)
        >>> env.close()
    """
    if -1 in batch.batch_size:
        raise ValueError(f"batch: expected rows of one length, got batch size {list(batch.batch_size)}. Pad the batch.")
    scan = EpisodeScan()
    if not batch.batch_size.numel():
        none = np.zeros(0, dtype=np.int64)
        return Episodes(np.zeros(0), none, np.zeros(0, dtype=np.bool_), none), 0
    found = [scan.update(FrameColumns.of(piece)) for piece in pieces(batch)]
    return Episodes(*(np.concatenate(column) for column in zip(*found, strict=True))), scan.unfinished


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
