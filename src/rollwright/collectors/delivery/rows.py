"""Rows of batches, held as views, and the one copy that joins them: flat, padded, or into rows of a storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright._keys import NestedKey, leaf_keys, place, unravel
from rollwright.data.layout import MASK, is_dense, pad_trajectories, stack_frames


class HeldBatch:
    """The frames of a batch ``[*env, T]`` in one row, environment after environment.

    Attributes:
        starts: row of each environment's first frame, int64 ``[num_envs]``.
        stops: row after its last one.
        leaves: the entries, ``[num_rows, ...]``; None where they are not all tensors.
        num_rows: frames in the row.
        is_ragged: whether each frame is a TensorDict of its own, with entries of its own.
    """

    def __init__(
        self,
        batch: TensorDictBase,
        leaves: dict[NestedKey, torch.Tensor] | None,
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
    ) -> None:
        self._batch, self.leaves, self.starts, self.stops = batch, leaves, starts, stops
        self.num_rows = batch.numel()
        self.is_ragged = isinstance(batch, LazyStackedTensorDict)

    @classmethod
    def of(cls, batch: TensorDictBase, steps: int) -> HeldBatch:
        """A batch of which ``steps`` times were taken."""
        length = batch.batch_size[-1]
        starts = np.arange(0, batch.numel(), max(length, 1), dtype=np.int64)
        if not is_dense(batch):
            return cls(batch.reshape(-1), None, starts, starts + steps)
        leaves = {unravel(key): value.flatten(0, batch.ndim - 1) for key, value in batch.items(True, True)}
        return cls(batch, leaves, starts, starts + steps)

    @property
    def device(self) -> torch.device | None:
        """Of the batch."""
        return self._batch.device

    @property
    def num_bytes(self) -> int:
        """Size of the entries, as far as they are tensors."""
        leaves = self._batch.values(True, True) if self.leaves is None else self.leaves.values()
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))

    def narrowed(self, envs: NDArray[np.int64], starts: NDArray[np.int64], skipped: NDArray[np.int64]) -> HeldBatch:
        """A copy of some rows.

        Args:
            envs: whose frames are kept, int64 ``[k]``.
            starts: the first row of each.
            skipped: the frames of each before that one.
        """
        stops = self.stops[envs]
        rows = np.concatenate([np.arange(*ends) for ends in zip(starts, stops, strict=True)])
        index = torch.from_numpy(rows)
        ends = np.cumsum(stops - starts)
        all_starts, all_stops = np.zeros_like(self.starts), np.zeros_like(self.stops)
        all_stops[envs] = ends
        all_starts[envs] = ends - (stops - starts) - skipped
        if self.leaves is None:
            kept = self._batch[index]
            return HeldBatch(kept if self.is_ragged else kept.clone(), None, all_starts, all_stops)
        leaves = {key: leaf[index.to(leaf.device)] for key, leaf in self.leaves.items()}
        return HeldBatch(self.nested_like(leaves, [len(rows)]), leaves, all_starts, all_stops)

    def placed(self, envs: list[int], lengths: list[int], num_envs: int) -> HeldBatch:
        """The same rows as those of ``envs``, each with its length, one after another."""
        starts, stops = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
        stops[envs] = np.cumsum(lengths)
        starts[envs] = stops[envs] - lengths
        return HeldBatch(self._batch, self.leaves, starts, stops)

    def rows(self, start: int, stop: int) -> TensorDictBase:
        """Some of the frames as a view ``[stop - start]``."""
        return (self._batch if self._batch.ndim == 1 else self._batch.reshape(-1))[start:stop]

    @property
    def keys(self) -> list[NestedKey]:
        """The entries."""
        return list(self.leaves) if self.leaves is not None else leaf_keys(self._batch)

    def nested_like(self, leaves: Mapping[NestedKey, torch.Tensor], batch_size: Sequence[int]) -> TensorDict:
        """A TensorDict of other entries that is nested as the batch is."""
        nested: dict[str, Any] = {}
        for key, leaf in leaves.items():
            place(nested, key, leaf)
        names: Any = [*[None] * (len(batch_size) - 1), "time"]
        td = TensorDict(nested, batch_size=batch_size, device=self._batch.device, names=names)
        for key, value in self._batch.items(True):
            mine = td.get(key, None)
            if isinstance(value, TensorDictBase) and mine is None and value.is_empty():
                mine = td.set(key, TensorDict({}, batch_size)).get(key)
            if isinstance(value, TensorDictBase) and mine is not None and value.ndim > self._batch.ndim:
                mine.batch_size = torch.Size([*batch_size, *value.batch_size[self._batch.ndim :]])
        return td


class RowRange(NamedTuple):
    """Rows ``start <= row < stop`` of some frames."""

    frames: HeldBatch
    start: int
    stop: int

    def of(self, key: NestedKey) -> torch.Tensor:
        """An entry, as a view ``[stop - start, ...]``."""
        leaf: torch.Tensor = cast(Any, self.frames.leaves)[key]
        return leaf[self.start : self.stop]

    def last_row(self) -> RowRange:
        """The range of the last row alone."""
        return RowRange(self.frames, self.stop - 1, self.stop)

    def as_td(self, keys: Sequence[NestedKey]) -> TensorDictBase:
        """All entries that are named, as a view ``[stop - start]``; of ragged frames, all that each has."""
        rows = self.frames.rows(self.start, self.stop)
        return rows if self.frames.is_ragged else rows.select(*keys)


def common_keys(pieces: Sequence[RowRange]) -> tuple[list[NestedKey], set[NestedKey]]:
    """The entries that all pieces have, and those that some of them lack."""
    sources = {id(piece.frames): piece.frames for piece in pieces}
    if all(frames.is_ragged for frames in sources.values()):  # a lazy stack takes frames of any entries
        return [], set()
    first, *others = [set(frames.keys) for frames in sources.values()]
    common = first.intersection(*others)
    return [key for key in pieces[0].frames.keys if key in common], first.union(*others) - common


def concatenate(pieces: Sequence[RowRange]) -> TensorDictBase:
    """The rows of pieces one after another, a copy ``[sum of lengths]`` (a view where there is but one piece)."""
    keys, _ = common_keys(pieces)
    if any(piece.frames.leaves is None for piece in pieces):
        return _join([piece.as_td(keys) for piece in pieces])
    length = sum(piece.stop - piece.start for piece in pieces)
    if len(pieces) == 1:
        leaves = {key: pieces[0].of(key) for key in keys}
    else:
        leaves = {key: torch.cat([piece.of(key) for piece in pieces]) for key in keys}
    return pieces[0].frames.nested_like(leaves, [length])


def copied(pieces: Sequence[RowRange]) -> TensorDictBase:
    """The rows of pieces one after another, in memory of their own; ragged ones are views, which nobody overwrites."""
    joined = concatenate(pieces)
    return joined if len(pieces) > 1 or isinstance(joined, LazyStackedTensorDict) else joined.clone()


def as_trajectories(batches: Sequence[TensorDictBase], *, padded: bool) -> TensorDictBase:
    """Batches ``[*env, T]`` as if each environment's frames were one whole trajectory: one after another, or padded."""
    held = [HeldBatch.of(batch, batch.batch_size[-1]) for batch in batches]
    pieces = [
        RowRange(each, int(start), int(stop))
        for each in held
        for start, stop in zip(each.starts, each.stops, strict=True)
    ]
    return pad([[piece] for piece in pieces]) if padded else concatenate(pieces)


