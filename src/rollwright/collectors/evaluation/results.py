"""Results: the first episodes of each environment of a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["EpisodeResults"]


class EpisodeResults:
    """Counts a fixed number of episodes for each environment, so that short ones are not preferred.

    Of ``n`` episodes over ``e`` environments, environment ``i`` gives its first ``n // e + (i < n % e)``. To take
    those that end first would prefer the short ones.

    Args:
        num_episodes: in all.
        num_envs: number of environments that step together.

    Example:
        >>> results = EpisodeResults(num_episodes=2, num_envs=2)
        >>> ended = np.array([[True, True, True], [False, False, True]])
        >>> results.take(np.ones((2, 3)), ended)
        >>> results.complete, results.returns, results.lengths
        (True, [1.0, 3.0], [1, 3])
    """

    def __init__(self, num_episodes: int, num_envs: int) -> None:
        self._left = num_episodes // num_envs + (np.arange(num_envs) < num_episodes % num_envs)
        self._return = np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)
        self._episodes: list[list[tuple[float, int]]] = [[] for _ in range(num_envs)]
        self.frames_stepped = 0

    @property
    def complete(self) -> bool:
        """Whether all episodes have ended."""
        return not self._left.any()

    def take(self, rewards: NDArray[Any], ended: NDArray[np.bool_]) -> None:
        """Count the frames of a batch, the next ones of each environment.

        Args:
            rewards: float ``[num_envs, T]``.
            ended: bool ``[num_envs, T]``, the last frame of an episode.
        """
        self.frames_stepped += ended.size
        for env in np.flatnonzero(self._left).tolist():
            start = 0
            for end in np.flatnonzero(ended[env]).tolist():
                self._add(env, rewards[env, start : end + 1])
                self._episodes[env].append((float(self._return[env]), int(self._length[env])))
                self._return[env] = self._length[env] = 0
                self._left[env] -= 1
                start = end + 1
                if not self._left[env]:
                    break
            else:
                self._add(env, rewards[env, start:])

    def _add(self, env: int, rewards: NDArray[Any]) -> None:
        self._return[env] += rewards.sum(dtype=np.float64)
        self._length[env] += len(rewards)

    def _in_order(self) -> list[tuple[float, int]]:
        """The first episode of each environment, then the second of each, and so on."""
        most = max(len(found) for found in self._episodes)
        return [found[i] for i in range(most) for found in self._episodes if i < len(found)]

    @property
    def returns(self) -> list[float]:
        """Sums of rewards."""
        return [value for value, _ in self._in_order()]

    @property
    def lengths(self) -> list[int]:
        """Numbers of frames."""
        return [length for _, length in self._in_order()]

    def summary(self) -> dict[str, Any]:
        """Numbers over all episodes, as JSON knows them; deviations are those of a sample (0 for one episode)."""
        returns, lengths = np.array(self.returns), np.array(self.lengths)
        several = int(len(returns) > 1)
        return {
            "reward": float(returns.mean()),
            "reward_std": float(returns.std(ddof=several)),
            "reward_min": float(returns.min()),
            "reward_max": float(returns.max()),
            "episode_length": float(lengths.mean()),
            "episode_length_std": float(lengths.std(ddof=several)),
            "episode_length_min": int(lengths.min()),
            "episode_length_max": int(lengths.max()),
            "num_episodes": len(returns),
            "frames": int(lengths.sum()),
            "returns": returns.tolist(),
            "lengths": lengths.tolist(),
        }
