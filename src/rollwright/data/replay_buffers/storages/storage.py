"""Storage: where a replay buffer keeps its elements; ListStorage: in a list of one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase, is_tensor_collection

from rollwright._keys import NestedKey, key_str, leaf_keys
from rollwright._processes.channel import is_sending
from rollwright._tensors import as_tensor
from rollwright.data.replay_buffers.ledger import Ledger, Reservation
from rollwright.data.replay_buffers.storages.batches import (
    is_structure,
    items_in_place,
    items_that_fit,
    mapped,
    positive,
)
from rollwright.data.replay_buffers.storages.saving import Part, SavingHooks
from rollwright.data.specs.shapes import usable_device

SENT_REMEDY = (
    "Pass a LazyTensorStorage or LazyMemmapStorage to a buffer with shared=True, or make the buffer in the process "
    "that uses it."
)


class Storage(Part, ABC):
    """A ring of rows, and the ledger that records which of them are published.

    A storage whose elements processes can share defines :meth:`share`, which is called when ``multiprocessing`` sends
    it to one; others it refuses to send.

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

    _part = "storage"
    max_size: int
    ndim: int = 1
    columns: int = 1
    period: int = 0
    ledger: Ledger
    keeps_objects: bool = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ForkingPickler.register(cls, _refuse_to_send if cls.share is Storage.share else _share_and_send)

    @property
    def requested_size(self) -> int:
        """The number of elements that was asked for; ``max_size`` may be more, in whole rows."""
        return self.max_size

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
            The positions that were written. Others write meanwhile, and may give up what they have reserved: positions
            need not follow one another.
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

    @property
    def structured(self) -> bool:
        """Whether elements are kept in another form than that in which users gave them; see :meth:`restored`."""
        return False

    def restored(self, elements: Any) -> Any:
        """What :meth:`read` gives, one element or a batch, in the structure in which it was written."""
        return elements

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

    def move_here(self) -> None:
        """Serve in this process from now on: it is a copy of one that was sent for that, and nobody uses the other."""

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
        """Flat indices from those of :meth:`public`, or a tuple of one for each dimension; -1: not stored."""
        if isinstance(index, tuple) and len(index) == self.ndim and isinstance(index[0], torch.Tensor):
            index = torch.stack(index, -1) if self.ndim > 1 else index[0]
        given = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index)
        if given.dtype.kind not in "iu" and given.size:
            raise TypeError(
                f"index: expected integers, as sample() and extend() give them, got {given.dtype}."
                f"{' Of a mask, pass mask.nonzero().' if given.dtype.kind == 'b' else ''}"
            )
        array = given.astype(np.int64)
        if self.ndim > 1 and array.ndim and array.shape[-1] == self.ndim:
            stored = np.asarray((array >= 0).all(-1))
            places = tuple(np.moveaxis(np.where(stored[..., None], array, 0), -1, 0))
            array = np.where(stored, np.ravel_multi_index(places, (self.capacity, *self.rest)), -1)
        return array.reshape(-1)

    def in_index_order(self, value: Any, index: NDArray[np.int64], dim: int) -> Any:
        """Values of a batch that was written, ``[*batch, ...]``, in the order of its index: ``[n, ...]``.

        Args:
            value: others are returned as they are.
            index: int64 ``[n]``, flat.
            dim: of the batch, the dimension that grows.
        """
        if self.ndim == 1 or not isinstance(value, torch.Tensor) or value.ndim < self.ndim:
            return value
        rows, lanes = len(index) // self.columns, np.arange(self.columns)
        if value.shape[: self.ndim] != (*self.rest[:dim], rows, *self.rest[dim:]):
            return value
        if not ((index.reshape(rows, -1) % self.columns == lanes) | (index.reshape(rows, -1) < 0)).all():
            return value  # of elements that were drawn
        return value.movedim(dim, 0).flatten(0, self.ndim - 1)

    def elements_at(self, index: Any, dim: int | None = None) -> NDArray[np.int64]:
        """Flat indices of the elements at places.

        Args:
            index: of the batch ``[n]`` of all that is stored; with ``ndim=2`` of ``[B, T]``, and so on.
            dim: of that batch, the dimension that grows; None: that of the storage.

        Returns:
            int64, of the shape that indexing that batch gives.

        Raises:
            TypeError: the index is a name.
            IndexError: there are no such places.
        """
        if isinstance(index, str):
            raise TypeError(f"index: expected places of elements, got {index!r}. For an entry: buffer[:][{index!r}].")
        index = index.numpy(force=True) if isinstance(index, torch.Tensor) else index
        index = np.asarray(index) if isinstance(index, range) else index
        count = self.rows_from_0()
        if self.ndim == 1 and count is not None and isinstance(index, int | np.integer | slice):
            if isinstance(index, slice):
                return np.arange(*index.indices(count))
            live: Any = range(count)
        else:
            rest = self.rest or (0,) * (self.ndim - 1)  # of a storage that nothing was written to
            rows = self.live_index()
            grid = rows.reshape(len(rows) // self.columns, *rest)
            live = np.moveaxis(grid, 0, self.dim_extend if dim is None else dim) if self.ndim > 1 else grid
        try:
            return np.array(live[index], np.int64, order="C")
        except IndexError as error:
            size = len(self) if self.ndim == 1 else list(live.shape)
            raise IndexError(f"index: {index!r} is out of range: the buffer holds {size} elements.") from error

    def get(self, index: Any, *, dim: int | None = None, collate: Callable[[Any], Any] = list) -> Any:
        """Elements by place, copied, in the structure in which they were written; of a ``ListStorage`` a list.

        Args:
            index: an integer gives one element; a slice, a range, a list, an array of integers or a mask, a batch.
            dim: see :meth:`elements_at`.
            collate: makes a batch of the list of elements of a ``ListStorage``.
        """
        with self.ledger.reading():
            chosen = self.elements_at(index, dim)
            data = self.read(chosen.reshape(-1))
        if not chosen.ndim:
            return self.restored(data[0])
        if isinstance(data, list):
            return collate(data)
        if chosen.ndim == 1:
            return self.restored(data)
        return self.restored(data.reshape(*chosen.shape, *data.shape[1:]))

    def set(self, index: Any, data: Any, *, dim: int | None = None) -> None:
        """Replace elements by place, or write those that come next.

        Args:
            index: see :meth:`get`; of a storage of ``ndim=1`` also the places after the last element, in order.
            data: one element for an integer, else a batch.
            dim: see :meth:`elements_at`.

        Raises:
            IndexError: there are no such places.
        """
        if self.ndim == 1 and (len(self) < self.max_size) and self._comes_next(index):
            self.append_one(data) if isinstance(index, int | np.integer) else self.append(data)
            return
        self.replace(index, data, dim=dim)

    def replace(self, index: Any, data: Any, *, dim: int | None = None) -> None:
        """Replace elements by place; see :meth:`set`."""
        chosen = self.elements_at(index, dim)
        if not chosen.ndim:
            data = [data]
        elif not isinstance(data, list):
            data = mapped(lambda leaf: leaf.reshape(-1, *leaf.shape[chosen.ndim :]), data)
        self.overwrite(chosen.reshape(-1), data)

    def _comes_next(self, index: Any) -> bool:
        """Whether places are those after the last element."""
        if isinstance(index, slice):
            index = np.arange(index.start or 0, len(self) if index.stop is None else index.stop, index.step or 1)
        places = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index).reshape(-1)
        first = len(self)
        is_next = places.dtype != np.bool_ and len(places) and np.array_equal(places, first + np.arange(len(places)))
        return bool(is_next) and self.rows_from_0() == first

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def __setitem__(self, index: Any, data: Any) -> None:
        self.set(index, data)

    def __iter__(self) -> Iterator[Any]:
        return (self.get(place) for place in range(len(self)))

    def contains(self, index: Any) -> Any:
        """Whether there are elements at places: a bool for an integer, a tensor of bools for others."""
        if isinstance(index, int | np.integer):
            return -len(self) <= index < len(self)
        places = as_tensor(index)
        return (places >= -len(self)) & (places < len(self))

    def __contains__(self, index: Any) -> bool:
        return bool(as_tensor(self.contains(index)).all())

    @property
    def is_full(self) -> bool:
        """Whether the next element replaces the oldest."""
        return len(self) >= self.capacity * self.columns > 0

    def generations(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """How often the row of each flat index was written before its element was; -1: nothing is stored there.

        An element that is overwritten is followed by one of a higher generation at the same place. Replacing an element
        by place does not change it.
        """
        low, high = self.ledger.live()
        rows = index // self.columns
        times = (high - 1 - rows) // max(self.capacity, 1)
        positions = rows + times * self.capacity
        stored = (index >= 0) & (rows < self.capacity) & (positions >= low) & (positions < high)
        for start, stop in self.ledger.gaps().tolist():
            stored &= (positions < start) | (positions >= stop)
        return np.where(stored, times, -1)

    def generations_at(self, index: torch.Tensor) -> torch.Tensor:
        """:meth:`generations` of the elements at :meth:`public` indices; -1 for places that there are not, too.

        Args:
            index: int64 ``[n]`` or ``[n, ndim]``, or of one element.

        Returns:
            int64 ``[n]``, or ``[]`` for one element.
        """
        places = as_tensor(index, dtype=torch.int64).cpu()
        each = places.reshape(-1, self.ndim) if self.ndim > 1 else places.reshape(-1, 1)
        shape = places.shape[:-1] if self.ndim > 1 else places.shape
        there = ((each >= 0) & (each < torch.tensor([self.capacity, *self.rest], device="cpu"))).all(-1)
        found = torch.full((len(each),), -1, dtype=torch.int64, device="cpu")
        with self.ledger.reading():
            found[there] = torch.from_numpy(self.generations(self.flat(each[there])))
        return found.reshape(shape)

    # State ------------------------------------------------------------------------------------

    @property
    def hooks(self) -> SavingHooks:
        """What is called when elements are written to a folder, or read from one."""
        hooks: SavingHooks = self.__dict__.setdefault("_hooks", SavingHooks())
        return hooks

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Change what :meth:`dumps` writes, that of a buffer with this storage included.

        Hooks stay in this process, and are in no state: register them again in each program.

        Args:
            hook: called as ``hook(elements, path=folder)`` with all live elements, oldest first, or what the hook
                before has returned; returns what is written in their place.
        """
        self.hooks.add(self.hooks.save, hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Change back what was read, before :meth:`loads` stores it; see :meth:`register_save_hook`.

        Args:
            hook: called as ``hook(data, path=folder)``; what the last one returns are the elements.
        """
        self.hooks.add(self.hooks.load, hook)

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
            "uncounted": self.ledger.num_uncounted,
            "passed": self.ledger.num_passed,
            "ids": self.ledger.next_id,
            "capacity": self.capacity,
            "max_size": self.requested_size,
            "ndim": self.ndim,
            "rest": list(self.rest),
            "dim_extend": self.dim_extend,
        }

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what another storage held: the result of :meth:`state_dict`. Where it raises, nothing has changed.

        After :meth:`check_state`, inside ``self.ledger.restoring(state_dict)``, element i of ``"elements"`` is written
        at position ``"low" + i``. ``"elements"`` is None where there are none.
        """

    def check_state(self, state_dict: Any) -> None:
        """Test that the storage takes a state of :meth:`state_dict`, before anything is changed.

        Raises:
            TypeError, KeyError: it is that of something else, or entries are missing.
            ValueError: it does not fit.
            RuntimeError: somebody is writing rows.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict: expected the state of a storage, a dictionary, got {type(state_dict).__name__}. Pass "
                "what state_dict() gave."
            )
        state, names = state_dict, ("low", "high", "voids", "lost", "max_size", "ndim", "elements")
        lacking = [name for name in names if name not in state]
        if lacking:
            raise KeyError(f"state_dict: expected that of a storage, got {sorted(state)}: {key_str(lacking)} missing.")
        needed = state["high"] - state["low"]
        if state["ndim"] != self.ndim or state["max_size"] > self.requested_size:
            raise ValueError(
                f"state_dict: expected one of ndim={self.ndim} with at most {self.requested_size} elements, got "
                f"ndim={state['ndim']} and max_size={state['max_size']} ({needed} rows). Make a storage like that."
            )
        elements = state["elements"]
        if elements is not None and not self._takes(elements):
            raise ValueError(
                f"state_dict: expected elements of a {type(self).__name__}, got {type(elements).__name__}. "
                "Load a list of objects into a ListStorage, rows of tensors into a storage of tensors, and encoded "
                "elements into a RaggedStorage."
            )
        self.ledger.check_at_rest()

    def make_room(self, state_dict: Mapping[str, Any]) -> None:
        """Take the memory for a state that :meth:`check_state` has passed; what is stored stays.

        Raises:
            OSError: the disk, or memory, is full.
        """

    def _takes(self, elements: Any) -> bool:
        """Whether elements of a state are of the kind that :meth:`read` gives."""
        if isinstance(self.read(np.zeros(0, np.int64)), list):
            return isinstance(elements, list)
        return isinstance(elements, torch.Tensor) or is_tensor_collection(elements)


