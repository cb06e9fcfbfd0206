"""Runs of a ring of frames, in which slices may lie, and the entries of a storage that say where they end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollwright._keys import NestedKey, as_tuple, checked_key, key_str
from rollwright.data.layout import NEXT_DONE, TRAJ_IDS
from rollwright.data.replay_buffers.ledger.ledger import Span
from rollwright.data.replay_buffers.storages.storage import Storage

Index = NDArray[np.int64]

_NONE = -1  # start of a run that is not there
_LENGTHS = 4  # least lengths to keep a queue for; the oldest makes place


class Grid:
    """Positions of the frames of a storage: in which lane, at which tick of its time.

    A lane is what time runs along: one environment. Where time runs over positions, each column is a lane, and a
    tick is a position. Where it runs inside a position, over its last ``period`` elements, each group of ``period``
    elements is a lane, and a position is ``period`` ticks.

    Args:
        capacity: rows of the ring.
        columns: elements of a row.
        period: 0 where time runs over positions.
    """

    def __init__(self, capacity: int, columns: int, period: int) -> None:
        self.capacity, self.columns, self.period = capacity, columns, period
        self.ticks = max(period, 1)  # of a position
        self.lanes = columns // self.ticks
        self.size = capacity * columns
        self.stride = 1 if period else columns  # elements from one tick to the next of a lane

    def elements(self, lane: Index, tick: Index) -> Index:
        """Flat elements of the storage, for arrays that broadcast."""
        if self.period:
            position, step = np.divmod(tick, self.period)
            return (position % self.capacity) * self.columns + lane * self.period + step
        row = tick % self.capacity
        return row if self.columns == 1 else row * self.columns + lane

    def place(self, element: Index, high: int) -> tuple[Index, Index]:
        """Lanes and ticks of live elements, both ``[n]``.

        Args:
            element: flat elements of the storage.
            high: tick after the last.
        """
        row, column = np.divmod(element, self.columns)
        position = row + (high // self.ticks - 1 - row) // self.capacity * self.capacity
        if self.period:
            return column // self.period, position * self.period + column % self.period
        return column, position

    def ahead(self, element: Index, ticks: Index) -> Index:
        """Elements of the same lanes, ``ticks`` later, for arrays that broadcast."""
        return (element + ticks * self.stride if self.stride > 1 else element + ticks) % self.size

    def by_tick(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values by position, ``[n, columns, ...]``, as values by tick, ``[n * ticks, lanes, ...]``."""
        if not self.period:
            return values
        n, _, *feature = values.shape
        split = values.reshape(n, self.lanes, self.period, *feature)
        return split.swapaxes(1, 2).reshape(n * self.period, self.lanes, *feature)


class _Queue:
    """Closed runs of at least some length, in order of closing, first in first out.

    Attributes:
        table: int64 ``[3, ...]``: lane, start, stop; runs are its columns from ``head`` to ``tail``.
    """

    def __init__(self, length: int, runs: Index) -> None:
        self.length = length
        self.table = np.zeros((3, 16), np.int64)
        self.head = self.tail = 0
        self.drawable: tuple[int, int, int] = (_NONE, _NONE, 0)  # low, high and the tail with open runs, as last asked
        self.push(runs)

    def push(self, runs: Index) -> None:
        """Add runs ``[3, m]``; those that are too short are left out."""
        if self.length > 1:
            runs = runs[:, runs[2] - runs[1] >= self.length]
        m = runs.shape[1]
        self.make_room(m)
        self.table[:, self.tail : self.tail + m] = runs
        self.tail += m
        self.drawable = (_NONE, _NONE, 0)

    def make_room(self, m: int) -> None:
        """See that there are ``m`` columns beyond the tail, in O(1) for each column ever used."""
        if self.tail + m <= self.table.shape[1]:
            return
        kept = self.table[:, self.head : self.tail]
        if kept.shape[1] + m > self.table.shape[1] // 2:
            self.table = np.zeros((3, 2 * (kept.shape[1] + m)), np.int64)
        self.table[:, : kept.shape[1]] = kept.copy()
        self.head, self.tail = 0, kept.shape[1]
        self.drawable = (_NONE, _NONE, 0)

    def trim(self, low: int) -> None:
        """Let go of runs of which less than ``length`` is left at or above ``low``."""
        self.head += int(self.table[2, self.head : self.tail].searchsorted(low + self.length))


