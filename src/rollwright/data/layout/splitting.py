"""Splitting a batch into rows, one a trajectory, and joining the rows again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, key_str, leaf_keys, unravel, without
from rollwright.data.layout.boundaries import MASK
from rollwright.data.layout.frames import blank_frame, is_dense, stack_frames
from rollwright.data.layout.nested import NestedTrajectories
from rollwright.data.layout.runs import Trajectories, check_rows, find_mask, mask_of, place_of, trajectory_runs


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