def check_number(state: Mapping[str, Any], expected: int, got: int) -> None:
    """Test that a state has an element for each of its positions.

    Raises:
        ValueError: it has more, or fewer.
    """
    if got != expected:
        raise ValueError(
            f"state_dict: expected {expected} elements for the positions {state['low']} to {state['high']}, got {got}. "
            "Pass what state_dict() gave."
        )


def _share_and_send(storage: Storage) -> Any:
    storage.share()  # else the process would write into a copy, which nobody else sees
    return storage.__reduce_ex__(2)


def _refuse_to_send(storage: Storage) -> Any:
    raise TypeError(
        f"storage: {type(storage).__name__} holds objects of this process, and another process would get a copy, of "
        f"which nobody else sees what is written. {SENT_REMEDY}"
    )


_UNLIMITED = 1 << 40


class ListStorage(Storage):
    """Elements of any kind, in a list of this process.

    Other processes cannot have it: ``multiprocessing`` refuses to send it (as an argument of a process, through a
    queue or a pipe). What comes along with a function that is sent to a worker is a copy, which can be read and not
    written. Copies by :mod:`copy` and :mod:`pickle` are storages of their own.

    Args:
        max_size: number of elements; None: no limit.
        device: where tensors are moved to when they are stored; None: nowhere.
        compilable: accepted for programs of the field; it changes nothing here.

    Example:
        >>> from rollwright.data import ReplayBuffer
        >>> buffer = ReplayBuffer(storage=ListStorage(10), batch_size=2, collate_fn=list)
        >>> buffer.extend(["left", "right", "up"])
        tensor([0, 1, 2])
        >>> len(buffer), len(buffer.sample())
        (3, 2)
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        compilable: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        self.max_size = _UNLIMITED if max_size is None else positive("max_size", max_size)
        self.ledger = Ledger(capacity=self.max_size)
        self._items: dict[int, tuple[Any]] = {}  # by row; each write makes a tuple of its own
        self._was_sent = False
        self._device = usable_device("device", device)

    @property
    def device(self) -> torch.device | None:
        """Device that elements are read to; None: that of each element."""
        return self._device

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_was_sent": self._was_sent or is_sending()}

    def move_here(self) -> None:
        """Serve in this process from now on, as the copy of a storage that was sent for this."""
        self._was_sent = False

    def _check_here(self) -> None:
        if self._was_sent:
            raise TypeError(
                "storage: this is a copy of a ListStorage of another process, where nobody would see what is written "
                f"here. {SENT_REMEDY}"
            )

    def append(self, data: Any, *, dim: int = 0) -> Reservation:
        """Write data after the newest elements, over the oldest if the storage is full."""
        self._check_here()
        items, skipped = items_that_fit(data, dim, self.max_size)
        with self.ledger.writes(len(items), skipped) as rows:
            for position, item in enumerate(items, rows.start):
                self._put(position % self.max_size, item)
        return rows

    def element(self, data: Any) -> Any:
        """One element as a batch of one row."""
        return [data]

    def _put(self, row: int, item: Any) -> None:
        self._items[row] = (_copied(item, self._device),)

    def clear(self) -> None:
        """Remove all elements, and release the objects."""
        self.ledger.clear_with(self._items)

    def read(self, index: NDArray[np.int64]) -> list[Any]:
        """The elements at flat indices as a list; tensors and TensorDicts are copied."""
        return [_copied(self._items.get(row, (None,))[0]) for row in index.tolist()]  # nothing lies in a gap

    def overwrite(self, index: NDArray[np.int64], data: Any) -> None:
        """Replace published elements, given by flat indices, by a batch ``[n]``."""
        self._check_here()
        items = items_in_place(data, len(index))
        with self.ledger.changing_in_place():
            for row, item in zip(index.tolist(), items, strict=True):
                self._put(row, item)

    def keys(self) -> list[NestedKey]:
        """The entries of the newest element; none if it is no TensorDict."""
        ranges = self.ledger.ranges(self.ledger.span())
        newest = self._items[(ranges[-1][1] - 1) % self.max_size][0] if ranges else None
        return leaf_keys(newest) if isinstance(newest, TensorDictBase) else []

    def entry(self, key: NestedKey, low: int, high: int) -> NDArray[Any]:
        """Values of an entry at the positions ``low <= p < high``, in order: ``[high - low, columns, *feature]``."""
        values = [self._items[p % self.max_size][0].get(key) for p in range(low, high)]
        if not values:
            return np.zeros((0, 1), np.int64)
        return np.stack([value.numpy(force=True) for value in values])[:, None]

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of :meth:`state_dict`. If this raises, nothing has changed."""
        self.check_state(state_dict)
        found = [(_copied(item, self._device),) for item in state_dict["elements"] or ()]
        with self.ledger.restoring(state_dict):
            self._items = {n % self.max_size: item for n, item in enumerate(found, state_dict["low"])}

    def check_state(self, state_dict: Any) -> None:
        """Test whether the storage can load a state of :meth:`state_dict`."""
        super().check_state(state_dict)
        check_number(state_dict, state_dict["high"] - state_dict["low"], len(state_dict["elements"] or ()))

    def __repr__(self) -> str:
        limit = "" if self.max_size == _UNLIMITED else f", max_size={self.max_size}"
        return f"ListStorage(len={len(self)}{limit})"


def _copied(item: Any, device: torch.device | None = None) -> Any:
    with torch.no_grad():
        if is_tensor_collection(item) or isinstance(item, torch.Tensor):
            return item.clone() if device is None else item.clone().to(device)
        return mapped(lambda leaf: _copied(leaf, device), item) if is_structure(item) else item