class RunIndex:
    """The runs of a ring of frames: maximal stretches of one lane, one trajectory and consecutive ticks.

    A run is closed when the next frame of its lane belongs to another trajectory; until then it is open, and grows.
    What the ring overwrites is taken off the front: of a run, ``max(start, low) <= tick < stop`` is left. To take in
    n frames costs O(n); to find the runs of at least some length costs O(lanes), whatever is stored.

    Args:
        lanes: number of lanes.
        period: every lane is cut where ``tick % period == 0``; 0: it is not.

    Attributes:
        low: first tick that is left.
        high: tick after the last.
        num_closed: runs closed so far, those that are gone included.

    Example:
        >>> index = RunIndex(lanes=1)
        >>> index.extend(np.array([[7], [7], [7], [8], [8]]))
        >>> index.runs().tolist()  # lanes, starts, stops
        [[0, 0], [0, 3], [3, 5]]
        >>> index.extend(np.array([[8]]))
        >>> index.trim(2)
        >>> index.runs().tolist()
        [[0, 0], [0, 3], [3, 6]]
        >>> index.runs(2).tolist()
        [[0], [3], [6]]
    """

    def __init__(self, lanes: int, period: int = 0) -> None:
        self.lanes, self.period = lanes, period
        self.low = self.high = self.num_closed = 0
        self._start = np.full(lanes, _NONE)  # of the open run of each lane
        self._last_id: NDArray[Any] | None = None
        self._last_end: NDArray[np.bool_] | None = None
        self._queues = {1: _Queue(1, np.zeros((3, 0), np.int64))}

    def extend(self, ids: NDArray[Any] | None = None, ends: NDArray[np.bool_] | None = None) -> None:
        """Take in the next frames.

        Args:
            ids: ``[n, lanes]`` trajectory of each frame; below 0: there is no frame.
            ends: bool ``[n, lanes]``: the frame is the last of its trajectory.
        """
        known = ids if ids is not None else ends
        if known is None or not len(known):
            return
        n = len(known)
        cut = np.zeros((n, self.lanes), np.bool_)
        if ids is not None:
            np.not_equal(ids[1:], ids[:-1], out=cut[1:])
            if self._last_id is not None:
                np.not_equal(ids[0], self._last_id, out=cut[0])
            self._last_id = ids[-1].copy()
        if ends is not None:
            cut[1:] |= ends[:-1]
            if self._last_end is not None:
                cut[0] |= self._last_end
            self._last_end = ends[-1].copy()
        if self.period:
            cut[-self.high % self.period :: self.period] = True
        cut[0] |= self._start < 0
        at = np.flatnonzero(cut)
        if len(at):
            self._cut(at, None if ids is None else ids.reshape(-1)[at])
        self.high += n

    def _cut(self, at: Index, ids: NDArray[Any] | None) -> None:
        """Begin new runs, of trajectories ``ids``, at the places ``at`` of the ``[n, lanes]`` new frames, ascending."""
        tick = at + self.high if self.lanes == 1 else at // self.lanes + self.high
        begun = tick if ids is None or int(ids.min()) >= 0 else np.where(ids >= 0, tick, _NONE)
        closed = np.zeros((3, len(at)), np.int64)  # by each cut
        closed[2] = tick
        before = closed[1]
        if self.lanes == 1:
            before[0], before[1:] = self._start[0], begun[:-1]
            self._start[0] = begun[-1]
        else:
            closed[0] = lane = at % self.lanes
            order = np.argsort(lane, kind="stable")
            by_lane, by_begun = lane[order], begun[order]
            first = np.append(True, by_lane[1:] != by_lane[:-1])
            before[order] = np.where(first, self._start[by_lane], np.append(_NONE, by_begun[:-1]))
            last = np.append(first[1:], True)
            self._start[by_lane[last]] = by_begun[last]
        self._close(closed if int(before.min()) >= 0 else closed[:, before >= 0])

    def _close(self, runs: Index) -> None:
        if runs.shape[1]:
            self.num_closed += runs.shape[1]
            for queue in self._queues.values():
                queue.push(runs)
                queue.trim(self.low)  # of a run that was open for long, too little may be left

    def skip(self, tick: int) -> None:
        """Close all runs, for no frames lie from here up to ``tick``."""
        lane = np.flatnonzero(self._start >= 0)
        self._close(np.stack([lane, self._start[lane], np.full(len(lane), self.high)]))
        self._start[:] = _NONE
        self._last_id = self._last_end = None
        self.high = max(self.high, tick)

    def trim(self, low: int) -> None:
        """Let go of all before ``low``, which never goes back."""
        if low <= self.low:
            return
        self.low = low
        for queue in self._queues.values():
            queue.trim(low)

    def closed_since(self, num_closed: int) -> Index:
        """Runs closed after the first ``num_closed``, less those that are gone, as in :meth:`runs`."""
        queue = self._queues[1]
        return queue.table[:, max(queue.head, queue.tail - (self.num_closed - num_closed)) : queue.tail]

    def remainders(self, length: int) -> Index:
        """Closed runs whose front is gone and of which fewer than ``length`` frames are left, as in :meth:`runs`."""
        queue = self._queues[1]
        last = queue.head + int(queue.table[2, queue.head : queue.tail].searchsorted(self.low + length))
        runs = queue.table[:, queue.head : last]
        return runs[:, runs[1] < self.low]

    def around(self, lane: Index, tick: Index) -> tuple[Index, Index]:
        """First and last tick that is left of the runs in which frames lie, both ``[n]``.

        Of a frame that is in no run, its own tick.
        """
        inside, start, stop = self._runs_of(lane, tick)
        return np.where(inside, np.maximum(start, self.low), tick), np.where(inside, stop - 1, tick)

    def covers(self, runs: Index) -> NDArray[np.bool_]:
        """Whether what is left of stretches ``[3, m]`` (lane, start, stop) lies in one run each, bool ``[m]``."""
        lane, start, stop = runs
        inside, _, end = self._runs_of(lane, np.maximum(start, self.low))
        covered: NDArray[np.bool_] = inside & (stop <= end)
        return covered

    def _runs_of(self, lane: Index, tick: Index) -> tuple[NDArray[np.bool_], Index, Index]:
        """Whether frames lie in runs, and the starts and stops of these, each ``[n]``."""
        lanes, starts, stops = self.runs()
        if not len(lanes):
            return np.zeros(len(tick), np.bool_), tick, tick
        if self.lanes > 1:
            order = np.lexsort((starts, lanes))
            lanes, starts, stops = lanes[order], starts[order], stops[order]
        width = max(self.high, int(tick.max(initial=0))) + 2
        run = (lanes * width + starts).searchsorted(lane * width + tick, "right") - 1
        inside = (run >= 0) & (lanes[run] == lane) & (tick < stops[run])
        return inside, starts[run], stops[run]

    def open_runs(self, length: int = 1) -> Index:
        """Open runs of which at least ``length`` frames are left, int64 ``[3, m]``, as in :meth:`runs`."""
        start = np.maximum(self._start, self.low)
        lane = np.flatnonzero((self._start >= 0) & (self.high - start >= length))
        return np.stack([lane, start[lane], np.full(len(lane), self.high)])

    def runs(self, length: int = 1) -> Index:
        """All runs of which at least ``length`` frames are left, closed ones first.

        Returns:
            int64 ``[3, m]``, to be read before the index changes: lane, start, stop. Where a run's front is gone
            ``start`` may lie below :attr:`low`.
        """
        queue = self._queues.get(length)
        if queue is None:
            queue = self._new_queue(length)
        low, high, tail = queue.drawable
        if low != self.low or high != self.high:
            open_runs = self.open_runs(length)
            queue.make_room(open_runs.shape[1])
            tail = queue.tail + open_runs.shape[1]
            queue.table[:, queue.tail : tail] = open_runs  # overwritten by the next that closes
            queue.drawable = (self.low, self.high, tail)
        return queue.table[:, queue.head : tail]

    def _new_queue(self, length: int) -> _Queue:
        every = self._queues[1]
        queue = _Queue(length, every.table[:, every.head : every.tail])
        queue.trim(self.low)
        if len(self._queues) > _LENGTHS:
            del self._queues[next(key for key in self._queues if key != 1)]
        self._queues[length] = queue
        return queue


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
