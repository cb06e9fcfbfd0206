"""TensorDicts split into tensors for shared memory and the rest, and joined again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rollwright._keys import NestedKey, place

Nests = dict[tuple[str, ...], tuple[int, ...]]


def dense_leaves(td: TensorDictBase) -> tuple[dict[NestedKey, Tensor], Nests, bool]:
    """The tensors of a TensorDict by key, the batch sizes of those nested in it, and whether that is all of it."""
    leaves: dict[NestedKey, Tensor] = {}
    nests: Nests = {}
    complete = type(td) is TensorDict and _walk(td, (), leaves, nests)
    return leaves, nests, complete


def _walk(td: TensorDictBase, above: tuple[str, ...], leaves: dict[NestedKey, Tensor], nests: Nests) -> bool:
    complete = True
    for name, value in td.items():
        if isinstance(value, Tensor):
            if value.layout is torch.strided and not value.is_nested:
                leaves[(*above, name) if above else name] = value
            else:
                complete = False
        elif type(value) is TensorDict:
            nests[*above, name] = tuple(value.batch_size)
            complete &= _walk(value, (*above, name), leaves, nests)
        else:
            complete = False
    return complete


def nested(leaves: Mapping[NestedKey, Tensor], nests: Nests, batch: Any, device: Any = None) -> TensorDict:
    """The opposite of :func:`dense_leaves`."""
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        place(tree, key, value)
    td = TensorDict(tree, batch, device=device)
    for path, size in nests.items():
        inner = td.get(path, None)
        if inner is None:
            td.set(path, TensorDict({}, size, device=device))
        elif tuple(inner.batch_size) != size:
            inner.batch_size = size
    return td


def row_of(
    given: Mapping[NestedKey, Tensor], row: int, nests: Nests, batch: Any, rest: TensorDictBase | None
) -> TensorDictBase:
    """One row as a TensorDict of new tensors, with what went beside shared memory."""
    td = nested({key: rows[row].clone() for key, rows in given.items()}, nests, batch)
    if rest is None:
        return td
    return td.update(rest) if given else rest
