"""Memory of a storage whose rows are bytes of any length: private, or shared by processes."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollwright._memory import Segment
from rollwright.data.encoding import Decoder, DecodingError, Encoded, length_of, write_length
from rollwright.data.replay_buffers.ledger import Ledger, Reservation
from rollwright.data.replay_buffers.ledger.locks import RowLock

_PAGE = 4096
_CHUNK_BYTES, _NUM_CHUNKS, _CURSOR = range(3)  # numbers of the head: size and number of chunks, next free byte
_ALIGNMENT, _LEAST_LENGTH = 8, 1 << 24
_NOWHERE = -1

Bytes = Encoded | bytes | bytearray | memoryview
Parent = int | Any | None  # see ElementMemory
Appended = tuple[Reservation, Sequence[Any]]
LINK = ("_transcript", "link")  # entry that holds the place of the element which one refers to


class Gone(Exception):
    """An element that another one was to refer to cannot be read any more."""


class Found(NamedTuple):
    """The bytes of an element.

    Attributes:
        key: no two elements share one.
        memory: the bytes.
        before: what it refers to, as the rows that it is of know it.
    """

    key: int
    memory: Any
    before: Any = None


_NONE = Found(-1, b"")


class ElementMemory(ABC):
    """Rows of bytes, and their ledger.

    An element may refer to one that was written before, which is then kept as long as it is: ``parents`` say which, by
    index among the elements that are written with it (int), by what :meth:`append` returned, or None.

    Attributes:
        ledger: of the rows.
        shared: whether other processes can have them too.
    """

    ledger: Ledger
    shared: bool = False

    @abstractmethod
    def append(self, elements: Sequence[Encoded], skipped: int, parents: Sequence[Parent] = ()) -> Appended:
        """Reserve rows, write, publish.

        Returns:
            The positions, and for each element what those that are written later can refer to it by.

        Raises:
            Gone: a parent cannot be read any more; nothing is written.
        """

    @abstractmethod
    def replace(self, rows: Sequence[int], elements: Sequence[Bytes]) -> None:
        """Put other elements in rows that are published. For use while rows change in place."""

    @abstractmethod
    def load(self, start: int, elements: Sequence[Bytes], parents: Sequence[int] = (), hidden: int = 0) -> None:
        """Hold these elements alone, from position ``start`` on. For use while rows change in place.

        Args:
            start: position of the first that is no hidden one.
            elements: the hidden ones, which others refer to, and then those of the rows.
            parents: index of the one that each refers to; -1: none.
            hidden: number of hidden ones.
        """

    @abstractmethod
    def find(self, row: int) -> Found:
        """The bytes of a row; none where nothing was written."""

    @abstractmethod
    def before(self, found: Found) -> Found | None:
        """The element that another refers to."""

    def view(self, row: int) -> Any:
        """The bytes of a row alone; none where nothing was written."""
        return self.find(row).memory

    def with_before(self, rows: Sequence[int | None]) -> tuple[list[Any], list[int], int]:
        """The bytes of rows (None: none), behind those that they refer to and that are in no row.

        Returns:
            The bytes; the index of the one that each refers to, -1: none; how many are in no row.
        """
        found = [_NONE if row is None else self.find(row) for row in rows]
        keys = {each.key for each in found}
        hidden: dict[int, Found] = {}
        todo = list(found)
        while todo:
            parent = self.before(todo.pop())
            if parent is not None and parent.key not in keys and parent.key not in hidden:
                hidden[parent.key] = parent
                todo.append(parent)
        every = [*hidden.values(), *found]
        index = {each.key: number for number, each in enumerate(every)}
        parents = [-1 if (parent := self.before(each)) is None else index[parent.key] for each in every]
        return [each.memory for each in every], parents, len(hidden)

    @abstractmethod
    def clear(self) -> None:
        """Drop all elements."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory taken for elements."""


