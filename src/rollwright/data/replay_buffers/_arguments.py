"""Checked arguments of replay buffers: their parts, transforms and elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright.data.replay_buffers.limiter import SampleToInsertRatio

__all__ = ["Transform", "check_given", "dimension", "inverse_of", "made", "stacked"]

Transform = Callable[[Any], Any]


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


def check_given(
    collate_fn: Any, transform: Any, transform_factory: Any, generator: Any, limiter: Any, *, pin_memory: bool
) -> None:
    """Refuse arguments of a buffer that it could not work with; see :class:`ReplayBuffer`.

    Raises:
        ValueError, TypeError: one is of another kind, or two contradict one another.
    """
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn: expected a callable, got {type(collate_fn).__name__}.")
    if transform is not None and transform_factory is not None:
        raise ValueError("transform and transform_factory were both given. Pass one of them.")
    if transform_factory is not None and not callable(transform_factory):
        raise TypeError(f"transform_factory: expected a callable, got {transform_factory!r}.")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: expected a torch.Generator, got {generator!r}.")
    if limiter is not None and not isinstance(limiter, SampleToInsertRatio):
        raise TypeError(f"limiter: expected a SampleToInsertRatio, got {type(limiter).__name__}: {limiter!r}.")
    if pin_memory and not torch.cuda.is_available():
        raise ValueError("pin_memory: torch sees no CUDA device to pin memory for. Leave it out.")


def dimension(name: str, value: int, ndim: int) -> int:
    """A dimension, counted from the front.

    Raises:
        ValueError: there is no such dimension.
    """
    if not isinstance(value, int) or not -ndim <= value < ndim:
        raise ValueError(f"{name}: expected a dimension of a storage of ndim={ndim}, got {value!r}.")
    return value % ndim


def inverse_of(change: Transform) -> Transform | None:
    """The inverse of a transform that has one, of this library or of another.

    Ours know whether there is anything to invert. Those of others are asked with all data: ``inv`` returns as they are
    what it has nothing to do with.

    Raises:
        TypeError: a transform has an inverse that cannot be called.
    """
    is_ours = hasattr(change, "inverts")
    parts = getattr(change, "transforms", None)
    if is_ours and parts is not None:
        return cast(Any, change).inv if any(inverse_of(part) is not None for part in parts) else None
    if is_ours and not (getattr(change, "in_keys_inv", None) or cast(Any, change).inverts):
        return None
    inverse: Transform | None = getattr(change, "inv", None)
    if callable(inverse):
        return inverse
    named = [name for name in ("_inv_call", "_inv_apply_transform") if callable(getattr(change, name, None))]
    if named:
        raise TypeError(
            f"transform: {type(change).__name__} has an inverse ({', '.join(named)}), and no method inv() that takes a "
            "batch: what is written would not be inverted. Give it one, or pass a function without."
        )
    return None


def stacked(items: list[Any]) -> Any:
    """Elements as a batch, where they are tensors or TensorDicts; else the list."""
    if items and all(isinstance(item, TensorDictBase) for item in items):
        return LazyStackedTensorDict.maybe_dense_stack(items, 0)
    if items and all(isinstance(item, torch.Tensor) and item.shape == items[0].shape for item in items):
        return torch.stack(items)
    return items
