"""Where the frames of a batch are written: rows of memory allocated for it, or a list stacked at its end."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright._keys import NestedKey, is_private, key_str, unravel
from rollwright.errors import RollwrightError

__all__ = ["Block", "FrameList", "Recorder"]


class RaggedError(RollwrightError):
    """A frame does not have the layout of the block's first frame."""


class Block:
    """The memory of one batch: ``[*env, T]``, one row of each entry a step.

    Args:
        frame: the first frame, ``[*env]``, whose keys, shapes, dtypes and devices are the layout.
        keys: the entries to keep.
        steps: T.
        device: where the block lies; None: each entry where the frame has it.
    """

    def __init__(self, frame: TensorDictBase, keys: list[NestedKey], steps: int, device: torch.device | None) -> None:
        self.keys = keys
        self.num_entries = len(list(frame.keys(True, True)))
        self._time = frame.ndim
        self.steps = steps
        self.batch = TensorDict({}, batch_size=[*frame.batch_size, steps], device=device)
        self._memory: list[tuple[NestedKey, torch.Tensor]] = []
        for key in keys:
            value = cast(torch.Tensor, frame.get(key))
            shape = (*frame.batch_size, steps, *value.shape[frame.ndim :])
            memory = torch.empty(shape, dtype=value.dtype, device=device or value.device)
            self._memory.append((key, memory))
            self.batch.set(key, memory)
        self._nest(frame)
        self.batch.names = [*[None] * frame.ndim, "time"]

    def _nest(self, frame: TensorDictBase) -> None:
        """Give nested entries their batch sizes, which may be longer than the root's."""
        for key, nested in frame.items(True):
            mine = self.batch.get(key, None)
            if isinstance(nested, TensorDictBase) and mine is not None:
                mine.batch_size = torch.Size([*frame.batch_size, self.steps, *nested.batch_size[frame.ndim :]])

    def write(self, t: int, frame: TensorDictBase) -> None:
        """Copy the frame of time ``t``.

        Raises:
            RaggedError: the frame has other keys, shapes or dtypes than the first.
        """
        if sum(1 for _ in frame.keys(True, True)) != self.num_entries:
            raise RaggedError
        for key, memory in self._memory:
            value = frame.get(key, None)
            row = memory.select(self._time, t)
            if not isinstance(value, torch.Tensor) or value.shape != row.shape or value.dtype != row.dtype:
                raise RaggedError
            row.copy_(value, non_blocking=row.is_cuda)

    def finish(self, steps: int) -> TensorDictBase:
        """The batch; entries of times that were not taken are zero, their trajectory ids -1."""
        if steps < self.steps:
            rest = self.batch[(*[slice(None)] * self._time, slice(steps, None))]
            rest.zero_()
            ids = rest.get(("collector", "traj_ids"), None)
            if ids is not None:
                ids.fill_(-1)
        return self.batch

    def reopened(self) -> Block:
        """This block, to be written again: what the consumer put in place of its memory is taken out."""
        for key, memory in self._memory:
            if self.batch.get(key, None) is not memory:
                self.batch.set(key, memory)
        return self

    def frames(self, steps: int) -> list[TensorDictBase]:
        """The frames written so far, as views."""
        return list(self.batch.unbind(self._time)[:steps])

    @property
    def num_bytes(self) -> int:
        """Size of the block's memory."""
        return sum(memory.numel() * memory.element_size() for _, memory in self._memory)


class FrameList:
    """Frames of any shape and content, stacked at the end: densely where that is possible."""

    num_bytes = 0

    def __init__(self, dropped: set[NestedKey], steps: int, device: torch.device | None) -> None:
        self._dropped = dropped
        self._device = device
        self.steps = steps
        self._frames: list[TensorDictBase] = []

    def write(self, t: int, frame: TensorDictBase) -> None:
        """Keep a copy of the frame."""
        private = [key for key in frame.keys(True) if is_private(key)]
        kept = frame.exclude(*private, *self._dropped)
        moves = self._device is not None and kept.device != self._device
        self._frames.append(kept.to(self._device) if moves else kept.clone())

    def extend(self, frames: list[TensorDictBase]) -> None:
        """Take over frames that were written elsewhere."""
        self._frames.extend(frames)

    def finish(self, steps: int) -> TensorDictBase:
        """The batch; times that were not taken repeat zeros with the trajectory id -1."""
        frames = self._frames
        if steps < self.steps:
            blank = cast(TensorDictBase, frames[-1].apply(torch.zeros_like))
            blank.set(("collector", "traj_ids"), torch.full_like(blank.get(("collector", "traj_ids")), -1))
            frames = frames + [blank] * (self.steps - steps)
        batch = LazyStackedTensorDict.maybe_dense_stack(frames, frames[0].ndim)
        batch.names = [*[None] * (batch.ndim - 1), "time"]
        return cast(TensorDictBase, batch)


class Recorder:
    """Writes frames into a :class:`Block` where all have one layout, else into a :class:`FrameList`.

    Args:
        steps: frames a batch for each environment.
        device: where batches lie; None leaves entries where they are.
        dropped: entries to leave out.
        use_blocks: None chooses by the first frame of each batch; True insists; False never allocates.
        reuse: write every batch into the same memory.
    """

    def __init__(
        self,
        steps: int,
        device: torch.device | None,
        *,
        dropped: set[NestedKey],
        use_blocks: bool | None,
        reuse: bool,
    ) -> None:
        self.steps = steps
        self._device = device
        self._dropped = dropped
        self._use_blocks = use_blocks
        self._reuse = reuse
        self._target: Block | FrameList | None = None

    def write(self, t: int, frame: TensorDictBase) -> None:
        """Store the frame of time ``t``; ``t == 0`` opens a new batch."""
        if t == 0:
            self._target = self._open(frame)
        target = cast("Block | FrameList", self._target)
        try:
            target.write(t, frame)
        except RaggedError as error:
            if self._use_blocks:
                raise self._refusal(frame) from error
            ragged = FrameList(self._dropped, self.steps, self._device)
            ragged.extend(cast(Block, target).frames(t))
            ragged.write(t, frame)
            self._target = ragged

    def finish(self, steps: int) -> TensorDictBase:
        """The batch of the ``steps`` frames written."""
        target = cast("Block | FrameList", self._target)
        if not self._reuse:
            self._target = None
        return target.finish(steps)

    @property
    def num_bytes(self) -> int:
        """Bytes that the recorder itself holds on to between batches."""
        return 0 if self._target is None else self._target.num_bytes

    def _open(self, frame: TensorDictBase) -> Block | FrameList:
        if self._use_blocks is False or not _is_dense(frame):
            if self._use_blocks:
                raise self._refusal(frame)
            return FrameList(self._dropped, self.steps, self._device)
        keys = [unravel(key) for key in frame.keys(True, True)]
        keys = [key for key in keys if key not in self._dropped and not is_private(key)]
        old = self._target
        if self._reuse and isinstance(old, Block) and old.keys == keys:
            return old.reopened()
        return Block(frame, keys, self.steps, self._device)

    def _refusal(self, frame: TensorDictBase) -> ValueError:
        return ValueError(
            f"use_buffers=True (and return_same_td) needs frames that all have the same keys, shapes and dtypes, and "
            f"only tensors. A frame held {key_str(frame.keys(True, True))}. Leave use_buffers out."
        )


def _is_dense(frame: TensorDictBase) -> bool:
    """Whether all entries are tensors in plain TensorDicts."""
    values: Any = frame.values(True)
    return not isinstance(frame, LazyStackedTensorDict) and all(
        isinstance(value, torch.Tensor) or type(value) is TensorDict for value in values
    )
