"""Where the weights of several models lie in the memory of one publication."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import NamedTuple

import torch

__all__ = ["ALIGNMENT", "EntrySpec", "Model", "Table", "aligned", "spec_of"]

ALIGNMENT = 64
EntrySpec = tuple[str, torch.Size, torch.dtype]


class Model(NamedTuple):
    """One model: its tensors, and room for the pickle of its extra state.

    Attributes:
        specs: name, shape and dtype of each tensor.
        offsets: of the tensors, in bytes from the model's start.
        extras: where the pickle lies, in bytes from the model's start.
        room: for the pickle, in bytes.
        start: in bytes from the start of the body.
        num_bytes: of it all.
    """

    specs: tuple[EntrySpec, ...]
    offsets: tuple[int, ...]
    extras: int
    room: int
    start: int
    num_bytes: int


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
        models, start = {}, aligned(16 * len(specs))
        for model_id, (entries, room) in specs.items():
            offsets, offset = [], 0
            for _, shape, dtype in entries:
                offsets.append(offset)
                offset = aligned(offset + shape.numel() * dtype.itemsize)
            num_bytes = aligned(offset + room)
            models[model_id] = Model(entries, tuple(offsets), offset, room, start, num_bytes)
            start += num_bytes
        return cls(models, start)

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


def aligned(num_bytes: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
