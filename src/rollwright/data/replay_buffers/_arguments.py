"""What a replay buffer is given: its parts, transforms, elements and places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

__all__ = ["Change", "dimension", "inverse_of", "made", "places", "stacked"]

Change = Callable[[Any], Any]


def made(name: str, given: Any, kind: type, default: Callable[[], Any]) -> Any:
    """A part of a buffer: given, made by a callable, or the default.

    Raises:
        TypeError: it is of another kind.
    """
    made = default() if given is None else given
    if not isinstance(made, kind) and callable(made):
        made = made()
    if not isinstance(made, kind):
        raise TypeError(
            f"{name}: expected a {kind.__name__} or a callable that makes one, got {type(made).__name__}: {made!r}."
        )
    return made


def dimension(name: str, value: int, ndim: int) -> int:
    """A dimension, counted from the front.

    Raises:
        ValueError: there is no such dimension.
    """
    if not isinstance(value, int) or not -ndim <= value < ndim:
        raise ValueError(f"{name}: expected a dimension of a storage of ndim={ndim}, got {value!r}.")
    return value % ndim


def inverse_of(change: Change) -> Change | None:
    """The inverse of a transform that has one."""
    parts = getattr(change, "transforms", None)
    if parts is not None:
        return cast(Any, change).inv if any(inverse_of(part) is not None for part in parts) else None
    if not (getattr(change, "in_keys_inv", None) or getattr(change, "_inverts", False)):
        return None
    return getattr(change, "inv", None)


def stacked(items: list[Any]) -> Any:
    """Elements as a batch, where they are tensors or TensorDicts; else the list."""
    if items and all(isinstance(item, TensorDictBase) for item in items):
        return LazyStackedTensorDict.maybe_dense_stack(items, 0)
    if items and all(isinstance(item, torch.Tensor) and item.shape == items[0].shape for item in items):
        return torch.stack(items)
    return items


def places(index: Any) -> Any:
    """An index with tensors in it, for NumPy."""
    if isinstance(index, tuple):
        return tuple(places(part) for part in index)
    return index.numpy(force=True) if isinstance(index, torch.Tensor) else index
