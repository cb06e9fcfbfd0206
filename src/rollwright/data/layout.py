"""What a boundary is: the keys that mark where trajectories begin and end, and how to split on them.

======================================  =======================================================
``("next", "terminated")``              the task ended here: the value of the next state is zero
``("next", "truncated")``               something else cut it here (a time limit): bootstrap
``("next", "done")``                    ``terminated | truncated``: the last step of a trajectory
``"_reset"``                            asks an environment to begin anew; never leaves a collector
``("collector", "traj_ids")``           int64 name of the trajectory that a frame belongs to
``("collector", "mask")``               which frames of a padded batch are real
======================================  =======================================================

Environments with several agents may hold these flags below the root, one *group* for each place.
When the root holds a group, that group decides for the whole environment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_keys, as_tuple, key_str, unravel

__all__ = [
    "DoneGroup",
    "complete_done",
    "deciding_groups",
    "done_groups",
    "end_of_trajectory",
    "mark_truncated",
    "split_trajectories",
]

DONE, TERMINATED, TRUNCATED, RESET = "done", "terminated", "truncated", "_reset"


class DoneGroup(NamedTuple):
    """The boundary flags that live side by side at one place of a TensorDict.

    Attributes:
        prefix: the place, ``()`` for the root.
        truncated: None where the environment does not tell truncation from termination.
    """

    prefix: tuple[str, ...]
    done: NestedKey
    terminated: NestedKey
    truncated: NestedKey | None
    reset: NestedKey

    @property
    def keys(self) -> list[NestedKey]:
        """The done, terminated and (where there is one) truncated keys, each once."""
        named = (self.done, self.terminated, self.truncated)
        return [key for key in dict.fromkeys(named) if key is not None]


def done_groups(done_keys: Iterable[NestedKey]) -> list[DoneGroup]:
    """Sort boundary keys into groups, the root first, then by name.

    Example:
        >>> [group.prefix for group in done_groups([("agent", "done"), "done", "terminated"])]
        [(), ('agent',)]
    """
    places: dict[tuple[str, ...], list[str]] = {}
    for key in done_keys:
        *prefix, name = as_tuple(key)
        places.setdefault(tuple(prefix), []).append(name)
    return [_group(*item) for item in sorted(places.items(), key=lambda item: (len(item[0]), item[0]))]


def deciding_groups(groups: list[DoneGroup]) -> list[DoneGroup]:
    """The groups that decide when a trajectory ends: the root's alone where there is one, else all."""
    return groups[:1] if groups and groups[0].prefix == () else groups


def _group(prefix: tuple[str, ...], names: list[str]) -> DoneGroup:
    done, terminated = DONE, TERMINATED
    if not {DONE, TERMINATED, TRUNCATED} & set(names):
        done = terminated = min(names)  # a flag of another name, such as "env_done", stands for both
    return DoneGroup(
        prefix,
        unravel((*prefix, done)),
        unravel((*prefix, terminated)),
        unravel((*prefix, TRUNCATED)) if TRUNCATED in names else None,
        unravel((*prefix, RESET)),
    )


def complete_done(td: TensorDictBase, groups: Iterable[DoneGroup]) -> None:
    """Write in place the flags of each group that follow from those present.

    ``done = terminated | truncated``. A lone ``done`` counts as terminated, a lone ``truncated``
    as not terminated. A group of which nothing is present stays absent.
    """
    for group in groups:
        done = td.get(group.done, None)
        terminated = td.get(group.terminated, None)
        truncated = None if group.truncated is None else td.get(group.truncated, None)
        if done is not None and terminated is not None and (truncated is not None or group.truncated is None):
            continue
        known = next((flag for flag in (done, terminated, truncated) if flag is not None), None)
        if known is None:
            continue
        if terminated is None:
            if truncated is None:
                terminated = done.clone()
            else:
                terminated = torch.zeros_like(known) if done is None else done & ~truncated
            td.set(group.terminated, terminated)
        if truncated is None and group.truncated is not None:
            truncated = torch.zeros_like(known) if done is None else done & ~terminated
            td.set(group.truncated, truncated)
        if done is None:
            td.set(group.done, terminated.clone() if truncated is None else terminated | truncated)


