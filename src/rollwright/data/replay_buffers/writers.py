"""Writers: choose where in a storage new elements go."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys, key_str, leaf_keys
from rollwright._tensors import as_tensor
from rollwright.data.replay_buffers.storages.batches import num_rows
from rollwright.data.replay_buffers.storages.saving import Part
from rollwright.data.replay_buffers.storages.storage import Storage

__all__ = [
    "ImmutableDatasetWriter",
    "RoundRobinWriter",
    "TensorDictMaxValueWriter",
    "TensorDictRoundRobinWriter",
    "Writer",
]


class Writer(Part, ABC):
    """Puts elements into a storage.

    Args:
        compilable: accepted for programs of the field; it changes nothing here.

    Attributes:
        in_order: whether elements lie in the order in which they came, which writes in place rely on.
        shareable: whether several processes may write, each with a copy of the writer.
        tracks_generations: whether batches say which element of its place each is, see :class:`RoundRobinWriter`.
        storage: of the buffer that writes with it; None: no buffer does yet.
        compilable: as given.
    """

    _part = "writer"
    in_order: bool = False
    shareable: bool = True
    tracks_generations: bool = False
    storage: Storage | None = None

    def __init__(self, compilable: bool = False) -> None:
        self.compilable = bool(compilable)

    def check_shareable(self) -> None:
        """Refuse what other processes are to write to.

        Raises:
            ValueError: the writer is not shareable.
        """
        if not self.shareable:
            raise ValueError(
                f"writer: {type(self).__name__} ranks what this process writes, and cannot see what others do. Use a "
                "RoundRobinWriter, or make the buffer in the process that uses it."
            )

    def register_storage(self, storage: Storage) -> None:
        """Learn which storage the indices of :meth:`generations_of` are of; a buffer does that with its own."""
        self.storage = storage

    def generations_of(self, index: Any) -> torch.Tensor:
        """How often the places of elements were written before these were.

        What ``sample`` gives as ``"index_generation"``, for the index that ``extend`` and ``add`` return.

        Args:
            index: int64 ``[n]`` or ``[n, ndim]``, or the number of one element.

        Returns:
            int64 ``[n]``, or ``[]`` for one element; -1: nothing is stored there, or the writer tracks no generations.
        """
        places = as_tensor(index)
        if self.storage is None or not self.tracks_generations:
            shape = places.shape if self.storage is None or self.storage.ndim == 1 else places.shape[:-1]
            return torch.full(shape, -1, dtype=torch.int64, device="cpu")
        return self.storage.generations_at(places)

    @abstractmethod
    def extend(self, storage: Storage, data: Any, dim: int) -> NDArray[np.int64]:
        """Store a batch; returns the flat indices of its elements, -1 for those that were not stored.

        Args:
            storage: where to.
            data: a batch, or several (of :func:`~rollwright.data.replay_buffers.storages.storage.pieces`).
            dim: of a batch: the dimension that rows are taken from.
        """

    def add(self, storage: Storage, data: Any, dim: int | None = None) -> NDArray[np.int64]:
        """Store one element.

        Args:
            storage: where to.
            data: the element; of a storage of several dimensions, a row of elements.
            dim: the dimension that rows are taken from; None: that of the storage.
        """
        batch, dim = _as_batch(storage, data, dim)
        return self.extend(storage, batch, dim)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class RoundRobinWriter(Writer):
    """Elements lie in the order in which they come; a full storage loses the oldest.

    Args:
        compilable: accepted for programs of the field; it changes nothing here.
        track_generations: give the entry ``"index_generation"`` along with ``"index"``, int64 ``[n]``, by which
            :meth:`~rollwright.data.replay_buffers.buffer.ReplayBuffer.update_if_present` and ``update_priority`` know
            whether an element was overwritten since it was drawn.

    Attributes:
        tracks_generations: as given.

    Example:
        >>> from rollwright.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(3), writer=RoundRobinWriter())
        >>> buffer.extend(torch.arange(2)), buffer.extend(torch.arange(2, 4))
        (tensor([0, 1]), tensor([2, 0]))
    """

    in_order = True

    def __init__(self, compilable: bool = False, track_generations: bool = False) -> None:
        super().__init__(compilable)
        self.tracks_generations = bool(track_generations)

    def extend(self, storage: Storage, data: Any, dim: int) -> NDArray[np.int64]:
        """Write a batch, over the oldest elements if the storage is full; returns flat indices."""
        rows = storage.append(data, dim=dim)
        index = storage.index_of(rows)
        if rows.stop - rows.start < storage.capacity:
            return index
        lost = max(0, num_rows(data, dim) - storage.capacity) * storage.columns  # no room for the first of them
        return np.concatenate([np.full(lost, -1), index]) if lost else index

    def add(self, storage: Storage, data: Any, dim: int | None = None) -> NDArray[np.int64]:
        """Write one element, over the oldest if the storage is full; returns its flat index."""
        if storage.ndim == 1:
            return storage.index_of(storage.append_one(data))
        return super().add(storage, data, dim)


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """Same as :class:`RoundRobinWriter`, under the name that it has for TensorDicts."""


class ImmutableDatasetWriter(Writer):
    """Refuses to write: for buffers over a dataset.

    Example:
        >>> from rollwright.data import ReplayBuffer, TensorStorage
        >>> buffer = ReplayBuffer(storage=TensorStorage(torch.arange(3)), writer=ImmutableDatasetWriter())
        >>> buffer.extend(torch.arange(3))
        Traceback (most recent call last):
        ...
        RuntimeError: This replay buffer is read-only (ImmutableDatasetWriter). Give it another writer to add elements.
    """

    def extend(self, storage: Storage, data: Any, dim: int) -> NDArray[np.int64]:
        """Raise.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"This replay buffer is read-only ({type(self).__name__}). Give it another writer to add elements."
        )


