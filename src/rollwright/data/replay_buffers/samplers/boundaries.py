"""The source of trajectory boundaries in a storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright._keys import NestedKey, as_tuple, checked_key, key_str
from rollwright.data.layout import NEXT_DONE, TRAJ_IDS
from rollwright.data.replay_buffers.ledger.ledger import Span
from rollwright.data.replay_buffers.samplers.runs import Grid, RunIndex
from rollwright.data.replay_buffers.storages.base import Storage

TRAJ_KEYS: tuple[NestedKey, ...] = (TRAJ_IDS, "episode")  # tried in this order
_MULTISTEP = "steps_to_next_obs"  # an entry of data that MultiStep rewrote
_CHUNK = 1 << 18  # elements to take in at a time


class Boundaries:
    """Keeps an index of the runs of a storage, from trajectory ids, from end flags, or from both.

    Where nothing is named, runs are cut where the trajectory id changes (``("collector", "traj_ids")``, else
    ``"episode"``) and after each ``("next", "done")``, as far as the storage has these entries. Where ids are named,
    they alone count; where ends are named, they and the collector's ids do; where both are named, one of them may be
    missing. The collector's ids, which rollouts lack, give way to ``("next", "done")``. Of data that
    :class:`~rollwright.data.MultiStep` rewrote, flags of ``"next"`` are left out where there are ids: they are those
    of a later frame, and set in several at the end of a trajectory.

    Args:
        traj_key: entry of ids, a number an element; below 0: no frame.
        end_keys: entries of flags, any of which marks the last of its trajectory.
        trajectories: ids ``[elements of the storage]`` in place of an entry.
        ends: bool flags in place of an entry.

    Raises:
        ValueError: both an entry and a tensor for it, or a tensor that is not of one dimension.

    Attributes:
        grid: where frames lie; None until something is stored.
    """

    def __init__(
        self,
        traj_key: NestedKey | None,
        end_keys: Sequence[NestedKey],
        trajectories: torch.Tensor | None,
        ends: torch.Tensor | None,
    ) -> None:
        end_key = end_keys[0] if end_keys else None
        for name, key, tensor in (("trajectories", traj_key, trajectories), ("ends", end_key, ends)):
            if tensor is None:
                continue
            if key is not None:
                raise ValueError(f"{name}: expected a tensor or the entry {key!r}, got both. Leave one out.")
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"{name}: expected a tensor [n], a value for each element, got {type(tensor).__name__}. Pass "
                    "torch.as_tensor of it, or name an entry that is stored."
                )
            if tensor.ndim != 1:
                raise ValueError(
                    f"{name}: expected one value for each element, of shape [n], got {list(tensor.shape)}. Flatten it."
                )
        self.traj_key = None if traj_key is None else checked_key("traj_key", traj_key)
        self.end_keys = tuple(checked_key("end_key" if len(end_keys) == 1 else "end_keys", key) for key in end_keys)
        self._ids = None if trajectories is None else trajectories.numpy(force=True)
        self._ends = None if ends is None else ends.numpy(force=True)
        self._free = traj_key is None and not end_keys and trajectories is None and ends is None
        self.grid: Grid | None = None
        self.num_begun = 0
        self._forget()

    def _forget(self) -> None:
        self.num_begun += 1
        self.grid = None
        self._index = RunIndex(1)
        self._seen = 0  # positions
        self._revision = -1
        self._storage: Storage | None = None
        self._used: tuple[NestedKey | None, tuple[NestedKey, ...]] = (None, ())

    def __getstate__(self) -> dict[str, Any]:
        derived = ("grid", "_index", "_seen", "_revision", "_storage", "_used")  # from the storage, where it is needed
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def follow(self, storage: Storage, span: Span) -> RunIndex | None:
        """Take in what was written; None where the storage does not have what is needed, see :meth:`missing`.

        Where rows are overwritten meanwhile, runs are wrong at positions that are not live any more, and nowhere else.
        """
        low, high, revision = span
        if revision != self._revision or storage is not self._storage or high < self._seen:
            self._forget()
            if not self._begin(storage):
                return None
            self._revision, self._storage = revision, storage
        if self.grid is None:
            return None
        if high > self._seen:
            self._revision = -1  # where this is interrupted, everything is looked at again
            self._take_in(storage, self.grid, span)
            self._seen, self._revision = high, revision
        self._index.trim(low * self.grid.ticks)
        return self._index

    def _begin(self, storage: Storage) -> bool:
        keys = set(storage.keys())
        if self._free:
            traj_key: NestedKey | None = next((key for key in TRAJ_KEYS if key in keys), None)
            end_keys: tuple[NestedKey, ...] = (NEXT_DONE,) if NEXT_DONE in keys else ()
        else:
            traj_key, end_keys = self.traj_key, self.end_keys
            if traj_key is not None and end_keys:  # both were named: what is stored of the two
                traj_key = traj_key if traj_key in keys or not keys.issuperset(end_keys) else None
                end_keys = end_keys if traj_key is None or not keys.isdisjoint(end_keys) else ()
            elif traj_key == TRAJ_IDS and traj_key not in keys and self._ends is None and NEXT_DONE in keys:
                traj_key, end_keys = None, (NEXT_DONE,)
            if not {traj_key, *end_keys} - {None} <= keys:
                return False
            if traj_key is None and self._ids is None and TRAJ_IDS in keys:
                traj_key = TRAJ_IDS  # what several writers put side by side need not end with a flag
        if traj_key is None and not end_keys and self._ids is None and self._ends is None:
            return False
        if not storage.capacity:
            return False
        if _MULTISTEP in keys and (traj_key is not None or self._ids is not None):
            # of the frame n steps later: it would cut each of the last n frames off as a run of one
            end_keys = tuple(key for key in end_keys if as_tuple(key)[0] != "next")
        self._used = traj_key, end_keys
        self.grid = Grid(storage.capacity, storage.columns, storage.period)
        self._index = RunIndex(self.grid.lanes, storage.period)
        return True

    def missing(self, storage: Storage) -> KeyError:
        """The error that names the entries that the storage lacks."""
        keys = storage.keys()
        has = f"the storage has {key_str(keys)}" if keys else "its elements are no TensorDicts"
        if self._free:
            return KeyError(
                f"traj_key, end_key: expected one of the entries {key_str([*TRAJ_KEYS, NEXT_DONE])} to tell "
                f"trajectories apart, but {has}. Collect with "
                "track_traj_ids=True, or name the entries with traj_key= or end_key=."
            )
        if self.traj_key is not None and self.traj_key not in keys:
            name, key = "traj_key", self.traj_key
        else:
            name = "end_key" if len(self.end_keys) == 1 else "end_keys"
            key = next((key for key in self.end_keys if key not in keys), "")
        return KeyError(f"{name}: there is no entry {key!r}; {has}. Name one of these, or leave {name} out.")

    def _take_in(self, storage: Storage, grid: Grid, span: Span) -> None:
        seen = self._seen
        for start, stop in storage.ledger.ranges(span, seen):
            if start > seen:  # a gap, or overwritten before it was seen
                self._index.skip(start * grid.ticks)
            self._read(storage, grid, start, stop)
            seen = stop
        if seen < span.high:
            self._index.skip(span.high * grid.ticks)

    def _read(self, storage: Storage, grid: Grid, low: int, high: int) -> None:
        traj_key, end_keys = self._used
        step = max(_CHUNK // grid.columns, 1)
        for start in range(low, high, step):
            stop = min(start + step, high)
            ids = ends = None
            if traj_key is not None:
                ids = storage.entry(traj_key, start, stop)
            elif self._ids is not None:
                ids = self._listed("trajectories", self._ids, grid, start, stop)
            if end_keys:
                flags = [_any_of_each(storage.entry(key, start, stop)) for key in end_keys]
                ends = flags[0] if len(flags) == 1 else np.logical_or.reduce(flags)
            elif self._ends is not None:
                ends = _any_of_each(self._listed("ends", self._ends, grid, start, stop))
            self._index.extend(
                None if ids is None else grid.by_tick(_one_each(ids, traj_key)),
                None if ends is None else grid.by_tick(ends),
            )

    def _listed(self, name: str, values: NDArray[Any], grid: Grid, start: int, stop: int) -> NDArray[Any]:
        """Values at positions, out of a tensor of all elements: ``[stop - start, columns]``."""
        rows = np.arange(start, stop) % grid.capacity
        if len(values) % grid.columns or int(rows.max()) >= len(values) // grid.columns:
            raise ValueError(
                f"{name}: expected a value for each of the {grid.columns * (int(rows.max()) + 1)} elements stored, got "
                f"{len(values)}. Pass a tensor of the storage's size, or name an entry that is stored."
            )
        listed: NDArray[Any] = values.reshape(-1, grid.columns)[rows]
        return listed


def _one_each(ids: NDArray[Any], key: NestedKey | None) -> NDArray[Any]:
    """``[n, columns]`` from values with any number of dimensions of size 1 behind."""
    if ids.ndim > 2:
        if ids[0, 0].size != 1:
            raise ValueError(
                f"traj_key: expected one id for each frame in {key!r}, got {list(ids.shape[2:])}. Name another entry; "
                "where elements hold several frames, extend(data.reshape(-1)) a new buffer."
            )
        ids = ids.reshape(ids.shape[:2])
    return ids


def _any_of_each(ends: NDArray[Any]) -> NDArray[np.bool_]:
    """``[n, columns]``: any flag of the frame is set."""
    flags: NDArray[np.bool_] = ends.astype(np.bool_, copy=False)
    if flags.ndim > 2:
        flags = flags.reshape(*flags.shape[:2], -1)
        flags = flags[:, :, 0] if flags.shape[2] == 1 else np.logical_or.reduce(flags, axis=2)
    return flags
