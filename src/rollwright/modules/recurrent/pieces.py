"""Pieces: runs of consecutive frames, each processed from the state stored at its start.

The frames of a batch ``[*B, T]`` are taken in one row, ``N = numel``. A piece begins at the start of each row of the
batch and wherever ``is_init`` is set, and ends where the next begins::

    starts[i + 1] = starts[i] + lengths[i]          sum(lengths) = N

so that a flat batch of concatenated slices and the same slices as rows of ``[num_slices, slice_len]`` have the same
pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

CALL_COST_ROWS = 64  # what one more call of a kernel costs, in rows of one step (measured for hidden sizes of 128, 256)


class Pieces:
    """Starts and lengths of pieces.

    Args:
        is_init: bool ``[*B, T]``.

    Attributes:
        starts: int64 ``[S]``, in ascending order.
        lengths: int64 ``[S]``, at least 1.
        num_frames: ``N``.
        length: the length of every piece where they have one, else None.
    """

    def __init__(self, is_init: Tensor) -> None:
        begins = is_init.reshape(-1, is_init.shape[-1]).clone()
        begins[:, 0] = True
        self._begins = begins.flatten()
        self.num_frames = begins.numel()
        self.starts = self._begins.nonzero().squeeze(-1)
        self.lengths = torch.diff(self.starts, append=self.starts.new_tensor([self.num_frames]))
        longest, shortest = int(self.lengths.max()), int(self.lengths.min())
        self.longest = longest
        self.length = longest if longest == shortest else None

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def last(self) -> Tensor:
        """Index of each piece's last frame, int64 ``[S]``."""
        return self.starts + self.lengths - 1

    @cached_property
    def order(self) -> Tensor:
        """Pieces from the longest to the shortest, int64 ``[S]``."""
        return torch.argsort(self.lengths, descending=True, stable=True)

    @cached_property
    def rank(self) -> Tensor:
        """Place of each piece in :attr:`order`, int64 ``[S]``."""
        return torch.empty_like(self.order).scatter_(0, self.order, torch.arange(len(self), device=self.order.device))

    @cached_property
    def sizes(self) -> Tensor:
        """Number of pieces that have a step 0, 1…, int64 ``[longest]``, on the CPU."""
        ended_before = torch.bincount(self.lengths, minlength=self.longest + 1)[: self.longest].cumsum(0)
        return (len(self) - ended_before).cpu()

    def frames_at(self, offsets: Tensor) -> Tensor:
        """Where frames lie if step ``t`` of the piece of rank ``r`` lies at ``offsets[t] + r``, int64 ``[N]``."""
        piece = self._begins.cumsum(0) - 1
        starts = self.starts[piece]
        steps = torch.arange(self.num_frames, device=starts.device) - starts
        return offsets.to(starts.device)[steps] + self.rank[piece]


@dataclass(frozen=True)
class PackedFrames:
    """Frames in time-major order, the longest pieces first; nothing is padded.

    Attributes:
        rows: frames in their new order, int64 ``[N]``.
        place: where each frame went, int64 ``[N]``.
        sizes: number of pieces that have a step 0, 1….
    """

    rows: Tensor
    place: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, pieces: Pieces) -> PackedFrames:
        """Pack ``pieces``."""
        sizes = pieces.sizes
        place = pieces.frames_at(sizes.cumsum(0) - sizes)
        rows = torch.empty_like(place).scatter_(0, place, torch.arange(pieces.num_frames, device=place.device))
        return cls(rows, place, sizes.tolist())


@dataclass(frozen=True)
class DenseSteps:
    """Steps ``begin`` to ``end`` of the ``count`` longest pieces, one dense call of a kernel."""

    begin: int
    end: int
    count: int

    @property
    def num_rows(self) -> int:
        """Rows of one step, those that are padded included."""
        return (self.end - self.begin) * self.count


@dataclass(frozen=True)
class Stairs:
    """Frames in segments, in each of which pieces that end early are padded with their last frame.

    A segment ends before its padding would cost more than one more call.

    Attributes:
        segments: in order of time.
        rows: frame at each row of the segments, one after the other, int64 ``[M]``.
        padded: which rows are padding, bool ``[M]``.
        place: the row of each frame, int64 ``[N]``.
    """

    segments: list[DenseSteps]
    rows: Tensor
    padded: Tensor
    place: Tensor

    @classmethod
    def of(cls, pieces: Pieces) -> Stairs:
        """Cut ``pieces`` into segments."""
        segments = _segments(pieces.sizes.tolist())
        starts, lengths = pieces.starts[pieces.order], pieces.lengths[pieces.order]
        rows, padded, offsets, base = [], [], [], 0
        for segment in segments:
            steps = torch.arange(segment.begin, segment.end, device=starts.device).unsqueeze(-1)
            n = segment.count
            rows.append((starts[:n] + torch.minimum(steps, lengths[:n] - 1)).flatten())
            padded.append((steps >= lengths[:n]).flatten())
            offsets.append(base + n * (steps.squeeze(-1) - segment.begin))
            base += segment.num_rows
        return cls(segments, torch.cat(rows), torch.cat(padded), pieces.frames_at(torch.cat(offsets)))


def _segments(sizes: list[int]) -> list[DenseSteps]:
    segments, begin, wasted = [], 0, 0
    for step, size in enumerate(sizes):
        wasted += sizes[begin] - size
        if wasted > CALL_COST_ROWS:
            segments.append(DenseSteps(begin, step, sizes[begin]))
            begin, wasted = step, 0
    return [*segments, DenseSteps(begin, len(sizes), sizes[begin])]
