"""The memory of a batch: its layout, and recorders of frames into its rows, or into a list that is stacked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, is_private, key_str, leaves, place, unravel
from rollwright._memory import MemoryPool
from rollwright.data.layout import blank_frame, is_dense, stack_frames
from rollwright.envs.arrays import FLAGS, Entry, Values
from rollwright.errors import RollwrightError


class RaggedError(RollwrightError):
    """A frame does not have the layout of the block's first frame."""


class FrameField(NamedTuple):
    """One entry of a frame: the shape of its tensor (the batch of environments in front), its dtype and its device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class BatchMemory:
    """The memory of one batch: ``[*env, T]``, one row of each entry a step.

    CPU memory is borrowed from ``pool`` and released when the consumer has dropped all of an entry's tensors.

    Args:
        fields: the entries of a frame to keep.
        env: the environments' batch size.
        steps: T.
        device: that of the batch; None: entries lie where frames have them.
        pool: gives memory.
        pinned: take pinned memory instead, which a GPU reads without another copy.
    """

    def __init__(
        self,
        fields: Mapping[NestedKey, FrameField],
        env: tuple[int, ...],
        steps: int,
        device: torch.device | None,
        pool: MemoryPool,
        *,
        pinned: bool = False,
    ) -> None:
        self.fields = dict(fields)
        self.steps = steps
        self._time = len(env)
        self._arrays: dict[NestedKey, NDArray[Any]] = {}
        self.memory: dict[NestedKey, torch.Tensor] = {}
        nested: dict[str, Any] = {}
        pool.reserve(fields, env, steps)
        for key, field in fields.items():
            self.memory[key] = memory = self._lease(key, field, device or field.device, pool, pinned)
            place(nested, key, memory)
        self._batch_size = torch.Size([*env, steps])
        self._names: Any = [*[None] * len(env), "time"]
        self.batch = TensorDict(nested, batch_size=self._batch_size, device=device, names=self._names)

    def _lease(
        self, key: NestedKey, field: FrameField, device: torch.device, pool: MemoryPool, pinned: bool
    ) -> torch.Tensor:
        shape = (*field.shape[: self._time], self.steps, *field.shape[self._time :])
        if device.type != "cpu" or pinned:
            # CUDA's allocators keep memory themselves, and know of copies that are still in progress.
            tensor = torch.empty(shape, dtype=field.dtype, device=device, pin_memory=pinned)
            if pinned:
                self._arrays[key] = tensor.numpy()
            return tensor
        tensor, array = pool.take(key, shape, field.dtype)
        if array is not None:
            self._arrays[key] = array  # not an array of the tensor, which would keep the memory borrowed
        return tensor

    def nest_like(self, frame: TensorDictBase) -> BatchMemory:
        """Give nested entries the batch sizes that they have in ``frame``, which may be longer than the root's."""
        for key, nested in frame.items(True):
            mine = self.batch.get(key, None)
            if isinstance(nested, TensorDictBase) and mine is not None:
                mine.batch_size = torch.Size([*frame.batch_size, self.steps, *nested.batch_size[frame.ndim :]])
        return self

    def nest(self, sizes: Mapping[str, tuple[int, ...]]) -> None:
        """Give nested entries a longer batch size than the root's, by name: of what follows the root's."""
        for name, size in sizes.items():
            for key in (name, ("next", name)):
                mine = self.batch.get(key, None)
                if mine is not None:
                    mine.batch_size = torch.Size([*self._batch_size, *size])

    def rows(self, key: NestedKey) -> NDArray[Any]:
        """The memory of an entry as an array ``[T, *env, ...]``, to be written in place."""
        array, time = self._arrays[key], self._time
        # np.moveaxis, which takes ten times as long
        return array.transpose(time, *range(time), *range(time + 1, array.ndim)) if time else array

    def write(self, t: int, frame: TensorDictBase, num_entries: int) -> None:
        """Copy the frame of time ``t``.

        Raises:
            RaggedError: the frame has other keys, shapes or dtypes than the first, or not ``num_entries`` leaves.
        """
        if isinstance(frame, LazyStackedTensorDict):
            raise RaggedError
        values = leaves(frame)
        if len(values) != num_entries:
            raise RaggedError
        for key, memory in self.memory.items():
            value = values.get(key)
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

    def reopened(self) -> BatchMemory:
        """This block, to be written again: what the consumer put in place of its memory is taken out."""
        for key, memory in self.memory.items():
            if self.batch.get(key, None) is not memory:
                self.batch.set(key, memory)
            if key in self._arrays:
                self._arrays[key] = memory.numpy()  # it may have moved, to shared memory for example
        if self.batch.batch_size != self._batch_size:
            self.batch.batch_size = self._batch_size
            self.batch.names = self._names
        return self

    def frame(self, t: int) -> TensorDictBase:
        """The frame of time ``t``, as a view ``[*env]``."""
        return self.batch[(*[slice(None)] * self._time, t)]

    def frames(self, steps: int) -> list[TensorDictBase]:
        """The frames written so far, as views."""
        return list(self.batch.unbind(self._time)[:steps])


