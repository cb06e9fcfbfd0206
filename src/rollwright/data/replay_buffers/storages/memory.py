"""Memory of a storage's rows: private, shared by processes, or in a file."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright._memory import Layout, Segment
from rollwright.data.replay_buffers.ledger.counters import Space, wrong_in
from rollwright.data.replay_buffers.ledger.ledger import Ledger
from rollwright.data.replay_buffers.ledger.locks import RowLock
from rollwright.errors import DamagedFileError

ROWS_FILE, LOCK_FILE = "buffer.rows", "buffer.lock"
STATE_FILE = "state.pt"  # of a buffer that was saved there
_MARK = b"rollwright rows 1\n"
_SCHEMA_ROOM = 1 << 18
_PAGE, _HUGE_PAGE = 4096, 1 << 21
_SPACE_AT = 64  # in the first page, behind the mark
_TAIL_BYTES = 16
_HEAD = _PAGE + Ledger.num_bytes + _SCHEMA_ROOM
# The number before the texts of schemas: the length of the one that counts, where it is, and its checksum.
_LENGTH, _SECOND = (1 << 31) - 1, 1 << 31
_SECOND_AT = _SCHEMA_ROOM // 2  # where a text is written that replaces one at the beginning of the room


class Schema(NamedTuple):
    """Entries of a row.

    Attributes:
        max_size: elements.
        ndim: dimensions of the storage.
        capacity: rows.
        rest: dimensions of a row, before those of an entry.
        dim_extend: which dimension of the data the rows are.
        fields: shape and dtype of each entry of an element; the key ``()`` stands for data that is one tensor.
        batch: batch size of an element, which may be a trajectory ``[T]``.
        form: what an element is, see :data:`~rollwright.data.replay_buffers.storages.batches.Form`.
    """

    max_size: int
    ndim: int
    capacity: int
    rest: tuple[int, ...]
    dim_extend: int
    fields: dict[NestedKey, tuple[tuple[int, ...], torch.dtype]]
    batch: tuple[int, ...] = ()
    form: Any = None

    def dumps(self) -> bytes:
        """As JSON."""
        entries = [
            [list(as_tuple(key)), list(shape), str(dtype).removeprefix("torch.")]
            for key, (shape, dtype) in self.fields.items()
        ]
        fields = {**self._asdict(), "fields": entries}
        if self.form is None:
            del fields["form"]
        return json.dumps(fields).encode()

    @classmethod
    def loads(cls, text: bytes) -> Schema:
        """From :meth:`dumps`."""
        read = json.loads(text)
        fields: dict[NestedKey, Any] = {
            unravel(tuple(path)) if path else (): (tuple(shape), getattr(torch, dtype))
            for path, shape, dtype in read["fields"]
        }
        return cls(**{**read, "rest": tuple(read["rest"]), "fields": fields, "batch": tuple(read["batch"])})

    def wrong(self) -> str:
        """What cannot be, as a phrase; empty where nothing is wrong."""
        sizes = [self.max_size, self.ndim, self.capacity, *self.rest, *self.batch]
        for key, (shape, dtype) in self.fields.items():
            if not isinstance(dtype, torch.dtype) or not all(isinstance(name, str) for name in as_tuple(key)):
                return f"its entry {key!r} is of {dtype}"
            sizes += [size + 1 for size in shape]  # an entry may hold nothing
        if not all(isinstance(size, int) and size >= 1 for size in sizes[: 3 + len(self.rest)]) or min(sizes) < 0:
            return f"its rows have the sizes {sizes}"
        whole = self.capacity == -(-self.max_size // math.prod(self.rest)) and len(self.rest) == self.ndim - 1
        if not whole or not 0 <= self.dim_extend < self.ndim or not self.fields:
            return f"its rows are {self.capacity} of {list(self.rest)} for {self.max_size} elements of ndim={self.ndim}"
        return ""

    def shape_of(self, key: NestedKey) -> tuple[int, ...]:
        """Shape of an entry's memory."""
        return (self.capacity, *self.rest, *self.fields[key][0])

    @property
    def layout(self) -> Layout[NestedKey]:
        """Where each entry lies in a file: from the start of a page."""
        return Layout.of(((key, self.shape_of(key), dtype) for key, (_, dtype) in self.fields.items()), _HEAD, _PAGE)

    @property
    def num_bytes(self) -> int:
        """Length of a file, with the numbers behind the rows."""
        return self.layout.end + _TAIL_BYTES


