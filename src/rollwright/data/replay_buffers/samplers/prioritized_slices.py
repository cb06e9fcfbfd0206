"""Prioritised sampling of slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright._options import with_options
from rollwright.data.replay_buffers.samplers.base import Draw
from rollwright.data.replay_buffers.samplers.prioritized import WEIGHT, PrioritizedSampler, Reduction
from rollwright.data.replay_buffers.samplers.runs import Grid, RunIndex
from rollwright.data.replay_buffers.samplers.slices import SliceSampler
from rollwright.data.replay_buffers.storages.base import Storage

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.keywords import CommonSliceKeywords

Index = NDArray[np.int64]


@with_options(SliceSampler, leave_out=["span"])
class PrioritizedSliceSampler(SliceSampler, PrioritizedSampler):
    """Slices of trajectories that begin where the priority is high.

    The first step of a slice is drawn in proportion to ``(priority + eps)^alpha``, among the steps where a whole
    slice fits into what is left of the trajectory; without ``strict_length`` also among the first steps of shorter
    trajectories, which are taken whole. Of the oldest trajectory, whose front is overwritten, less than a slice is
    not drawn. Each step of a slice has the weight of the first one, as ``"priority_weight"``.

    Args:
        max_capacity: see :class:`~rollwright.data.replay_buffers.PrioritizedSampler`, like those up to
            ``max_priority_within_buffer``.
        alpha: exponent of priorities.
        beta: exponent of weights.
        eps: added to each priority.
        dtype: of the weights.
        reduction: makes one priority of several.
        max_priority_within_buffer: of what is stored, instead of ever seen.
        **options: those of :class:`~rollwright.data.replay_buffers.SliceSampler`, except ``span``.

    Raises:
        ValueError: ``span`` is given, or see the two.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> sampler = PrioritizedSliceSampler(100, alpha=1.0, beta=1.0, slice_len=2, traj_key="episode")
        >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> index = buffer.extend(TensorDict({"episode": torch.zeros(5, dtype=torch.int64)}, [5]))
        >>> buffer.update_priority(index, torch.tensor([0.0, 0.0, 1.0, 0.0, 9.0]))
        >>> buffer.sample()["index"]
        tensor([2, 3, 2, 3])
    """

    def __init__(
        self,
        max_capacity: int,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float32,
        reduction: Reduction = "max",
        max_priority_within_buffer: bool = False,
        **options: Unpack[CommonSliceKeywords],
    ) -> None:
        SliceSampler.__init__(self, **options)
        if self.span != (0, 0):
            raise ValueError(
                f"span: expected False where slices begin by priority, got {cast(Any, options)['span']!r}."
            )
        PrioritizedSampler.__init__(self, max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer)

    def _reset(self) -> None:
        super()._reset()
        self._room = np.zeros(self._masses.size, np.int32)  # steps of the slice that begins at an element; 0: none may
        self._length = self.slice_len  # which that holds for
        self._opened_of: RunIndex | None = None  # the index that it was read from, up to ...
        self._opened_from = self._opened_to = self._num_closed = 0  # ... this tick, and so many closed runs

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_opened_of": None}

    # Keeping up with the storage --------------------------------------------------------------

    def follow(self, storage: Storage) -> None:
        """Read what was written since the last call."""
        span = storage.ledger.span()
        self._follow(storage, span)
        index, grid = self._boundaries.follow(storage, span), self._boundaries.grid
        if index is not None and grid is not None and self._length is not None:
            self._open(grid, index, self._length)

    def _make_room(self, size: int) -> None:
        super()._make_room(size)
        if self._masses.size > len(self._room):
            self._room = np.concatenate([self._room, np.zeros(self._masses.size - len(self._room), np.int32)])

    def _clear(self, start: int, stop: int) -> None:
        super()._clear(start, stop)
        self._room[start:stop] = 0

    def _admit(self, start: int, stop: int) -> None:
        self._priorities.fill(start, stop, self.default_priority)
        self._masses.fill(start, stop, 0.0)  # until it is known how long the trajectory is

    def _drawable(self) -> NDArray[np.bool_]:
        drawable: NDArray[np.bool_] = self._room > 0
        return drawable

    def _masses_at(self, index: Index, priority: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(self._room.take(index) > 0, self._mass(priority), 0.0)

    def _open(self, grid: Grid, index: RunIndex, length: int) -> None:
        """Let slices begin where they fit by now; costs O(new frames + lanes) unless the length is another one."""
        if index is not self._opened_of or length != self._length:
            self._room[:] = 0
            self._masses.fill(0, self._masses.size, 0.0)
            self._length, self._opened_of, self._opened_to = length, index, 0
            runs = index.runs()
        elif index.high == self._opened_to and index.num_closed == self._num_closed and index.low == self._opened_from:
            return
        else:
            cut_short = index.remainders(length) if not self.strict_length else index.remainders(1)
            runs = np.concatenate([cut_short, index.closed_since(self._num_closed), index.open_runs()], 1)
        lane, start, stop = runs
        start = np.maximum(start, index.low)
        begin = np.maximum(start, self._opened_to - length + 1)  # the first where a whole slice did not fit before
        count = np.maximum(stop - length + 1 - begin, 0)
        tick = np.arange(count.sum()) + (begin - count.cumsum() + count).repeat(count)
        whole = grid.elements(lane.repeat(count), tick)
        self._room[whole] = length
        opened = whole
        if not self.strict_length:
            room = stop - start
            short = room < length
            firsts = grid.elements(lane[short], start[short])
            self._room[firsts] = room[short]
            opened = np.concatenate([whole, firsts])
        if len(opened):
            self._masses.update(opened, self._mass(self._priorities.leaves.take(opened)))
        self._opened_to, self._num_closed, self._opened_from = index.high, index.num_closed, index.low

    # Drawing ----------------------------------------------------------------------------------

    def draw(self, storage: Storage, batch_size: int, generator: torch.Generator | None = None) -> Draw:
        """Choose slices by priority; ``info`` has ``"priority_weight"``, of ``dtype``."""
        length, count = self._shape(batch_size)
        span = storage.ledger.span()
        self._follow(storage, span)
        grid, index = self._up_to_date(storage, span)
        self._open(grid, index, length)
        if not self._masses.total > 0.0:
            raise self._too_long(index, length)
        first = self._draw(count, generator)
        taken = self._room.take(first).astype(np.int64)
        drawn = self._laid_out(grid, first, None if self.strict_length else taken, length)
        steps = torch.from_numpy(np.full(count, length) if self.pad_output else taken)
        return Draw(drawn.index, {WEIGHT: self._weight(first).repeat_interleave(steps)}, drawn.slices)
