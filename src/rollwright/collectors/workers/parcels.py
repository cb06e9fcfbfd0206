"""Parcels: what does not lie in a block travels pickled, its tensors through memory that both processes map."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

from rollwright._processes.segment import Segment

__all__ = ["ParcelMemory", "open_parcel"]

_SMALL = 1 << 12
_ALIGNMENT = 64


class ParcelMemory:
    """Where a worker packs parcels: two, in turn, so that one may be opened while the next is packed.

    Args:
        segments: two of them.

    Example:
        >>> segments = (Segment(), Segment())
        >>> parcel = ParcelMemory(segments).pack({"a": torch.arange(5000), "b": "text"})
        >>> opened = open_parcel(parcel, segments)
        >>> opened["a"].shape, opened["b"]
        (torch.Size([5000]), 'text')
    """

    def __init__(self, segments: tuple[Segment, Segment]) -> None:
        self._segments = segments
        self._next = 0

    def pack(self, value: Any) -> tuple[int, bytes]:
        """Pack anything; tensors are copied once."""
        place, self._next = self._next, 1 - self._next
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, self._segments[place])
        pickler.dump(value)
        return place, buffer.getvalue()


def open_parcel(parcel: tuple[int, bytes], segments: tuple[Segment, Segment]) -> Any:
    """What was packed; tensors are copied once more, into memory of their own."""
    place, pickled = parcel
    return _Unpickler(io.BytesIO(pickled), segments[place]).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Puts plain CPU tensors of some size into a segment, and everything else into the stream."""

    def __init__(self, file: io.BytesIO, segment: Segment) -> None:
        super().__init__(file, protocol=5)
        self._segment, self._end = segment, 0

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        num_bytes = math.prod(value.shape) * value.dtype.itemsize
        if num_bytes < _SMALL or value.requires_grad:
            return None
        start, self._end = self._end, self._end + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._segment.grow(self._end)
        memory = self._segment.map(start, num_bytes)
        torch.frombuffer(memory, dtype=value.dtype, count=value.numel()).view(value.shape).copy_(value)
        return start, tuple(value.shape), value.dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, segment: Segment) -> None:
        super().__init__(file)
        self._segment = segment

    def persistent_load(self, pid: Any) -> torch.Tensor:
        start, shape, dtype = pid
        count = math.prod(shape)
        memory = self._segment.map(start, count * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape).clone()
