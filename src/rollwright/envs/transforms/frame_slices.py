"""Frames of a replay buffer that are joined when they are drawn: the sampler, and the transform that goes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey
from rollwright.data.replay_buffers import SliceSampler
from rollwright.data.replay_buffers.samplers.base import Draw
from rollwright.data.replay_buffers.storages.base import Storage
from rollwright.data.specs import Composite
from rollwright.envs.transforms.base import Transform

__all__ = ["LastOfSlices", "SliceForEach"]

_Join = Callable[[TensorDictBase, torch.Tensor], dict[NestedKey, torch.Tensor]]


class SliceForEach(SliceSampler):
    """Draws a slice for each element that is asked for: that element, and those before it."""

    def draw(self, storage: Storage, batch_size: int, generator: torch.Generator | None = None) -> Draw:
        """See :meth:`SliceSampler.draw`; ``[n * slice_len]`` at most."""
        return super().draw(storage, batch_size * (self.slice_len or 1), generator)


class LastOfSlices(Transform):
    """Of a batch of slices the last element of each, with what was joined over the slice.

    Args:
        join: is called with the batch ``[n]``, and with the place where the slice of each element begins, int64
            ``[n]``; returns the entries that it has joined.
        begins: entry in which the first element of each slice is marked.
        keep: keep that entry.
        owner: what was joined, for messages.
        leave_out: entries that are not stored, since they are joined.
    """

    leaves_out = ends_slices = True

    def __init__(
        self, join: _Join, begins: NestedKey, *, keep: bool, owner: str, leave_out: Sequence[NestedKey]
    ) -> None:
        super().__init__()
        self._leave_out = leave_out
        self._join, self._begins, self._keep, self._owner = join, begins, keep, owner

    @property
    def inverts(self) -> bool:
        """See :class:`Transform`."""
        return bool(self._leave_out)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.exclude(*self._leave_out)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Join, and leave out all but the last of each slice."""
        begins = tensordict.get(self._begins, None)
        if begins is None:
            raise KeyError(
                f"transform: {self!r} expected slices, marked in {self._begins!r}, got a batch without them. Give the "
                "buffer the sampler that was made with it; read single elements with buffer.storage[...]."
            )
        marks = begins.reshape(len(tensordict), -1).any(-1)
        place = torch.arange(len(marks), device=marks.device)
        joined = self._join(tensordict, torch.where(marks, place, 0).cummax(0).values)
        last = torch.cat([marks[1:], marks.new_ones(1)])
        kept = tensordict.exclude(*joined, *(() if self._keep else (self._begins,)))[last]
        for key, value in joined.items():
            kept.set(key, value[last])
        return kept

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Refuse: environments take steps, not slices.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"transform: {self!r} is for batches of a replay buffer. Put {self._owner} on the environment.")

    def __repr__(self) -> str:
        return f"LastOfSlices({self._owner})"