def _join(tds: list[TensorDictBase]) -> TensorDictBase:
    """Rows of any content, one after another."""
    frames = [frame for td in tds for frame in td.unbind(0)]
    if all(isinstance(td, LazyStackedTensorDict) for td in tds):  # ragged: nothing is copied
        return LazyStackedTensorDict(*frames, stack_dim=0, stack_dim_name="time")
    return stack_frames(frames, 0)


def pad(trajectories: Sequence[Sequence[RowRange]]) -> TensorDictBase:
    """Trajectories of several pieces each, a copy ``[num_trajectories, longest]``: zero-padded, with a mask.

    Raises:
        ValueError: the shape of an entry varies from frame to frame.
    """
    pieces = [piece for trajectory in trajectories for piece in trajectory]
    lengths = torch.tensor([sum(piece.stop - piece.start for piece in found) for found in trajectories], device="cpu")
    if any(piece.frames.leaves is None for piece in pieces):
        return pad_trajectories(concatenate(pieces), lengths.cumsum(0) - lengths, lengths, MASK)
    longest = int(lengths.max())
    shape = [len(trajectories), longest]
    leaves = {}
    for key in common_keys(pieces)[0]:
        parts = []
        like = pieces[0].of(key)
        blank = like.new_zeros((1, *like.shape[1:]))
        for found, length in zip(trajectories, lengths.tolist(), strict=True):
            parts += [piece.of(key) for piece in found]
            parts.append(blank.expand(longest - length, *like.shape[1:]))
        leaves[key] = torch.cat(parts).unflatten(0, shape)
    mask = torch.arange(longest, device="cpu") < lengths.unsqueeze(-1)
    leaves[MASK] = mask.to(pieces[0].frames.device or "cpu")
    return pieces[0].frames.nested_like(leaves, shape)
