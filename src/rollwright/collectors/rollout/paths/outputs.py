"""Outputs of a policy: what it wrote, moved into the current TensorDict; entries may be ragged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_tuple, unravel

Before = dict[NestedKey, Any] | list[Any]  # entries by key, or those of each row of a lazy stack


def entries(td: TensorDictBase, place: tuple[str, ...] = ()) -> Iterator[tuple[NestedKey, Any]]:
    """The leaves of a TensorDict; objects and stacks count as leaves.

    Raises:
        RuntimeError: it is a lazy stack with a ragged tensor, which has no common shape to be read with.
    """
    for key, value in td.items():
        if type(value) is TensorDict:
            yield from entries(value, (*place, key))
        else:
            yield unravel((*place, key)) if place else key, value


def entries_or_rows(td: TensorDictBase) -> Iterator[tuple[NestedKey, Any]]:
    """The leaves of a TensorDict; a ragged tensor as the list of its rows."""
    if not isinstance(td, LazyStackedTensorDict):
        yield from entries(td)
        return
    for key in td.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        try:
            yield unravel(key), td.get(key)
        except RuntimeError:
            yield unravel(key), [row.get(key) for row in td.unbind(0)]


def entry_keys(td: TensorDictBase) -> list[NestedKey]:
    """The keys of :func:`entries`, of all rows of a lazy stack; nothing is read."""
    if isinstance(td, LazyStackedTensorDict):
        return list(dict.fromkeys(key for row in td.tensordicts for key in entry_keys(row)))
    return [key for key, _ in entries(td)]


def entries_before(td: TensorDictBase) -> Before:
    """The leaves that a TensorDict holds before a policy is called with it."""
    if isinstance(td, LazyStackedTensorDict):
        return [entries_before(row) for row in td.tensordicts]
    return dict(entries(td))


def write_outputs(current: TensorDictBase, chosen: TensorDictBase, before: Before, *, fresh: bool) -> TensorDictBase:
    """Write what a policy has changed or added into the current TensorDict, in place.

    Args:
        current: ``[*env]``.
        chosen: what the policy returned, ``[*env]``; its rows may differ in shape.
        before: of :func:`entries_before`, of what the policy was called with.
        fresh: False where the policy overwrites its outputs at the next call: they are copied.

    Returns:
        ``current``; or a lazy stack of its rows, where rows of the outputs differ in shape and those before did not.
    """
    if isinstance(current, LazyStackedTensorDict):
        dim = current.stack_dim
        mine = isinstance(chosen, LazyStackedTensorDict) and chosen.stack_dim == dim
        rows = cast(LazyStackedTensorDict, chosen).tensordicts if mine else chosen.unbind(dim)
        for i, row in enumerate(rows):
            old = before[i] if isinstance(before, list) and mine else {}
            current.tensordicts[i] = write_outputs(current.tensordicts[i], row, old, fresh=fresh)
        return current
    try:
        written = list(entries(chosen))
    except RuntimeError:
        if not isinstance(chosen, LazyStackedTensorDict) or chosen.stack_dim >= current.ndim:
            raise
        dim = chosen.stack_dim
        rows_of_it = LazyStackedTensorDict(*current.unbind(dim), stack_dim=dim)
        return write_outputs(rows_of_it, chosen, before, fresh=fresh)
    old = before if isinstance(before, dict) else {}
    for key, value in written:
        if old.get(key) is not value or not isinstance(value, torch.Tensor):  # stacks are written into
            current.set(key, value if fresh else value.clone())
    return current


def changed_keys(td: TensorDictBase, before: Before) -> list[NestedKey]:
    """The entries that are not those of :func:`entries_before`, each once."""
    if isinstance(td, LazyStackedTensorDict):
        olds = before if isinstance(before, list) else [{}] * len(td.tensordicts)
        changed = [changed_keys(row, old) for row, old in zip(td.tensordicts, olds, strict=True)]
        return list(dict.fromkeys(key for keys in changed for key in keys))
    old = before if isinstance(before, dict) else {}
    return [key for key, value in entries(td) if old.get(key) is not value]


def has_entry(td: TensorDictBase, key: NestedKey) -> bool:
    """Whether there is an entry, which may be ragged; nothing is read."""
    if isinstance(td, LazyStackedTensorDict):
        return all(has_entry(row, key) for row in td.tensordicts)
    name, *below = as_tuple(key)
    if name not in td.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        return False
    return not below or has_entry(td.get(name), unravel(tuple(below)))


def remove_entry(td: TensorDictBase, key: NestedKey) -> None:
    """Take an entry out, which may be ragged, or may not be there."""
    if isinstance(td, LazyStackedTensorDict):
        for row in td.tensordicts:
            remove_entry(row, key)
        return
    name, *below = as_tuple(key)
    if name not in td.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        return
    if below:
        remove_entry(td.get(name), unravel(tuple(below)))
    else:
        td.del_(name)
