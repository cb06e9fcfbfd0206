"""Numbers of a collector's run: frames in a batch, times, episodes."""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._warnings import warn_user
from rollwright.collectors.options import CollectorOptions


def announce_rounding(owner: str, rounding: str) -> None:
    """Warn of what differs from what was asked, if anything does."""
    if rounding:
        warn_user(f"{owner} delivers whole batches: {rounding}.", UserWarning)


@dataclass(frozen=True)
class FrameCounts:
    """Counts of a collector.

    Attributes:
        steps: of each environment in a batch.
        frames: in a batch, over all environments.
        batches: in all; None for no end, or where it is not known.
        total: frames in all; infinity for no end.
        random_frames: first frames with random actions.
        rounding: what differs from what was asked, for a warning; empty when nothing does.

    Example:
        >>> counts = FrameCounts.of(CollectorOptions(frames_per_batch=10, total_frames=25), num_envs=4)
        >>> counts.steps, counts.frames, counts.batches, counts.total
        (3, 12, 3, 36)
        >>> counts.rounding
        'frames_per_batch=10 becomes 12, 3 steps of 4 environments; total_frames=25 becomes 36, 3 batches of 12'
    """

    steps: int
    frames: int
    batches: int | None
    total: float
    random_frames: int
    rounding: str

    @classmethod
    def of(cls, options: CollectorOptions, num_envs: int) -> FrameCounts:
        """Round up what the options ask, for a number of environments stepped together."""
        asked = num_envs if options.frames_per_batch is None else options.frames_per_batch
        steps = -(-asked // num_envs)
        frames = steps * num_envs
        batches = None if options.total_frames == -1 else -(-options.total_frames // frames)
        asked_random = max(options.init_random_frames or 0, 0)
        random_frames = -(-asked_random // frames) * frames
        notes = []
        if frames != asked:
            notes.append(f"frames_per_batch={asked} becomes {frames}, {steps} steps of {num_envs} environments")
        if batches is not None and batches * frames != options.total_frames:
            notes.append(
                f"total_frames={options.total_frames} becomes {batches * frames}, {batches} batches of {frames}"
            )
        if random_frames != asked_random:
            notes.append(f"init_random_frames={asked_random} becomes {random_frames}")
        total = math.inf if batches is None else batches * frames
        return cls(steps, frames, batches, total, random_frames, "; ".join(notes))

    @classmethod
    def of_workers(
        cls, asked: Any, total: int, each: Sequence[tuple[int, int]], *, sync: bool, waits: bool
    ) -> FrameCounts:
        """Counts of a collector with workers.

        Args:
            asked: as ``frames_per_batch``; a list for one number each.
            total: frames in all, as asked; -1 for no end.
            each: frames in a batch and with random actions, of each worker.
            sync: whether a batch is of all workers.
            waits: whether it waits for all of them to the end.
        """
        of_each = [frames for frames, _ in each]
        frames = sum(of_each) if sync else max(of_each)
        known = waits if sync else len(set(of_each)) == 1
        batches = None if total == -1 else -(-total // frames)
        rounded = math.inf if batches is None else batches * frames if known else total
        notes = []
        if asked not in (None, frames) and not isinstance(asked, list | tuple):
            notes.append(f"frames_per_batch={asked} becomes {frames}, in {len(each)} workers")
        if total not in (-1, rounded):
            notes.append(f"total_frames={total} becomes {rounded}, {batches} batches of {frames}")
        random_frames = sum(random for _, random in each)
        return cls(0, frames, batches if known else None, rounded, random_frames, "; ".join(notes))


NUM_EPISODES = 100  # that ended last, which means are taken over


class StageTimer:
    """Seconds spent in each stage of collection, and the frames that they were spent on.

    Attributes:
        frames: that were collected.
        seconds: by stage.
        total: from the beginning to the end of each batch.
        rested: of these, spent in pauses.
    """

    def __init__(self) -> None:
        self.frames = 0
        self.seconds = {"policy": 0.0, "env": 0.0, "write": 0.0}
        self.total = self.rested = self._aside = 0.0

    @property
    def elapsed(self) -> float:
        """``total``, without rests in the middle of batches."""
        return self.total - self.rested

    def rate(self) -> float | None:
        """Frames per second."""
        return self.frames / self.elapsed if self.elapsed else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of the ``with`` block to ``total``."""
        start, self._aside = time.perf_counter(), 0.0
        try:
            yield
        finally:
            self.total += time.perf_counter() - start - self._aside

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the time of the ``with`` block, inside of :meth:`running`, out of ``total``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._aside += time.perf_counter() - start


class EpisodeStats:
    """Episodes that ended, with their returns and lengths; read once a batch.

    Args:
        window: number of last episodes that means are taken over.

    Example:
        >>> stats = EpisodeStats()
        >>> stats.update(np.array([[1.0, 1.0, 1.0]]), np.array([[False, True, False]]), np.array([False]))
        >>> stats.summary()
        {'episodes': 1, 'mean_return': 2.0, 'mean_length': 2.0, 'last_return': 2.0}
        >>> stats.update(np.array([[5.0]]), np.array([[True]]), np.array([False]))
        >>> stats.summary()["last_return"]
        6.0
    """

    def __init__(self, window: int = NUM_EPISODES) -> None:
        self.episodes = 0
        self._returns: deque[float] = deque(maxlen=window)
        self._lengths: deque[int] = deque(maxlen=window)
        self._ended_at: deque[float] = deque(maxlen=window)  # by time.monotonic(), which processes of a machine share
        self._ended_in: deque[int] = deque(maxlen=window)  # number of the step
        self._begun_at, self._num_steps = time.monotonic(), 0
        self._open_return: np.ndarray[Any, np.dtype[np.float64]] | None = None
        self._open_length: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def begin(self, num_steps: int) -> None:
        """A batch begins, after so many steps."""
        self._begun_at, self._num_steps = time.monotonic(), num_steps

    def update(self, rewards: Any, ended: Any, were_reset: Any) -> None:
        """Count the frames of one batch.

        Args:
            rewards: float ``[env, T]``, array or tensor; of those on a device, only what is noted is read.
            ended: bool ``[env, T]``, the last frame of an episode, likewise.
            were_reset: bool ``[env]``, environments that were reset between the last batch and this one without
                having ended.
        """
        num_envs, steps = rewards.shape
        rows, some, marks, total = _with_ends(rewards, ended)
        if self._open_return is None or self._open_length is None:
            self._open_return = np.zeros(num_envs)
            self._open_length = np.zeros(num_envs, dtype=np.int64)
        self._open_return[were_reset] = 0.0
        self._open_length[were_reset] = 0
        opened, so_far = self._open_return[rows], self._open_length[rows]
        self._open_return += total
        self._open_length += steps
        if not len(rows):
            return
        at = np.flatnonzero(marks)
        t, last = at % steps, np.append(at[1:] // steps != at[:-1] // steps, True)  # of its environment
        first = np.append(True, last[:-1])
        # Of each end: where its episode begins among these frames, and the first frame after it.
        span = np.stack([at - t, at + 1], 1)
        span[1:, 0] = np.where(first[1:], span[1:, 0], at[:-1] + 1)
        cuts = span.reshape(-1)[: -1 if at[-1] + 1 == some.size else None]
        sums = np.zeros(span.size)
        sums[: len(cuts)] = np.add.reduceat(some.reshape(-1), cuts, dtype=np.float64)
        returns, lengths = sums[::2], span[:, 1] - span[:, 0]
        returns[first] += opened
        lengths[first] += so_far
        rest = steps - 1 - t[last]
        self._open_return[rows], self._open_length[rows] = np.where(rest, sums[1::2][last], 0.0), rest
        self._note(returns, lengths, t + 1, steps)

    def _note(self, returns: Any, lengths: Any, taken: Any, steps: int) -> None:
        """Episodes that ended in a batch of ``steps`` steps, each after so many of them."""
        self.episodes += len(taken)
        order = np.argsort(taken, kind="stable")[-(self._returns.maxlen or 0) :]
        taken = taken[order]
        self._returns.extend(returns[order].tolist())
        self._lengths.extend(lengths[order].tolist())
        elapsed = time.monotonic() - self._begun_at
        self._ended_at.extend((self._begun_at + elapsed * taken / steps).tolist())
        self._ended_in.extend((self._num_steps + taken).tolist())

    def add(self, ended: Sequence[tuple[float, int]]) -> None:
        """Count episodes whose returns and lengths are known, in the order in which they ended."""
        self._returns.extend(each for each, _ in ended)
        self._lengths.extend(length for _, length in ended)
        self._ended_at.extend([time.monotonic()] * len(ended))
        self._ended_in.extend([self._num_steps] * len(ended))
        self.episodes += len(ended)

    def update_from(
        self, batch: TensorDictBase, reward: torch.Tensor | None, ended: torch.Tensor, were_reset: Any
    ) -> None:
        """:meth:`update` from the tensors of a batch ``[*env, T]``; without rewards, returns count zero."""
        steps = batch.batch_size[-1]
        if reward is None:
            rows = torch.zeros(ended.shape, device="cpu")
        else:
            rows = reward.detach().reshape(*batch.batch_size, -1)
            rows = rows.squeeze(-1) if rows.shape[-1] == 1 else rows.sum(-1, dtype=torch.float64)
            rows = rows.float() if rows.dtype == torch.bfloat16 else rows
        rows, marks = rows.reshape(-1, steps), ended.reshape(-1, steps)
        if rows.is_cpu or rows.device != marks.device:
            self.update(rows.cpu().numpy(), marks.cpu().numpy(), were_reset)
        else:
            self.update(rows, marks, were_reset)

    def copy(self) -> EpisodeStats:
        """The same, which further episodes do not change."""
        other = copy.copy(self)
        other._returns, other._lengths = self._returns.copy(), self._lengths.copy()
        other._ended_at, other._ended_in = self._ended_at.copy(), self._ended_in.copy()
        opened, steps = self._open_return, self._open_length
        other._open_return = None if opened is None else opened.copy()
        other._open_length = None if steps is None else steps.copy()
        return other

    def state_dict(self) -> dict[str, Any]:
        """Episodes so far, and what is counted of those in progress."""
        opened, steps = self._open_return, self._open_length
        return {
            "episodes": self.episodes,
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "open_return": None if opened is None else torch.from_numpy(opened.copy()),
            "open_length": None if steps is None else torch.from_numpy(steps.copy()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, goes_on: bool) -> None:
        """Go on from a saved state.

        Args:
            state_dict: of :meth:`state_dict`.
            goes_on: whether the episodes in progress do so too.
        """
        self.episodes = state_dict["episodes"]
        for held, name in ((self._returns, "returns"), (self._lengths, "lengths")):
            held.clear()
            held.extend(state_dict[name])
        self._ended_at.clear()
        self._ended_in.clear()
        now, count = time.monotonic(), len(self._returns)
        self._ended_at.extend(now - age_s for age_s in range(count, 0, -1))  # in turn with those of other workers
        self._ended_in.extend(range(-count, 0))
        opened, steps = (state_dict[name] if goes_on else None for name in ("open_return", "open_length"))
        self._open_return = None if opened is None else opened.numpy().copy()
        self._open_length = None if steps is None else steps.numpy().copy()

    def rows(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return, length, and time and step of the end of each episode that means are taken over, ``[n, 4]``."""
        columns = self._returns, self._lengths, self._ended_at, self._ended_in
        return np.array([*zip(*columns, strict=True)], np.float64).reshape(-1, 4)

    def summary(self) -> dict[str, Any]:
        """Counts and means, as JSON knows them."""
        returns, lengths = self._returns.copy(), self._lengths.copy()  # another thread may be adding to them
        return {
            "episodes": self.episodes,
            "mean_return": float(np.mean(returns)) if returns else None,
            "mean_length": float(np.mean(lengths)) if lengths else None,
            "last_return": returns[-1] if returns else None,
        }


def _with_ends(rewards: Any, ended: Any) -> tuple[Any, Any, Any, Any]:
    """Environments in which something has ended, their rewards and flags; and the sums of rewards of all."""
    steps = rewards.shape[1]
    if isinstance(rewards, torch.Tensor):
        total = rewards.sum(1, dtype=torch.float64).cpu().numpy()
        rows = ended.any(1).nonzero().squeeze(1)
        return rows.cpu().numpy(), rewards[rows].cpu().numpy(), ended[rows].cpu().numpy(), total
    total = np.add.reduceat(rewards.reshape(-1), np.arange(len(rewards)) * steps, dtype=np.float64)
    env = np.flatnonzero(ended) // steps
    rows = env[np.append(True, env[1:] != env[:-1])] if len(env) else env
    every = len(rows) == len(rewards)
    return rows, rewards if every else rewards[rows], ended if every else ended[rows], total
