"""Tables of the weights of several models in the memory of one publication."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import NamedTuple

import torch

from rollwright._memory import Layout, aligned

__all__ = ["EntrySpec", "Model", "Table", "spec_of"]

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