class FrameList:
    """Frames of any shape and content, stacked at the end: densely where that is possible.

    Args:
        dropped: entries to leave out.
        steps: T.
        device: where frames are moved; None: they are copied where they are.
        ragged: entries whose first dimension has any size.
    """

    def __init__(
        self,
        dropped: set[NestedKey],
        steps: int,
        device: torch.device | None,
        ragged: Collection[NestedKey] = (),
    ) -> None:
        self._dropped = dropped
        self._around = _nests_of(dropped)
        self._device = device
        self._ragged = ragged
        self.steps = steps
        self._frames: list[TensorDictBase] = []

    def write(self, t: int, frame: TensorDictBase) -> None:
        """Keep a copy of the frame."""
        private = [key for key in frame.keys(True) if is_private(key)]
        kept = frame.exclude(*private, *self._dropped)
        kept = kept.exclude(*(key for key in self._around if _is_empty(kept.get(key, None))))
        moves = self._device is not None and kept.device != self._device
        self._frames.append(kept.to(self._device) if moves else kept.clone())

    def frame(self, t: int) -> TensorDictBase:
        """The frame of time ``t``."""
        return self._frames[t]

    def extend(self, frames: list[TensorDictBase]) -> None:
        """Take over frames that were written elsewhere."""
        self._frames.extend(frames)

    def finish(self, steps: int) -> TensorDictBase:
        """The batch; times that were not taken hold nothing, see :func:`~rollwright.data.layout.blank_frame`."""
        frames = self._frames
        if steps < self.steps:
            blank = blank_frame(frames, ragged=self._ragged)
            frames = frames + [blank] * (self.steps - steps)
        return stack_frames(frames, frames[0].ndim)


def _nests_of(keys: Collection[NestedKey]) -> list[NestedKey]:
    """The nested TensorDicts below ``"next"`` in which some keys lie, the innermost first."""
    nests = {unravel(path[:n]) for path in map(as_tuple, keys) for n in range(2, len(path))}
    return sorted(nests, key=lambda key: -len(as_tuple(key)))


def _is_empty(value: Any) -> bool:
    return isinstance(value, TensorDictBase) and value.is_empty()


