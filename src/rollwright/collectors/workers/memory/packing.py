"""Packing: pickles what does not fit in a block, through memory that both processes map."""

from __future__ import annotations

import io
import pickle
from typing import Any, NamedTuple, cast

import cloudpickle  # type: ignore[import-untyped]
import torch

from rollwright._memory import Field, Segment, aligned


class Packed(NamedTuple):
    """Position of a packed object: all that the message about it carries.

    Attributes:
        place: number of the segment.
        num_bytes: of the tensors and the pickle behind them, from the segment's first byte.
        pickle_at: first byte of the pickle.
    """

    place: int
    num_bytes: int
    pickle_at: int


class Packer:
    """Packs values in two segments in turn, so that one may be opened while the next is packed.

    Args:
        segments: two of them.

    Example:
        >>> segments = (Segment(), Segment())
        >>> packed = Packer(segments).pack({"a": torch.arange(5000), "b": "text"})
        >>> opened = unpack(packed, segments)
        >>> opened["a"].shape, opened["b"]
        (torch.Size([5000]), 'text')
    """

    def __init__(self, segments: tuple[Segment, Segment]) -> None:
        self._segments = segments
        self._next = 0

    def pack(self, value: Any) -> Packed:
        """Pack anything; tensors are copied once."""
        place, self._next = self._next, 1 - self._next
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(value)
        pickled, start = stream.getbuffer(), pickler.num_bytes
        packed = Packed(place, start + len(pickled), start)
        self._segments[place].grow(packed.num_bytes)
        memory = self._segments[place].map(0, packed.num_bytes)
        memory[start:] = pickled
        pickler.write_tensors(memory)
        return packed


def unpack(packed: Packed, segments: tuple[Segment, Segment]) -> Any:
    """What was packed; it is copied once more, and its tensors lie in one piece of memory."""
    content = torch.frombuffer(segments[packed.place].map(0, packed.num_bytes), dtype=torch.uint8)
    memory = memoryview(cast(Any, content.clone().numpy()))
    return _Unpickler(io.BytesIO(memory[packed.pickle_at :]), memory).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Leaves plain CPU tensors out of the stream, and gives each a place in memory.

    Attributes:
        num_bytes: that they take.
    """

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.num_bytes = 0
        self._left_out: dict[int, tuple[torch.Tensor, Field[None]]] = {}  # by id, which stays as long as they do

    def persistent_id(self, value: Any) -> Field[None] | None:
        if type(value) is not torch.Tensor or value.is_nested:
            return None
        known = self._left_out.get(id(value))
        if known is not None:
            return known[1]
        if value.layout is not torch.strided or value.device.type != "cpu" or value.requires_grad or not value.numel():
            return None
        if value.is_quantized or value.__dict__:
            return None
        field = Field(None, tuple(value.shape), value.dtype, self.num_bytes)
        self.num_bytes = aligned(field.stop)
        self._left_out[id(value)] = value, field
        return field

    def write_tensors(self, memory: memoryview) -> None:
        """Copy what was left out to its places."""
        for value, field in self._left_out.values():
            field.tensor(memory).copy_(value)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, memory: memoryview) -> None:
        super().__init__(stream)
        self._memory, self._known = memory, dict[int, torch.Tensor]()

    def persistent_load(self, pid: Field[None]) -> torch.Tensor:
        found = self._known.get(pid.start)
        if found is None:
            found = self._known[pid.start] = pid.tensor(self._memory)
        return found
