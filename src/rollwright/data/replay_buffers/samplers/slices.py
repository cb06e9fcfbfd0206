"""Samplers of slices, stretches of consecutive frames of one trajectory: uniform, without replacement, by priority."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, checked_key, unravel
from rollwright._options import with_options
from rollwright._tensors import device_of
from rollwright.data.layout import IS_INIT, MASK
from rollwright.data.replay_buffers.ledger.ledger import Span
from rollwright.data.replay_buffers.samplers.prioritized import WEIGHT, PrioritizedSampler, Reduction
from rollwright.data.replay_buffers.samplers.runs import Boundaries, Grid, RunIndex
from rollwright.data.replay_buffers.samplers.sampler import Draw, Sampler, Slices
from rollwright.data.replay_buffers.samplers.uniform import InPasses, Passes
from rollwright.data.replay_buffers.storages.batches import positive
from rollwright.data.replay_buffers.storages.storage import Storage

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.keywords import CommonSliceKeywords, SliceKeywords


FLAG_DTYPES = (torch.bool, torch.uint8)
"""Of an entry that marks where slices begin."""
Index = NDArray[np.int64]
Margin = bool | int | tuple[bool | int, bool | int]


@with_options()
class SliceSampler(Sampler):
    """Draws slices of trajectories, one after the other in a flat batch.

    First, a trajectory is drawn, then a place in it; all have the same probability. A slice has consecutive frames of
    one trajectory. Rows that were overwritten, never written, or are being written, are in no slice. The sampler notes
    trajectories as they are written, so a draw costs the same however much is stored.

    ``init_key`` marks the first step of each slice in the batch, in addition to the stored marks. Recurrent modules
    read it.

    Args:
        num_slices: number of slices in a batch; their length is ``batch_size // num_slices``.
        slice_len: steps in a slice; their number is ``batch_size // slice_len``. One of the two is required. If you
            pass both, their product must be the batch size.
        end_key: entry of flags that mark the last frame of a trajectory.
        end_keys: several such entries, in place of ``end_key``: a trajectory ends where any of them is set.
        traj_key: entry of trajectory ids, one number for each frame. If you pass neither this nor ``end_key``, the
            sampler reads ``("collector", "traj_ids")``, else ``"episode"``, and ``("next", "done")``, if stored. A
            trajectory then ends where the id changes, and after each done. If you pass both, one may be missing. So may
            ``("collector", "traj_ids")``, if ``("next", "done")`` is stored.
        cache_values: no effect, for older programs; boundaries are always kept.
        truncated_key: entry that marks the last step of each slice, such as ``("next", "truncated")``. It is set, and
            "done" with it, unless "terminated", "truncated" or "done" beside it is set there already.
        init_key: entry that marks the first step of each slice; None: as stored.
        strict_length: draw only trajectories that are long enough. If False, short ones are taken whole, and the batch
            is smaller than you asked for.
        pad_output: fill up short slices by repeating their last step, and write ``("collector", "mask")``, bool
            ``[batch_size]``: True for real steps. Recurrent modules do not need this.
        span: let slices begin before and end after their trajectory; steps outside are left out. True: at least one
            step is inside; i: at least ``length - i`` steps. A pair has a value for each side.
        ends: flags of all elements of the storage, bool ``[n]``, in place of ``end_key``.
        trajectories: ids of all elements of the storage, ``[n]``, in place of ``traj_key``.
        replacement: False makes a :class:`SliceSamplerWithoutReplacement`, which has options of its own.
        compile, use_gpu: no effect, for programs that were written for TorchRL.

    Raises:
        ValueError: neither ``num_slices`` nor ``slice_len``, or arguments that exclude each other.
        TypeError: an argument has the wrong type.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage, ReplayBuffer
        >>> sampler = SliceSampler(slice_len=3, strict_length=True)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=6)
        >>> ids = torch.tensor([0, 0, 1, 1, 1])
        >>> _ = buffer.extend(TensorDict({"obs": torch.arange(5), "collector": {"traj_ids": ids}}, [5]))
        >>> batch = buffer.sample()
        >>> batch["obs"]
        tensor([2, 3, 4, 2, 3, 4])
        >>> batch["is_init"].squeeze(-1)
        tensor([ True, False, False,  True, False, False])
    """

    repeatable = True

    def __init__(
        self,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        end_key: NestedKey | None = None,
        traj_key: NestedKey | None = None,
        cache_values: bool = False,
        truncated_key: NestedKey | None = None,
        init_key: NestedKey | None = IS_INIT,
        strict_length: bool = False,
        pad_output: bool = False,
        span: bool | int | tuple[bool | int, bool | int] = False,
        ends: torch.Tensor | None = None,
        trajectories: torch.Tensor | None = None,
        end_keys: Sequence[NestedKey] | None = None,
        replacement: bool = True,
        compile: bool | dict[str, Any] = False,
        use_gpu: torch.device | bool = False,
    ) -> None:
        if not replacement and not isinstance(self, InPasses):
            raise TypeError(
                f"replacement: no {type(self).__name__} draws without replacement. Leave it out, or use a "
                "SliceSamplerWithoutReplacement."
            )
        if num_slices is None and slice_len is None:
            raise ValueError("num_slices, slice_len: expected one of them, got neither. Pass slice_len=32, say.")
        self.num_slices = None if num_slices is None else positive("num_slices", num_slices)
        self.slice_len = None if slice_len is None else positive("slice_len", slice_len)
        self.strict_length, self.pad_output = bool(strict_length), bool(pad_output)
        self.cache_values = bool(cache_values)
        self.truncated_key = None if truncated_key is None else checked_key("truncated_key", truncated_key)
        self.init_key = None if init_key is None else checked_key("init_key", init_key)
        self.span = _span(span, self.slice_len)
        self._boundaries = Boundaries(traj_key, _end_keys(end_key, end_keys), trajectories, ends)

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **options: Any) -> Any:
            """A sampler of slices; with ``replacement=False`` one that draws each trajectory once."""
            if cls is SliceSampler and not options.get("replacement", True):
                cls = SliceSamplerWithoutReplacement
            return super().__new__(cls)

    @property
    def traj_key(self) -> NestedKey | None:
        """Entry of trajectory ids, as given."""
        return self._boundaries.traj_key

    @property
    def end_keys(self) -> tuple[NestedKey, ...]:
        """Entries of flags that mark the last frame of a trajectory, as given."""
        return self._boundaries.end_keys

    # Drawing ----------------------------------------------------------------------------------

    def check(self, storage: Storage, data: Any) -> None:
        """Refuse data that could be stored, but not be sampled from; called before a batch is stored.

        Raises:
            ValueError: an element would hold several frames, which slices do not distinguish; ``init_key`` names an
                entry that is no flag.
        """
        for batch in data if isinstance(data, list) else (data,):
            if isinstance(batch, TensorDict) and self.init_key is not None:
                _check_flag(self.init_key, batch.get(self.init_key, None))
            if isinstance(batch, TensorDictBase) and batch.batch_size[storage.ndim :].numel() > 1:
                raise _frames_in_elements(batch.batch_size, storage.ndim)

    def follow(self, storage: Storage) -> None:
        """Read what was written since the last call."""
        self._boundaries.follow(storage, storage.ledger.span())

    def draw(self, storage: Storage, batch_size: int, generator: torch.Generator | None = None) -> Draw:
        """Choose elements; ``[n]`` with n at most ``batch_size``.

        Raises:
            KeyError: the storage has none of the entries that distinguish trajectories.
            ValueError: a batch size that slices do not fill, or slices longer than any trajectory.
        """
        length, count = self._shape(batch_size)
        grid, index = self._up_to_date(storage, storage.ledger.span())
        runs = index.runs(length if self.strict_length else 1)
        if not runs.shape[1]:
            raise self._too_long(index, length)
        share = torch.rand((2, count), dtype=torch.float64, generator=generator, device="cpu").numpy()
        chosen = runs[:, (share[0] * runs.shape[1]).astype(np.int64)]
        return self._sliced(grid, index.low, chosen, share[1], length)

    def _up_to_date(self, storage: Storage, span: Span) -> tuple[Grid, RunIndex]:
        index, grid = self._boundaries.follow(storage, span), self._boundaries.grid
        if index is None or grid is None:
            raise self._boundaries.missing(storage)
        return grid, index

    def _shape(self, batch_size: int) -> tuple[int, int]:
        """Steps of a slice, and slices in a batch."""
        length, count = self.slice_len, self.num_slices
        if length is None:
            length = batch_size // count if count else 0
        if count is None:
            count = batch_size // length
        if length * count != batch_size or not batch_size:
            sizes = {"num_slices": self.num_slices, "slice_len": self.slice_len}
            given = " * ".join(f"{name}={value}" for name, value in sizes.items() if value)
            either = " or ".join(f"batch_size={size}" for size in self._sizes_near(batch_size))
            raise ValueError(
                f"batch_size: expected {'a multiple of ' if None in sizes.values() else ''}{given}, got {batch_size}. "
                f"Pass {either}, or change the slices."
            )
        return length, count

    def _sizes_near(self, batch_size: int) -> list[int]:
        """The nearest batch sizes that slices fill."""
        if self.slice_len is not None and self.num_slices is not None:
            return [self.slice_len * self.num_slices]
        step = self.slice_len or self.num_slices or 1
        below = batch_size // step * step
        return [size for size in (below, below + step) if size]

    def _too_long(self, index: RunIndex, length: int) -> ValueError:
        runs = index.runs()
        if not runs.shape[1]:
            return ValueError("no trajectory to draw from: all frames that are stored have an id below 0.")
        longest = int((runs[2] - np.maximum(runs[1], index.low)).max())
        return ValueError(
            f"slice_len: expected at most {longest}, the length of the longest trajectory stored, got {length}. "
            "Draw shorter slices, store longer trajectories, or pass strict_length=False."
        )

    def _sliced(self, grid: Grid, low: int, runs: Index, share: NDArray[np.float64], length: int) -> Draw:
        """One slice of each run, beginning at ``share`` of the places where it may."""
        lane, start, stop = runs
        start = np.maximum(start, low)
        room = stop - start
        taken = None if self.strict_length else np.minimum(room, length)
        if self.span == (0, 0):
            first = start + (share * (room - (length if taken is None else taken) + 1)).astype(np.int64)
        else:
            whole = np.minimum(room, length)
            before, after = (np.minimum(length - 1 if side is True else side, whole - 1) for side in self.span)
            begin = (share * (room - whole + after + before + 1)).astype(np.int64) - before
            first = start + np.maximum(begin, 0)
            taken = start + np.minimum(begin + whole, room) - first
        return self._laid_out(grid, grid.elements(lane, first), taken, length)

    def _laid_out(self, grid: Grid, first: Index, taken: Index | None, length: int) -> Draw:
        """A draw of slices from their first elements.

        Args:
            grid: of the storage.
            first: int64 ``[k]``.
            taken: int64 ``[k]``, steps of each; None: all have ``length``.
            length: steps of a slice that is not short.
        """
        k, step = len(first), np.arange(length)
        if taken is not None and int(taken.min()) == length:
            taken = None
        if taken is None:  # the common case: no slice is short
            begins = np.arange(0, k * length, length)
            mask = np.ones(k * length, np.bool_) if self.pad_output else None
            index = grid.ahead(first[:, None], step).reshape(-1)
            return Draw(index, {}, Slices(begins, begins + (length - 1), mask))
        if self.pad_output:
            begins, final = np.arange(0, k * length, length), taken[:, None] - 1
            index = grid.ahead(first[:, None], np.minimum(step, final)).reshape(-1)
            return Draw(index, {}, Slices(begins, begins + (taken - 1), (step <= final).reshape(-1)))
        ends = taken.cumsum()
        begins = ends - taken
        index = grid.ahead(first.repeat(taken), np.arange(ends[-1]) - begins.repeat(taken))
        return Draw(index, {}, Slices(begins, ends - 1))

    # Marking ----------------------------------------------------------------------------------

    def mark(self, batch: TensorDictBase, draw: Draw) -> TensorDictBase:
        """Mark where slices begin and, where asked for, where they end and what is padding."""
        slices = draw.slices
        if slices is None:
            return batch
        if isinstance(batch, LazyStackedTensorDict):
            batch = batch.copy()  # whose rows may be the ones that are stored, and twice the same
        if self.init_key is not None:
            _raise_flag(batch, self.init_key, slices.first)
        if self.truncated_key is not None:
            _mark_ends(batch, self.truncated_key, slices.last)
        if slices.mask is not None:
            batch.set(MASK, torch.from_numpy(slices.mask))
        return batch

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_slices={self.num_slices}, slice_len={self.slice_len}, "
            f"strict_length={self.strict_length})"
        )


@with_options(SliceSampler)
class SliceSamplerWithoutReplacement(InPasses, SliceSampler):
    """A slice of every trajectory once, then of every trajectory again.

    A pass goes over the trajectories that are stored, and long enough, when it begins; those that are overwritten in
    the meantime, or cut by what replaces elements of them, are left out. Its last batch may have fewer slices.

    Args:
        drop_last: leave out the last batch of a pass where it has fewer slices.
        shuffle: in an order drawn for each pass; else those that ended first come first.
        **options: those of :class:`SliceSampler`.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage, ReplayBuffer
        >>> sampler = SliceSamplerWithoutReplacement(slice_len=2, traj_key="episode", shuffle=False)
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> _ = buffer.extend(TensorDict({"episode": torch.tensor([0, 0, 1, 1, 2, 2])}, [6]))
        >>> buffer.sample()["episode"], sampler.ran_out
        (tensor([0, 0, 1, 1]), False)
        >>> buffer.sample()["episode"], sampler.ran_out
        (tensor([2, 2]), True)
    """

    _item_size = 3  # lane, start and stop of a run

    def __init__(self, *, drop_last: bool = False, shuffle: bool = True, **options: Unpack[SliceKeywords]) -> None:
        if options.get("replacement"):
            raise ValueError(f"replacement: expected False for {type(self).__name__}, got True. Use a SliceSampler.")
        options["replacement"] = False
        super().__init__(**options)
        self._passes = Passes(bool(drop_last), bool(shuffle), "trajectories")
        self._num_begun = 0  # of the boundaries, when the runs of the pass were those of the storage

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the pass of a state of :meth:`state_dict`."""
        super().load_state_dict(state_dict)
        self._num_begun = 0  # the state of the storage may be another one

    def draw(self, storage: Storage, batch_size: int, generator: torch.Generator | None = None) -> Draw:
        """Choose slices that this pass has not drawn yet."""
        length, count = self._shape(batch_size)
        grid, index = self._up_to_date(storage, storage.ledger.span())
        least = length if self.strict_length else 1
        if not index.runs(least).shape[1]:
            raise self._too_long(index, length)
        if self._num_begun != self._boundaries.num_begun:  # elements were replaced, or all is another storage's
            if self._passes.epoch is not None:
                self._passes.epoch.keep(index.covers)
            self._num_begun = self._boundaries.num_begun

        def alive(runs: Index) -> NDArray[np.bool_]:
            lives: NDArray[np.bool_] = runs[2] - np.maximum(runs[1], index.low) >= least
            return lives

        chosen = self._passes.take(count, lambda: index.runs(least).copy(), alive, generator)
        share = torch.rand(chosen.shape[1], dtype=torch.float64, generator=generator, device="cpu").numpy()
        return self._sliced(grid, index.low, chosen, share, length)