class Memory(ABC):
    """Holds the ledger and the rows of a storage.

    A :class:`RowStorage` calls :meth:`allocate` with its first element, and writes into :meth:`tensors` from then on.

    Attributes:
        ledger: of the rows; a new one (``Ledger()``) has no rows until ``set_capacity``.
        shared: whether other processes can have it too. Where it is False, ``shared=True`` of a buffer moves the rows
            to a :class:`SharedMemory`.
    """

    ledger: Ledger
    shared: bool = False

    @abstractmethod
    def schema(self) -> Schema | None:
        """What a row holds; None until the first was written."""

    @abstractmethod
    def allocate(self, schema: Schema) -> None:
        """Settle what a row holds, once; whoever comes second keeps what the first has settled.

        Inside ``self.ledger.writing()``: makes a tensor of ``schema.shape_of(key)`` for each of ``schema.fields``,
        calls ``self.ledger.set_capacity(schema.capacity)``, and keeps the schema last.
        """

    def replace(self, schema: Schema) -> bool:
        """Change what a row holds, where none holds anything; returns whether this memory can.

        Inside ``self.ledger.changing_in_place()``, with rows of the same number: :meth:`schema` returns this one from
        now on, to all processes, and :meth:`tensors` others.
        """
        return False

    @abstractmethod
    def tensors(self) -> dict[NestedKey, torch.Tensor]:
        """The rows: ``[capacity, *rest, *entry]`` each, the same tensors until the schema is another."""

    def make_space(self, end: int) -> None:  # noqa: B027 - memory of a process has it
        """Have space for the rows of all positions below ``end``; whoever reserves rows has it. For use while writing.

        Raises:
            OSError: the disk is full.
        """


