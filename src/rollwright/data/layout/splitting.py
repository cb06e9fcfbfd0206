"""Splitting a batch into rows, one a trajectory: padded, nested, with blank frames; and joining the rows again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, cast

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)

from rollwright._keys import NestedKey, as_tuple, key_str, leaf_keys, unravel, without
from rollwright.data.layout.boundaries import (
    MASK,
    TRAJ_IDS,
    Trajectories,
    check_rows,
    find_mask,
    mask_of,
    place_of,
    trajectory_runs,
)

_EMPTY = (str, bytes, bool, int, float, list, tuple, dict, set)


def blank_frame(
    frames: Sequence[TensorDictBase], *, ragged: Collection[NestedKey] = (), padding: float = 0.0, traj_id: float = -1
) -> TensorDictBase:
    """A frame of the form of others that holds nothing.

    Args:
        frames: at least one, all ``[*env]``; they have the same entries.
        ragged: entries whose first dimension has any size, whether or not it differs between these frames.
        padding: the value of tensors.
        traj_id: the value of trajectory ids.

    Returns:
        ``[*env]``, in memory of its own: tensors hold ``padding``, and are empty along dimensions whose size differs
        between frames or environments; text is ``""``, other objects are empty ones of their type, or None.

    Example:
        >>> frames = [TensorDict({"tokens": torch.arange(n), "x": torch.ones(2)}).set("text", "yes") for n in (1, 3)]
        >>> blank = blank_frame(frames)
        >>> blank["tokens"].shape, blank["x"], blank["text"]
        (torch.Size([0]), tensor([0., 0.]), '')
    """
    return cast(TensorDictBase, _Blanks(set(ragged), padding, traj_id).of(frames, (), frames[0].ndim))


def is_dense(frame: TensorDictBase) -> bool:
    """Whether all entries are tensors in plain TensorDicts."""
    values: Any = frame.values(True)
    return not isinstance(frame, LazyStackedTensorDict) and all(
        isinstance(value, torch.Tensor) or type(value) is TensorDict for value in values
    )


def stack_frames(frames: Sequence[TensorDictBase], dim: int, name: str | None = "time") -> TensorDictBase:
    """Frames in one TensorDict: densely where all entries have one shape, else lazily.

    Args:
        frames: at least one, ``[*env]``, or any rows.
        dim: where the new dimension is, and what a lazy stack of ragged frames is stacked along.
        name: of the new dimension.

    Returns:
        ``[*env, T]`` for ``dim=len(env)``; a copy where it is dense.
    """
    stacked: Any
    try:
        stacked = LazyStackedTensorDict.maybe_dense_stack(list(frames), dim)
    except RuntimeError:  # some frames are lazy stacks with ragged entries, and others are not
        stacked = None
    lazy = stacked is None or isinstance(stacked, LazyStackedTensorDict)
    if lazy and (stacked is None or stacked.stack_dim == dim or _varies(stacked)):
        # not rows of stacks, each ragged in itself; named at once, for names that are set later read every entry
        return LazyStackedTensorDict(*frames, stack_dim=dim, stack_dim_name=name)
    names = list(frames[0].names)
    stacked.names = [*names[:dim], name, *names[dim:]]
    return cast(TensorDictBase, stacked)


def _varies(stacked: LazyStackedTensorDict) -> bool:
    return any(isinstance(row, LazyStackedTensorDict) for row in stacked.tensordicts)


class _Blanks:
    def __init__(self, ragged: set[NestedKey], padding: float, traj_id: float) -> None:
        self._ragged, self._padding, self._traj_id = ragged, padding, traj_id

    def of(self, values: Sequence[Any], place: tuple[str, ...], ndim: int) -> Any:
        """The blank of one entry, given as it is in each frame; ``ndim``: dimensions of the environments."""
        like = values[-1]
        if isinstance(like, torch.Tensor):
            return self._tensor(values, unravel(place), ndim)
        if is_non_tensor(like):
            return _object(like)
        if is_tensorclass(like):
            inside = self.of([value._tensordict for value in values], place, ndim)
            return type(like)._from_tensordict(inside)
        if isinstance(like, LazyStackedTensorDict):
            return self._stack(values, like.stack_dim, place, ndim)
        out = TensorDict({}, like.batch_size, device=like.device)
        nodes = [dict(value.items()) for value in values]
        for key in nodes[-1]:
            entries = [node[key] for node in nodes if key in node]
            out.set(key, self.of(entries, (*place, str(key)), ndim))
        return out

    def _stack(self, values: Sequence[Any], dim: int, place: tuple[str, ...], ndim: int) -> Any:
        rows = [value.unbind(dim) for value in values]
        if dim < ndim:  # environments, whose sizes differ from one another as they do from frame to frame
            every = [row for each in rows for row in each]
            blanks = [self.of(every, place, ndim - 1) for _ in rows[-1]]
        else:  # agents, say: each has a form of its own
            blanks = [self.of(list(each), place, ndim) for each in zip(*rows, strict=True)]
        return LazyStackedTensorDict(*blanks, stack_dim=dim)

    def _tensor(self, values: Sequence[torch.Tensor], key: NestedKey, ndim: int) -> torch.Tensor:
        like = values[-1]
        if key == TRAJ_IDS:
            return torch.full_like(like, self._traj_id)
        shapes = {value.shape for value in values}
        shape = list(like.shape)
        for at in range(ndim, len(shape)):
            sizes = {other[at] for other in shapes if len(other) == len(shape)}
            if len(sizes) > 1 or (at == ndim and key in self._ragged):
                shape[at] = 0
        return like.new_full(shape, self._padding)


def _object(like: Any) -> Any:
    if isinstance(like, LazyStackedTensorDict):
        return NonTensorStack(*[_object(row) for row in like.tensordicts], stack_dim=like.stack_dim)
    kind = type(like.data)
    return NonTensorData(kind() if kind in _EMPTY else None, batch_size=like.batch_size, device=like.device)


_FORMS = ("as_list", "as_padded_tensor", "as_nested_tensor")
Offsets = dict[tuple[torch.device, tuple[int, ...]], torch.Tensor]


class NestedTrajectories(LazyStackedTensorDict):
    """Trajectories ``[length]`` one above the other, ``[num_trajectories, -1]``; :func:`of` makes it.

    A row is a TensorDict of its own length. An entry is a nested tensor ``[num_trajectories, j, ...]`` of the layout
    ``torch.jagged``, also where all lengths are equal; all entries have the same ``j``, so they can be added, compared,
    and so on. Reading an entry copies; rows share their memory. An entry that varies beyond the length is read with
    ``get(key, as_list=True)``. Objects are as in any lazy stack.

    Example:
        >>> from tensordict import TensorDict
        >>> rows = [TensorDict({"x": torch.ones(n), "next": {"done": torch.ones(n, 1) > 0}}, [n]) for n in (1, 2)]
        >>> nested = NestedTrajectories.of(rows)
        >>> nested["x"].to_padded_tensor(0.0)
        tensor([[1., 0.],
                [1., 1.]])
        >>> nested["next", "done"].is_nested, nested[1]["x"]
        (True, tensor([1., 1.]))
    """

    offsets: Offsets | None = None  # by device and lengths; rows below are of the same lengths, and share them

    @classmethod
    def of(cls, rows: Sequence[TensorDictBase]) -> NestedTrajectories:
        """The stack of some trajectories, which are not copied."""
        return cls(*rows, stack_dim=0)

    # Every read of an entry calls this.
    def _get_str(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        if any(kwargs.get(form) for form in _FORMS):
            return super()._get_str(key, *args, **kwargs)
        found = super()._get_str(key, *args, **{**kwargs, "as_list": True})
        if type(found) is LazyStackedTensorDict:
            below = NestedTrajectories.of(found.tensordicts)
            below.offsets = self._known_offsets()
            return below
        if isinstance(found, list) and any(isinstance(value, list) for value in found):
            found = [row._get_str(key, *args) for row in self.tensordicts]  # rows that are lazy stacks themselves
        if not isinstance(found, list) or not all(isinstance(value, torch.Tensor) for value in found):
            return found
        if len({value.shape[1:] for value in found}) > 1:
            return super()._get_str(key, *args, **kwargs)  # which says how such an entry is read
        lengths = [row.batch_size[0] for row in self.tensordicts]
        return torch.nested.nested_tensor_from_jagged(
            torch.cat(found),
            self._offsets_on(found[0].device),
            min_seqlen=min(lengths),
            max_seqlen=max(lengths),  # without it, torch pads to the sum of all
        )

    def _known_offsets(self) -> Offsets:
        if self.offsets is None:
            self.offsets = {}
        return self.offsets

    def _offsets_on(self, device: torch.device) -> torch.Tensor:
        """Where rows begin; torch takes nested tensors for alike where this is one object."""
        lengths = tuple(row.batch_size[0] for row in self.tensordicts)
        known = self._known_offsets()
        if (device, lengths) not in known:
            known[device, lengths] = torch.tensor([0, *lengths], device=device).cumsum(0)
        return known[device, lengths]

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if type(found) is LazyStackedTensorDict and found.ndim == self.ndim and found.stack_dim == 0:
            return NestedTrajectories.of(found.tensordicts)
        return found

    def to_padded_tensor(self, padding: float = 0.0, mask_key: Any = None) -> Any:
        """All entries, padded at the end: ``[num_trajectories, longest]``, in memory of its own.

        Args:
            padding: the value; see :func:`~rollwright.data.layout.blank_frame` of text and objects.
            mask_key: where to put the mask, bool of that shape, True on real frames; None: nowhere.

        Raises:
            RuntimeError: an entry varies beyond the length.
        """
        lengths = torch.tensor([row.batch_size[0] for row in self.tensordicts], device="cpu")
        longest = int(lengths.max())
        rows: list[TensorDictBase] = []
        for row in self.tensordicts:
            missing = longest - row.batch_size[0]
            if not missing:
                rows.append(row.clone())
                continue
            blank = blank_frame([row[-1]], padding=padding, traj_id=padding)
            if is_dense(row):
                rest = blank.unsqueeze(0).expand(missing)
                rest.names = row.names
                rows.append(cast(TensorDictBase, torch.cat(cast(Any, [row, rest]))))
            else:
                rows.append(stack_frames([*row.unbind(0), *[blank] * missing], 0, row.names[0]))
        padded = cast(TensorDictBase, LazyStackedTensorDict.maybe_dense_stack(cast(Any, rows), 0))
        padded.names = [None, "time"]
        if mask_key is not None:
            padded.set(
                mask_key, (torch.arange(longest, device="cpu") < lengths.unsqueeze(-1)).to(padded.device or "cpu")
            )
        return padded


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: str | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    as_nested: bool = False,
) -> TensorDictBase:
    """Split a batch of frames into its trajectories.

    Args:
        rollout_tensordict: batch ``[*env, T]``, time last, cut as
            :func:`~rollwright.data.layout.trajectory_runs` says.
        prefix: where to look for ids and to put the mask; ``"collector"`` unless the batch has no
            such entry.
        trajectory_key: integer ids ``[*env, T]``; ``(prefix, "traj_ids")`` unless given.
        done_key: bool ``[*env, T, 1]``, read where there are no ids, below ``"next"`` or, where it is not there, at
            the root; ``"done"`` unless given.
        as_nested: return a lazily stacked TensorDict whose rows have the lengths of their
            trajectories: nothing padded, no mask, and rows are views of the batch. Entries are read as
            nested tensors, ``split["next", "done"].to_padded_tensor(0.0)``; see
            :class:`~rollwright.data.layout.NestedTrajectories`.

    Returns:
        ``[num_trajectories, longest]``, zero-padded, with ``(prefix, "mask")`` bool of the same
        shape (``"mask"`` at the root without a prefix) that is True on real frames; or, with
        ``as_nested=True``, ``[num_trajectories, -1]``. In padding, text is ``""`` and ragged tensors are empty;
        where shapes vary from frame to frame, the result is a lazy stack along time. Trajectories are in
        order of environments, then of time. Frames that an interrupted rollout did not take (id -1) are left out.

    Raises:
        KeyError: when there are neither ids nor ``done`` flags to split on.
        ValueError: when there is no time dimension, or an entry is not in every frame and ``as_nested`` is not set.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict(
        ...     {"x": torch.arange(5), "collector": {"traj_ids": torch.tensor([0, 0, 1, 1, 1])}}, [5]
        ... )
        >>> split = split_trajectories(batch)
        >>> split["x"]
        tensor([[0, 1, 0],
                [2, 3, 4]])
        >>> split["collector", "mask"].sum(-1)
        tensor([2, 3])
        >>> nested = split_trajectories(batch, as_nested=True)
        >>> [len(row) for row in nested], nested["x"].is_nested
        ([2, 3], True)
    """
    batch = rollout_tensordict
    check_rows("rollout_tensordict", batch)
    prefix = place_of(batch, prefix)
    runs = trajectory_runs(batch, prefix=prefix, trajectory_key=trajectory_key, done_key=done_key)
    mask = mask_of(prefix)
    if as_nested:
        views = Trajectories(batch if find_mask(batch, prefix) is None else without(batch, mask), runs)
        nested = NestedTrajectories.of(list(views))
        nested.names = [None, "time"]
        return nested
    return pad_trajectories(batch.reshape(-1), runs.rows * batch.batch_size[-1] + runs.starts, runs.lengths, mask)


def join_trajectories(
    split: TensorDictBase | Iterable[TensorDictBase], *, mask_key: NestedKey | None = None
) -> TensorDictBase:
    """Concatenate trajectories into the flat layout: the inverse of :func:`split_trajectories`.

    ``join_trajectories(split_trajectories(batch)) == batch.reshape(-1)``, less the frames that were not taken.

    Args:
        split: padded ``[trajectories, T]`` with its mask, nested ``[trajectories, -1]``, or any sequence of
            trajectories ``[length]``, such as :func:`~rollwright.data.layout.trajectories` gives.
        mask_key: bool ``[trajectories, T]`` or ``[trajectories, T, 1]``, True on real frames; ``("collector",
            "mask")``, or ``"mask"``, unless given. The result is without it.

    Returns:
        ``[N]``, ``N`` the number of real frames, in memory of its own.

    Raises:
        KeyError: a padded batch has no mask.
        ValueError: it has other dimensions than trajectories and time, the mask is of another shape, or there is no
            trajectory.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"x": torch.arange(3), "next": {"done": torch.tensor([[True], [False], [False]])}}, [3])
        >>> join_trajectories(split_trajectories(batch))["x"]
        tensor([0, 1, 2])
    """
    if not isinstance(split, TensorDictBase):
        return _concatenate(list(split))
    if split.ndim != 2:
        raise ValueError(
            f"split: expected the dimensions [trajectories, T], got batch size {list(split.batch_size)}. Pass what "
            "split_trajectories returns."
        )
    key = None if -1 in split.batch_size else _find_mask(split, mask_key)
    if key is None:
        return _concatenate(list(split.unbind(0)))
    mask = split.get(key)
    if mask.shape == (*split.batch_size, 1):
        mask = mask.squeeze(-1)
    if mask.shape != split.batch_size or mask.dtype != torch.bool:
        raise ValueError(
            f"mask_key: expected {key!r} to be bool {list(split.batch_size)}, got {mask.dtype} {list(mask.shape)}. "
            "Name the entry that tells real frames from padding."
        )
    joined: TensorDictBase = without(split, key)[mask]
    *place, _ = as_tuple(key)
    if place and joined.get(unravel(tuple(place))).is_empty():
        joined = joined.exclude(unravel(tuple(place)))  # made for the mask
    joined.names = ["time"]
    return joined


def _find_mask(split: TensorDictBase, named: NestedKey | None) -> NestedKey | None:
    """The key of the mask; None for a lazy stack of rows that happen to have one length, and no mask."""
    keys: list[NestedKey] = [MASK, "mask"] if named is None else [unravel(named)]
    found = next((key for key in keys if split.get(key, None) is not None), None)
    if found is None and (named is not None or not isinstance(split, LazyStackedTensorDict)):
        raise KeyError(
            f"split: expected a mask, {' or '.join(map(repr, keys))}, that tells real frames from padding, and there "
            "is none. Pass what split_trajectories returns, or name the mask with mask_key=."
        )
    return found


def _concatenate(rows: list[TensorDictBase]) -> TensorDictBase:
    if not rows:
        raise ValueError("split: expected at least one trajectory, got none.")
    joined = cast(TensorDictBase, torch.cat(cast(Any, rows)))
    joined.names = ["time"]
    return joined


def pad_trajectories(
    frames: TensorDictBase, starts: torch.Tensor, lengths: torch.Tensor, mask_key: NestedKey
) -> TensorDictBase:
    """Rows ``frames[start : start + length]``, padded to the longest, with a mask.

    Args:
        frames: ``[N]``.
        starts: int64 ``[n]``.
        lengths: int64 ``[n]``, at least 1.
        mask_key: where to put the mask, bool ``[n, longest]``.

    Returns:
        ``[n, longest]``, in memory of its own; lazily stacked along time where shapes vary from frame to frame. Padding
        holds nothing: see :func:`~rollwright.data.layout.blank_frame`.

    Raises:
        ValueError: an entry is not in every frame.
    """
    time = torch.arange(int(lengths.max()) if len(lengths) else 0, device=lengths.device)
    mask = time < lengths.unsqueeze(-1)
    if len(lengths) and not is_dense(frames):
        padded = _stacked_and_padded(list(frames.unbind(0)), starts.tolist(), lengths.tolist())
    else:
        padded = frames[starts.unsqueeze(-1) + torch.minimum(time, lengths.unsqueeze(-1) - 1)]
        padded[~mask] = padded[~mask].apply(torch.zeros_like)
        padded.names = [None, "time"]
    padded.set(mask_key, mask)
    return padded


def _stacked_and_padded(frames: list[TensorDictBase], starts: list[int], lengths: list[int]) -> TensorDictBase:
    """The rows of :func:`pad_trajectories`, where frames hold more than tensors, or differ in shape."""
    first, *others = [set(leaf_keys(frame)) for frame in frames]
    if lacking := first.union(*others) - first.intersection(*others):
        raise ValueError(
            f"Cannot pad trajectories: {key_str(lacking)} is not in every frame. Call split_trajectories(batch, "
            "as_nested=True), on a batch collected without split_trajs."
        )
    blank = blank_frame(frames, traj_id=0)
    columns = []
    for t in range(max(lengths)):
        rows = [
            (frames[start + t] if t < length else blank).clone() for start, length in zip(starts, lengths, strict=True)
        ]
        columns.append(stack_frames(rows, 0, None))
    return stack_frames(columns, 1)
