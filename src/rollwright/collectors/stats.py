"""What a collector knows about its own run: counts, times, episodes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDictBase

__all__ = ["EpisodeStats", "StageTimer"]

Call = TypeVar("Call", bound=Callable[..., Any])


class StageTimer:
    """Seconds spent in each stage of collection, and the frames that they were spent on."""

    def __init__(self) -> None:
        self.frames = 0
        self.seconds: dict[str, float] = {}
        self.total = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of the ``with`` block to ``total``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.total += time.perf_counter() - start

    def timed(self, stage: str, call: Call) -> Call:
        """``call``, its time added to ``stage``."""
        seconds, clock = self.seconds, time.perf_counter
        seconds.setdefault(stage, 0.0)

        def measured(*args: Any) -> Any:
            start = clock()
            try:
                return call(*args)
            finally:
                seconds[stage] += clock() - start

        return measured  # type: ignore[return-value]


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

    def __init__(self, window: int = 100) -> None:
        self.episodes = 0
        self._returns: deque[float] = deque(maxlen=window)
        self._lengths: deque[int] = deque(maxlen=window)
        self._open_return: np.ndarray[Any, np.dtype[np.float64]] | None = None
        self._open_length: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def update(self, rewards: Any, ended: Any, begun_anew: Any) -> None:
        """Count the frames of one batch.

        Args:
            rewards: float ``[env, T]``.
            ended: bool ``[env, T]``, the last frame of an episode.
            begun_anew: bool ``[env]``, environments that were reset between the last batch and this one without
                having ended.
        """
        rewards = np.asarray(rewards, dtype=np.float64)
        num_envs, steps = rewards.shape
        if self._open_return is None or self._open_length is None:
            self._open_return = np.zeros(num_envs)
            self._open_length = np.zeros(num_envs, dtype=np.int64)
        self._open_return[begun_anew] = 0.0
        self._open_length[begun_anew] = 0
        total = rewards.cumsum(1)
        done_before = np.zeros(num_envs)
        start = np.zeros(num_envs, dtype=np.int64)
        for env, t in zip(*np.nonzero(ended), strict=True):
            self._returns.append(float(self._open_return[env] + total[env, t] - done_before[env]))
            self._lengths.append(int(self._open_length[env] + t + 1 - start[env]))
            self._open_return[env] = self._open_length[env] = 0
            done_before[env], start[env] = total[env, t], t + 1
            self.episodes += 1
        self._open_return += total[:, -1] - done_before
        self._open_length += steps - start

    def update_from(self, batch: TensorDictBase, reward: torch.Tensor | None, ended: torch.Tensor, anew: Any) -> None:
        """:meth:`update` from the tensors of a batch ``[*env, T]``; without rewards, returns count zero."""
        steps = batch.batch_size[-1]
        if reward is None:
            rows = torch.zeros(ended.shape)
        else:
            rows = reward.detach().reshape(*batch.batch_size, -1).sum(-1, dtype=torch.float64)
        self.update(rows.reshape(-1, steps).cpu().numpy(), ended.reshape(-1, steps).cpu().numpy(), anew)

    def summary(self) -> dict[str, Any]:
        """Counts and means, as JSON knows them."""
        return {
            "episodes": self.episodes,
            "mean_return": float(np.mean(self._returns)) if self._returns else None,
            "mean_length": float(np.mean(self._lengths)) if self._lengths else None,
            "last_return": self._returns[-1] if self._returns else None,
        }
