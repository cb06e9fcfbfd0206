"""Storage: where a replay buffer keeps its elements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase, is_tensor_collection

from rollwright._keys import NestedKey, key_str, leaf_keys
from rollwright._processes.pickling import is_sending
from rollwright.data.replay_buffers.ledger import Ledger, Reservation

__all__ = ["ListStorage", "Storage"]

_UNLIMITED = 1 << 40
_SENT_REMEDY = (
    "Pass a LazyTensorStorage or LazyMemmapStorage to a buffer with shared=True, or make the buffer in the process "
    "that uses it."
)


class Storage(ABC):
    """A ring of rows, and the ledger that records which of them are published.

    The n-th row ever written has position n and lies in row ``n % capacity``. A row holds ``columns`` elements (one,
    unless ``ndim`` exceeds 1); the *flat index* of an element is ``(position % capacity) * columns + column``.

    Attributes:
        max_size: elements that it has room for.
        ndim: dimensions that distinguish elements.
        capacity: rows.
        columns: elements in a row.
        period: 0: time runs from row to row, and each column is an environment of its own. T: time runs along the
            last T elements of a row, and never from one row to the next.
        ledger: of the rows.
        keeps_objects: whether entries may be text and other objects that are no tensors.
    """

    max_size: int
    ndim: int = 1
    columns: int = 1
    period: int = 0
    ledger: Ledger
    keeps_objects: bool = True

    @property
    def capacity(self) -> int:
        """Number of rows; 0 until it is known."""
        return self.ledger.capacity

    @property
    def rest(self) -> tuple[int, ...]:
        """The dimensions of a row; their product is :attr:`columns`."""
        return ()

    @property
    def dim_extend(self) -> int:
        """Which dimension of the data the rows are."""
        return self.ndim - 1

    def __len__(self) -> int:
        return self.ledger.num_live() * self.columns

    @abstractmethod
    def append(self, data: Any, *, dim: int = 0) -> Reservation:
        """Write data after what is there, over the oldest where it is full; everyone reads them once all are written.

        What is stored is a copy, and in no autograd graph. Of more rows than :attr:`capacity`, the last are written and
        the others are skipped: ``with self.ledger.writes(n, skipped) as rows``, where n are written.

        Args:
            data: a batch (TensorDict or tensor), a list of elements, or several batches (:func:`pieces`) that are
                written one after the other; :func:`items_of` gives the rows of each.
            dim: of a batch: which dimension rows are taken from.

        Returns:
            The positions that were written.
        """

    def append_one(self, data: Any) -> Reservation:
        """Write one element (or one row of ``rest``) after what is there."""
        return self.append(self.element(data), dim=self.ndim - 1)

    @abstractmethod
    def element(self, data: Any) -> Any:
        """One element (or one row of ``rest``) as a batch of one row."""

    @abstractmethod
    def read(self, index: NDArray[np.int64]) -> Any:
        """A copy of the elements at flat indices, in any order and repeated, as a batch ``[n]``; n may be 0.

        A gap is read like an element (:meth:`state_dict` does), though nothing was written there: the result is
        anything of the same form.
        """

    @abstractmethod
    def overwrite(self, index: NDArray[np.int64], data: Any) -> None:
        """Replace the elements at flat indices, which are published, by a batch ``[n]``.

        The writes are inside ``self.ledger.changing_in_place()``.
        """

    @abstractmethod
    def keys(self) -> list[NestedKey]:
        """The entries of an element; none where elements are no TensorDicts."""

    @abstractmethod
    def entry(self, key: NestedKey, low: int, high: int) -> NDArray[Any]:
        """Values of an entry at the positions ``low <= p < high``, in order: ``[high - low, columns, *feature]``."""

    def clear(self) -> None:
        """Drop all elements."""
        self.ledger.clear()

    @property
    def device(self) -> torch.device | None:
        """Where elements are read to."""
        return None

    def share(self) -> None:
        """Move to memory that processes share."""
        raise TypeError(
            f"shared: {type(self).__name__} holds objects of this process. Pass a LazyTensorStorage, or a "
            "RaggedStorage for text and ragged tensors."
        )

    @property
    def shared(self) -> bool:
        """Whether other processes can write and read it too."""
        return False

    # Places -----------------------------------------------------------------------------------

    def live_index(self) -> NDArray[np.int64]:
        """Flat indices of all live elements, ascending."""
        positions = self.ledger.positions()
        return self.elements_of(np.sort(positions % self.capacity)) if len(positions) else positions

    def rows_from_0(self) -> int | None:
        """Number of live rows, where they are the first of the storage; None: where they lie elsewhere, or apart."""
        low, high = self.ledger.live()
        whole = (low % max(self.capacity, 1) == 0 or high - low == self.capacity) and not len(self.ledger.gaps())
        return high - low if whole else None

    def elements_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Flat indices of the elements at positions, one position after the other."""
        rows = positions % max(self.capacity, 1)
        wide: NDArray[np.int64] = rows[:, None] * self.columns + np.arange(self.columns)
        return rows if self.columns == 1 else wide.reshape(-1)

    def index_of(self, reservation: Reservation) -> NDArray[np.int64]:
        """Flat indices of the elements of a reservation, in the order in which they were written."""
        return self.elements_of(np.arange(reservation.start, reservation.stop))

    def public(self, index: NDArray[np.int64]) -> torch.Tensor:
        """Flat indices as users see them: int64 ``[n]``, or ``[n, ndim]`` with the row first; -1: not stored."""
        if self.ndim == 1:
            return torch.from_numpy(index)
        places = np.stack(np.unravel_index(np.maximum(index, 0), (self.capacity, *self.rest)), -1)
        return torch.from_numpy(np.where(index[:, None] < 0, -1, places))

    def flat(self, index: Any) -> NDArray[np.int64]:
        """Flat indices from those of :meth:`public`, flattened; -1: not stored."""
        array = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index, np.int64)
        if self.ndim > 1 and array.ndim and array.shape[-1] == self.ndim:
            stored = np.asarray((array >= 0).all(-1))
            places = tuple(np.moveaxis(np.where(stored[..., None], array, 0), -1, 0))
            array = np.where(stored, np.ravel_multi_index(places, (self.capacity, *self.rest)), -1)
        return array.reshape(-1)

    # State ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Live elements in the order of positions, and the positions."""
        with self.ledger.reading():
            low, high = self.ledger.live()
            flat = self.elements_of(np.arange(low, high))
            return {**self._state(low, high), "elements": self.read(flat) if high > low else None}

    def _state(self, low: int, high: int) -> dict[str, Any]:
        """All of the state but the elements."""
        return {
            "low": low,
            "high": high,
            "voids": torch.from_numpy(self.ledger.gaps()),
            "lost": self.ledger.num_lost,
            "skipped": self.ledger.num_skipped,
            "ids": self.ledger.next_id,
            "capacity": self.capacity,
            "max_size": self.max_size,
            "ndim": self.ndim,
            "rest": list(self.rest),
            "dim_extend": self.dim_extend,
        }

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what another storage held: the result of :meth:`state_dict`.

        Inside ``self.ledger.changing_in_place()``, element i of ``"elements"`` is written at position ``"low" + i``;
        then ``self.ledger.restore(state_dict)`` sets the positions. ``"elements"`` is None where there are none.
        """

    def _check_state(self, state: Mapping[str, Any]) -> None:
        lacking = [name for name in ("low", "high", "elements", "ndim") if name not in state]
        if lacking:
            raise KeyError(f"state_dict: expected that of a storage, got {sorted(state)}: {key_str(lacking)} missing.")
        needed = state["high"] - state["low"]
        if state["ndim"] != self.ndim or state["max_size"] > self.max_size:
            raise ValueError(
                f"state_dict: expected one of ndim={self.ndim} with at most {self.max_size} elements, got "
                f"ndim={state['ndim']} and max_size={state['max_size']} ({needed} rows). Make a storage like that."
            )
        elements = state["elements"]
        if elements is not None and not self._takes(elements):
            raise ValueError(
                f"state_dict: expected elements of a {type(self).__name__}, got {type(elements).__name__}. "
                "Load a list of objects into a ListStorage, rows of tensors into a storage of tensors, and encoded "
                "elements into a RaggedStorage."
            )

    def _takes(self, elements: Any) -> bool:
        """Whether elements of a state are of the kind that this storage holds."""
        return isinstance(elements, torch.Tensor) or is_tensor_collection(elements)


class ListStorage(Storage):
    """Elements of any kind, in a list of this process.

    Other processes cannot have it: ``multiprocessing`` refuses to send it (as an argument of a process, through a
    queue or a pipe). What comes along with a function that is sent to a worker is a copy, which can be read and not
    written. Copies by :mod:`copy` and :mod:`pickle` are storages of their own.

    Args:
        max_size: number of elements; None: no limit.

    Example:
        >>> from rollwright.data import ReplayBuffer
        >>> buffer = ReplayBuffer(storage=ListStorage(10), batch_size=2, collate_fn=list)
        >>> buffer.extend(["left", "right", "up"])
        tensor([0, 1, 2])
        >>> len(buffer), len(buffer.sample())
        (3, 2)
    """

    def __init__(self, max_size: int | None = None) -> None:
        self.max_size = _UNLIMITED if max_size is None else positive("max_size", max_size)
        self.ledger = Ledger(capacity=self.max_size)
        self._items: dict[int, tuple[Any]] = {}  # by row; each write makes a tuple of its own
        self._was_sent = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ForkingPickler.register(cls, _refuse_to_send)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_was_sent": self._was_sent or is_sending()}

    def _check_here(self) -> None:
        if self._was_sent:
            raise TypeError(
                "storage: this is a copy of a ListStorage of another process, where nobody would see what is written "
                f"here. {_SENT_REMEDY}"
            )

    def append(self, data: Any, *, dim: int = 0) -> Reservation:
        """See :meth:`Storage.append`."""
        self._check_here()
        items = items_of(data, dim)
        if not items:
            raise ValueError("data: expected at least one element, got none.")
        skipped = max(0, len(items) - self.max_size)
        with self.ledger.writes(len(items) - skipped, skipped) as rows:
            for position, item in enumerate(items[skipped:], rows.start):
                self._put(position % self.max_size, item)
        return rows

    def element(self, data: Any) -> Any:
        """See :meth:`Storage.element`."""
        return [data]

    def _put(self, row: int, item: Any) -> None:
        self._items[row] = (_copied(item),)

    def clear(self) -> None:
        """See :meth:`Storage.clear`; lets the objects go."""
        before = list(self._items.items())
        self.ledger.clear()
        with self.ledger.writing():
            for row, item in before:
                if self._items.get(row) is item:  # else it was written since
                    del self._items[row]

    def read(self, index: NDArray[np.int64]) -> list[Any]:
        """See :meth:`Storage.read`; a list, of copies as far as elements are tensors or TensorDicts."""
        return [_copied(self._items.get(row, (None,))[0]) for row in index.tolist()]  # nothing lies in a gap

    def overwrite(self, index: NDArray[np.int64], data: Any) -> None:
        """See :meth:`Storage.overwrite`."""
        self._check_here()
        items = items_of(data, 0)
        if len(items) != len(index):
            raise ValueError(f"data: expected {len(index)} elements to replace as many, got {len(items)}.")
        with self.ledger.changing_in_place():
            for row, item in zip(index.tolist(), items, strict=True):
                self._put(row, item)

    def keys(self) -> list[NestedKey]:
        """See :meth:`Storage.keys`; those of the newest element."""
        positions = self.ledger.positions() if len(self.ledger.gaps()) else range(*self.ledger.live())
        newest = self._items[positions[-1] % self.max_size][0] if len(positions) else None
        return leaf_keys(newest) if isinstance(newest, TensorDictBase) else []

    def entry(self, key: NestedKey, low: int, high: int) -> NDArray[Any]:
        """See :meth:`Storage.entry`."""
        values = [self._items[p % self.max_size][0].get(key) for p in range(low, high)]
        if not values:
            return np.zeros((0, 1), np.int64)
        return np.stack([value.numpy(force=True) for value in values])[:, None]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`Storage.load_state_dict`."""
        self._check_state(state_dict)
        with self.ledger.changing_in_place():
            for position, item in enumerate(state_dict["elements"] or (), state_dict["low"]):
                self._put(position % self.max_size, item)
            self.ledger.restore(state_dict)

    def _takes(self, elements: Any) -> bool:
        return isinstance(elements, list)

    def __repr__(self) -> str:
        limit = "" if self.max_size == _UNLIMITED else f", max_size={self.max_size}"
        return f"ListStorage(len={len(self)}{limit})"


