"""RaggedStorage: TensorDicts with text, objects and ragged tensors, of one process or shared by many."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensor_collection

from rollwright._keys import NestedKey, as_tuple, key_str, leaf_keys
from rollwright.data.encoding import Decoder, Encoded, PackedRows, encode, pack_rows
from rollwright.data.entries import MadeEntries
from rollwright.data.llm.stored_records import GROWTH, end_of, growth_of, restored, stored, transcript_of
from rollwright.data.replay_buffers.ledger import Ledger, Reservation
from rollwright.data.replay_buffers.storages.batches import (
    batches_of,
    items_in_place,
    items_of,
    items_that_fit,
    positive,
    too_long,
)
from rollwright.data.replay_buffers.storages.elements import (
    ElementMemory,
    Found,
    Gone,
    Parent,
    PrivateElements,
    SharedElements,
)
from rollwright.data.replay_buffers.storages.storage import Storage, check_number
from rollwright.data.transcript import Transcript

_UNLIMITED = 1 << 40
_START = (0, 0, 0)
_LEAST_CHUNK_BYTES = 4096


class RaggedStorage(Storage):
    """TensorDicts whose entries may be text, objects and tensors of other lengths in each element.

    An element is a TensorDict with any keys: tensors of any shape and dtype, text, nested TensorDicts, tensorclasses
    (see :func:`~rollwright.data.encoding.register_tensorclass`), and lists, dictionaries, numbers and None. What is
    read is a copy. The bytes of a tensor are copied once when it is written. Tensors lie on the CPU; names of
    dimensions are not kept.

    A batch of ``sample()`` is a ``LazyStackedTensorDict`` ``[n]``, whatever the shapes: ``batch[0]`` is an element,
    ``batch["text"]`` a list, and ``batch["tokens"]`` a tensor where all have one shape.

    Nothing that is saved is a pickle: text is saved as UTF-8, objects as JSON, tensors as they lie in memory.

    Shared by processes (``ReplayBuffer(..., shared=True)``, :meth:`share`), elements lie in chunks of shared memory,
    which are filled again when none of their elements can be read any more. Memory grows with the elements, and stays
    taken::

        memory  <=  2 * bytes of the elements that are stored and being written, at their most  +  3 * chunk_bytes

    This holds for elements of at most ``chunk_bytes`` that nobody replaces in place (``buffer[i] = ...``): a chunk is
    kept for one of its elements. :attr:`num_bytes` says what is taken. A process that is killed while it writes loses
    what it did not publish, and nothing else; the memory has no name and is gone with the last process, however it
    ends.

    Turns of a conversation, as an ``LLMCollector`` delivers them, hold what each adds, and refer to the turn before, if
    that was written by the same process and can still be read. It then stays in memory as long as they do, beyond its
    own row. What is read is whole.

    Args:
        max_size: number of elements; None: no limit, and not to be shared.
        chunk_bytes: of the memory that is taken at a time, where processes share it. Elements may be longer.

    Raises:
        TypeError: in ``extend``: an entry is an object of another kind; it is named.
        OSError: in ``extend``: memory is full; nothing of the batch is stored.

    Example:
        >>> from tensordict import lazy_stack
        >>> from rollwright.data import ReplayBuffer
        >>> buffer = ReplayBuffer(storage=RaggedStorage(100), batch_size=2)
        >>> short = TensorDict({"text": "yes", "tokens": torch.tensor([7])})
        >>> long = TensorDict({"text": "no, never", "tokens": torch.tensor([4, 9, 9])})
        >>> buffer.extend(lazy_stack([short, long]))
        tensor([0, 1])
        >>> [len(element["tokens"]) for element in buffer[:]], list(buffer[:]["text"])
        ([1, 3], ['yes', 'no, never'])
        >>> type(buffer.sample()).__name__
        'LazyStackedTensorDict'
    """

    def __init__(self, max_size: int | None = None, *, chunk_bytes: int = 1 << 22) -> None:
        self.max_size = _UNLIMITED if max_size is None else positive("max_size", max_size)
        self.chunk_bytes = positive("chunk_bytes", chunk_bytes)
        if self.chunk_bytes < _LEAST_CHUNK_BYTES or self.chunk_bytes % 8:
            raise ValueError(
                f"chunk_bytes: expected a multiple of 8, at least {_LEAST_CHUNK_BYTES}, got {chunk_bytes}. Leave it "
                "out for 4 MiB."
            )
        self._rows: ElementMemory = PrivateElements(self.max_size)
        self._decoder = Decoder()
        self._written = _Written()

    @property
    def ledger(self) -> Ledger:  # type: ignore[override]
        """Counts the elements that were reserved and published."""
        return self._rows.ledger

    @property
    def device(self) -> torch.device | None:
        """Device that elements are read to."""
        return torch.device("cpu")

    @property
    def shared(self) -> bool:
        """Whether other processes can write and read, too."""
        return self._rows.shared

    @property
    def num_bytes(self) -> int:
        """Memory taken for the elements, without that of the ledger and the table of rows."""
        return self._rows.num_bytes

    def share(self) -> None:
        """Move to memory that processes share."""
        if self.shared:
            return
        if self.max_size == _UNLIMITED:
            raise ValueError("shared: expected a storage with a max_size, got None. Pass RaggedStorage(max_size).")
        with self.ledger.standing_still():
            if not self.shared:  # else another thread was faster
                shared = SharedElements(self.max_size, self.chunk_bytes)
                shared.take_over(cast(PrivateElements, self._rows))
                self._rows, self._written = shared, _Written()

    # Writing ----------------------------------------------------------------------------------

    def append(self, data: Any, *, dim: int = 0) -> Reservation:
        """Write data after the newest elements, over the oldest if the storage is full."""
        items, skipped = items_that_fit(data, dim, self.max_size)
        if skipped and len(batches_of(data)) > 1:
            raise too_long(len(items) + skipped, self.max_size)
        return self._written.append(self._rows, items, skipped)

    def element(self, data: Any) -> Any:
        """One element as a batch of one row."""
        return [data]

    def overwrite(self, index: NDArray[np.int64], data: Any) -> None:
        """Replace published elements, given by flat indices, by a batch ``[n]``."""
        items = [_encoded(item) for item in items_in_place(data, len(index))]
        with self.ledger.changing_in_place():
            self._rows.replace(index.tolist(), items)

    def clear(self) -> None:
        """Remove all elements."""
        self._rows.clear()
        self._written = _Written()

    # Reading ----------------------------------------------------------------------------------

    def read(self, index: NDArray[np.int64]) -> Any:
        """The elements at flat indices as a ``LazyStackedTensorDict``; a list if elements are tensors."""
        reading = Reading(self._decoder, self._rows.before)
        return _together([reading.element(self._rows.find(row)) for row in index.tolist()])

    def in_order(self) -> Any:
        """All live elements in the order in which they were written, as a batch ``[N]``."""
        with self.ledger.reading():
            return self.read(self.elements_of(self.ledger.positions()))

    def keys(self) -> list[NestedKey]:
        """The entries of the newest element; none if it is no TensorDict."""
        ranges = self.ledger.ranges(self.ledger.span())
        if not ranges:
            return []
        found = self._rows.find((ranges[-1][1] - 1) % self.capacity)
        keys = self._decoder.keys(found.memory)
        grows = any(as_tuple(key)[0] == GROWTH for key in keys)
        return leaf_keys(Reading(self._decoder, self._rows.before).element(found)) if grows else keys

    def entry(self, key: NestedKey, low: int, high: int) -> NDArray[Any]:
        """Values of an entry at the positions ``low <= p < high``, in order: ``[high - low, columns, *feature]``.

        Raises:
            KeyError: an element lacks the entry.
            ValueError: its shape differs between elements.
        """
        rows, decoder, capacity = self._rows, self._decoder, self.capacity
        if low >= high:
            return np.zeros((0, 1), np.int64)
        try:
            values = [self._value(decoder, rows.find(position % capacity), key) for position in range(low, high)]
        except KeyError:
            raise KeyError(
                f"{key!r}: an element that is stored has no tensor of that name; the newest has "
                f"{key_str(self.keys())}. A sampler of slices, and a writer that ranks elements, need it in each: "
                "write it into all of them, or name another entry."
            ) from None
        try:
            return np.stack(values)[:, None]
        except ValueError as error:
            raise ValueError(
                f"{key!r}: expected one shape in all elements, got {sorted({value.shape for value in values})}. A "
                "sampler of slices, and a writer that ranks elements, need one: name another entry."
            ) from error

    def _value(self, decoder: Decoder, found: Found, key: NestedKey) -> NDArray[Any]:
        try:
            return decoder.entry(found.memory, key)
        except KeyError:
            item = Reading(decoder, self._rows.before).element(found)
            value = item.get(key, None) if MadeEntries.of(item) is not None else None
            if not isinstance(value, torch.Tensor):
                raise
            return value.numpy()

    # State ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Live elements in the order of positions, encoded, and the positions; see :meth:`elements_of_state`."""
        with self.ledger.reading():
            low, high = self.ledger.live()
            gone = np.zeros(high - low, np.bool_)
            for start, stop in (self.ledger.gaps() - low).tolist():
                gone[start:stop] = True
            rows = [None if gone[n] else (low + n) % self.capacity for n in range(high - low)]
            elements, parents, hidden = self._rows.with_before(rows)
            packed: dict[str, Any] | None = pack_rows(elements) if rows else None
            if packed is not None and max(parents) >= 0:
                packed |= {"parents": torch.tensor(parents), "hidden": hidden}
            return {**self._state(low, high), "elements": packed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold what another storage held: the result of :meth:`state_dict`; takes the states of other storages, too.

        Raises:
            DamagedFileError: the elements are damaged.
        """
        super().check_state(state_dict)
        rows, parents, hidden = self._saved_rows(state_dict)
        skipped = max(0, len(rows) - hidden - self.capacity)
        with self.ledger.restoring(state_dict):  # those that are skipped may be referred to
            self._rows.load(state_dict["low"] + skipped, rows, parents, hidden + skipped)
            self._written = _Written()

    def check_state(self, state_dict: Any) -> None:
        """Test that the storage takes a state of :meth:`state_dict`, before anything is changed.

        Raises:
            DamagedFileError: the elements are damaged.
        """
        super().check_state(state_dict)
        self._saved_rows(state_dict)

    @staticmethod
    def _saved_rows(state: Mapping[str, Any]) -> tuple[Sequence[Any], list[int], int]:
        """Rows of a state, which each one refers to, and how many are in no row, see :meth:`ElementMemory.load`."""
        found = state["elements"]
        rows: Sequence[Any] = ()
        parents, hidden = list[int](), 0
        if isinstance(found, Mapping) and not is_tensor_collection(found):
            rows = list(PackedRows.of(found))
            parents, hidden = _parents(found)
        elif found is not None:
            rows = [_encoded(item) for item in items_of(found, 0)]
        check_number(state, state["high"] - state["low"], len(rows) - hidden)
        return rows, parents, hidden

    @staticmethod
    def elements_of_state(state_dict: Mapping[str, Any]) -> list[Any]:
        """The elements of a state, in order, less those that were lost.

        Raises:
            DamagedFileError: they are damaged.
        """
        packed = state_dict.get("elements")
        if packed is None:
            return []
        parents, hidden = _parents(packed)
        rows = [Found(number, row) for number, row in enumerate(PackedRows.of(packed))]

        def before(found: Found) -> Found | None:
            return rows[parents[found.key]] if parents and parents[found.key] >= 0 else None

        reading = Reading(Decoder(), before)
        return [reading.element(row) for row in rows[hidden:] if len(row.memory)]

    def _takes(self, elements: Any) -> bool:
        return True

    def __repr__(self) -> str:
        limit = "" if self.max_size == _UNLIMITED else f", max_size={self.max_size}"
        return f"{type(self).__name__}(len={len(self)}{limit}{', shared' if self.shared else ''})"


LazyStackStorage = RaggedStorage


class _Written:
    """What this process has written of transcripts: a turn that follows refers to it, and holds what is new.

    Turns whose conversation was written elsewhere, or is not there any more, hold all of it.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Transcript, tuple[tuple[int, int, int], Any]] = (
            weakref.WeakKeyDictionary()
        )

    def append(self, rows: ElementMemory, items: Sequence[Any], skipped: int) -> Reservation:
        """Encode and write items."""
        try:
            return self._append(rows, items, skipped)
        except Gone:
            self._known.clear()
            return self._append(rows, items, skipped)

    def _append(self, rows: ElementMemory, items: Sequence[Any], skipped: int) -> Reservation:
        elements, parents = list[Encoded](), list[Parent]()
        now: dict[Transcript, tuple[tuple[int, int, int], int]] = {}
        for number, item in enumerate(items):
            transcript = transcript_of(item)
            if transcript is None:
                elements.append(_encoded(item))
                parents.append(None)
                continue
            start, parent = now.get(transcript) or self._known.get(transcript) or (_START, None)
            elements.append(encode(stored(item, start)))
            parents.append(parent)
            now[transcript] = cast(Any, tuple(map(max, start, end_of(item)))), number
        reservation, names = rows.append(elements, skipped, parents if now else ())
        for transcript, (end, number) in now.items():
            self._known[transcript] = end, names[number]
        return reservation

    def __reduce__(self) -> Any:  # another process writes for itself
        return _Written, ()

    def __deepcopy__(self, memo: Any) -> _Written:
        return _Written()