class Recorder:
    """Writes frames into a :class:`BatchMemory` where all have one layout, else into a :class:`FrameList`.

    Args:
        steps: frames a batch for each environment.
        device: where batches lie; None leaves entries where they are.
        dropped: entries to leave out.
        use_blocks: None chooses by the first frame of each batch; True insists that tensors keep their shapes; False
            never allocates.
        reuse: write every batch into the same memory.
        pool: gives memory for blocks.
        ragged: entries whose first dimension has any size.
    """

    def __init__(
        self,
        steps: int,
        device: torch.device | None,
        *,
        dropped: set[NestedKey],
        use_blocks: bool | None,
        reuse: bool,
        pool: MemoryPool,
        ragged: Collection[NestedKey] = (),
    ) -> None:
        self.steps = steps
        self._device = device
        self._ragged = ragged
        self._dropped = dropped
        self._use_blocks = use_blocks
        self._reuse = reuse
        self._pool = pool
        self._num_entries = 0
        self._target: BatchMemory | FrameList | None = None

    def write(self, t: int, frame: TensorDictBase) -> None:
        """Store the frame of time ``t``; ``t == 0`` opens a new batch."""
        if t == 0:
            self._target = self._open(frame)
        target = self._target
        if not isinstance(target, BatchMemory):
            cast(FrameList, target).write(t, frame)
            return
        try:
            target.write(t, frame, self._num_entries)
        except RaggedError as error:
            if self._use_blocks:
                raise self._refusal(frame) from error
            self._target = ragged = FrameList(self._dropped, self.steps, self._device, self._ragged)
            ragged.extend(target.frames(t))
            ragged.write(t, frame)

    def frame(self, t: int) -> TensorDictBase:
        """The frame of time ``t``, which was written last."""
        target = cast("BatchMemory | FrameList", self._target)
        return target.frame(t)

    def take_over(self, frames: list[TensorDictBase], varied: TensorDictBase) -> None:
        """Go on, as a list, with a batch that another recorder began; its next frame has the layout of ``varied``."""
        if not frames:
            return  # nothing is written yet: the next frame settles the layout
        if self._use_blocks:
            raise self._refusal(varied)
        self._target = ragged = FrameList(self._dropped, self.steps, self._device, self._ragged)
        ragged.extend(frames)

    def finish(self, steps: int) -> TensorDictBase:
        """The batch of the ``steps`` frames written."""
        target = cast("BatchMemory | FrameList", self._target)
        if not self._reuse:
            self._target = None
        return target.finish(steps)

    def _open(self, frame: TensorDictBase) -> BatchMemory | FrameList:
        if self._use_blocks is False or not is_dense(frame):
            if self._reuse:
                raise self._refusal(frame)
            return FrameList(self._dropped, self.steps, self._device, self._ragged)
        keys = [unravel(key) for key in frame.keys(True, True)]
        self._num_entries = len(keys)
        kept = {key: frame.get(key) for key in keys if key not in self._dropped and not is_private(key)}
        fields = {key: FrameField(tuple(value.shape), value.dtype, value.device) for key, value in kept.items()}
        old = self._target
        if self._reuse and isinstance(old, BatchMemory) and old.fields == fields:
            return old.reopened()
        return BatchMemory(fields, tuple(frame.batch_size), self.steps, self._device, self._pool).nest_like(frame)

    def _refusal(self, frame: TensorDictBase) -> ValueError:
        return ValueError(
            f"use_buffers=True (and return_same_td) needs frames that all have the same keys, shapes and dtypes, and "
            f"only tensors. A frame held {key_str(frame.keys(True, True))}. Leave use_buffers out."
        )


Form = tuple[tuple[int, ...], np.dtype[Any]]


class BatchLayout(NamedTuple):
    """Entries of a batch, fixed by its first step.

    Attributes:
        acts: shape and dtype of the policy's outputs.
        presets: those below ``"next"``: key, and key inside ``"next"``.
        fields: the entries of a frame.
        roots: what is written from the current TensorDict at each step: key, place in the frame, whether a column.
        outcomes: what is written from the outcome at each step, likewise.
        blank: what is zero in the whole batch.
    """

    acts: dict[NestedKey, Form]
    presets: list[tuple[NestedKey, NestedKey]]
    fields: dict[NestedKey, FrameField]
    roots: list[tuple[NestedKey, NestedKey, bool]]
    outcomes: list[tuple[NestedKey, NestedKey, bool]]
    blank: list[NestedKey]