def _refuse_to_send(storage: ListStorage) -> Any:
    raise TypeError(
        f"storage: {type(storage).__name__} holds objects of this process, and another process would get a copy, of "
        f"which nobody else sees what is written. {_SENT_REMEDY}"
    )


ForkingPickler.register(ListStorage, _refuse_to_send)


def _copied(item: Any) -> Any:
    with torch.no_grad():
        return item.clone() if is_tensor_collection(item) or isinstance(item, torch.Tensor) else item


class _Pieces(list[Any]):
    """Batches to be written one after the other, and published at once."""


def pieces(batches: Sequence[Any]) -> list[Any]:
    """Mark batches as parts of one write, see :meth:`Storage.append`."""
    return _Pieces(batches)


def batches_of(data: Any) -> list[Any]:
    """The batches in data for :meth:`Storage.append`: one, or those of :func:`pieces`."""
    return data if isinstance(data, _Pieces) else [data]


def items_of(data: Any, dim: int) -> list[Any]:
    """The rows in data for :meth:`Storage.append`, one by one; they share memory with it.

    Raises:
        TypeError: it is neither a tensor, a TensorDict, nor a list of elements.
    """
    return [item for batch in batches_of(data) for item in _unbound(batch, dim)]


def num_rows(data: Any, dim: int) -> int:
    """Rows in data for :meth:`Storage.append`."""
    if isinstance(data, _Pieces):
        return sum(num_rows(batch, dim) for batch in data)
    return int(data.shape[dim]) if isinstance(data, torch.Tensor) or is_tensor_collection(data) else len(data)


