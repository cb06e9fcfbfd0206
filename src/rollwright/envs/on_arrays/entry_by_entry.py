"""Functions on tensors as functions on arrays, and the array form of those that change one entry after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rollwright._keys import NestedKey
from rollwright.data.specs import Composite, TensorSpec
from rollwright.data.specs.gymspaces import numpy_dtype
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, Entry, Rows, Values
from rollwright.errors import EnvError, NotNative

Apply = Callable[[torch.Tensor], torch.Tensor]


def on_array(function: Apply) -> Callable[[Any], Any]:
    """A function of tensors, as one of arrays."""

    def call(value: Any) -> Any:
        array = np.asarray(value)
        return function(torch.from_numpy(array if array.flags.writeable else array.copy())).numpy()

    return call


def by_entries(
    name: str,
    env: ArrayEnv,
    pairs: list[tuple[NestedKey, NestedKey]],
    change: Callable[[int, NestedKey, Entry, bool], tuple[Entry, Callable[..., Any]]],
    *,
    restarts: bool = False,
) -> ArrayTransform:
    """The array form of a transform that changes one entry after another.

    Args:
        name: of the transform, for messages.
        env: the environment that it follows.
        pairs: keys read and written, in order.
        change: for the place of a pair, the key that is written, the entry that is read, and whether that is a reward:
            what becomes of the entry, and the function of its values in row form.
        restarts: whether these functions take the rows of a reset, too.

    Raises:
        NotNative: an entry is neither an observation nor a reward.
    """
    entries: dict[NestedKey, Entry] = {}
    rewards: dict[NestedKey, Entry] = {}
    calls: list[tuple[NestedKey, NestedKey, Callable[..., Any]]] = []
    for index, (key, out_key) in enumerate(pairs):
        of_reward = key in env.rewards or key in rewards
        known, made = ({**env.rewards, **rewards}, rewards) if of_reward else ({**env.entries, **entries}, entries)
        if key not in known:
            raise NotNative(f"{name} changes {key!r}, which is neither an observation nor a reward")
        made[out_key], function = change(index, out_key, known[key], of_reward)
        calls.append((key, out_key, function))
    of_observations = [call for call in calls if call[1] in entries]

    def step(root: Values, out: Values) -> None:
        for key, out_key, function in calls:
            out[out_key] = function(out[key])

    def reset(fresh: Values, *rows: Rows | None) -> None:
        for key, out_key, function in of_observations:
            fresh[out_key] = function(fresh[key], *rows)

    return ArrayTransform(entries, [], step, reset, rewards, restart=reset if restarts else None)


def by_specs(
    name: str, apply: Apply, observations: Composite, rewards: Composite, ndim: int
) -> Callable[[int, NestedKey, Entry, bool], tuple[Entry, Callable[..., Any]]]:
    """A change for :func:`by_entries` by a function of tensors.

    Args:
        name: of the transform.
        apply: the function; it is given copies.
        observations: specs after the transform, which say what ``apply`` returns.
        rewards: likewise.
        ndim: dimensions of the batch.
    """

    def change(index: int, out_key: NestedKey, entry: Entry, of_reward: bool) -> tuple[Entry, Callable[..., Any]]:
        spec = rewards if of_reward else observations
        if out_key not in spec:
            raise NotNative(f"{name} writes {out_key!r}, which is neither an observation nor a reward")
        found = _entry_of(name, spec[out_key], ndim, of_reward or entry.column)
        return found, _checked(name, out_key, apply, entry, found)

    return change


def _entry_of(name: str, leaf: TensorSpec, batch_ndim: int, may_be_column: bool) -> Entry:
    if leaf.dtype is None or -1 in leaf.shape:
        raise NotNative(f"{name} writes what varies in shape, or objects")
    is_column = may_be_column and len(leaf.shape) == batch_ndim + 1 and leaf.shape[-1] == 1
    return Entry(tuple(leaf.shape), np.dtype(numpy_dtype(leaf.dtype)), is_column)


def _checked(name: str, key: NestedKey, apply: Apply, given: Entry, found: Entry) -> Callable[[Any], Any]:
    """``apply`` on values in row form, whose result is tested as that on TensorDicts is."""

    def call(value: Any) -> Any:
        result = apply(torch.from_numpy(np.array(value, given.dtype).reshape(given.shape))).numpy()
        if result.shape != found.shape or result.dtype != found.dtype:
            raise EnvError(
                f"{name}: its spec announces {key!r} as {found.dtype} {list(found.shape)}, got {result.dtype} "
                f"{list(result.shape)}. Correct transform_observation_spec or transform_reward_spec, or the result."
            )
        return result[..., 0][()] if found.column else result

    return call
