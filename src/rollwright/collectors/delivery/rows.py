"""Rows that batches lie in: held as views and joined by one copy, or reserved in a replay buffer's storage."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright._keys import NestedKey, leaf_keys, place, unravel
from rollwright._memory import EntryMemory, MemoryPool
from rollwright.collectors.options import CollectorOptions, buffer_of
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


def batch_memory(options: CollectorOptions) -> MemoryPool:
    """Where the batches of a collector lie: in the rows of its replay buffer if that takes whole rollouts."""
    stored = options.replay_buffer is not None and options.extend_buffer and not options.delivers_whole
    return StorageMemory(options) if stored else MemoryPool()


def why_not_direct(buffer: Any) -> str | None:
    """Why the rows of a buffer cannot be written in place; None: they can."""
    if not hasattr(buffer, "direct_writes"):
        return f"{type(buffer).__name__} has no rows to write in place"
    reason: str | None = buffer.direct_writes()
    return reason


class StorageMemory(MemoryPool):
    """Gives reserved rows of a storage for the batch that is being collected, else memory of its own.

    A batch lies in the rows as if :meth:`extend` had put it there: ``[*env, T]`` in one row after another for a
    storage of one dimension, else time by time. Nobody reads the rows until :meth:`publish`, nor rows that others
    reserve after them: so they are reserved only while the caller iterates, over a buffer of this process alone.

    Args:
        options: of the collector, with a ``replay_buffer``.

    Attributes:
        how: what is done, and why; for ``stats()``.
        num_direct: batches that lay in the storage.
        num_copied: batches that were copied into it.
    """

    def __init__(self, options: CollectorOptions) -> None:
        super().__init__()
        self._buffer = buffer_of(options)
        self._storage: Any = getattr(self._buffer, "storage", None)
        self._why_never = _never_direct(options)
        self._reason = self._why_never or why_not_direct(self._buffer)
        self._open = False
        self._reservation: Any = None
        self._windows: dict[NestedKey, torch.Tensor] = {}
        self.num_direct = self.num_copied = 0

    @property
    def how(self) -> str:
        """What is done with a batch, and why."""
        return "direct: frames are written into the storage's rows" if not self._reason else f"extend: {self._reason}"

    @contextmanager
    def batch(self, *, keeps_batches: bool, in_background: bool) -> Iterator[None]:
        """Collect a batch in the ``with`` block; what was reserved and not published at its end is released.

        Args:
            keeps_batches: whether someone is given the batch, who may keep it longer than the rows hold it.
            in_background: whether a thread collects, and others use the buffer meanwhile.
        """
        self._begin(keeps_batches, in_background)
        try:
            yield
        finally:
            self._open = False
            self._abandon()

    def _begin(self, keeps_batches: bool, in_background: bool) -> None:
        self._reason = self._why_never or why_not_direct(self._buffer)
        if not self._reason:
            if keeps_batches:
                self._reason = "post_collect_hook may keep the batch"
            elif in_background:
                self._reason = "a thread collects, and what others write meanwhile is not held back"
            elif getattr(self._storage, "shared", False):
                self._reason = "the buffer is shared, and what other processes write is not held back"
        self._open = not self._reason

    def _abandon(self) -> None:
        """Give back what is reserved and not published."""
        self._windows = {}
        if self._reservation is not None:
            self._storage.abandon(self._reservation)
            self._reservation = None

    def reserve(self, fields: Mapping[NestedKey, Any], env: tuple[int, ...], steps: int) -> None:
        """Reserve rows for a batch.

        Args:
            fields: shape, dtype and device of each entry of a frame ``[*env]``.
            env: the environment's batch size.
            steps: T.
        """
        storage = self._storage
        if not self._open or self._reservation is not None:
            return
        flat = storage.ndim == 1
        if not flat and storage.ndim != len(env) + 1:
            self._reason = f"a batch has {len(env) + 1} dimensions, the storage {storage.ndim}"
            return
        try:
            forms = {key: (tuple(field.shape[len(env) :]), field.dtype) for key, field in fields.items()}
            schema = storage.settle(forms, () if flat else env)
        except (KeyError, ValueError):  # extend() reports it again, to the user
            self._reason = "the frames are not those of the storage"
            return
        env_size = torch.Size(env).numel()
        rows = steps * env_size if flat else steps
        end = storage.ledger.live()[1]
        if any(field.device.type != "cpu" for field in fields.values()):
            self._reason = "frames do not lie on the CPU"
        elif rows > storage.capacity:
            self._reason = "a batch is larger than the storage"
        elif end % storage.capacity + rows > storage.capacity:
            self._reason = None  # this batch alone goes around the ring's seam
        else:
            self._reservation = reservation = storage.reserve(rows)
            if not storage.holds(schema):  # another writer has begun with other entries; extend() reports it
                self._abandon()
                return
            for key in fields:
                window = storage.window(reservation, key)
                if window is None:  # another writer was faster
                    self._abandon()
                    return
                self._windows[key] = window.unflatten(0, (*env, steps)) if flat else window.movedim(0, len(env))

    def take(self, place: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> EntryMemory:
        """Memory that nothing reads, allocated where there is none; slabs of another shape or dtype are dropped."""
        window = self._windows.get(place)  # type: ignore[call-overload]
        return EntryMemory.over(window) if window is not None else super().take(place, shape, dtype)

    def publish(self, batch: TensorDictBase, steps: int) -> TensorDictBase | None:
        """Let everyone read the batch, if it lies in the rows.

        Args:
            batch: ``[*env, T]``, as it was collected.
            steps: those of the T that were taken.

        Returns:
            None if it lies there; else what is to be stored, in other memory, and nothing is reserved any more.
        """
        whole = steps == batch.batch_size[-1]
        batch = batch if whole else batch[..., :steps]
        if self._reservation is None or not whole or not self._holds(batch):
            if self._reservation is not None:
                if whole:  # what was reserved in vain is lost: do not try again
                    self._why_never = "batches do not lie where frames are written"
                batch = batch.clone()  # the rows given up may be the next to be written
                self._abandon()
            self.num_copied += 1
            return batch
        self._storage.publish(self._reservation)
        self._reservation, self._windows = None, {}
        self.num_direct += 1
        self._buffer.written()
        return None

    def _holds(self, batch: TensorDictBase) -> bool:
        """Whether the batch is what lies in the windows: it may have been stacked or moved."""
        if isinstance(batch, LazyStackedTensorDict):  # of frames whose shapes vary
            return False
        if len(leaf_keys(batch)) != len(self._windows):
            return False
        held = [batch.get(key, None) for key in self._windows]
        return all(
            value is not None and value.data_ptr() == window.data_ptr() and value.shape == window.shape
            for value, window in zip(held, self._windows.values(), strict=True)
        )


def _never_direct(options: CollectorOptions) -> str | None:
    """What stands against writes in place for good."""
    if options.postproc is not None:
        return "postproc comes first"
    if options.interruptor is not None:
        return "an interrupted rollout would leave rows unused"
    device = options.storing_device or options.device
    if device is not None and torch.device(device).type != "cpu":
        return f"batches lie on {device}"
    return None
