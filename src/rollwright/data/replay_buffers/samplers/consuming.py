"""ConsumingSampler: each element so often and no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright.data.replay_buffers.samplers.base import Draw, Sampler
from rollwright.data.replay_buffers.storages.base import Storage
from rollwright.data.replay_buffers.storages.batches import positive

Index = NDArray[np.int64]


class ConsumingSampler(Sampler):
    """Every element that is stored, with the same probability, until it was drawn so often.

    An element is at most once in a batch. A batch is short where fewer elements are left than it asks for;
    ``len(buffer)`` is their number, and iterating over the buffer ends when none is left. What was consumed can be read
    by place until it is overwritten. The oldest element is overwritten first, whether it was consumed or not.

    Args:
        max_sample_count: how often an element may be drawn.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=ConsumingSampler(), batch_size=3)
        >>> _ = buffer.extend(TensorDict({"obs": torch.arange(4)}, [4]))
        >>> len(buffer.sample()), len(buffer), len(buffer.sample()), len(buffer)
        (3, 1, 1, 0)
    """

    repeatable = False
    consumes = True
    state_entries = ("names", "drawn", "high")

    def __init__(self, max_sample_count: int = 1) -> None:
        self.max_sample_count = positive("max_sample_count", max_sample_count)
        self._names: Index = np.zeros(0, np.int64)  # of the elements that are left: position * columns + column
        self._drawn: Index = np.zeros(0, np.int64)  # how often each was drawn
        self._high = 0  # positions taken in
        self.ran_out = False
        self._storage: Storage | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_storage": None}

    def follow(self, storage: Storage) -> None:
        """Read what was written since the last call."""
        (low, high), columns = storage.ledger.live(), storage.columns
        if high < self._high or (self._storage is not None and storage is not self._storage):
            self._names, self._drawn, self._high = self._names[:0], self._drawn[:0], 0
        self._storage = storage
        if len(self._names) and self._names.min() < low * columns:
            held = self._names >= low * columns
            self._names, self._drawn = self._names[held], self._drawn[held]
        if high > self._high:
            positions = storage.ledger.positions()
            fresh = positions[positions >= self._high]
            names = (fresh[:, None] * columns + np.arange(columns)).reshape(-1)
            self._names = np.concatenate([self._names, names])
            self._drawn = np.concatenate([self._drawn, np.zeros(len(names), np.int64)])
            self._high = high

    def num_left(self, storage: Storage) -> int:
        """Number of elements that were drawn less often than allowed; call it inside ``storage.ledger.reading()``."""
        self.follow(storage)
        return len(self._names)

    def draw(self, storage: Storage, batch_size: int, generator: torch.Generator | None = None) -> Draw:
        """See :meth:`Sampler.draw`; ``[n]`` with n below ``batch_size`` where fewer are left.

        Raises:
            RuntimeError: none is left.
        """
        self.follow(storage)
        if not len(self._names):
            raise RuntimeError(
                f"every element was drawn {self.max_sample_count} times: nothing is left to sample. Call extend(), or "
                "wait until what writes into the buffer has written."
            )
        chosen = torch.randperm(len(self._names), generator=generator, device="cpu")[:batch_size].numpy()
        names = self._names[chosen]
        self._drawn[chosen] += 1
        left = self._drawn < self.max_sample_count
        self._names, self._drawn = self._names[left], self._drawn[left]
        self.ran_out = not len(self._names)
        return Draw(names % (storage.capacity * storage.columns), {})

    def state_dict(self) -> dict[str, Any]:
        """Which elements are left, and how often they were drawn."""
        names, drawn = torch.from_numpy(self._names.copy()), torch.from_numpy(self._drawn.copy())
        return {"names": names, "drawn": drawn, "high": self._high}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`."""
        self.check_state(state_dict)
        names = state_dict["names"].numpy(force=True).astype(np.int64)
        drawn = state_dict["drawn"].numpy(force=True).astype(np.int64)
        self._names, self._drawn, self._high = names, drawn, int(state_dict["high"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_sample_count={self.max_sample_count})"