class TensorDictMaxValueWriter(Writer):
    """A full storage keeps the elements of the largest value.

    Args:
        rank_key: the entry that holds the value; numbers of any shape. None: ``("next", "reward")``.
        reduction: how several numbers become one: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"median"``.
        compilable: accepted for programs of the field; it changes nothing here.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter("value"))
        >>> buffer.extend(TensorDict({"value": torch.tensor([1.0, 5.0, 3.0, 0.0])}, [4]))
        tensor([ 0,  1,  0, -1])
        >>> buffer[:]["value"]
        tensor([3., 5.])
    """

    shareable = False
    _reductions = ("sum", "mean", "max", "min", "median")

    def __init__(self, rank_key: NestedKey | None = None, reduction: str = "sum", *, compilable: bool = False) -> None:
        super().__init__(compilable)
        if reduction not in self._reductions:
            raise ValueError(f"reduction: expected one of {', '.join(self._reductions)}, got {reduction!r}.")
        self.rank_key = ("next", "reward") if rank_key is None else as_keys(rank_key)[0]
        self.reduction = reduction
        self._heap: list[tuple[float, int]] = []  # the smallest value first, and its row
        self._seen = (0, 0, 0)  # what was live in the storage, and its revision, when the heap was right
        self._seen_in: Storage | None = None  # which storage that was

    def extend(self, storage: Storage, data: Any, dim: int) -> NDArray[np.int64]:
        """Write a batch, as if each element were added alone; returns flat indices, -1 for those not stored."""
        batch = torch.cat(data) if isinstance(data, list) else data
        if storage.ndim > 1 or storage.shared or not isinstance(batch, TensorDictBase):
            raise ValueError(
                f"{type(self).__name__} keeps TensorDicts in a storage of ndim=1 of this process, got "
                f"{type(batch).__name__} for {storage}. Use a RoundRobinWriter."
            )
        values = self._rank(batch)
        self._catch_up(storage)
        heap = self._heap
        room = min(self._room(storage), len(values))
        index = np.full(len(values), -1)
        if room:
            index[:room] = storage.index_of(storage.append(batch[:room]))
            for n in range(room):
                heapq.heappush(heap, (float(values[n]), int(index[n])))
        chosen: dict[int, int] = {}  # the last element that goes to each place
        for n in range(room, len(values)):
            if values[n] > heap[0][0]:
                row = heap[0][1]
                heapq.heapreplace(heap, (float(values[n]), row))
                chosen[row], index[n] = n, row
        if chosen:
            storage.overwrite(np.fromiter(chosen, np.int64), batch[torch.tensor(list(chosen.values()), device="cpu")])
        if room < len(values):
            storage.ledger.skip(len(values) - room)
        self._seen, self._seen_in = storage.ledger.span(), storage
        return index

    def add(self, storage: Storage, data: Any, dim: int | None = None) -> NDArray[np.int64]:
        """Write one element if its rank is high enough."""
        return self.extend(storage, data.unsqueeze(0) if isinstance(data, TensorDictBase) else data, 0)

    def _catch_up(self, storage: Storage) -> None:
        """Read the values of elements that others have put there."""
        span = storage.ledger.span()
        if storage is self._seen_in and span == self._seen:
            return
        heap: list[tuple[float, int]] = []
        for start, stop in storage.ledger.ranges(span):
            values = self._reduce(torch.from_numpy(storage.entry(self.rank_key, start, stop)))
            rows = np.arange(start, stop) % storage.capacity
            heap += zip(values.tolist(), rows.tolist(), strict=True)
        heapq.heapify(heap)
        self._heap = heap

    def _room(self, storage: Storage) -> int:
        """Elements that may be appended before one is lost: gaps take room, too, except for the oldest."""
        positions = storage.ledger.positions()
        if not len(positions):
            return storage.max_size
        return storage.max_size - int(storage.ledger.live()[1] - positions[0])

    def _rank(self, batch: TensorDictBase) -> NDArray[np.float64]:
        value: Any = batch.get(self.rank_key, None)
        if not isinstance(value, torch.Tensor):
            raise KeyError(
                f"rank_key: the data have no tensor {self.rank_key!r}; they have {key_str(leaf_keys(batch))}. "
                "Name one of these."
            )
        return self._reduce(value)

    def _reduce(self, value: torch.Tensor) -> NDArray[np.float64]:
        flat = value.to(torch.float64).reshape(len(value), value[:1].numel() if len(value) else 1)
        reduced: Any = getattr(flat, self.reduction)(-1)
        reduced = reduced if isinstance(reduced, torch.Tensor) else reduced.values
        ranked: NDArray[np.float64] = np.nan_to_num(
            reduced.numpy(force=True), nan=-np.inf, posinf=np.inf, neginf=-np.inf
        )  # NaN ranks last
        return ranked

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank_key={self.rank_key!r}, reduction={self.reduction!r})"


def _as_batch(storage: Storage, data: Any, dim: int | None) -> tuple[Any, int]:
    """One row as a batch, and the dimension that it is taken from."""
    dim = storage.dim_extend if dim is None else dim
    if storage.ndim > 1 and isinstance(data, TensorDictBase | torch.Tensor):
        return data.unsqueeze(dim), dim
    return storage.element(data), dim