def _unbound(batch: Any, dim: int) -> list[Any]:
    if isinstance(batch, torch.Tensor) or is_tensor_collection(batch):
        return list(batch.unbind(dim))
    if isinstance(batch, Mapping) or not isinstance(batch, Sequence) or isinstance(batch, str):
        raise TypeError(
            f"data: expected a TensorDict, a tensor or a list of elements, got {type(batch).__name__}. "
            "Pass one element to add()."
        )
    return list(batch)


def no_objects(name: str, keys: Sequence[NestedKey], storage: str) -> str:
    """The message for entries that a storage of tensors cannot keep."""
    quoted = ", ".join(repr(key) for key in keys)
    return (
        f"{name}: {storage} keeps tensors only, got text or other objects in {key_str(keys)}. Use a "
        f"RaggedStorage or a ListStorage, which keep them, or leave them out: data.exclude({quoted}); in a collector "
        f"postproc=lambda data: data.exclude({quoted}), or an environment without them "
        "(gymnasium.wrappers.FilterObservation)."
    )


def positive(name: str, value: Any) -> int:
    """An integer of at least 1.

    Raises:
        TypeError, ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}: expected an integer of at least 1, got {type(value).__name__}: {value!r}.")
    if value < 1:
        raise ValueError(f"{name}: expected an integer of at least 1, got {value}.")
    return int(value)
