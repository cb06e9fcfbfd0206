"""Boundary flags, and runs: where trajectories begin and end; trajectories as views; sums of rewards of tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_keys, as_tuple, unravel
from rollwright._tensors import device_of

# As an environment names them, below "next" and at the root.
DONE, TERMINATED, TRUNCATED, RESET = "done", "terminated", "truncated", "_reset"
# As a batch holds them; rollwright.data.layout says what they mean.
IS_INIT = "is_init"
NEXT_DONE, NEXT_TERMINATED, NEXT_TRUNCATED = ("next", DONE), ("next", TERMINATED), ("next", TRUNCATED)
TRAJ_IDS, MASK = ("collector", "traj_ids"), ("collector", "mask")


class DoneGroup(NamedTuple):
    """The boundary flags that live side by side at one place of a TensorDict.

    Attributes:
        prefix: the place, ``()`` for the root.
        truncated: None where the environment does not distinguish truncation from termination.
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
    own = (done, terminated, TRUNCATED, RESET)
    keys: Sequence[NestedKey] = [(*prefix, name) for name in own] if prefix else own
    return DoneGroup(prefix, keys[0], keys[1], keys[2] if TRUNCATED in names else None, keys[3])


def complete_done(td: TensorDictBase, groups: Iterable[DoneGroup], *, may_contradict: bool = False) -> None:
    """Write in place the flags of each group that follow from those present.

    ``done = terminated | truncated``. A lone ``done`` counts as terminated, a lone ``truncated``
    as not terminated. A group of which nothing is present stays absent.

    Args:
        td: ``[*batch]``.
        groups: of its flags.
        may_contradict: where all of a group are present, ``terminated`` or ``truncated`` may be set without ``done``.
    """
    for group in groups:
        done = td.get(group.done, None)
        terminated = td.get(group.terminated, None)
        truncated = None if group.truncated is None else td.get(group.truncated, None)
        if done is not None and terminated is not None and (truncated is not None or group.truncated is None):
            if may_contradict:
                _follow_causes(td, group, done, terminated, truncated)
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


def _follow_causes(
    td: TensorDictBase, group: DoneGroup, done: torch.Tensor, terminated: torch.Tensor, truncated: torch.Tensor | None
) -> None:
    """Set ``done`` in place where one of its causes is."""
    causes = [flag for flag in (terminated, truncated) if flag is not None]
    if any(flag.shape != done.shape for flag in causes):  # which the check of entries reports
        return
    if done.numel() == 1 and (done.item() or not any(flag.item() for flag in causes)):  # cheaper than an operation
        return
    cause = terminated if truncated is None else terminated | truncated
    if not torch.equal(cause, done):
        td.set(group.done, done | cause)


def end_of_trajectory(td: TensorDictBase, groups: list[DoneGroup], batch_ndim: int) -> torch.Tensor:
    """Where a trajectory ends, one flag for each environment.

    Args:
        td: holds the ``done`` flags of ``groups``, each of shape ``[*batch, ...]``.
        groups: of :func:`done_groups`; see :func:`deciding_groups`.
        batch_ndim: number of leading dimensions that distinguish environments (and time).

    Returns:
        bool ``[*batch]``: any flag of the environment is set.
    """
    return any_of((td.get(group.done) for group in deciding_groups(groups)), td, batch_ndim)


def any_of(flags: Iterable[torch.Tensor], td: TensorDictBase, batch_ndim: int) -> torch.Tensor:
    """Whether any of some flags of a TensorDict is set, bool ``[*batch]``."""
    found = [any_below(flag, batch_ndim) for flag in flags]
    if not found:
        return torch.zeros(td.batch_size[:batch_ndim], dtype=torch.bool, device=device_of(td))
    return functools.reduce(torch.logical_or, found)


def any_below(flag: torch.Tensor, batch_ndim: int) -> torch.Tensor:
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
    cuts = []
    for group in groups:
        if group.truncated is None:
            raise RuntimeError(
                f"set_truncated: there is no 'truncated' flag beside {group.done!r}. "
                "Call env.add_truncated_keys() first."
            )
        cut = ~outcome.get(group.done)
        outcome.get(group.truncated).logical_or_(cut)
        outcome.get(group.done).logical_or_(cut)
        cuts.append(cut)
    return any_of(cuts, outcome, batch_ndim)


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


def summed_reward(td: TensorDictBase, key: NestedKey, ndim: int) -> torch.Tensor:
    """The reward of each step: where a row has one number for each of its tokens, their sum.

    Args:
        td: ``[*batch]``.
        key: of the reward.
        ndim: dimensions of a reward below the batch, where it is one number.

    Returns:
        ``[*batch, ...]``, with ``ndim`` dimensions below the batch.
    """
    if isinstance(td, LazyStackedTensorDict):
        rows: list[Any] = [summed_reward(row, key, ndim) for row in td.unbind(td.stack_dim)]
        return torch.stack(rows, td.stack_dim)
    reward: torch.Tensor = td.get(key)
    return reward.sum(td.batch_dims) if reward.ndim - td.batch_dims > ndim else reward


def take_token_rewards(td: TensorDictBase, key: NestedKey, ndim: int) -> list[tuple[TensorDictBase, torch.Tensor]]:
    """Put sums in place of rewards that have one number for each token.

    Args:
        td: ``[*batch]``, lazily stacked where there is any.
        key: of the reward.
        ndim: dimensions of a reward below the batch, where it is one number.

    Returns:
        The rows that had one, with it.
    """
    if not isinstance(td, LazyStackedTensorDict):
        reward = td.get(key, None)
        if not isinstance(reward, torch.Tensor) or reward.ndim - td.batch_dims <= ndim:
            return []
        td.set(key, reward.sum(td.batch_dims))
        return [(td, reward)]
    return [found for row in td.tensordicts for found in take_token_rewards(row, key, ndim)]
