"""Memory of a storage whose rows are bytes of any length: private, or shared by processes."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollwright._memory import Segment
from rollwright.data.encoding import DecodingError, Encoded, length_of, write_length
from rollwright.data.replay_buffers.ledger import Ledger, Reservation
from rollwright.data.replay_buffers.ledger.locks import RowLock

_PAGE = 4096
_CHUNK_BYTES, _NUM_CHUNKS, _CURSOR = range(3)  # numbers of the head: size and number of chunks, next free byte
_ALIGNMENT, _LEAST_LENGTH = 8, 1 << 24
_NOWHERE = -1

Bytes = Encoded | bytes | bytearray | memoryview


class EncodedRows(ABC):
    """Rows of bytes, and their ledger.

    Attributes:
        ledger: of the rows.
        shared: whether other processes can have them too.
    """

    ledger: Ledger
    shared: bool = False

    @abstractmethod
    def append(self, elements: Sequence[Encoded], skipped: int) -> Reservation:
        """Reserve rows, write, publish."""

    @abstractmethod
    def replace(self, rows: Sequence[int], elements: Sequence[Bytes]) -> None:
        """Put other elements in rows that are published. For use while rows change in place."""

    @abstractmethod
    def load(self, start: int, elements: Sequence[Bytes]) -> None:
        """Hold these elements alone, from position ``start`` on. For use while rows change in place."""

    @abstractmethod
    def view(self, row: int) -> Any:
        """The bytes of a row; none where nothing was written."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all elements."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory taken for elements."""


class PrivateRows(EncodedRows):
    """Memory of this process: an object of bytes for each row."""

    def __init__(self, capacity: int) -> None:
        self.ledger = Ledger(capacity=capacity)
        self._rows: dict[int, bytearray] = {}  # never changed once they are here

    def append(self, elements: Sequence[Encoded], skipped: int) -> Reservation:
        """See :meth:`EncodedRows.append`."""
        capacity = self.ledger.capacity
        with self.ledger.writes(len(elements), skipped) as reservation:
            for position, element in enumerate(elements, reservation.start):
                self._rows[position % capacity] = _written(element)
        return reservation

    def replace(self, rows: Sequence[int], elements: Sequence[Bytes]) -> None:
        """See :meth:`EncodedRows.replace`."""
        self._rows.update((row, _written(element)) for row, element in zip(rows, elements, strict=True))

    def load(self, start: int, elements: Sequence[Bytes]) -> None:
        """See :meth:`EncodedRows.load`."""
        capacity = self.ledger.capacity
        self._rows = {(start + n) % capacity: _written(one) for n, one in enumerate(elements) if _length(one)}

    def view(self, row: int) -> Any:
        """See :meth:`EncodedRows.view`."""
        return self._rows.get(row, b"")

    def clear(self) -> None:
        """See :meth:`EncodedRows.clear`; lets the bytes go."""
        self.ledger.clear_with(self._rows)

    @property
    def num_bytes(self) -> int:
        """See :attr:`EncodedRows.num_bytes`."""
        return sum(map(len, list(self._rows.values())))


def _length(element: Bytes) -> int:
    return element.num_bytes if isinstance(element, Encoded) else len(element)


def _written(element: Bytes) -> bytearray:
    if not isinstance(element, Encoded):
        return bytearray(element)
    memory = bytearray(element.num_bytes)
    element.write(memory)
    return memory


class SharedRows(EncodedRows):
    """Memory that processes share: a table of rows, and a log of their bytes in chunks.

    One file without a name holds all: a page of numbers, the ledger, the table (the place of each row's bytes, int64),
    and the chunks. A row's bytes lie inside one chunk, or in several that follow one another where they are longer. A
    writer takes the bytes behind those of the writer before, under the ledger's lock and together with the rows, and
    fills them outside it. Where the chunk is full it goes on in one in which no element lies that can be read, or is
    being written; where there is none, in a new one, whose memory is allocated at that moment.

    A place is one int64, stored when the element's old row cannot be read any more. So a process that is killed at any
    moment leaves each row that is published as it was.

    Args:
        capacity: rows.
        chunk_bytes: of a chunk.
    """

    shared = True

    def __init__(self, capacity: int, chunk_bytes: int) -> None:
        rows = Segment()
        table_at = _PAGE + -(-Ledger.num_bytes // _PAGE) * _PAGE
        rows.allocate(0, table_at + 8 * capacity)
        self._connect(rows, Segment(), capacity)
        self._table[:] = _NOWHERE
        self._head[_CHUNK_BYTES] = chunk_bytes
        self.ledger.set_capacity(capacity)

    def _connect(self, rows: Segment, lock: Segment, capacity: int) -> None:
        self._file, self._lock, self._capacity = rows, lock, capacity
        table_at = _PAGE + -(-Ledger.num_bytes // _PAGE) * _PAGE
        self._bytes_at = table_at + -(-8 * capacity // _PAGE) * _PAGE
        self._head = rows.map(0, _PAGE).cast("q")
        self._table: NDArray[np.int64] = np.frombuffer(rows.map(table_at, 8 * capacity), np.int64)
        self._memory = memoryview(b"")
        self.ledger = Ledger(rows.map(_PAGE, Ledger.num_bytes), RowLock.over(lock))
        self.ledger.settle()

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self._file, "lock": self._lock, "capacity": self._capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._connect(state["file"], state["lock"], state["capacity"])

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedRows:
        return self  # it is what all copies share

    def take_over(self, private: PrivateRows) -> None:
        """Hold what other memory held; the ledger is the same object. For use while nobody writes."""
        low, high = private.ledger.live()
        self.load(low, [private.view(position % self._capacity) for position in range(low, high)])
        private.ledger.lock.extend_over(self._lock)
        private.ledger.move(self._file.map(_PAGE, Ledger.num_bytes))
        self.ledger = private.ledger

    # Writing ----------------------------------------------------------------------------------

    def append(self, elements: Sequence[Encoded], skipped: int) -> Reservation:
        """See :meth:`EncodedRows.append`."""
        room = _Room(self, [element.num_bytes for element in elements])
        with self.ledger.writes(len(elements), skipped, room) as reservation:
            self._write(room.places, elements)
        return reservation

    def replace(self, rows: Sequence[int], elements: Sequence[Bytes]) -> None:
        """See :meth:`EncodedRows.replace`; each row is replaced by one store, behind its bytes."""
        low, _ = self.ledger.live()
        places, cursor = self.place([_length(element) for element in elements], low, self.ledger.end())
        self._write(places, elements)
        self._head[_CURSOR] = cursor
        self._table[np.asarray(rows, np.int64)] = places

    def load(self, start: int, elements: Sequence[Bytes]) -> None:
        """See :meth:`EncodedRows.load`."""
        kept = [element for element in elements if _length(element)]
        places, cursor = self.place([_length(element) for element in kept], self.ledger.live()[0], self.ledger.end())
        self._write(places, kept)
        self._head[_CURSOR] = cursor
        self._table[:] = _NOWHERE
        rows = [(start + n) % self._capacity for n, element in enumerate(elements) if _length(element)]
        self._table[np.asarray(rows, np.int64)] = places

    def _write(self, places: Sequence[int], elements: Sequence[Bytes]) -> None:
        for place, element in zip(places, elements, strict=True):
            memory = self._mapped(place, _length(element))
            if isinstance(element, Encoded):
                element.write(memory)
            else:
                memory[:] = element

    def place(self, lengths: Sequence[int], low: int, high: int) -> tuple[list[int], int]:
        """Find room in the chunks. For use while writing; changes nothing that is read.

        Args:
            lengths: of the elements.
            low: the first position whose element has to stay.
            high: the one behind the last.

        Returns:
            The places of the elements, and the cursor behind them.

        Raises:
            OSError: memory is full.
        """
        chunk_bytes, cursor = self._head[_CHUNK_BYTES], self._head[_CURSOR]
        left = -cursor % chunk_bytes
        free: _FreeChunks | None = None
        places = []
        for length in lengths:
            length = -(-length // _ALIGNMENT) * _ALIGNMENT
            if length > left:
                if free is None:
                    free = self._free_chunks(low, high, [(cursor - 1) // chunk_bytes] if cursor else [])
                count = -(-length // chunk_bytes)
                first = free.take(count) * chunk_bytes
                if count > 1:  # the chunk before goes on being filled
                    places.append(first)
                    continue
                cursor, left = first, chunk_bytes
            places.append(cursor)
            cursor, left = cursor + length, left - length
        if free is not None and free.num_chunks > self._head[_NUM_CHUNKS]:
            self._grow(free.num_chunks)
        return places, cursor

    def _free_chunks(self, low: int, high: int, taken: list[int]) -> _FreeChunks:
        """The chunks in which no element of these positions lies; ``taken``: chunks that are used, too."""
        chunk_bytes, count = self._head[_CHUNK_BYTES], self._head[_NUM_CHUNKS]
        used = np.zeros(count, np.bool_)
        used[taken] = True
        places = self._table[np.arange(low, high) % self._capacity]
        places = places[places >= 0]
        chunks = places // chunk_bytes
        used[chunks] = True
        for place in places[places % chunk_bytes == 0].tolist():  # perhaps one that takes several chunks
            with contextlib.suppress(DecodingError):  # of a gap, whose bytes are those of other elements by now
                used[place // chunk_bytes : -(-(place + self._length_at(place)) // chunk_bytes)] = True
        return _FreeChunks(used)

    def _grow(self, num_chunks: int) -> None:
        chunk_bytes, count = self._head[_CHUNK_BYTES], self._head[_NUM_CHUNKS]
        needed = self._bytes_at + num_chunks * chunk_bytes
        if self._file.num_bytes < needed:  # longer than needed, so that it is mapped again a few times only
            self._file.grow(max(2 * self._file.num_bytes, needed, self._bytes_at + _LEAST_LENGTH))
        try:
            self._file.allocate(self._bytes_at + count * chunk_bytes, (num_chunks - count) * chunk_bytes)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{error.strerror}: elements of a replay buffer need {num_chunks - count} more chunks of {chunk_bytes} "
                f"bytes, beside {count}. Nothing of them was written. Free memory, or make the storage smaller",
                self._file.name,
            ) from error
        self._head[_NUM_CHUNKS] = num_chunks

    def note(self, start: int, lengths: Sequence[int], places: Sequence[int], cursor: int) -> None:
        """Say where the elements from a position on lie. For use while writing, where nobody reads these rows."""
        chunk_bytes = self._head[_CHUNK_BYTES]
        for place, length in zip(places, lengths, strict=True):
            if place % chunk_bytes == 0:  # which whoever looks for free chunks reads, before the element is written
                write_length(self._mapped(place, length), length)
        self._table[np.arange(start, start + len(places)) % self._capacity] = places
        self._head[_CURSOR] = cursor

    # Reading ----------------------------------------------------------------------------------

    def view(self, row: int) -> Any:
        """See :meth:`EncodedRows.view`."""
        place = int(self._table[row])
        return b"" if place < 0 else self._mapped(place, self._length_at(place))

    def _length_at(self, place: int) -> int:
        return length_of(self._mapped(place, 16))

    def _mapped(self, place: int, length: int) -> memoryview:
        if place + length > len(self._memory):
            size = self._file.num_bytes - self._bytes_at
            if place + length > size:
                raise ValueError(f"{length} bytes at {place} of {size}: they are being written")
            self._memory = self._file.map(self._bytes_at, size)
        return self._memory[place : place + length]

    def clear(self) -> None:
        """See :meth:`EncodedRows.clear`; the chunks are filled again."""
        self.ledger.clear()

    @property
    def num_bytes(self) -> int:
        """See :attr:`EncodedRows.num_bytes`."""
        return self._head[_NUM_CHUNKS] * self._head[_CHUNK_BYTES]


class _Room:
    """Room for the elements of one write; see :class:`~rollwright.data.replay_buffers.ledger.ledger.Room`."""

    def __init__(self, rows: SharedRows, lengths: list[int]) -> None:
        self._rows, self._lengths = rows, lengths
        self.places: list[int] = []
        self._cursor = 0

    def find(self, start: int, stop: int) -> None:
        ledger = self._rows.ledger
        low = max(stop - ledger.capacity, ledger.live()[0])
        self.places, self._cursor = self._rows.place(self._lengths, min(low, start), start)

    def take(self, start: int) -> None:
        self._rows.note(start, self._lengths, self.places, self._cursor)


class _FreeChunks:
    """Chunks that can be filled, and new ones behind them."""

    def __init__(self, used: NDArray[np.bool_]) -> None:
        self._free = np.flatnonzero(~used).tolist()
        self.num_chunks = len(used)

    def take(self, count: int) -> int:
        """The first of ``count`` chunks that follow one another."""
        free = self._free
        for at in range(len(free) - count + 1):
            if free[at + count - 1] - free[at] == count - 1:
                first = free[at]
                del free[at : at + count]
                return int(first)
        first = self.num_chunks
        self.num_chunks += count
        return first
