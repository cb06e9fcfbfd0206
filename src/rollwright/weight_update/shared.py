"""Weights in shared memory: one process publishes, others read, each publication complete or not at all."""

from __future__ import annotations

import contextlib
import mmap
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from rollwright._memory import Layout, Segment, aligned, fence
from rollwright._processes.channel import dumps
from rollwright._processes.forks import on_fork
from rollwright.weight_update.forms import State, is_extra

EntrySpec = tuple[str, torch.Size, torch.dtype]


class Model(NamedTuple):
    """One model: its tensors, and room for the pickle of its extra state.

    Attributes:
        specs: name, shape and dtype of each tensor.
        layout: of the tensors in the body; the pickle lies behind them.
        room: for the pickle, in bytes.
    """

    specs: tuple[EntrySpec, ...]
    layout: Layout[str]
    room: int

    @property
    def end(self) -> int:
        """The first free byte of the body behind it, aligned."""
        return aligned(self.layout.end + self.room)


class Table(NamedTuple):
    """All models of a publication.

    A publication's memory is the pickle of this table, then (aligned) its body: two int64 for each model (the stamp of
    the publication that it is from, and the length of its extra state's pickle), then the models.

    Attributes:
        models: by id, in the order of the body.
        num_bytes: of the body.
    """

    models: dict[str, Model]
    num_bytes: int

    @classmethod
    def of(cls, specs: Mapping[str, tuple[tuple[EntrySpec, ...], int]]) -> Table:
        """A table for models, given what they hold and the room for their extra state in bytes."""
        models, end = {}, aligned(16 * len(specs))
        for model_id, (entries, room) in specs.items():
            models[model_id] = Model(entries, Layout.of(entries, end), room)
            end = models[model_id].end
        return cls(models, end)

    def changed(self, updates: Mapping[str, tuple[tuple[EntrySpec, ...], int]]) -> Table:
        """This table if it has room for the updates; else a new one, with what they need and all other models."""
        if all(self._takes(model_id, *needed) for model_id, needed in updates.items()):
            return self
        specs = {model_id: (model.specs, model.room) for model_id, model in self.models.items()}
        for model_id, (entries, num_bytes) in updates.items():
            room = specs[model_id][1] if model_id in specs else 0
            specs[model_id] = entries, room if num_bytes <= room else 2 * aligned(num_bytes)
        return Table.of(specs)

    def _takes(self, model_id: str, entries: tuple[EntrySpec, ...], num_bytes: int) -> bool:
        model = self.models.get(model_id)
        return model is not None and num_bytes <= model.room and entries == model.specs

    def dumps(self) -> bytes:
        """As bytes."""
        return pickle.dumps((self.models, self.num_bytes), 5)

    @classmethod
    def loads(cls, data: bytes) -> Table:
        """Of :meth:`dumps`."""
        return cls(*pickle.loads(data))