class PrivateMemory(Memory):
    """Memory of this process, on any device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._schema: Schema | None = None
        self._tensors: dict[NestedKey, torch.Tensor] = {}
        self.ledger = Ledger()

    def __getstate__(self) -> dict[str, Any]:
        # As bytes: torch would make processes share the tensors, of which each has a ledger of its own.
        kept = {key: value for key, value in self._tensors.items() if value.device.type != "cpu"}
        held = {
            key: value.view(torch.uint8).numpy() if value.numel() else None
            for key, value in self._tensors.items()
            if key not in kept
        }
        return {**self.__dict__, "_tensors": kept, "held": held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        held = state.pop("held")
        self.__dict__.update(state)
        for key, array in held.items():
            shape, dtype = cast(Schema, self._schema).shape_of(key), cast(Schema, self._schema).fields[key][1]
            memory = _empty(shape, dtype, self._device)
            if array is not None:
                memory.view(torch.uint8).numpy()[...] = array
            self._tensors[key] = memory

    def schema(self) -> Schema | None:
        """What a row holds; None until the first was written."""
        return self._schema

    def allocate(self, schema: Schema) -> None:
        """Settle what a row holds, once; whoever comes second keeps what the first has settled."""
        with self.ledger.writing():
            if self._schema is None:
                self.ledger.set_capacity(schema.capacity)
                self.replace(schema)

    def replace(self, schema: Schema) -> bool:
        """Change what a row holds, where none holds anything; returns whether this memory can."""
        self._tensors = {
            key: _empty(schema.shape_of(key), dtype, self._device) for key, (_, dtype) in schema.fields.items()
        }
        self._schema = schema
        return True

    def tensors(self) -> dict[NestedKey, torch.Tensor]:
        """The rows: ``[capacity, *rest, *entry]`` each, the same tensors until the schema is another."""
        return self._tensors


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that takes no room until it is written; in huge pages, where reads at random miss fewer translations."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < 4 * _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    mapped = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapped, np.uint8)
    first = -whole.ctypes.data % _HUGE_PAGE
    return torch.from_numpy(whole[first : first + num_bytes]).view(dtype).view(shape)


class SharedMemory(Memory):
    """Memory that processes share; with a folder, files that stay and can be opened again.

    One file holds all: a mark, the ledger, the schema as JSON, and the rows of each entry, from the start of a page.
    A second one is locked. Processes map the file once its schema is there, so it may come with the first row, from
    any of them.

    Behind the rows, the end of the last reservation and the revision of the ledger are written once more, before rows
    change. Whoever copies the file while others write reads it from the beginning to the end, so the copy's second
    numbers say which of the rows that its ledger holds may have been overwritten meanwhile.

    Args:
        folder: None for memory without a name.
        on_disk: whether memory without a name is a file too.

    Attributes:
        num_dropped: rows that were being written by a process that is dead when this one came.
        num_overwritten: rows that were overwritten while this file was copied.
    """

    shared = True

    def __init__(self, folder: Path | None = None, *, on_disk: bool = False) -> None:
        self._connect(
            Segment(None if folder is None else folder / ROWS_FILE, on_disk=on_disk),
            Segment(None if folder is None else folder / LOCK_FILE),
        )

    def take_over(self, private: PrivateMemory) -> None:
        """Hold what other memory held; the ledger is the same object. For use while nobody writes."""
        schema = private.schema()
        if schema is not None:
            self.allocate(schema)
            begun = private.ledger.num_begun
            self.make_space(begun)
            for key, rows in private.tensors().items():
                self._tensors[key][:begun].copy_(rows[:begun])
        private.ledger.lock.extend_over(self._lock)
        private.ledger.move(self._rows.map(_PAGE, Ledger.num_bytes))
        self.ledger = private.ledger
        self.ledger.space = self._space

    def _connect(self, rows: Segment, lock: Segment) -> None:
        self._rows, self._lock = rows, lock
        self._check_mark()
        rows.grow(_HEAD)
        row_lock = RowLock.over(lock)
        if not Space.is_counted_for(rows, os.pread(rows.fd, Space.num_bytes, _SPACE_AT)):
            with row_lock.writing():
                rows.allocate(0, _PAGE + Ledger.num_bytes + 8)  # what every process reads at any time
        self._mark = rows.map(0, _PAGE)
        self._text = rows.map(_PAGE + Ledger.num_bytes, _SCHEMA_ROOM)
        self._length = self._text[:8].cast("q")
        self._schema: Schema | None = None
        self._settled = 0  # the number before the texts when the schema was read
        self._tensors: dict[NestedKey, torch.Tensor] = {}
        self._tail: memoryview | None = None
        self.num_overwritten = 0
        self.ledger = Ledger(rows.map(_PAGE, Ledger.num_bytes), row_lock)
        self._space = self.ledger.space = Space(rows, self._mark[_SPACE_AT : _SPACE_AT + Space.num_bytes].cast("q"))
        if rows.path is not None or not self._space.is_of_this_file():
            with self.ledger.writing():
                self._open()
                if rows.path is not None:
                    self.ledger.before_rows_change = _weakly(self._note_end)
        lost = self.ledger.num_lost
        self.ledger.settle()
        self.num_dropped = self.ledger.num_lost - lost

    def _open(self) -> None:
        """Make the file ready for use, once; test what it says of itself. For use while writing."""
        ready = self._space.is_of_this_file()
        if bytes(self._mark[: len(_MARK)]) != _MARK:
            self._mark[: len(_MARK)] = _MARK
        schema = self._check()
        self.ledger.repair_base()
        if schema is not None:
            if not ready:
                self._rows.allocate(schema.layout.end, _TAIL_BYTES)
                self._check_copy(schema)
            self._note_end()
        if not ready:
            self._space.begin()

    def _check_copy(self, schema: Schema) -> None:
        """Drop rows that were overwritten while this file was copied. For use while writing.

        Raises:
            DamagedFileError: any may have changed.
        """
        end, revision = self._rows.map(schema.layout.end, _TAIL_BYTES).cast("q")
        if revision > self.ledger.revision or revision % 2:  # less: a process was killed between the two stores
            raise DamagedFileError(
                f"{self._rows.name} was copied while rows were replaced in it, and holds some of before and some of "
                "after that. Copy the folder while nobody writes, or use dumps(), which others may write beside."
            )
        self.num_overwritten = self.ledger.drop_below(end - schema.capacity)

    def _note_end(self) -> None:
        """Write the end of the last reservation, and the revision, behind the rows. For use while writing."""
        if self.schema() is not None and self._tail is not None:
            self._tail[0], self._tail[1] = self.ledger.end(), self.ledger.revision

    def _check_mark(self) -> None:
        """Test that the file is a new one, or holds rows.

        Raises:
            DamagedFileError: it is cut short.
            ValueError: it holds something else.
        """
        size = self._rows.num_bytes
        if not size:
            return
        begins = os.pread(self._rows.fd, len(_MARK), 0)
        if begins != _MARK:
            if not begins.strip(b"\0"):
                if size == _HEAD:  # whoever made it was killed
                    return
                raise self._damaged(f"it begins with zeros, and has {size} bytes")
            if not _MARK.startswith(begins):
                raise ValueError(f"{self._rows.path} holds no rows of a replay buffer. Name another folder.")
        if size < _HEAD:
            raise self._damaged(f"it has {size} bytes, expected at least {_HEAD}")

    def _check(self) -> Schema | None:
        """Test what the file says of itself; returns what its rows hold. For use while writing."""
        schema = capacity = None
        if self._length[0]:
            try:
                schema = Schema.loads(self._read_text(self._length[0]))
                wrong = schema.wrong()
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
                raise self._damaged(f"what its rows hold cannot be read ({type(error).__name__}: {error})") from error
            if not wrong and self._rows.num_bytes < schema.num_bytes:
                wrong = f"it has {self._rows.num_bytes} bytes, expected {schema.num_bytes}"
            if wrong:
                raise self._damaged(wrong)
            capacity = schema.capacity
        wrong = wrong_in(self.ledger, capacity)
        if wrong:
            raise self._damaged(wrong)
        return schema

    def _read_text(self, packed: int) -> bytes:
        length, check, at = packed & _LENGTH, packed >> 32, _SECOND_AT if packed & _SECOND else 8
        text = bytes(self._text[at : at + length])
        if packed < 0 or length > _SCHEMA_ROOM - at or (check and check != _checksum(text)):
            raise ValueError(f"{length} bytes with the checksum {check}")
        return text

    def _damaged(self, what: str) -> DamagedFileError:
        return DamagedFileError(f"{self._rows.name} is damaged: {what}. Nothing was changed. Restore it from a copy.")

    def schema(self) -> Schema | None:
        """What a row holds; None until the first was written."""
        while self._length[0] != self._settled:
            settled = self._length[0]
            try:
                schema = Schema.loads(self._read_text(settled))
            except ValueError:
                if self._length[0] != settled:  # replaced twice meanwhile, so what was read is not whole
                    continue
                raise
            self._map(schema)
            self.ledger.capacity = schema.capacity
            self._schema, self._settled = schema, settled
        return self._schema

    def allocate(self, schema: Schema) -> None:
        """Settle what a row holds, once; whoever comes second keeps what the first has settled."""
        text = self._text_of(schema)
        with self.ledger.writing():
            if not self._length[0]:
                self._grow(schema)
                self.ledger.set_capacity(schema.capacity)
                self._keep(text, second=False)
        self.schema()

    def replace(self, schema: Schema) -> bool:
        """Change what a row holds, where none holds anything; returns whether this memory can."""
        text, held = self._text_of(schema), self._length[0]
        if max(len(text), held & _LENGTH) > _SECOND_AT - 8:
            return False
        self._grow(schema)
        self._space.begin()
        self._keep(text, second=not held & _SECOND)
        self.schema()
        return True

    def _grow(self, schema: Schema) -> None:
        self._rows.grow(schema.num_bytes)
        self._rows.allocate(schema.layout.end, _TAIL_BYTES)

    def _text_of(self, schema: Schema) -> bytes:
        text = schema.dumps()
        if len(text) > _SCHEMA_ROOM - 8:
            raise ValueError(f"a frame has too many entries for a shared storage: {len(schema.fields)}.")
        return text

    def _keep(self, text: bytes, *, second: bool) -> None:
        """Write the text of a schema where none is that counts; one store makes it the one that counts."""
        at = _SECOND_AT if second else 8
        self._rows.allocate(_PAGE + Ledger.num_bytes, at + len(text))
        self._text[at : at + len(text)] = text
        self._length[0] = len(text) | (_SECOND if second else 0) | _checksum(text) << 32

    def _map(self, schema: Schema) -> None:
        layout = schema.layout
        self._space.lay_out(layout, schema.capacity)
        self._tensors = layout.map(self._rows)
        self._tail = self._rows.map(layout.end, _TAIL_BYTES).cast("q")

    def tensors(self) -> dict[NestedKey, torch.Tensor]:
        """The rows: ``[capacity, *rest, *entry]`` each, the same tensors until the schema is another."""
        return self._tensors

    def make_space(self, end: int) -> None:
        """Have space for the rows of all positions below ``end``; whoever reserves rows has it."""
        self._space.make_for(end)

    @property
    def folder(self) -> Path | None:
        """Where the files lie; None where they have no name."""
        return None if self._rows.path is None else self._rows.path.parent

    def flush(self) -> None:
        """Wait until the disk has everything."""
        self._rows.flush_to_disk()

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedMemory:
        return self  # it is what all copies share

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self._rows, "lock": self._lock}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._connect(state["rows"], state["lock"])


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """The method, without keeping its object, and the files of that, from being released."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        held = reference()
        if held is not None:
            held()

    return call


def _checksum(text: bytes) -> int:
    return zlib.crc32(text) & 0x7FFFFFFF
