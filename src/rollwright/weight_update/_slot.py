"""Slot: the memory of one publication, as tensors over it."""

from __future__ import annotations

import contextlib
import mmap
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from rollwright._memory import Segment, aligned
from rollwright._processes.pickling import dumps
from rollwright.weight_update._tables import Model, Table

__all__ = ["SlotLocation", "Slot", "Torn", "copy_all", "dump_extras", "load_extras"]


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