def spec_of(tensors: Mapping[str, torch.Tensor]) -> tuple[EntrySpec, ...]:
    """What tensors are."""
    return tuple([(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()])


class SlotLocation(NamedTuple):
    """Position and content of a slot's memory.

    Attributes:
        table_id: names the table; a slot whose place is the same holds tensors at the same addresses.
        start: in the segment, in bytes.
        capacity: in bytes.
        table_bytes: length of the table's pickle.
    """

    table_id: int
    start: int
    capacity: int
    table_bytes: int

    def holds(self, table: Table, table_bytes: int) -> bool:
        """Whether it has room for a table and its body."""
        return aligned(table_bytes) + table.num_bytes <= self.capacity


class Slot:
    """Tensors over the memory at a place.

    Args:
        segment: where the place lies.
        place: the place.
        table: what lies there; None: read it there.
        valid: whether what was read there is whole.

    Raises:
        Torn: it is not.
    """

    def __init__(
        self,
        segment: Segment,
        place: SlotLocation,
        *,
        table: Table | None = None,
        valid: Callable[[], bool] = lambda: True,
    ) -> None:
        self.place = place
        self._memory = segment.map(place.start, place.capacity)
        if table is None:
            dumped = bytes(self._memory[: place.table_bytes])
            if not valid():
                raise Torn
            table = Table.loads(dumped)
        else:
            dumped = table.dumps()
            self._memory[: len(dumped)] = dumped
        self.table = table
        begin = aligned(place.table_bytes)
        self._body = self._memory[begin : begin + table.num_bytes]
        self._numbers = self._body[: 16 * len(table.models)].cast("q")
        self._index = {model_id: index for index, model_id in enumerate(table.models)}
        self._tensors = {model_id: model.layout.tensors(self._body) for model_id, model in table.models.items()}

    def stamp(self, model_id: str) -> int:
        """Of the publication that a model is from."""
        return self._numbers[2 * self._index[model_id]]

    def tensors(self, model_id: str) -> dict[str, torch.Tensor]:
        """A model's tensors, by name; the same objects at each call."""
        return self._tensors[model_id]

    def extras(self, model_id: str) -> bytes:
        """A copy of the pickle of a model's extra state; empty where it has none."""
        model = self.table.models[model_id]
        length = min(self._numbers[2 * self._index[model_id] + 1], model.room)
        return bytes(self._body[model.layout.end : model.layout.end + length])

    def write(self, model_id: str, stamp: int, tensors: dict[str, torch.Tensor], extras: bytes) -> None:
        """Copy a model in."""
        model, index = self.table.models[model_id], self._index[model_id]
        with torch.no_grad():
            copy_all(list(self._tensors[model_id].values()), list(tensors.values()))
        self._body[model.layout.end : model.layout.end + len(extras)] = extras
        self._numbers[2 * index], self._numbers[2 * index + 1] = stamp, len(extras)

    def _bytes_of(self, model: Model) -> torch.Tensor:
        return torch.frombuffer(self._body[model.layout.start : model.end], dtype=torch.uint8)

    def carry_on(self, model_id: str, other: Slot) -> None:
        """Copy a model from another slot, where it has the same layout."""
        mine, theirs = self.table.models[model_id], other.table.models[model_id]
        if mine.end > mine.layout.start:
            self._bytes_of(mine).copy_(other._bytes_of(theirs))
        index, source = 2 * self._index[model_id], 2 * other._index[model_id]
        self._numbers[index : index + 2] = other._numbers[source : source + 2]

    def release(self) -> None:
        """Give the memory at this place back to the system; it reads as zeros from now on."""
        mapped = self._memory.obj
        if hasattr(mmap, "MADV_REMOVE") and isinstance(mapped, mmap.mmap):
            with contextlib.suppress(OSError):  # a file system without holes keeps it
                mapped.madvise(mmap.MADV_REMOVE)


class Torn(Exception):
    """Raised where the data that were read were being written."""


def copy_all(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copy tensors one by one into others, of the same shapes, in few calls."""
    if into:
        torch._foreach_copy_(into, values)


def dump_extras(extras: dict[str, Any]) -> bytes:
    """A pickle of extra state, with the code of classes that another process cannot import."""
    if not extras:
        return b""
    return dumps({name: _on_cpu(value) for name, value in extras.items()})


def load_extras(dumped: bytes) -> dict[str, Any]:
    """Of :func:`dump_extras`."""
    return dict(pickle.loads(dumped)) if dumped else {}


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


_PAGE = 4096
_GRAIN = max(_PAGE, mmap.ALLOCATIONGRANULARITY)
# Numbers (int64) of the head, which is two pages long.
_CURRENT = 0
_SLOTS = (8, 16)  # of each slot: code of its publication (0: none that is whole), version, place
_PAUSES, _TAKEN, _NUM_READERS = 32, 512, 480
_TRIES_BEFORE_PAUSE = 3
_SHORTEST_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3


class ModelWeights(NamedTuple):
    """A model's weights in a publication.

    Attributes:
        stamp: of the publication that they are from.
        specs: name, shape and dtype of each tensor; equal objects at each take, mostly the same.
        tensors: by name; views of memory that is whole only until :meth:`SharedWeights.take` returns, on the CPU.
        extras: extra state by name.
    """

    stamp: int
    specs: tuple[EntrySpec, ...]
    tensors: dict[str, torch.Tensor]
    extras: dict[str, Any]


class Publication(NamedTuple):
    """The result of :meth:`SharedWeights.take`.

    Attributes:
        stamp: names the publication; later ones have greater stamps, in all of a machine.
        version: as published.
        models: those that are newer than what the reader has, by id.
    """

    stamp: int
    version: int
    models: dict[str, ModelWeights]


class SharedWeights:
    """Two slots in a segment, one of them current.

    A publication is written to the slot that is not current, and one store of an int64 makes it current. A reader
    copies from the current slot, and looks afterwards whether the slot was written meanwhile: if so, it copies again.
    So a publisher waits for no reader, a reader waits for no publisher, and a publisher that is killed leaves the last
    publication whole. A reader that failed three times asks for a pause, for which the publisher waits before it writes
    again (at most ``timeout_s``, and once for a reader that is dead).

    Publications are cumulative: the models that one leaves out are carried on from the last.

    One process publishes at a time. Any number of processes and threads may read, each with an object and a
    number of its own: see :meth:`as_reader`. It is handed to a process while that starts.

    Args:
        segment: memory to use; None: new memory.
        reader: number of this reader.

    Example:
        >>> weights = SharedWeights()
        >>> stamp = weights.publish(1, {"policy": {"weight": torch.ones(2)}})
        >>> copies = []
        >>> taken = weights.take({}, lambda found: copies.append(found.models["policy"].tensors["weight"].clone()))
        >>> weights.version, taken.stamp == stamp, copies
        (1, True, [tensor([1., 1.])])
    """

    def __init__(self, segment: Segment | None = None, *, reader: int = 0) -> None:
        self.segment = Segment() if segment is None else segment
        self.segment.grow(2 * _PAGE)
        head = self.segment.map(0, 2 * _PAGE)
        self.head = head.cast("q")
        numbers = np.frombuffer(head, np.int64)
        self._pauses, self._taken = (numbers[begin : begin + _NUM_READERS] for begin in (_PAUSES, _TAKEN))
        self._reader, self._pausing = reader % _NUM_READERS, False
        self.reset_after_fork()
        on_fork(self)
        self._slots: list[Slot | None] = [None, None]

    def reset_after_fork(self) -> None:
        """Have a lock that nobody holds."""
        self._publishing = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SharedWeights, self.segment, reader=self._reader), ()

    def as_reader(self, reader: int) -> SharedWeights:
        """The same weights, for the reader of that number."""
        return SharedWeights(self.segment, reader=reader)

    @property
    def stamp(self) -> int:
        """Of the last publication; 0 before the first."""
        return self.head[_CURRENT] >> 1

    @property
    def version(self) -> int:
        """Of the last publication, as published; -1 before the first."""
        while True:
            code = self.head[_CURRENT]
            if not code:
                return -1
            version = self.head[_SLOTS[code & 1] + 1]
            fence()
            if self.head[_SLOTS[code & 1]] == code:
                return version

    # Publishing -------------------------------------------------------------------------------

    def publish(self, version: int, updates: Mapping[str, State], *, timeout_s: float = 1.0) -> int:
        """Make weights current, together with the last ones of all models that are left out.

        Args:
            version: names the publication for users.
            updates: flat states of tensors and extra state, by model. They are copied.
            timeout_s: how long to wait for readers that have failed to take a publication, because they were followed
                by others too fast. What they read is lost for them after that, and they try again.

        Returns:
            The publication's stamp.
        """
        packed = {model_id: _packed(state) for model_id, state in updates.items()}
        needed = {model_id: (spec_of(tensors), len(extras)) for model_id, (tensors, extras) in packed.items()}
        with self._publishing:
            self._await_readers(timeout_s)
            code = self.head[_CURRENT]
            stamp = max((code >> 1) + 1, time.monotonic_ns())
            current = self._slot(code & 1, lambda: True) if code else None
            table = (Table({}, 0) if current is None else current.table).changed(needed)
            spare = 1 - (code & 1)
            base = _SLOTS[spare]
            was_whole = self.head[base] != 0
            self.head[base] = 0
            fence()
            slot, is_new = self._room_for(spare, table, stamp, was_whole)
            for model_id in table.models:
                if model_id in packed:
                    slot.write(model_id, stamp, *packed[model_id])
                elif is_new or not was_whole or slot.stamp(model_id) != _stamp_in(current, model_id):
                    assert current is not None  # where the model is from
                    slot.carry_on(model_id, current)
            self.head[base + 1] = version
            fence()
            self.head[base] = stamp << 1 | spare
            fence()
            self.head[_CURRENT] = stamp << 1 | spare
            return stamp

    def _room_for(self, number: int, table: Table, stamp: int, was_whole: bool) -> tuple[Slot, bool]:
        """The slot of that number, with room for a table, and whether the table is new to it."""
        base = _SLOTS[number]
        place = SlotLocation(*self.head[base + 2 : base + 6])
        slot = self._slot(number, lambda: True) if was_whole else self._slots[number]
        if slot is not None and slot.place != place:
            slot = None  # a publisher was killed while it changed the place
        if slot is not None and slot.table == table:
            return slot, False
        dumped = len(table.dumps())
        if slot is None or not place.holds(table, dumped):
            if slot is not None:
                slot.release()
            start = aligned(self.segment.num_bytes, _GRAIN)
            capacity = aligned(aligned(dumped) + table.num_bytes, _GRAIN)
            self.segment.grow(start + capacity)
        else:
            start, capacity = place.start, place.capacity
        place = SlotLocation(stamp, start, capacity, dumped)
        self._slots[number] = None
        for offset, value in enumerate(place):
            self.head[base + 2 + offset] = value
        slot = self._slots[number] = Slot(self.segment, place, table=table)
        return slot, True

    def _await_readers(self, timeout_s: float) -> None:
        if not self._pauses.any():
            return
        until, nap = time.monotonic() + timeout_s, _SHORTEST_NAP_S
        while self._pauses.any():
            if time.monotonic() > until:
                self._pauses[:] = 0  # a reader that lives asks again
                return
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)

    def forget(self, reader: int) -> None:
        """Wait no more for a reader, which is dead."""
        self._pauses[reader % _NUM_READERS] = 0

    def stamp_taken(self, reader: int) -> int:
        """Stamp of the publication that a reader took last; 0 before its first."""
        return int(self._taken[reader % _NUM_READERS])

    # Reading ----------------------------------------------------------------------------------

    def take(
        self,
        since: Mapping[str, int],
        apply: Callable[[Publication], None],
        *,
        floor: int = 0,
        timeout_s: float = 30.0,
    ) -> Publication | None:
        """Copy what was published last.

        Args:
            since: the stamps of the models that the reader has.
            apply: copies the weights; is called again, with a later publication, where what it copied was written
                meanwhile. Until this method returns, what it has copied may be a mixture.
            floor: a stamp for all models that ``since`` leaves out, or has a lower one for.
            timeout_s: how long to try.

        Returns:
            The publication whose weights were copied last; None before the first.

        Raises:
            TimeoutError: publications followed too fast all the time.
        """
        if not self.head[_CURRENT]:
            return None
        until, tries = time.monotonic() + timeout_s, 0
        try:
            while True:
                tries += 1
                if tries > _TRIES_BEFORE_PAUSE:
                    self._pauses[self._reader] = 1
                    fence()
                publication = self._try_taking(since, floor, apply)
                if publication is not None:
                    self._taken[self._reader] = publication.stamp
                    return publication
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"weights: tried {tries} times in {timeout_s:g} s to take a publication, and each was "
                        "overwritten meanwhile. Publish less often."
                    )
        finally:
            self._pauses[self._reader] = self._pausing

    def ask_to_pause(self, pausing: bool) -> None:
        """Ask the publisher to wait, or no more: for a reader that takes from several."""
        self._pausing = pausing
        self._pauses[self._reader] = pausing

    def _try_taking(
        self, since: Mapping[str, int], floor: int, apply: Callable[[Publication], None]
    ) -> Publication | None:
        code = self.head[_CURRENT]
        base = _SLOTS[code & 1]

        def valid() -> bool:
            fence()
            return bool(self.head[base] == code)

        try:
            slot = self._slot(code & 1, valid)
        except Torn:
            return None
        version, newer = self.head[base + 1], {}
        for model_id in slot.table.models:
            stamp = slot.stamp(model_id)
            if stamp > max(since.get(model_id, 0), floor):
                newer[model_id] = stamp, slot.extras(model_id)
        if not valid():
            return None
        found = Publication(
            code >> 1,
            version,
            {
                model_id: ModelWeights(
                    stamp, slot.table.models[model_id].specs, slot.tensors(model_id), load_extras(extras)
                )
                for model_id, (stamp, extras) in newer.items()
            },
        )
        apply(found)
        return found if valid() else None

    def _slot(self, number: int, valid: Callable[[], bool]) -> Slot:
        base = _SLOTS[number]
        place = SlotLocation(*self.head[base + 2 : base + 6])
        slot = self._slots[number]
        if slot is None or slot.place != place:
            if not valid():  # the place may be half of one and half of another
                raise Torn
            slot = self._slots[number] = Slot(self.segment, place, valid=valid)
        return slot


def _packed(state: State) -> tuple[dict[str, torch.Tensor], bytes]:
    tensors = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not is_extra(name):
            tensors[name] = value.detach()
        elif not is_extra(name):
            raise TypeError(f"weights: expected a tensor at {name!r}, got {type(value).__name__}. Pass a flat state.")
    return tensors, dump_extras({name: value for name, value in state.items() if is_extra(name)})


def _stamp_in(slot: Slot | None, model_id: str) -> int:
    return 0 if slot is None else slot.stamp(model_id)