def _end_keys(end_key: NestedKey | None, end_keys: Sequence[NestedKey] | None) -> list[NestedKey]:
    if end_key is not None and end_keys is not None:
        raise ValueError(f"end_key, end_keys: expected one of them, got {end_key!r} and {end_keys!r}. Leave one out.")
    if end_keys is None:
        return [] if end_key is None else [end_key]
    if isinstance(end_keys, str) or not isinstance(end_keys, Sequence) or not end_keys:
        raise TypeError(
            f"end_keys: expected a list of entries, at least one, got {end_keys!r}. For one entry pass end_key."
        )
    return list(end_keys)


def _frames_in_elements(shape: Sequence[int], ndim: int) -> ValueError:
    """The error over batches ``shape`` for a storage of ``ndim``."""
    return ValueError(
        f"data: slices need a frame an element, and a storage of ndim={ndim} takes a batch {list(shape)} for "
        f"{list(shape[:ndim])} elements. Pass extend(data.reshape(-1)), or make the storage with "
        f"LazyTensorStorage(n, ndim={len(shape)}) (and the buffer anew, where such a batch is stored already)."
    )


def _span(span: Margin, slice_len: int | None) -> tuple[bool | int, bool | int]:
    sides: Any = span if isinstance(span, tuple | list) else (span, span)
    steps = "less steps than a slice has" + ("" if slice_len is None else f" ({slice_len})")
    expected = f"span: expected True, False or {steps}, or a pair of these, one for each side, got {span!r}."
    if len(sides) != 2 or not all(isinstance(side, Integral) for side in sides):
        raise TypeError(expected)
    before, after = (side if isinstance(side, bool) else int(side) for side in sides)
    for side in (before, after):
        if side < 0 or (slice_len is not None and side is not True and side >= slice_len):
            raise ValueError(expected)
    return before or 0, after or 0


