"""Functions on tensors as functions on arrays, and the array form of those that change one entry after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rollwright._keys import NestedKey
from rollwright.data.specs import Composite, TensorSpec
from rollwright.data.specs.gymspaces import numpy_dtype
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, Entry, Values
from rollwright.errors import EnvError, NotNative

Apply = Callable[[torch.Tensor], torch.Tensor]


def on_array(function: Apply) -> Callable[[Any], Any]:
    """A function of tensors, as one of arrays."""

    def call(value: Any) -> Any:
        array = np.asarray(value)
        return function(torch.from_numpy(array if array.flags.writeable else array.copy())).numpy()

    return call


def by_entries(
    name: str, env: ArrayEnv, pairs: list[tuple[NestedKey, NestedKey]], apply: Apply, specs: tuple[Composite, Composite]
) -> ArrayTransform:
    """The array form of a transform that changes each of some entries by a function.

    Args:
        name: of the transform, for messages.
        env: the environment that it follows.
        pairs: keys read and written, in order.
        apply: the function; it is given copies.
        specs: of observations and rewards after the transform, which say what ``apply`` returns.

    Raises:
        NotNative: an entry is neither an observation nor a reward.
    """
    entries: dict[NestedKey, Entry] = {}
    rewards: dict[NestedKey, Entry] = {}
    calls: list[tuple[NestedKey, NestedKey, Callable[[Any], Any]]] = []
    for key, out_key in pairs:
        of_reward = key in env.rewards or key in rewards
        known, made, spec = (
            ({**env.rewards, **rewards}, rewards, specs[1])
            if of_reward
            else ({**env.entries, **entries}, entries, specs[0])
        )
        if key not in known or out_key not in spec:
            raise NotNative(f"{name} changes {key!r}, which is neither an observation nor a reward")
        made[out_key] = found = _entry_of(name, spec[out_key], len(env.batch), of_reward or known[key].column)
        calls.append((key, out_key, _checked(name, out_key, apply, known[key], found)))
    of_observations = [call for call in calls if call[1] in entries]

    def step(root: Values, out: Values) -> None:
        for key, out_key, function in calls:
            out[out_key] = function(out[key])

    def reset(fresh: Values) -> None:
        for key, out_key, function in of_observations:
            fresh[out_key] = function(fresh[key])

    return ArrayTransform(entries, [], step, reset, rewards)


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
