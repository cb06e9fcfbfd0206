"""RowStorage: a storage of tensors, allocated once and written in place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection

from rollwright._keys import NestedKey, key_str, leaves, place
from rollwright._tensors import as_tensor
from rollwright.data.compact import is_table, without_table
from rollwright.data.replay_buffers.ledger import Ledger, Reservation
from rollwright.data.replay_buffers.storages.batches import (
    Column,
    Form,
    TensorDictBuilder,
    batches_of,
    form_str,
    is_a_class,
    joined,
    mapped,
    no_objects,
    packed,
    positive,
    restored,
    too_long,
)
from rollwright.data.replay_buffers.storages.memory import Memory, PrivateMemory, Schema, SharedMemory
from rollwright.data.replay_buffers.storages.storage import Storage, check_number

_WHOLE: NestedKey = ()  # the key of data that is one tensor


class _Parts(NamedTuple):
    """Data as they are written.

    Attributes:
        entries: by name, ``[*batch, ...]``; at least one dimension less where an element is a tensor.
        batch: batch size; that of elements that have one of their own is at its end.
        form: what an element is.
    """

    entries: dict[NestedKey, torch.Tensor]
    batch: tuple[int, ...]
    form: Form


class RowStorage(Storage):
    """Rows of tensors; what they hold is settled with the first element, and with the first after :meth:`clear`.

    Text and other objects are refused by name.

    Args:
        max_size: number of elements; see :attr:`max_size`.
        memory: where rows lie.
        ndim: see :class:`LazyTensorStorage`.
        device: of the rows.
    """

    keeps_objects = False

    def __init__(self, max_size: int, memory: Memory, ndim: int, device: torch.device) -> None:
        self._requested_size, self.ndim = positive("max_size", max_size), positive("ndim", ndim)
        self._memory, self._device = memory, device
        self._shared = False
        self._detach()

    @property
    def max_size(self) -> int:  # type: ignore[override]
        """Elements that it has room for: what was asked for, in whole rows once it is known what these are."""
        schema = self._settled()
        return self._requested_size if schema is None else schema.capacity * math.prod(schema.rest)

    @property
    def requested_size(self) -> int:
        """The number of elements that was asked for; ``max_size`` may be more, in whole rows."""
        return self._requested_size

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
        """Counts the rows that were reserved and published."""
        if self._schema is None:
            self._settled()  # another process may have set the number of rows
        return self._memory.ledger

    @property
    def initialized(self) -> bool:
        """Whether it is settled what a row holds."""
        return self._settled() is not None

    def _settled(self) -> Schema | None:
        """The schema, which another process may have settled, or replaced where nothing was stored any more."""
        schema = self._memory.schema()
        if schema is not self._schema and schema is not None:
            self._adopt(schema)
        return self._schema

    def _adopt(self, schema: Schema) -> None:
        if schema.ndim != self.ndim or schema.max_size != self._requested_size:
            raise ValueError(
                f"max_size, ndim: expected those of the rows that are there ({schema.max_size}, {schema.ndim}), got "
                f"({self._requested_size}, {self.ndim}). Pass the former."
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
        """The dimensions of a row; their product is :attr:`columns`."""
        schema = self._settled()
        return () if schema is None else schema.rest

    @property
    def dim_extend(self) -> int:
        """Which dimension of the data the rows are."""
        schema = self._settled()
        return self.ndim - 1 if schema is None else schema.dim_extend

    @property
    def device(self) -> torch.device | None:
        """Where elements are read to."""
        return self._device

    @property
    def shared(self) -> bool:
        """Whether other processes can write and read it too."""
        return self._shared

    def share(self) -> None:
        """Move to memory that processes share."""
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
        """Write data after what is there, over the oldest where it is full."""
        parts = [self._parts(batch, self.ndim, "extend") for batch in batches_of(data)]
        first = parts[0]
        schema = self._settle(first, dim)
        lengths = [self._check(schema, part, dim) for part in parts]
        total = sum(lengths)
        if not total:
            raise ValueError("data: expected at least one element, got none.")
        skipped = max(0, total - schema.capacity)
        if skipped:
            if len(parts) > 1:
                raise too_long(total, schema.capacity)
            total = schema.capacity  # the rest would be overwritten
            kept = {key: value.narrow(dim, skipped, total) for key, value in first.entries.items()}
            parts, lengths = [first._replace(entries=kept)], [total]
        with self.ledger.writes(total, skipped) as rows:
            self._check_unchanged(schema)
            start = rows.start
            for part, length in zip(parts, lengths, strict=True):
                self._write(start, length, part.entries, dim)
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
        """Write one element (or one row of ``rest``) after what is there."""
        schema = self._settled()
        if schema is None or self.ndim > 1 or self._holds_nothing:
            return super().append_one(data)
        part = self._parts(data, 0, "add")
        entries = part.entries
        self._check_keys(schema, part)
        self._check_forms(schema, entries, ())
        with self.ledger.writes(1) as reservation:
            self._check_unchanged(schema)
            row = reservation.start % self.capacity
            for key, rows in self._tensors.items():
                rows[row].copy_(entries[key].detach())
        return reservation

    def element(self, data: Any) -> Any:
        """One element (or one row of ``rest``) as a batch of one row."""
        if isinstance(data, TensorDictBase | torch.Tensor):
            return data.unsqueeze(self.ndim - 1)
        return mapped(lambda leaf: _as_row(leaf, self.ndim - 1), data)

    def _parts(self, data: Any, ndim: int, call: str) -> _Parts:
        form: Form = None
        if not isinstance(data, TensorDictBase):
            if not isinstance(data, torch.Tensor):
                data, form = _packed(data, ndim)
            if isinstance(data, torch.Tensor) and data.is_nested:
                raise _ragged("they are a nested tensor")
            if isinstance(data, torch.Tensor) and data.ndim >= ndim:
                return _Parts({_WHOLE: data}, data.shape[:ndim], None)
        if data.ndim < ndim:
            raise ValueError(
                f"data: {type(self).__name__} of ndim={self.ndim} expected a TensorDict or tensor with {ndim} batch "
                f"dimensions to {call}, got batch size {list(data.shape)}. Pass one element to add(), other objects to "
                "a ListStorage."
            )
        lazy: list[LazyStackedTensorDict] = []
        try:
            entries = leaves(data, lazy)
        except RuntimeError as error:
            raise _ragged(error) from error
        nested = [key for key, value in entries.items() if isinstance(value, torch.Tensor) and value.is_nested]
        if nested:
            raise _ragged(f"there are nested tensors in {key_str(nested)}")
        for stack in lazy:
            _check_same_entries(stack)
        objects = [key for key, value in entries.items() if not isinstance(value, torch.Tensor)]
        if any(is_table(key) for key in objects):
            entries = without_table(entries)
            objects = [key for key in objects if key in entries]
        if not objects:
            return _Parts(entries, data.batch_size, form)
        try:
            if any(is_a_class(entries[key]) for key in objects):
                data, form = _packed(data, ndim)
                return _Parts(leaves(data), data.batch_size, form)
        except TypeError:  # it holds objects
            pass
        raise TypeError(no_objects("data", objects, type(self).__name__))

    def _settle(self, part: _Parts, dim: int) -> Schema:
        """What rows hold, which these data say where nothing is stored."""
        schema = self._settled()
        if schema is not None and not self._holds_nothing:
            return schema
        rest = list(part.batch[: self.ndim])
        del rest[dim]
        if not math.prod(rest) or not part.entries:
            raise ValueError(
                f"data: expected elements with entries to begin a storage with, got {key_str(part.entries) or 'none'} "
                f"in a batch of {list(part.batch)}."
            )
        fields = {key: (tuple(value.shape[self.ndim :]), value.dtype) for key, value in part.entries.items()}
        return self._allocate(tuple(rest), dim, fields, tuple(part.batch[self.ndim :]), part.form)

    @property
    def _holds_nothing(self) -> bool:
        low, high = self.ledger.live()
        return low == high

    def _allocate(self, rest: tuple[int, ...], dim: int, fields: Any, batch: tuple[int, ...], form: Form) -> Schema:
        """Settle what a row holds, where that is not settled or nothing is stored; returns what is settled then."""
        capacity = -(-self._requested_size // math.prod(rest))
        schema = Schema(self._requested_size, self.ndim, capacity, rest, dim, dict(fields), batch, form)
        try:
            if self._settled() is None:
                self._memory.allocate(schema)
            elif self._holds_nothing:
                self._replace(schema)
        except OSError as error:
            why = (
                f"max_size: {self._requested_size} elements take {schema.layout.stop:,} bytes, for which there is no "
                f"room ({error.strerror}). Lower it, or give a LazyMemmapStorage a folder on a larger disk"
            )
            raise OSError(error.errno, why, *([] if error.filename is None else [error.filename])) from error
        return cast(Schema, self._settled())

    def _replace(self, schema: Schema) -> None:
        """Let rows hold something else, unless somebody has written one, or is about to."""
        held = cast(Schema, self._schema)
        if schema == held or (schema.rest, schema.dim_extend) != (held.rest, held.dim_extend):
            return
        ledger = self.ledger
        ledger.settle()
        with ledger.changing_in_place():
            if self._memory.schema() == held and self._holds_nothing and ledger.is_settled():
                self._memory.replace(schema)

    def _check_unchanged(self, schema: Schema) -> None:
        """Test, with rows reserved or everyone held off, that they hold what they did; it stays so until then."""
        if not self.holds(schema):
            raise RuntimeError(
                "data: the storage was emptied meanwhile, and somebody has begun it with other entries. Nothing was "
                "written. Write again."
            )

    def holds(self, schema: Schema) -> bool:
        """Whether rows hold what :meth:`settle` has returned; with rows reserved, it stays so."""
        now = self._settled()
        return now is schema or now == schema  # another object where rows were shared meanwhile

    def _check(self, schema: Schema, part: _Parts, dim: int) -> int:
        """Test that a batch fits the rows; returns the number of rows."""
        self._check_keys(schema, part)
        length = int(part.batch[dim])
        self._check_forms(schema, part.entries, (*schema.rest[:dim], length, *schema.rest[dim:]))
        return length

    def _check_keys(self, schema: Schema, part: _Parts) -> None:
        if part.form != schema.form:
            raise TypeError(
                f"data: expected elements like those of the storage ({form_str(schema.form)}), got "
                f"{form_str(part.form)}. Convert them, or use another buffer."
            )
        entries = part.entries
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
                several = (
                    f" Its elements are batches {list(schema.batch)}, as the first extend() gave them; for a frame an "
                    "element, pass extend(data.reshape(-1)) to a new buffer."
                )
                raise ValueError(
                    f"data: expected {key!r} of shape {list(lead)} + {list(shape)} and {dtype}, got "
                    f"{list(value.shape)} and {value.dtype}. Convert it, or use another buffer."
                    f"{several if schema.batch else ''}"
                )
            if value.is_meta or value.layout is not torch.strided:
                what = "on the device 'meta', and holds no numbers" if value.is_meta else f"of {value.layout}"
                raise ValueError(f"data: expected {key!r} as a dense tensor, got one that is {what}.")

    def overwrite(self, index: NDArray[np.int64], data: Any) -> None:
        """Replace the elements at flat indices, which are published, by a batch ``[n]``."""
        schema = self._settled()
        part = self._parts(data, 1, "replace elements")
        if schema is None:
            raise KeyError("data: nothing is stored that could be replaced. Call extend() first.")
        self._check_keys(schema, part)
        self._check_forms(schema, part.entries, index.shape)
        with self.ledger.changing_in_place():
            self._check_unchanged(schema)
            self.write_entries(index, part.entries)

    # Single entries ---------------------------------------------------------------------------

    @property
    def fields(self) -> dict[NestedKey, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each entry of an element; none until the first was written."""
        schema = self._settled()
        return {} if schema is None else schema.fields

    @property
    def _storage(self) -> TensorDictBase | torch.Tensor | None:
        """The memory of all rows, for programs of the field that look into it; None until the first was written.

        Tensors ``[capacity, *rest, *entry]``, whose attribute ``filename`` is that of their file, if that has a name.
        """
        schema = self._settled()
        if schema is None:
            return None
        rows = {key: tensor.view(tensor.shape) for key, tensor in self._tensors.items()}
        for tensor in rows.values():
            tensor.filename = self._filename  # type: ignore[attr-defined]
        if _WHOLE in rows:
            return rows[_WHOLE]
        return self._builder.build(rows.values(), (schema.capacity, *schema.rest, *schema.batch), self._device)

    @property
    def _filename(self) -> str | None:
        return None

    def read_entry(self, key: NestedKey, index: NDArray[np.int64]) -> torch.Tensor:
        """A copy of an entry of the elements at flat indices, ``[n, *entry]``."""
        self._settled()
        return self._columns[key].take(index)

    def write_entries(self, index: NDArray[np.int64], entries: Mapping[NestedKey, torch.Tensor]) -> None:
        """Replace entries of the elements at flat indices. For use inside ``self.ledger.changing_in_place()``."""
        where = torch.from_numpy(index).to(self._device)
        for key, value in entries.items():
            self._columns[key].put(where, value.detach().to(self._device))

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
        form: Form = None,
    ) -> Schema:
        """Allocate rows for entries of these shapes and dtypes; test that they are those that are there.

        Others may write other entries until rows are reserved: see :meth:`holds`.

        Args:
            fields: shape and dtype of each entry of an element.
            rest: dimensions of a row.
            dim: which dimension of the data the rows are; None: the last.
            batch: batch size of an element.
            form: what an element is, see :data:`~rollwright.data.replay_buffers.storages.batches.Form`.

        Returns:
            What a row holds.

        Raises:
            KeyError, ValueError, TypeError: the storage has other entries.
        """
        dim = self.ndim - 1 if dim is None else dim
        schema = self._allocate(rest, dim, fields, batch, form)
        self._check_fields(schema, fields, rest, dim, form)
        return schema

    def _check_fields(self, schema: Schema, fields: Any, rest: tuple[int, ...], dim: int, form: Form) -> None:
        lead = (*rest[:dim], 0, *rest[dim:])
        blank = {key: torch.empty((*lead, *shape), dtype=dtype, device="cpu") for key, (shape, dtype) in fields.items()}
        self._check(schema, _Parts(blank, lead, form), dim)

    def publish(self, reservation: Reservation, gaps: Iterable[tuple[int, int]] = ()) -> None:
        """Let everyone read the rows; see :meth:`Ledger.publish`."""
        self.ledger.publish(reservation, list(gaps))

    def abandon(self, reservation: Reservation) -> None:
        """Give the rows up."""
        self.ledger.abandon(reservation)

    # Reading ----------------------------------------------------------------------------------

    def read(self, index: NDArray[np.int64]) -> Any:
        """A copy of the elements at flat indices, in any order and repeated, as a batch ``[n]``; n may be 0."""
        self._settled()
        values = [column.take(index) for column in self._columns.values()]
        if _WHOLE in self._tensors:
            return values[0]
        return self._builder.build(values, (len(index), *self._batch), self._device)

    @property
    def structured(self) -> bool:
        """Whether elements are kept in another form than that in which users gave them; see :meth:`restored`."""
        return self._schema is not None and self._schema.form is not None

    def restored(self, elements: Any) -> Any:
        """What :meth:`read` gives, one element or a batch, in the structure in which it was written."""
        schema = self._schema
        return elements if schema is None or schema.form is None else restored(elements, schema.form)

    def in_order(self) -> Any:
        """All live elements in the order in which they were written, as a batch ``[N]`` or ``[*env, T]``.

        Views of the rows where these lie in one piece, for data that may be larger than memory; else a copy.
        """
        dim = self.ndim - 1
        with self.ledger.reading():
            self._settled()
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
        """The entries of an element; none where elements are no TensorDicts."""
        schema = self._settled()
        return [] if schema is None else [key for key in schema.fields if key != _WHOLE]

    def entry(self, key: NestedKey, low: int, high: int) -> NDArray[Any]:
        """Values of an entry at the positions ``low <= p < high``, in order: ``[high - low, columns, *feature]``."""
        rows = self._tensors[key].flatten(1, len(self.rest)) if self.rest else self._tensors[key].unsqueeze(1)
        start, length = low % self.capacity, high - low
        if start + length <= self.capacity:
            return rows[start : start + length].numpy(force=True)
        return torch.cat([rows[start:], rows[: start + length - self.capacity]]).numpy(force=True)

    # State ------------------------------------------------------------------------------------

    def _state(self, low: int, high: int) -> dict[str, Any]:
        schema = self._settled()
        form = {} if schema is None or schema.form is None else {"form": schema.form}
        return {**super()._state(low, high), **form}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what another storage held: the result of :meth:`state_dict`. Where it raises, nothing has changed.

        Raises:
            OSError: the disk, or memory, is full.
        """
        self.check_state(state_dict)
        self.make_room(state_dict)
        saved, low, high = self._saved_rows(state_dict), state_dict["low"], state_dict["high"]
        with self.ledger.restoring(state_dict):
            if saved is not None:
                entries, dim, _ = saved
                skipped = max(0, high - low - self.capacity)
                kept = {key: value.narrow(dim, skipped, high - low - skipped) for key, value in entries.items()}
                self._write(low + skipped, high - low - skipped, kept, dim)

    def check_state(self, state_dict: Any) -> None:
        """Test that the storage takes a state of :meth:`state_dict`, before anything is changed."""
        super().check_state(state_dict)
        saved, held = self._saved_rows(state_dict), self._settled()
        if saved is None or held is None:
            return
        schema, alike = saved[2], (held.rest, held.dim_extend)
        if not self._holds_nothing or (schema.rest, schema.dim_extend) != alike:
            self._check_fields(held, schema.fields, schema.rest, schema.dim_extend, schema.form)

    def make_room(self, state_dict: Mapping[str, Any]) -> None:
        """Take the memory for a state that :meth:`check_state` has passed; what is stored stays."""
        saved = self._saved_rows(state_dict)
        if saved is None:
            return
        schema = saved[2]
        self.settle(schema.fields, schema.rest, schema.dim_extend, schema.batch, schema.form)
        with self.ledger.writing():
            self._memory.make_space(state_dict["high"])

    def _saved_rows(self, state: Mapping[str, Any]) -> tuple[dict[NestedKey, torch.Tensor], int, Schema] | None:
        """Entries of a saved storage, the dimension of them that rows are, and what a row holds; None: there are none.

        Raises:
            KeyError, ValueError, TypeError: there is no element for each position, or they are no rows.
        """
        elements, count = state["elements"], state["high"] - state["low"]
        if elements is None:
            check_number(state, count, 0)
            return None
        lacking = [name for name in ("rest", "dim_extend") if name not in state]
        if lacking:
            raise KeyError(f"state_dict: expected that of a {type(self).__name__}: {key_str(lacking)} missing.")
        rest, dim = tuple(state["rest"]), state["dim_extend"]
        check_number(state, count * math.prod(rest), len(elements))
        rows = elements.reshape(count, *rest, *elements.shape[1:])
        entries = self._parts(rows, self.ndim, "load").entries
        if dim:
            entries = {key: value.movedim(0, dim) for key, value in entries.items()}
        fields = {key: (tuple(value.shape[self.ndim :]), value.dtype) for key, value in entries.items()}
        batch, form = _batch_of(elements)[1:], state.get("form")
        return entries, dim, Schema(self._requested_size, self.ndim, count, rest, dim, fields, batch, form)

    def __repr__(self) -> str:
        shape = "not settled yet" if not self.initialized else f"{self.capacity} rows of {list(self.rest)}"
        return f"{type(self).__name__}(len={len(self)}, max_size={self.max_size}, {shape}, device={self._device})"


def _as_row(leaf: Any, dim: int) -> Any:
    """A leaf of one element as that of a batch of one row."""
    if isinstance(leaf, bool | int | float | np.generic | np.ndarray):
        leaf = as_tensor(leaf)
    return leaf.unsqueeze(dim) if isinstance(leaf, torch.Tensor) or is_tensor_collection(leaf) else leaf


def _ragged(error: RuntimeError | str) -> ValueError:
    return ValueError(
        f"data: entries whose shape varies do not fit rows of tensors: {str(error).rstrip('.')}. Use a RaggedStorage "
        "or a ListStorage."
    )


def _check_same_entries(stack: LazyStackedTensorDict) -> None:
    """Test that the elements of a lazy stack have the same entries; as a whole it has those of all of them."""
    each = [set(one.keys()) for one in stack.tensordicts]
    some = set.union(*each) - set.intersection(*each)
    if some:
        raise KeyError(
            f"data: expected the same entries in all elements, got {key_str(some)} in some of them only. Select "
            "entries, or use a RaggedStorage or a ListStorage for elements that differ."
        )


def _packed(data: Any, ndim: int) -> tuple[Any, Form]:
    """Data as one tensor or TensorDict, and what their elements were; a list is one of elements."""
    if isinstance(data, list) and not data and ndim:
        raise ValueError("data: expected at least one element, got none.")
    try:
        return joined(data, ndim) if isinstance(data, list) and data and ndim else packed(data, ndim)
    except RuntimeError as error:
        raise _ragged(error) from error


def _batch_of(data: Any) -> tuple[int, ...]:
    return tuple(data.batch_size) if isinstance(data, TensorDictBase) else ()


def _moved(data: Any, dim: int) -> Any:
    """A batch whose rows are along ``dim``, from one whose rows are along the first dimension."""
    if not dim:
        return data
    if isinstance(data, torch.Tensor):
        return data.movedim(0, dim)
    return data.permute(*range(1, dim + 1), 0, *range(dim + 1, data.ndim))