def _check_flag(key: NestedKey, flag: Any) -> None:
    """Test that an entry is one of flags, or is not there."""
    if flag is not None and getattr(flag, "dtype", None) not in FLAG_DTYPES:
        raise ValueError(
            f"init_key: expected {key!r} to hold flags (bool), which mark where slices begin, got "
            f"{getattr(flag, 'dtype', type(flag).__name__)}. Rename that entry, or pass another init_key (None: none)."
        )


def _raise_flag(batch: TensorDictBase, key: NestedKey, where: Index) -> None:
    """Set a flag at some steps of a batch ``[n]``; of shape ``[n, 1]`` where there is none yet."""
    flag = batch.get(key, None)
    _check_flag(key, flag)
    made = flag is None
    if flag is None:
        flag = torch.zeros(len(batch), 1, dtype=torch.bool, device=device_of(batch))
    flag[torch.from_numpy(where).to(flag.device)] = True
    if made or isinstance(batch, LazyStackedTensorDict):  # which reads entries as copies
        batch.set(key, flag)


def _mark_ends(batch: TensorDictBase, truncated_key: NestedKey, last: Index) -> None:
    """Truncate slices at their last steps, where the trajectory does not end there by itself.

    Afterwards ``done = terminated | truncated`` where it held before; flags that are missing are added.
    """
    *path, _ = as_tuple(truncated_key)
    keys = [truncated_key, unravel((*path, "done")), unravel((*path, "terminated"))]
    truncated, done, terminated = (batch.get(key, None) for key in keys)
    known = next((flag for flag in (truncated, done, terminated) if flag is not None), None)
    blank = torch.zeros(len(batch), 1, dtype=torch.bool, device=device_of(batch)) if known is None else known ^ known
    if terminated is None:  # a lone done counts as terminated
        terminated = blank if done is None else done if truncated is None else done & ~truncated
    truncated = blank if truncated is None else truncated
    ended = terminated | truncated if done is None else done | terminated | truncated
    cut = torch.zeros_like(blank)
    cut[torch.from_numpy(last).to(cut.device)] = True
    cut &= ~ended
    for key, flag in zip(keys, (truncated | cut, ended | cut, terminated), strict=True):
        batch.set(key, flag)


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
