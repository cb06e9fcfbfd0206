"""RowStorage: a storage of tensors, allocated once and written in place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey, key_str, leaves, place
from rollwright.data.replay_buffers.ledger import Ledger, Reservation
from rollwright.data.replay_buffers.storages.base import Storage, batches_of, no_objects, positive
from rollwright.data.replay_buffers.storages.builder import TensorDictBuilder
from rollwright.data.replay_buffers.storages.columns import Column
from rollwright.data.replay_buffers.storages.memory import Memory, PrivateMemory, Schema, SharedMemory

__all__ = ["RowStorage"]

_WHOLE: NestedKey = ()  # the key of data that is one tensor


class RowStorage(Storage):
    """Rows of tensors; what they hold is settled with the first element.

    Text and other objects are refused by name.

    Args:
        max_size: number of elements.
        memory: where rows lie.
        ndim: see :class:`LazyTensorStorage`.
        device: of the rows.
    """

    keeps_objects = False

    def __init__(self, max_size: int, memory: Memory, ndim: int, device: torch.device) -> None:
        self.max_size, self.ndim = positive("max_size", max_size), positive("ndim", ndim)
        self._memory, self._device = memory, device
        self._shared = False
        self._detach()

    def _detach(self) -> None:
        """Know nothing of the rows, until they are looked at."""
        self._schema: Schema | None = None
        self._tensors: dict[NestedKey, torch.Tensor] = {}
        self._columns: dict[NestedKey, Column] = {}
        self._builder = TensorDictBuilder(())
        self._batch: tuple[int, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # Not the tensors: torch would move each to shared memory of its own when it sends them to a process.
        self._shared = self._memory.shared  # whoever is sent the storage has it too
        derived = ("_schema", "_tensors", "_columns", "_builder", "_batch")
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._detach()

    @property
    def ledger(self) -> Ledger:  # type: ignore[override]
        """See :class:`Storage`."""
        if self._schema is None:
            self._settled()  # another process may have set the number of rows
        return self._memory.ledger

    @property
    def initialized(self) -> bool:
        """Whether it is settled what a row holds."""
        return self._settled() is not None

    def _settled(self) -> Schema | None:
        """The schema, which another process may have settled."""
        if self._schema is None:
            schema = self._memory.schema()
            if schema is not None:
                self._adopt(schema)
        return self._schema

    def _adopt(self, schema: Schema) -> None:
        if schema.ndim != self.ndim or schema.max_size != self.max_size:
            raise ValueError(
                f"max_size, ndim: expected those of the rows that are there ({schema.max_size}, {schema.ndim}), got "
                f"({self.max_size}, {self.ndim}). Pass the former."
            )
        self._tensors = self._memory.tensors()
        self._columns = {key: Column(tensor.flatten(0, len(schema.rest))) for key, tensor in self._tensors.items()}
        self._builder = TensorDictBuilder(key for key in self._tensors if key != _WHOLE)
        self._batch = schema.batch
        self.columns = math.prod(schema.rest)
        self.period = schema.rest[-1] if schema.dim_extend < schema.ndim - 1 else 0
        self._schema = schema

    @property
    def rest(self) -> tuple[int, ...]:
        """See :attr:`Storage.rest`."""
        schema = self._settled()
        return () if schema is None else schema.rest

    @property
    def dim_extend(self) -> int:
        """See :attr:`Storage.dim_extend`."""
        schema = self._settled()
        return self.ndim - 1 if schema is None else schema.dim_extend

    @property
    def device(self) -> torch.device | None:
        """See :attr:`Storage.device`."""
        return self._device

    @property
    def shared(self) -> bool:
        """See :attr:`Storage.shared`."""
        return self._shared

    def share(self) -> None:
        """See :meth:`Storage.share`."""
        if self._memory.shared:  # a file may be
            self._shared = True
        if self._shared:
            return
        if self._device.type != "cpu":
            raise ValueError(f"shared: expected a storage on the CPU, got one on {self._device}. Pass device='cpu'.")
        with self.ledger.standing_still():
            if not self._shared:  # else another thread was faster
                shared = SharedMemory()
                shared.take_over(cast(PrivateMemory, self._memory))
                self._memory = shared
                if self._schema is not None:
                    self._adopt(self._schema)  # whoever reads finds one or the other, which are the same
                self._shared = True

    # Writing ----------------------------------------------------------------------------------

    def append(self, data: Any, *, dim: int = 0) -> Reservation:
        """See :meth:`Storage.append`."""
        batches = batches_of(data)
        found = [self._entries(batch, self.ndim, "extend") for batch in batches]
        schema = self._settled() or self._settle(batches[0], found[0], dim)
        lengths = [self._check(schema, entries, batch, dim) for entries, batch in zip(found, batches, strict=True)]
        total = sum(lengths)
        if not total:
            raise ValueError("data: expected at least one element, got none.")
        skipped = max(0, total - schema.capacity)
        if skipped:
            if len(batches) > 1:
                raise ValueError(
                    f"data: a trajectory of {total} frames is longer than the storage, which has room for "
                    f"{schema.capacity}. Make the storage larger, or end trajectories with max_frames_per_traj."
                )
            batch = batches[0].narrow(dim, skipped, schema.capacity)  # the rest would be overwritten
            found, lengths, total = [self._entries(batch, self.ndim, "extend")], [schema.capacity], schema.capacity
        with self.ledger.writes(total, skipped) as rows:
            start = rows.start
            for entries, length in zip(found, lengths, strict=True):
                self._write(start, length, entries, dim)
                start += length
        return rows

    def _write(self, start: int, length: int, entries: Mapping[NestedKey, torch.Tensor], dim: int) -> None:
        row = start % self.capacity
        until_seam = min(length, self.capacity - row)
        for key, rows in self._tensors.items():
            value = entries[key]
            if value.requires_grad:  # the rows are no part of anybody's graph
                value = value.detach()
            if dim:
                value = value.movedim(dim, 0)
            if until_seam == length:
                rows[row : row + length].copy_(value)
            else:
                rows[row:].copy_(value[:until_seam])
                rows[: length - until_seam].copy_(value[until_seam:])

    def append_one(self, data: Any) -> Reservation:
        """See :meth:`Storage.append_one`."""
        schema = self._settled()
        if schema is None or self.ndim > 1 or not isinstance(data, TensorDictBase):
            return super().append_one(data)
        entries = self._entries(data, 0, "add")
        self._check_keys(schema, entries)
        self._check_forms(schema, entries, ())
        with self.ledger.writes(1) as reservation:
            row = reservation.start % self.capacity
            for key, rows in self._tensors.items():
                rows[row].copy_(entries[key].detach())
        return reservation

    def element(self, data: Any) -> Any:
        """See :meth:`Storage.element`."""
        if isinstance(data, TensorDictBase | torch.Tensor):
            return data.unsqueeze(self.ndim - 1)
        return data

    def _entries(self, data: Any, ndim: int, call: str) -> dict[NestedKey, torch.Tensor]:
        if isinstance(data, torch.Tensor) and data.ndim >= ndim:
            return {_WHOLE: data}
        if not isinstance(data, TensorDictBase) or data.ndim < ndim:
            got = f"batch size {list(data.batch_size)}" if isinstance(data, TensorDictBase) else type(data).__name__
            raise (ValueError if isinstance(data, TensorDictBase) else TypeError)(
                f"data: {type(self).__name__} of ndim={self.ndim} expected a TensorDict or tensor with {ndim} batch "
                f"dimensions to {call}, got {got}. Pass one element to add(), other objects to a ListStorage."
            )
        try:
            entries = leaves(data)
        except RuntimeError as error:
            raise ValueError(
                f"data: entries whose shape varies do not fit rows of tensors: {error}. Use a ListStorage."
            ) from error
        objects = [key for key, value in entries.items() if not isinstance(value, torch.Tensor)]
        if objects:
            raise TypeError(no_objects("data", objects, type(self).__name__))
        return entries

    def _settle(self, data: Any, entries: dict[NestedKey, torch.Tensor], dim: int) -> Schema:
        shape = list(data.shape[: self.ndim])
        del shape[dim]
        columns = math.prod(shape)
        if not columns or not entries:
            raise ValueError(f"data: expected elements with entries to begin a storage with, got {data}.")
        fields = {key: (tuple(value.shape[self.ndim :]), value.dtype) for key, value in entries.items()}
        capacity, batch = -(-self.max_size // columns), _batch_of(data)[self.ndim :]
        self._memory.allocate(Schema(self.max_size, self.ndim, capacity, tuple(shape), dim, fields, batch))
        return cast(Schema, self._settled())

    def _check(self, schema: Schema, entries: dict[NestedKey, torch.Tensor], data: Any, dim: int) -> int:
        """Test that a batch fits the rows; returns the number of rows."""
        self._check_keys(schema, entries)
        length = int(data.shape[dim])
        self._check_forms(schema, entries, (*schema.rest[:dim], length, *schema.rest[dim:]))
        return length

    def _check_keys(self, schema: Schema, entries: dict[NestedKey, torch.Tensor]) -> None:
        if entries.keys() != schema.fields.keys():
            missing, unknown = schema.fields.keys() - entries.keys(), entries.keys() - schema.fields.keys()
            raise KeyError(
                f"data: expected the entries of the storage. Missing: {key_str(missing) or 'none'}; unknown: "
                f"{key_str(unknown) or 'none'}. Select entries before the first extend(), or use another buffer."
            )

    def _check_forms(self, schema: Schema, entries: dict[NestedKey, torch.Tensor], lead: tuple[int, ...]) -> None:
        for key, (shape, dtype) in schema.fields.items():
            value = entries[key]
            if value.dtype != dtype or value.shape != (*lead, *shape):
                raise ValueError(
                    f"data: expected {key!r} of shape {list(lead)} + {list(shape)} and {dtype}, got "
                    f"{list(value.shape)} and {value.dtype}. Convert it, or use another buffer."
                )

    def overwrite(self, index: NDArray[np.int64], data: Any) -> None:
        """See :meth:`Storage.overwrite`."""
        schema = self._settled()
        entries = self._entries(data, 1, "replace elements")
        if schema is None or entries.keys() != schema.fields.keys():
            raise KeyError(f"data: expected the entries {key_str(self.keys())}, got {key_str(entries)}.")
        where = torch.from_numpy(index).to(self._device)
        values = {}
        for key, column in self._columns.items():
            values[key] = value = entries[key].detach().to(self._device)
            shape, dtype = (len(index), *column.rows.shape[1:]), column.rows.dtype
            if value.dtype != dtype or value.shape != shape:
                raise ValueError(
                    f"data: expected {key!r} of shape {list(shape)} and {dtype}, got "
                    f"{list(value.shape)} and {value.dtype}."
                )
        with self.ledger.changing_in_place():
            for key, column in self._columns.items():
                column.rows[where] = values[key]

    # Writing in place: the collector's batch lies in the rows ------------------------------------------------

    def reserve(self, num_rows: int) -> Reservation:
        """Rows to be written through :meth:`window`, then :meth:`publish`."""
        return self.ledger.reserve(num_rows)

    def window(self, reservation: Reservation, key: NestedKey) -> torch.Tensor | None:
        """The memory of reserved rows, ``[n, *rest, *entry]``; None where they cross the ring's seam."""
        row, length = reservation.start % self.capacity, reservation.stop - reservation.start
        return self._tensors[key][row : row + length] if row + length <= self.capacity else None

    def settle(
        self,
        fields: Mapping[NestedKey, tuple[tuple[int, ...], torch.dtype]],
        rest: tuple[int, ...],
        dim: int | None = None,
        batch: tuple[int, ...] = (),
    ) -> None:
        """Allocate rows for entries of these shapes and dtypes; test that they are those that are there.

        Args:
            fields: shape and dtype of each entry of an element.
            rest: dimensions of a row.
            dim: which dimension of the data the rows are; None: the last.
            batch: batch size of an element.

        Raises:
            KeyError, ValueError: the storage has other entries.
        """
        dim = self.ndim - 1 if dim is None else dim
        if self._settled() is None:
            capacity = -(-self.max_size // math.prod(rest))
            self._memory.allocate(Schema(self.max_size, self.ndim, capacity, rest, dim, dict(fields), batch))
        schema = cast(Schema, self._settled())
        lead = (*rest[:dim], 0, *rest[dim:])
        blank = {key: torch.empty((*lead, *shape), dtype=dtype) for key, (shape, dtype) in fields.items()}
        self._check(schema, blank, torch.empty(lead), dim)

    def publish(self, reservation: Reservation, gaps: Iterable[tuple[int, int]] = ()) -> None:
        """Let everyone read the rows; see :meth:`Ledger.publish`."""
        self.ledger.publish(reservation, list(gaps))

    def abandon(self, reservation: Reservation) -> None:
        """Give the rows up."""
        self.ledger.abandon(reservation)

    # Reading ----------------------------------------------------------------------------------

    def read(self, index: NDArray[np.int64]) -> Any:
        """See :meth:`Storage.read`."""
        self._settled()
        values = [column.take(index) for column in self._columns.values()]
        if _WHOLE in self._tensors:
            return values[0]
        return self._builder.build(values, (len(index), *self._batch), self._device)

    def in_order(self) -> Any:
        """All live elements in the order in which they were written, as a batch ``[N]`` or ``[*env, T]``.

        Views of the rows where these lie in one piece, for data that may be larger than memory; else a copy.
        """
        dim = self.ndim - 1
        with self.ledger.reading():
            low, high = self.ledger.live()
            row, length = low % max(self.capacity, 1), high - low
            if len(self.ledger.gaps()) or row + length > self.capacity:
                data = self.read(self.elements_of(self.ledger.positions())).reshape(-1, *self.rest)
                return _moved(data, dim)
            rows = {key: tensor[row : row + length] for key, tensor in self._tensors.items()}
        if _WHOLE in rows:
            return _moved(rows[_WHOLE], dim)
        nested: dict[str, Any] = {}
        for key, value in rows.items():
            place(nested, key, value)
        return _moved(TensorDict(nested, batch_size=[length, *self.rest, *self._batch], device=self._device), dim)

    def keys(self) -> list[NestedKey]:
        """See :meth:`Storage.keys`."""
        schema = self._settled()
        return [] if schema is None else [key for key in schema.fields if key != _WHOLE]

    def entry(self, key: NestedKey, low: int, high: int) -> NDArray[Any]:
        """See :meth:`Storage.entry`."""
        rows = self._tensors[key].flatten(1, len(self.rest)) if self.rest else self._tensors[key].unsqueeze(1)
        start, length = low % self.capacity, high - low
        if start + length <= self.capacity:
            return rows[start : start + length].numpy(force=True)
        return torch.cat([rows[start:], rows[: start + length - self.capacity]]).numpy(force=True)

    # State ------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`Storage.load_state_dict`."""
        self._check_state(state_dict)
        elements, low, high = state_dict["elements"], state_dict["low"], state_dict["high"]
        if elements is not None:
            rest = tuple(state_dict["rest"])
            rows = elements.reshape(high - low, *rest, *elements.shape[1:])
            dim = state_dict["dim_extend"]
            entries = self._entries(rows, self.ndim, "load")
            if dim:
                entries = {key: value.movedim(0, dim) for key, value in entries.items()}
            fields = {key: (tuple(value.shape[self.ndim :]), value.dtype) for key, value in entries.items()}
            self.settle(fields, rest, dim, _batch_of(elements)[1:])
        with self.ledger.changing_in_place():
            if elements is not None:
                self._memory.make_space(high)
                skipped = max(0, high - low - self.capacity)
                kept = {key: value.narrow(dim, skipped, high - low - skipped) for key, value in entries.items()}
                self._write(low + skipped, high - low - skipped, kept, dim)
            self.ledger.restore(state_dict)

    def __repr__(self) -> str:
        shape = "not settled yet" if not self.initialized else f"{self.capacity} rows of {list(self.rest)}"
        return f"{type(self).__name__}(len={len(self)}, max_size={self.max_size}, {shape}, device={self._device})"


def _batch_of(data: Any) -> tuple[int, ...]:
    return tuple(data.batch_size) if isinstance(data, TensorDictBase) else ()


def _moved(data: Any, dim: int) -> Any:
    """A batch whose rows are along ``dim``, from one whose rows are along the first dimension."""
    if not dim:
        return data
    if isinstance(data, torch.Tensor):
        return data.movedim(0, dim)
    return data.permute(*range(1, dim + 1), 0, *range(dim + 1, data.ndim))