class Reading:
    """Reads elements, of which some refer to others; those of one conversation share its transcript.

    Args:
        decoder: of their bytes.
        before: what an element refers to.
    """

    def __init__(self, decoder: Decoder, before: Callable[[Found], Found | None]) -> None:
        self._decoder, self._before = decoder, before
        self._known: dict[int, tuple[Transcript, tuple[int, int, int]]] = {}  # by key: and how far that element goes

    def element(self, found: Found) -> Any:
        """A copy of an element."""
        memory = bytearray(found.memory)
        if not memory:
            return TensorDict({})
        item = self._decoder.decode(memory)
        if type(item) is not TensorDict or GROWTH not in item.keys():  # noqa: SIM118
            return item
        return restored(item, self._transcript(found))

    def _transcript(self, found: Found) -> Transcript:
        if found.key in self._known:
            return self._known[found.key][0]
        chain: list[Found] = []
        each: Found | None = found
        transcript: Transcript | None = None
        while each is not None and transcript is None:
            chain.append(each)
            each = self._before(each)
            known = None if each is None else self._known.get(each.key)
            transcript = known[0] if known is not None and known[0].final == known[1] else None
        transcript = transcript or Transcript()
        for one in reversed(chain):
            transcript.grow(growth_of(self._decoder.part(one.memory, GROWTH)))
            self._known[one.key] = transcript, transcript.final
        return transcript


def _parents(packed: Mapping[str, Any]) -> tuple[list[int], int]:
    """Which element each one of a saved state refers to, and how many are in no row."""
    parents = packed.get("parents")
    return ([], 0) if parents is None else (parents.tolist(), int(packed["hidden"]))


def _encoded(item: Any) -> Encoded:
    if isinstance(item, torch.Tensor | TensorDictBase) or is_tensor_collection(item):
        return encode(item if transcript_of(item) is None else stored(item))
    raise TypeError(
        f"data: expected TensorDicts or tensors as elements, got {type(item).__name__}. Put it into a TensorDict, or "
        "use a ListStorage, which keeps objects of one process."
    )


def _together(items: list[Any]) -> Any:
    if items and all(is_tensor_collection(item) for item in items):
        return LazyStackedTensorDict(*items, stack_dim=0)
    if items and all(isinstance(item, torch.Tensor) and item.shape == items[0].shape for item in items):
        return torch.stack(items)
    return items
