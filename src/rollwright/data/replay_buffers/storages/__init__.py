"""Storages: where a replay buffer keeps its elements: a list, rows of tensors, or ragged records."""

from rollwright.data.replay_buffers.storages.ragged import LazyStackStorage, RaggedStorage
from rollwright.data.replay_buffers.storages.storage import ListStorage, Storage
from rollwright.data.replay_buffers.storages.tensors import LazyMemmapStorage, LazyTensorStorage, TensorStorage

__all__ = [
    "LazyMemmapStorage",
    "LazyStackStorage",
    "LazyTensorStorage",
    "ListStorage",
    "RaggedStorage",
    "Storage",
    "TensorStorage",
]