def lay_out(
    acts: dict[NestedKey, Form],
    roots: Mapping[NestedKey, Entry],
    outcomes: Mapping[NestedKey, Entry],
    *,
    batch: tuple[int, ...],
    dropped: Collection[NestedKey],
    own: Sequence[NestedKey],
    blank: Mapping[NestedKey, Form],
    done_follows: bool,
    roots_have_flags: bool,
) -> BatchLayout:
    """Decide what goes where.

    Args:
        acts: the policy's outputs, those below ``"next"`` among them.
        roots: entries of the current TensorDict.
        outcomes: entries of what comes of a step.
        batch: the environment's batch size.
        dropped: places in the frame that the batch leaves out.
        own: what the collector writes itself, int64 ``[*batch]``.
        blank: shape and dtype of what is zero in the whole batch.
        done_follows: whether ``done`` follows from the other flags, and is not written at each step.
        roots_have_flags: whether flags of roots may be set, so that they are written at each step.
    """
    fields: dict[NestedKey, FrameField] = {}
    layout = BatchLayout(acts, [], fields, [], [], [])
    for key, entry in roots.items():
        fields[key] = _field(entry.shape, entry.dtype)
        if key not in FLAGS or roots_have_flags:  # else they follow from the rows of the batch
            layout.roots.append((key, key, entry.column))
    for key, entry in outcomes.items():
        fields[below_next(key)] = _field(entry.shape, entry.dtype)
        if key != "done" or not done_follows:
            layout.outcomes.append((key, below_next(key), entry.column))
    for key, (shape, dtype) in acts.items():
        if as_tuple(key)[0] == "next":
            layout.presets.append((key, unravel(as_tuple(key)[1:])))
        elif not is_private(key):
            fields[key] = _field(shape, dtype)
            layout.roots.append((key, key, False))
    for key, (shape, dtype) in blank.items():
        fields[key] = _field(shape, dtype)
    for key in own:
        fields[key] = _field(batch, np.dtype(np.int64))
    for key in [key for key in fields if key in dropped or is_private(key)]:
        del fields[key]
    kept = [[row for row in rows if row[1] in fields] for rows in (layout.roots, layout.outcomes)]
    return BatchLayout(acts, layout.presets, fields, kept[0], kept[1], [key for key in blank if key in fields])


def below_next(key: NestedKey) -> NestedKey:
    """The key of an entry's outcome.

    >>> below_next("observation"), below_next(("agent", "observation"))
    (('next', 'observation'), ('next', 'agent', 'observation'))
    """
    return unravel(("next", *as_tuple(key)))


def _field(shape: Sequence[int], dtype: np.dtype[Any]) -> FrameField:
    return FrameField(tuple(shape), torch.from_numpy(np.empty(0, dtype)).dtype, torch.device("cpu"))


def unfit(outputs: Values, roots: Collection[NestedKey], kind: type = np.ndarray) -> str | None:
    """Why a policy's outputs cannot lie in rows, all of one ``kind``, beside those of the environment, ``roots``."""
    for key, value in outputs.items():
        if not isinstance(value, kind):
            return f"it writes {key!r}, which is no {'array' if kind is np.ndarray else 'tensor'}"
        below = unravel(as_tuple(key)[1:]) if as_tuple(key)[0] == "next" else None
        if key in roots or (below is not None and below not in roots):
            return f"it writes {key!r}, beside what the environment has"
    return None


def difference(outputs: Values, acts: Mapping[NestedKey, tuple[Any, Any]], kind: type[Any] = np.ndarray) -> str | None:
    """What of a policy's outputs, all of one ``kind``, is not as it was in the first step of the batch, ``acts``."""
    for key, value in outputs.items():
        form = acts.get(key)
        if form is None or type(value) is not kind or value.shape != form[0] or value.dtype != form[1]:
            break
    else:
        if len(outputs) == len(acts):
            return None
    if outputs.keys() != acts.keys():
        return f"it writes {key_str(outputs)} after {key_str(acts)}"
    forms = {key: (getattr(value, "shape", None), getattr(value, "dtype", None)) for key, value in outputs.items()}
    varied = [key for key, form in forms.items() if form != acts[key]]
    return f"{varied[0]!r} varies in shape or dtype" if varied else None
