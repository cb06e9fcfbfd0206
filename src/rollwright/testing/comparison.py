"""Comparing TensorDicts to the bit, and environments with a seed that are closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_non_tensor, is_tensorclass

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright.envs.base import EnvBase

MakeEnv = Callable[[], EnvBase]


def differing_key(first: TensorDictBase, second: TensorDictBase) -> NestedKey | None:
    """The first key at which two TensorDicts differ in presence, shape, dtype or value (NaN equals NaN).

    Example:
        >>> from tensordict import TensorDict
        >>> a = TensorDict({"x": torch.zeros(2), "y": {"z": torch.zeros(2)}})
        >>> b = TensorDict({"x": torch.zeros(2), "y": {"z": torch.ones(2)}})
        >>> differing_key(a, a.clone()), differing_key(a, b)
        (None, ('y', 'z'))
    """
    if isinstance(first, LazyStackedTensorDict):  # its rows may differ in shape and in keys
        for one, other in zip(first.tensordicts, second.unbind(first.stack_dim), strict=True):
            key = differing_key(one, other)
            if key is not None:
                return key
        return None
    names = list(first.keys())
    unshared = set(names) ^ set(second.keys())
    if unshared:
        return str(min(unshared))
    for key in names:
        one, other = first.get(key), second.get(key)
        if isinstance(one, TensorDictBase) and not is_non_tensor(one):
            below = differing_key(one, other)
            if below is not None:
                return unravel((str(key), *as_tuple(below)))
        elif not _equal(one, other):
            return str(key)
    return None


def _equal(one: Any, other: Any) -> bool:
    if is_tensorclass(one) and not is_non_tensor(one):
        return type(one) is type(other) and differing_key(one.to_tensordict(), other.to_tensordict()) is None
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.is_nested, one.layout) != (other.is_nested, other.layout):
            return False
        if one.is_nested:
            return one.size(0) == other.size(0) and all(map(_equal, one.unbind(), other.unbind()))
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    return bool(_plain(one) == _plain(other))


def _plain(value: Any) -> Any:
    """The objects inside non-tensor data."""
    return value.tolist() if is_non_tensor(value) else value


def rows_of(env: EnvBase) -> list[tuple[int, ...]]:
    """The index of every environment in the batch, ``[()]`` where there is one."""
    return [tuple(index) for index in torch.ones(env.batch_size).nonzero().tolist()]


@contextmanager
def seeded(make_env: MakeEnv, seed: int) -> Iterator[EnvBase]:
    """An environment with its seed set, closed at the end."""
    env = make_env()
    try:
        env.set_seed(seed)
        yield env
    finally:
        env.close(raise_if_closed=False)
