"""Results: the first episodes of each environment of a batch, their numbers and their frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright.data.layout import MASK, pad_trajectories


class _Episode(NamedTuple):
    """One episode: its return, its number of frames, its environment, and its first frame among all of these."""

    total: float
    length: int
    env: int
    start: int


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
        self._episodes: list[list[_Episode]] = [[] for _ in range(num_envs)]
        self._steps = 0
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
                length = int(self._length[env])
                first = self._steps + end + 1 - length
                self._episodes[env].append(_Episode(float(self._return[env]), length, env, first))
                self._return[env] = self._length[env] = 0
                self._left[env] -= 1
                start = end + 1
                if not self._left[env]:
                    break
            else:
                self._add(env, rewards[env, start:])
        self._steps += ended.shape[1]

    def _add(self, env: int, rewards: NDArray[Any]) -> None:
        self._return[env] += rewards.sum(dtype=np.float64)
        self._length[env] += len(rewards)

    def _in_order(self) -> list[_Episode]:
        """The first episode of each environment, then the second of each, and so on."""
        most = max(len(found) for found in self._episodes)
        return [found[i] for i in range(most) for found in self._episodes if i < len(found)]

    @property
    def returns(self) -> list[float]:
        """Sums of rewards."""
        return [episode.total for episode in self._in_order()]

    @property
    def lengths(self) -> list[int]:
        """Numbers of frames."""
        return [episode.length for episode in self._in_order()]

    @property
    def places(self) -> list[tuple[int, int]]:
        """Environment and first frame."""
        return [(episode.env, episode.start) for episode in self._in_order()]

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


def padded_episodes(batches: Sequence[TensorDictBase], results: EpisodeResults) -> TensorDictBase:
    """The frames of the episodes, in the order of ``returns``.

    Args:
        batches: ``[*env, T]`` each, as ``results`` has taken them.
        results: complete.

    Returns:
        ``[episodes, longest]``, padded, with the mask ``("collector", "mask")``.
    """
    frames = cast(TensorDictBase, torch.cat(cast(Any, list(batches)), batches[0].ndim - 1))
    steps = frames.batch_size[-1]
    starts = torch.tensor([env * steps + start for env, start in results.places], device="cpu")
    return pad_trajectories(frames.reshape(-1), starts, torch.tensor(results.lengths, device="cpu"), MASK)


def as_number(value: Any) -> Any:
    """A tensor or array of one number as that number, anything else as it is.

    Example:
        >>> as_number(torch.tensor(2.5)), as_number([1, 2])
        (2.5, [1, 2])
    """
    return (
        value.item()
        if isinstance(value, torch.Tensor | np.ndarray | np.generic) and np.prod(value.shape) == 1
        else value
    )


class _Float(float):
    """A float with the method by which tensors give their number."""

    def item(self) -> float:
        """The number."""
        return float(self)


class _Int(int):
    """An int with the method by which tensors give their number."""

    def item(self) -> int:
        """The number."""
        return int(self)


class _Numbers(list[Any]):
    """A list of numbers with that method."""

    def item(self) -> float:
        """Their mean: who asks for one number wants to log one."""
        return float(np.mean(self))


def with_item(result: Mapping[str, Any]) -> dict[str, Any]:
    """The same results, which also have ``item()``, for functions that expect tensors.

    Example:
        >>> found = with_item({"reward": 2.5, "num_episodes": 3, "lengths": [1, 2]})
        >>> found, found["reward"].item(), found["lengths"].item()
        ({'reward': 2.5, 'num_episodes': 3, 'lengths': [1, 2]}, 2.5, 1.5)
    """
    kinds: dict[type, Any] = {float: _Float, int: _Int, list: _Numbers}
    return {name: kinds.get(type(value), lambda same: same)(value) for name, value in result.items()}
