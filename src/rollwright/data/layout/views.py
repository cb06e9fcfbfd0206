"""Whole trajectories as views over the flat layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright.data.layout.runs import Runs, trajectory_runs


class Trajectories(Sequence[TensorDictBase]):
    """The trajectories of a batch: a sequence of views ``[length]``, made when they are asked for.

    Nothing is copied: what is written into a view is written into the batch. :func:`trajectories` makes it.

    Args:
        batch: ``[*env, T]``, time last.
        runs: where its trajectories lie.
    """

    def __init__(self, batch: TensorDictBase, runs: Runs) -> None:
        self._batch = batch
        self.runs = runs
        self._spans = torch.stack(runs, -1).tolist()

    @property
    def lengths(self) -> torch.Tensor:
        """int64 ``[trajectories]``."""
        return self.runs.lengths

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> TensorDictBase: ...

    @overload
    def __getitem__(self, index: slice) -> Trajectories: ...

    def __getitem__(self, index: int | slice) -> TensorDictBase | Trajectories:
        """One trajectory, or the sequence of some of them."""
        if isinstance(index, slice):
            kept = torch.tensor(range(len(self))[index], dtype=torch.int64, device=self.lengths.device)
            return Trajectories(self._batch, Runs(*(column[kept] for column in self.runs)))
        row, start, length = self._spans[index]
        env = map(int, np.unravel_index(row, self._batch.batch_size[:-1])) if self._batch.ndim > 1 else ()
        return self._batch[(*env, slice(start, start + length))]

    def __repr__(self) -> str:
        return f"Trajectories({len(self)} of {sum(span[2] for span in self._spans)} frames)"


def trajectories(
    batch: TensorDictBase,
    *,
    prefix: str | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
) -> Trajectories:
    """The trajectories of a batch ``[*env, T]``, as views ``[length]`` in order of environments, then of time.

    Arguments and errors are those of :func:`~rollwright.data.layout.trajectory_runs`.

    Example:
        >>> from tensordict import TensorDict
        >>> done = torch.tensor([[False], [True], [False]])
        >>> batch = TensorDict({"reward": torch.ones(3), "next": {"done": done}}, [3])
        >>> whole = trajectories(batch)
        >>> whole, [trajectory["reward"].sum().item() for trajectory in whole]
        (Trajectories(2 of 3 frames), [2.0, 1.0])
        >>> _ = whole[1]["reward"].zero_()
        >>> batch["reward"]
        tensor([1., 1., 0.])
    """
    runs = trajectory_runs(batch, prefix=prefix, trajectory_key=trajectory_key, done_key=done_key)
    return Trajectories(batch, runs)
