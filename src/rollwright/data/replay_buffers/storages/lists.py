"""ListStorage: elements of any kind, in a list of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase, is_tensor_collection

from rollwright._keys import NestedKey, leaf_keys
from rollwright._processes.pickling import is_sending
from rollwright.data.replay_buffers.ledger import Ledger, Reservation
from rollwright.data.replay_buffers.storages.base import SENT_REMEDY, Storage, check_number
from rollwright.data.replay_buffers.storages.batches import items_in_place, items_that_fit, positive
from rollwright.data.replay_buffers.storages.structures import is_structure, mapped
from rollwright.data.specs.shapes import usable_device

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