def end_of_trajectory(td: TensorDictBase, groups: list[DoneGroup], batch_ndim: int) -> torch.Tensor:
    """Where a trajectory ends, one flag for each environment.

    Args:
        td: holds the ``done`` flags of ``groups``, each of shape ``[*batch, ...]``.
        groups: of :func:`done_groups`; see :func:`deciding_groups`.
        batch_ndim: number of leading dimensions that tell environments (and time) apart.

    Returns:
        bool ``[*batch]``: any flag of the environment is set.
    """
    ended: torch.Tensor | None = None
    for group in deciding_groups(groups):
        flag = _any_below(td.get(group.done), batch_ndim)
        ended = flag if ended is None else ended | flag
    if ended is None:
        return torch.zeros(td.batch_size[:batch_ndim], dtype=torch.bool, device=td.device)
    return ended


def _any_below(flag: torch.Tensor, batch_ndim: int) -> torch.Tensor:
    """Whether any flag is set below the batch dimensions, bool ``[*batch]``."""
    return flag.flatten(batch_ndim).any(-1) if flag.ndim > batch_ndim else flag


def mark_truncated(groups: Iterable[DoneGroup], outcome: TensorDictBase, batch_ndim: int) -> torch.Tensor:
    """Cut, in place, what has not ended by itself: ``truncated`` and ``done`` where neither flag was set.

    Args:
        groups: every one has a ``truncated`` flag.
        outcome: the content of ``"next"`` at one step, ``[*batch]``.
        batch_ndim: number of batch dimensions.

    Returns:
        bool ``[*batch]``: where a cut was made.

    Raises:
        RuntimeError: a group has no ``truncated`` flag.
    """
    cut_at: torch.Tensor | None = None
    for group in groups:
        if group.truncated is None:
            raise RuntimeError(
                f"set_truncated: there is no 'truncated' flag beside {group.done!r}. "
                "Call env.add_truncated_keys() first."
            )
        cut = ~outcome.get(group.done)
        outcome.get(group.truncated).logical_or_(cut)
        outcome.get(group.done).logical_or_(cut)
        cut = _any_below(cut, batch_ndim)
        cut_at = cut if cut_at is None else cut_at | cut
    return torch.zeros(outcome.batch_size[:batch_ndim], dtype=torch.bool) if cut_at is None else cut_at