class PrivateElements(ElementMemory):
    """Memory of this process: an object of bytes for each row."""

    def __init__(self, capacity: int) -> None:
        self.ledger = Ledger(capacity=capacity)
        self._rows: dict[int, _Row] = {}  # never changed once they are here

    def append(self, elements: Sequence[Encoded], skipped: int, parents: Sequence[Parent] = ()) -> Appended:
        """Reserve rows, write, publish."""
        capacity = self.ledger.capacity
        with self.ledger.writes(len(elements), skipped) as reservation:
            made = _chained([_written(element) for element in elements], parents)
            for position, row in enumerate(made, reservation.start):
                self._rows[position % capacity] = row
        return reservation, made

    def replace(self, rows: Sequence[int], elements: Sequence[Bytes]) -> None:
        """Put other elements in rows that are published. For use while rows change in place."""
        self._rows.update((row, _Row(_written(element))) for row, element in zip(rows, elements, strict=True))

    def load(self, start: int, elements: Sequence[Bytes], parents: Sequence[int] = (), hidden: int = 0) -> None:
        """Hold these elements alone, from position ``start`` on. For use while rows change in place."""
        made = _chained([_written(element) for element in elements], [None if at < 0 else at for at in parents])
        capacity = self.ledger.capacity
        self._rows = {(start + n) % capacity: row for n, row in enumerate(made[hidden:]) if row.memory}

    def find(self, row: int) -> Found:
        """The bytes of a row; none where nothing was written."""
        found = self._rows.get(row)
        return _NONE if found is None else Found(id(found), found.memory, found.before)

    def before(self, found: Found) -> Found | None:
        """The element that another refers to."""
        row = found.before
        return None if row is None else Found(id(row), row.memory, row.before)

    def __getstate__(self) -> dict[str, Any]:
        rows = list(self._rows)
        return {"ledger": self.ledger, "rows": rows, "elements": self.with_before(rows)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.ledger = state["ledger"]
        elements, parents, hidden = state["elements"]
        made = _chained([bytearray(each) for each in elements], [None if at < 0 else at for at in parents])
        self._rows = dict(zip(state["rows"], made[hidden:], strict=True))

    def clear(self) -> None:
        """Drop all elements; lets the bytes go."""
        self.ledger.clear_with(self._rows)

    @property
    def num_bytes(self) -> int:
        """Memory taken for elements."""
        elements, _, _ = self.with_before(list(self._rows))
        return sum(map(len, elements))


class _Row:
    """An element of this process, and the one that it refers to."""

    __slots__ = ("before", "memory")

    def __init__(self, memory: bytearray, before: _Row | None = None) -> None:
        self.memory, self.before = memory, before


def _chained(elements: Sequence[bytearray], parents: Sequence[Parent]) -> list[_Row]:
    """Rows that refer to each other, or to rows that are named."""
    made = [_Row(element) for element in elements]
    for row, parent in zip(made, parents, strict=False):
        row.before = made[parent] if isinstance(parent, int) else parent
    return made


def _length(element: Bytes) -> int:
    return element.num_bytes if isinstance(element, Encoded) else len(element)


def _written(element: Bytes) -> bytearray:
    if not isinstance(element, Encoded):
        return bytearray(element)
    memory = bytearray(element.num_bytes)
    element.write(memory)
    return memory


class SharedElements(ElementMemory):
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
        rows.allocate(0, table_at + 16 * capacity)
        self._connect(rows, Segment(), capacity)
        self._table[:] = self._links[:] = _NOWHERE
        self._head[_CHUNK_BYTES] = chunk_bytes
        self.ledger.set_capacity(capacity)

    def _connect(self, rows: Segment, lock: Segment, capacity: int) -> None:
        self._file, self._lock, self._capacity = rows, lock, capacity
        table_at = _PAGE + -(-Ledger.num_bytes // _PAGE) * _PAGE
        self._bytes_at = table_at + -(-16 * capacity // _PAGE) * _PAGE
        self._head = rows.map(0, _PAGE).cast("q")
        tables: NDArray[np.int64] = np.frombuffer(rows.map(table_at, 16 * capacity), np.int64)
        self._table, self._links = tables[:capacity], tables[capacity:]
        self._decoder = Decoder()
        self._memory = memoryview(b"")
        self.ledger = Ledger(rows.map(_PAGE, Ledger.num_bytes), RowLock.over(lock))
        self.ledger.settle()

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self._file, "lock": self._lock, "capacity": self._capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._connect(state["file"], state["lock"], state["capacity"])

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedElements:
        return self  # it is what all copies share

    def take_over(self, private: PrivateElements) -> None:
        """Hold what other memory held; the ledger is the same object. For use while nobody writes."""
        low, high = private.ledger.live()
        self.load(low, *private.with_before([position % self._capacity for position in range(low, high)]))
        private.ledger.lock.extend_over(self._lock)
        private.ledger.move(self._file.map(_PAGE, Ledger.num_bytes))
        self.ledger = private.ledger

    # Writing ----------------------------------------------------------------------------------

    def append(self, elements: Sequence[Encoded], skipped: int, parents: Sequence[Parent] = ()) -> Appended:
        """Reserve rows, write, publish."""
        room = _Room(self, [element.num_bytes for element in elements], parents)
        with self.ledger.writes(len(elements), skipped, room) as reservation:
            self._write(room.places, elements, room.links)
            numbers = [self._link_at(place, 1) for place in room.places] if parents else room.places
        return reservation, list(zip(range(reservation.start, reservation.stop), room.places, numbers, strict=True))

    def replace(self, rows: Sequence[int], elements: Sequence[Bytes]) -> None:
        """Put other elements in rows that are published; each row is replaced by one store, behind its bytes."""
        low, _ = self.ledger.live()
        places, cursor = self.place([_length(element) for element in elements], low, self.ledger.end())
        self._write(places, elements)
        self._head[_CURSOR] = cursor
        self._table[np.asarray(rows, np.int64)] = places
        self._links[np.asarray(rows, np.int64)] = _NOWHERE

    def load(self, start: int, elements: Sequence[Bytes], parents: Sequence[int] = (), hidden: int = 0) -> None:
        """Hold these elements alone, from position ``start`` on. For use while rows change in place."""
        kept = [number for number, element in enumerate(elements) if _length(element)]
        lengths = [_length(elements[number]) for number in kept]
        found, cursor = self.place(lengths, self.ledger.live()[0], self.ledger.end())
        places = dict(zip(kept, found, strict=True))
        links = [places.get(parents[number], _NOWHERE) if parents else _NOWHERE for number in kept]
        self._write(found, [elements[number] for number in kept], links)
        self._head[_CURSOR] = cursor
        self._table[:] = self._links[:] = _NOWHERE
        in_rows = [place for place, number in enumerate(kept) if number >= hidden]
        rows = np.asarray([(start + kept[place] - hidden) % self._capacity for place in in_rows], np.int64)
        self._table[rows], self._links[rows] = np.asarray(found)[in_rows], np.asarray(links)[in_rows]

    def _write(self, places: Sequence[int], elements: Sequence[Bytes], links: Sequence[int] = ()) -> None:
        for number, (place, element) in enumerate(zip(places, elements, strict=True)):
            memory = self._mapped(place, _length(element))
            if isinstance(element, Encoded):
                element.write(memory)
            else:
                memory[:] = element
            if links and (links[number] >= 0 or self._link_at(place) >= 0):
                self._decoder.entry(memory, LINK)[0] = links[number]

    def _link_at(self, place: int, item: int = 0) -> int:
        """The place of the element that the one at a place refers to; ``item=1``: its own number."""
        try:
            return int(self._decoder.entry(self._mapped(place, self._length_at(place)), LINK)[item])
        except KeyError:
            return _NOWHERE

    def place(self, lengths: Sequence[int], low: int, high: int, parents: Sequence[int] = ()) -> tuple[list[int], int]:
        """Find room in the chunks. For use while writing; changes nothing that is read.

        Args:
            lengths: of the elements.
            low: the first position whose element has to stay.
            high: the one behind the last.
            parents: places of elements that have to stay as well.

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
                    free = self._free_chunks(low, high, [(cursor - 1) // chunk_bytes] if cursor else [], parents)
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

    def _free_chunks(self, low: int, high: int, taken: list[int], parents: Sequence[int]) -> _FreeChunks:
        """The chunks in which no element of these positions lies, or one that they refer to.

        Args:
            low: the first position.
            high: the one behind the last.
            taken: chunks that are used, too.
            parents: places of elements that are, too.
        """
        chunk_bytes, count = self._head[_CHUNK_BYTES], self._head[_NUM_CHUNKS]
        used = np.zeros(count, np.bool_)
        used[taken] = True
        rows = np.arange(low, high) % self._capacity
        places = self._table[rows]
        places = places[places >= 0]
        hidden = self._hidden(set(places.tolist()), [*self._links[rows].tolist(), *parents])
        places = np.concatenate([places, np.asarray(hidden, np.int64)])
        chunks = places // chunk_bytes
        used[chunks] = True
        for place in places[places % chunk_bytes == 0].tolist():  # perhaps one that takes several chunks
            with contextlib.suppress(DecodingError):  # of a gap, whose bytes are those of other elements by now
                used[place // chunk_bytes : -(-(place + self._length_at(place)) // chunk_bytes)] = True
        return _FreeChunks(used)

    def _hidden(self, known: set[int], links: Sequence[int]) -> list[int]:
        """Places of elements that others refer to, beside those that are known."""
        found: list[int] = []
        todo = [place for place in set(links) if place >= 0 and place not in known]
        while todo:
            place = todo.pop()
            if place not in known:
                known.add(place)
                found.append(place)
                link = self._link_at(place)
                todo += [link] if link >= 0 else []
        return found

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

    def note(
        self, start: int, lengths: Sequence[int], places: Sequence[int], links: Sequence[int], cursor: int
    ) -> None:
        """Say where the elements from a position on lie. For use while writing, where nobody reads these rows."""
        chunk_bytes = self._head[_CHUNK_BYTES]
        for place, length in zip(places, lengths, strict=True):
            if place % chunk_bytes == 0:  # which whoever looks for free chunks reads, before the element is written
                write_length(self._mapped(place, length), length)
        rows = np.arange(start, start + len(places)) % self._capacity
        self._table[rows], self._links[rows] = places, links
        self._head[_CURSOR] = cursor

    # Reading ----------------------------------------------------------------------------------

    def find(self, row: int) -> Found:
        """The bytes of a row; none where nothing was written."""
        place = int(self._table[row])
        return _NONE if place < 0 else self._at(place)

    def before(self, found: Found) -> Found | None:
        """The element that another refers to."""
        link = _NOWHERE if found.key < 0 else self._link_at(found.key)
        return None if link < 0 else self._at(link)

    def place_of(self, name: tuple[int, int, int]) -> int:
        """The place of an element that was named. For use while writing.

        Raises:
            Gone: it cannot be read any more.
        """
        position, place, number = name
        here = self._table[position % self._capacity] == place and position >= self.ledger.live()[0]
        if not here or self._link_at(place, 1) != number:
            raise Gone
        return place

    def _at(self, place: int) -> Found:
        return Found(place, self._mapped(place, self._length_at(place)))

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
        """Drop all elements; the chunks are filled again."""
        self.ledger.clear()

    @property
    def num_bytes(self) -> int:
        """Memory taken for elements."""
        return self._head[_NUM_CHUNKS] * self._head[_CHUNK_BYTES]


class _Room:
    """Room for the elements of one write; see :class:`~rollwright.data.replay_buffers.ledger.ledger.Room`."""

    def __init__(self, rows: SharedElements, lengths: list[int], parents: Sequence[Parent]) -> None:
        self._rows, self._lengths = rows, lengths
        self._parents = list(parents) or [None] * len(lengths)
        self.places: list[int] = []
        self.links: list[int] = []
        self._cursor = 0

    def find(self, start: int, stop: int) -> None:
        ledger = self._rows.ledger
        low = max(stop - ledger.capacity, ledger.live()[0])
        named = {
            number: self._rows.place_of(parent)
            for number, parent in enumerate(self._parents)
            if isinstance(parent, tuple)
        }
        self.places, self._cursor = self._rows.place(self._lengths, min(low, start), start, list(named.values()))
        self.links = [
            self.places[parent] if isinstance(parent, int) else named.get(number, _NOWHERE)
            for number, parent in enumerate(self._parents)
        ]

    def take(self, start: int) -> None:
        self._rows.note(start, self._lengths, self.places, self.links, self._cursor)


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
