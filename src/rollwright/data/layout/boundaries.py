"""Boundary flags: what they are called, how they follow from one another, where they end a trajectory."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_tuple
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
