"""Runs: ranges of consecutive frames of one trajectory; and trajectories as views over the flat layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys, as_tuple, unravel
from rollwright.data.layout.boundaries import (
    DONE,
    IS_INIT,
    MASK,
    NEXT_DONE,
    TERMINATED,
    TRUNCATED,
    any_below,
    done_groups,
    end_of_trajectory,
)


class Runs(NamedTuple):
    """Runs of frames in a batch ``[*env, T]``, in order of environments, then of time.

    A run is a whole trajectory, or the part of one that lies in the batch.

    Attributes:
        rows: int64 ``[n]``, the environment, as index into the flattened ``*env``.
        starts: int64 ``[n]``, the time of the first frame.
        lengths: int64 ``[n]``, at least 1.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor


def trajectory_runs(
    batch: TensorDictBase,
    *,
    prefix: str | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
) -> Runs:
    """Where the trajectories of a batch lie, without a loop over its frames.

    A run ends where the trajectory id changes, before a frame marked ``is_init``, and with its row; where there are no
    ids, after a frame that is done. Frames with a negative id and frames that a mask leaves out are in no run.

    Args:
        batch: ``[*env, T]``, time last.
        prefix: where ids and mask are; ``"collector"`` unless the batch has no such entry, then its root.
        trajectory_key: integer ids ``[*env, T]`` that decide alone, ``is_init`` left aside; ``(prefix, "traj_ids")``,
            together with ``is_init``, unless given.
        done_key: bool ``[*env, T, ...]``, read where there are no ids, below ``"next"`` or, where it is not there, at
            the root; ``"done"`` unless given, or the flags of the agents where there is none.

    Raises:
        KeyError: an entry that was named is missing, or there are neither ids nor flags.
        ValueError: the batch has no dimension of time, or rows of different lengths.

    Example:
        >>> from tensordict import TensorDict
        >>> ids = torch.tensor([[0, 0, 2], [1, 1, 1]])
        >>> rows, starts, lengths = trajectory_runs(TensorDict({"collector": {"traj_ids": ids}}, [2, 3]))
        >>> rows.tolist(), starts.tolist(), lengths.tolist()
        ([0, 0, 1], [0, 2, 0], [2, 1, 3])
    """
    ends, taken = find_ends(batch, prefix, trajectory_key, done_key)
    stops = ends.flatten().nonzero().squeeze(-1) + 1
    lengths = torch.diff(stops, prepend=stops.new_zeros(1))
    offsets = stops - lengths
    if taken is not None:
        real = taken.flatten()[offsets]
        offsets, lengths = offsets[real], lengths[real]
    steps = max(1, batch.batch_size[-1])
    return Runs(offsets // steps, offsets % steps, lengths)


def last_steps(
    batch: TensorDictBase,
    *,
    prefix: str | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
) -> torch.Tensor:
    """Bool ``[*env, T]``: the last frame of every run; sums over time stop there, whatever the flags say.

    Arguments and errors are those of :func:`trajectory_runs`.

    Example:
        >>> from tensordict import TensorDict
        >>> done = torch.tensor([[False], [True], [False], [False]])
        >>> last_steps(TensorDict({"next": {"done": done}}, [4]))
        tensor([False,  True, False,  True])
    """
    ends, taken = find_ends(batch, prefix, trajectory_key, done_key)
    return (ends if taken is None else ends & taken).reshape(batch.batch_size)


def check_rows(name: str, batch: TensorDictBase) -> None:
    """Test that a batch has rows of one length.

    Raises:
        ValueError: it has not; the message names the argument ``name``.
    """
    if batch.ndim == 0 or -1 in batch.batch_size:
        raise ValueError(
            f"{name}: expected a batch with a time dimension, and rows of one length, got batch size "
            f"{list(batch.batch_size)}. Pass what a collector yields or what rollout() returns."
        )


def find_ends(
    batch: TensorDictBase, prefix: str | None, trajectory_key: NestedKey | None, done_key: NestedKey | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bool ``[rows, T]``: where a run ends; and which frames are real, None where all of them are."""
    check_rows("batch", batch)
    shape = (batch.batch_size[:-1].numel(), batch.batch_size[-1])
    prefix = place_of(batch, prefix)
    ids = _ids(batch, prefix, trajectory_key)
    if ids is not None:
        ids = ids.reshape(shape)
        ends = torch.zeros_like(ids, dtype=torch.bool)
        ends[:, :-1] = ids[:, 1:] != ids[:, :-1]
    else:
        ends = _done(batch, done_key, prefix).reshape(shape).clone()
    first = batch.get(IS_INIT, None) if trajectory_key is None else None
    if first is not None:
        ends[:, :-1] |= any_below(first, batch.ndim).reshape(shape)[:, 1:]
    taken = None if ids is None or bool((ids >= 0).all()) else ids >= 0
    mask = find_mask(batch, prefix)
    if mask is not None:
        mask = mask.reshape(shape)
        taken = mask if taken is None else mask & taken
    if taken is not None:
        ends[:, :-1] |= taken[:, 1:] != taken[:, :-1]
    ends[:, -1:] = True
    return ends, taken


def place_of(batch: TensorDictBase, prefix: str | None) -> str | None:
    """Where ids and mask are: the prefix asked for, else ``"collector"`` where there is one, else the root."""
    return "collector" if prefix is None and batch.get("collector", None) is not None else prefix


def mask_of(prefix: str | None) -> NestedKey:
    """The mask's key: below the prefix, or at the root."""
    return unravel((prefix, "mask")) if prefix else "mask"


def find_mask(batch: TensorDictBase, prefix: str | None) -> torch.Tensor | None:
    """The mask of a padded batch, bool ``[*env, T]`` or ``[*env, T, 1]``, as ``[*env, T]``.

    An entry of another shape or dtype, such as an action mask, is none.

    Raises:
        ValueError: it is below ``"collector"``, where there can be no other.
    """
    key = mask_of(prefix)
    mask: torch.Tensor | None = batch.get(key, None)
    if mask is None:
        return None
    fits = isinstance(mask, torch.Tensor) and mask.dtype == torch.bool
    if fits and mask.shape in (batch.batch_size, (*batch.batch_size, 1)):
        return mask.reshape(batch.batch_size)
    if key == MASK:
        shape = list(batch.batch_size)
        raise ValueError(
            f"{key!r}: expected bool {shape} or {[*shape, 1]}, True on real frames, got "
            f"{getattr(mask, 'dtype', type(mask).__name__)} {list(getattr(mask, 'shape', ()))}. Convert it, or call it "
            "something else."
        )
    return None


def _ids(batch: TensorDictBase, prefix: str | None, trajectory_key: NestedKey | None) -> torch.Tensor | None:
    key = (prefix or "collector", "traj_ids") if trajectory_key is None else as_keys(trajectory_key)[0]
    ids: torch.Tensor | None = batch.get(key, None)
    if ids is None and trajectory_key is not None:
        raise KeyError(f"trajectory_key: the batch has no entry {key!r}; it has {sorted(map(str, batch.keys(True)))}.")
    return ids


def _done(batch: TensorDictBase, done_key: NestedKey | None, prefix: str | None) -> torch.Tensor:
    named: list[NestedKey] = [NEXT_DONE] if done_key is None else [unravel(("next", *as_tuple(done_key))), done_key]
    done = next((flag for flag in (batch.get(key, None) for key in named) if flag is not None), None)
    if done is not None:
        return any_below(done, batch.ndim)
    outcome = batch.get("next", None) if done_key is None else None
    if outcome is not None:
        flags = [key for key in outcome.keys(True, True) if as_tuple(key)[-1] in (DONE, TERMINATED, TRUNCATED)]
        groups = [group for group in done_groups(flags) if group.done in outcome.keys(True)]
        if groups:
            return end_of_trajectory(outcome, groups, batch.ndim)
    raise KeyError(
        f"Cannot split: the batch has neither {(prefix or 'collector', 'traj_ids')!r} nor "
        f"{named[0]!r}. "
        "Collect with track_traj_ids=True, or name the entries with trajectory_key= or done_key=."
    )


class Trajectories(Sequence[TensorDictBase]):
    """The trajectories of a batch: a sequence of views ``[length]``, made when they are asked for.

    Nothing is copied: what is written into a view is written into the batch. :func:`trajectories` makes it.

    Args:
        batch: ``[*env, T]``, time last.
        runs: where its trajectories lie.
    """

    def __init__(self, batch: TensorDictBase, runs: Runs) -> None:
        self._batch = batch
        self.runs = runs
        self._spans = torch.stack(runs, -1).tolist()

    @property
    def lengths(self) -> torch.Tensor:
        """int64 ``[trajectories]``."""
        return self.runs.lengths

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> TensorDictBase: ...

    @overload
    def __getitem__(self, index: slice) -> Trajectories: ...

    def __getitem__(self, index: int | slice) -> TensorDictBase | Trajectories:
        """One trajectory, or the sequence of some of them."""
        if isinstance(index, slice):
            kept = torch.tensor(range(len(self))[index], dtype=torch.int64, device=self.lengths.device)
            return Trajectories(self._batch, Runs(*(column[kept] for column in self.runs)))
        row, start, length = self._spans[index]
        env = map(int, np.unravel_index(row, self._batch.batch_size[:-1])) if self._batch.ndim > 1 else ()
        return self._batch[(*env, slice(start, start + length))]

    def __repr__(self) -> str:
        return f"Trajectories({len(self)} of {sum(span[2] for span in self._spans)} frames)"


def trajectories(
    batch: TensorDictBase,
    *,
    prefix: str | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
) -> Trajectories:
    """The trajectories of a batch ``[*env, T]``, as views ``[length]`` in order of environments, then of time.

    Arguments and errors are those of :func:`~rollwright.data.layout.trajectory_runs`.

    Example:
        >>> from tensordict import TensorDict
        >>> done = torch.tensor([[False], [True], [False]])
        >>> batch = TensorDict({"reward": torch.ones(3), "next": {"done": done}}, [3])
        >>> whole = trajectories(batch)
        >>> whole, [trajectory["reward"].sum().item() for trajectory in whole]
        (Trajectories(2 of 3 frames), [2.0, 1.0])
        >>> _ = whole[1]["reward"].zero_()
        >>> batch["reward"]
        tensor([1., 1., 0.])
    """
    runs = trajectory_runs(batch, prefix=prefix, trajectory_key=trajectory_key, done_key=done_key)
    return Trajectories(batch, runs)
