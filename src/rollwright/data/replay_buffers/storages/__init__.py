"""Storages: where a replay buffer keeps its elements, as a list or as rows of tensors."""

from rollwright.data.replay_buffers.storages.base import ListStorage, Storage
from rollwright.data.replay_buffers.storages.tensors import LazyMemmapStorage, LazyTensorStorage, TensorStorage

__all__ = ["LazyMemmapStorage", "LazyTensorStorage", "ListStorage", "Storage", "TensorStorage"]
