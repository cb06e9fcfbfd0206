"""BatchShaping: what is done with a batch of all workers that could not be done in each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright.collectors.workers.schedules.joining import are_alike
from rollwright.data.layout import split_trajectories


class BatchShaping:
    """Splits batches into trajectories, moves them to a device, and returns the same TensorDict each time.

    Args:
        splits: cut them into padded trajectories.
        postproc: called with what was split.
        device: where batches are delivered; None, or the CPU: where they are.
        same_td: write each batch into the first one, where it has the same entries.
    """

    def __init__(
        self,
        *,
        splits: bool,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None,
        device: Any,
        same_td: bool,
    ) -> None:
        self._splits, self._postproc, self._returns_same = splits, postproc, same_td
        self._device = None if device is None or torch.device(device).type == "cpu" else device
        self._same_td: TensorDictBase | None = None

    def __call__(self, batch: TensorDictBase | None) -> TensorDictBase | None:
        """The batch to deliver; None stays None."""
        if batch is None:
            return None
        batch = self.shape(batch)
        if not self._returns_same:
            return batch
        if self._same_td is None or not are_alike(self._same_td, batch):
            self._same_td = batch.clone()
        else:
            self._same_td.update_(batch)
        return self._same_td

    def shape(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch, split and moved, in a TensorDict of its own."""
        if self._splits:
            batch = split_trajectories(batch, prefix="collector")
            batch = batch if self._postproc is None else self._postproc(batch)
        return batch if self._device is None else batch.to(self._device)