def _trajectory_lengths(ids: torch.Tensor, ends: torch.Tensor | None) -> list[int]:
    """Lengths of the runs in ``[rows, T]`` data, row after row; a run ends with its row."""
    if ends is None:
        ends = torch.zeros_like(ids, dtype=torch.bool)
        ends[:, :-1] = ids[:, 1:] != ids[:, :-1]
    else:
        ends = ends.clone()
    ends[:, -1] = True
    stops = ends.flatten().nonzero().squeeze(-1) + 1
    return cast(list[int], torch.diff(stops, prepend=stops.new_zeros(1)).tolist())


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
        rollout_tensordict: batch ``[*env, T]``, time last. Every row is cut where its trajectory
            id changes, or after each ``done`` where there are no ids.
        prefix: where to look for ids and to put the mask; ``"collector"`` unless the batch has no
            such entry.
        trajectory_key: integer ids ``[*env, T]``; ``(prefix, "traj_ids")`` unless given.
        done_key: bool ``[*env, T, 1]``, read where there are no ids; ``("next", "done")`` unless given.
        as_nested: return a lazily stacked TensorDict whose rows have the lengths of their
            trajectories: nothing padded, no mask, and rows are views of the batch.

    Returns:
        ``[num_trajectories, longest]``, zero-padded, with ``(prefix, "mask")`` bool of the same
        shape (``"mask"`` at the root without a prefix) that is True on real frames; or, with
        ``as_nested=True``, ``[num_trajectories, -1]``. Trajectories are in order of environments,
        then of time. Frames that an interrupted rollout did not take (id -1) are left out.

    Raises:
        KeyError: when there are neither ids nor ``done`` flags to split on.
        ValueError: when there is no time dimension, or shapes vary from frame to frame and ``as_nested`` is not set.

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
        >>> [len(row) for row in split_trajectories(batch, as_nested=True)]
        [2, 3]
    """
    batch = rollout_tensordict
    if batch.ndim == 0:
        raise ValueError(
            "rollout_tensordict: expected a batch with a time dimension, got batch size []. "
            "Pass what a collector yields or what rollout() returns."
        )
    if prefix is None and batch.get("collector", None) is not None:
        prefix = "collector"
    ids_key = as_keys(trajectory_key)[0] if trajectory_key is not None else unravel((prefix or "collector", "traj_ids"))
    ids = batch.get(ids_key, None)
    if trajectory_key is not None and ids is None:
        raise KeyError(
            f"trajectory_key: the batch has no entry {ids_key!r}; it has {sorted(map(str, batch.keys(True)))}."
        )
    length = batch.batch_size[-1]
    if ids is not None:
        ends = None
        ids = ids.reshape(-1, length)
    else:
        done = batch.get(done_key if done_key is not None else ("next", DONE), None)
        if done is None:
            raise KeyError(
                f"Cannot split: the batch has neither {ids_key!r} nor ('next', 'done'). "
                "Collect with track_traj_ids=True, or name the entries with trajectory_key= or done_key=."
            )
        ends = _any_below(done, batch.ndim).reshape(-1, length)
        ids = ends
    lengths = torch.tensor(_trajectory_lengths(ids, ends), device=ids.device)
    starts = lengths.cumsum(0) - lengths
    if ends is None:
        taken = ids.flatten()[starts] >= 0
        lengths, starts = lengths[taken], starts[taken]
    frames = batch.reshape(-1)
    if as_nested:
        spans = zip(starts.tolist(), lengths.tolist(), strict=True)
        nested = LazyStackedTensorDict.lazy_stack([frames[start : start + n] for start, n in spans], 0)
        nested.names = [None, "time"]
        return nested
    return _pad(frames, starts, lengths, unravel((prefix, "mask")) if prefix else "mask")


def _pad(frames: TensorDictBase, starts: torch.Tensor, lengths: torch.Tensor, mask_key: NestedKey) -> TensorDictBase:
    """Rows ``frames[start : start + length]``, zero-padded to the longest, with a mask.

    Raises:
        ValueError: an entry is not in every frame, or its shape varies from frame to frame.
    """
    if isinstance(frames, LazyStackedTensorDict):
        steps = frames.unbind(0)
        frames = LazyStackedTensorDict.maybe_dense_stack(steps, 0)
        if isinstance(frames, LazyStackedTensorDict):
            raise ValueError(
                f"Cannot pad trajectories: {key_str(_varying(steps))} is not in every frame, or not of one shape. "
                "Call split_trajectories(batch, as_nested=True), on a batch collected without split_trajs."
            )
    time = torch.arange(int(lengths.max()), device=lengths.device)
    mask = time < lengths.unsqueeze(-1)
    padded = frames[starts.unsqueeze(-1) + torch.minimum(time, lengths.unsqueeze(-1) - 1)]
    if any(isinstance(value, LazyStackedTensorDict) for value in padded.values(True)):
        padded = padded.clone()  # a lazy stack is indexed by reference, so padding and real frames would be one
    padded[~mask] = padded[~mask].apply(torch.zeros_like)  # objects repeat the last real one
    padded.set(mask_key, mask)
    padded.names = [*[None] * (padded.ndim - 1), "time"]
    return padded


def _varying(steps: Iterable[TensorDictBase]) -> set[NestedKey]:
    """Keys that some frames lack, or whose shape differs between frames."""
    shapes = [{unravel(key): getattr(step.get(key), "shape", None) for key in step.keys(True, True)} for step in steps]
    return {key for shape in shapes for key in shape if any(other.get(key, ()) != shape[key] for other in shapes)}
