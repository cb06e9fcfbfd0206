"""TimeMaxPool: the greatest of the last values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys
from rollwright.data.specs import Bounded, Composite, TensorSpec
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, Entry, Rows, Values
from rollwright.envs.transforms.base import KeySeq, Transform, map_spec
from rollwright.errors import NotNative

__all__ = ["TimeMaxPool"]


class TimeMaxPool(Transform):
    """Takes the greatest of each element's last ``T`` values in the trajectory.

    What is missing at the begin of a trajectory counts as zeros: values below zero appear once there are ``T``. The
    past values are buffers of the transform, part of ``state_dict()``; each row of a batch has its own.

    Args:
        in_keys: observations; default ``["observation"]``.
        out_keys: where to write; default: ``in_keys``.
        T: number of values to look at.
        reset_key: ``"_reset"`` entry that begins them again; None: that of the environment, or of the group of agents
            that the observation is of.

    Raises:
        ValueError: ``T`` is no integer of at least 1.

    Example:
        >>> from rollwright.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("Pendulum-v1"), TimeMaxPool(["observation"], ["greatest"], T=4))
        >>> rollout = env.rollout(6)
        >>> bool((rollout["greatest"][5] == rollout["observation"][2:6].amax(0)).all())
        True
    """

    def __init__(
        self, in_keys: KeySeq = None, out_keys: KeySeq = None, T: int = 1, reset_key: NestedKey | None = None
    ) -> None:
        super().__init__("observation" if in_keys is None else in_keys, out_keys)
        if not isinstance(T, int) or isinstance(T, bool) or T < 1:
            raise ValueError(f"T: expected an integer of at least 1, got {T!r}.")
        self._pairs()
        self.T = T
        self.reset_key = None if reset_key is None else as_keys(reset_key)[0]
        for index in range(len(self.in_keys)):
            self.register_buffer(f"values_{index}", None)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        for index, (in_key, out_key) in enumerate(self._pairs()):
            next_tensordict.set(out_key, self._next(index, self._read(next_tensordict, in_key), in_key))
        return next_tensordict

    def _next(self, index: int, value: torch.Tensor, key: NestedKey) -> torch.Tensor:
        """The greatest of the last values and this one."""
        past = self._buffers[f"values_{index}"]
        if past is None or past.shape[1:] != value.shape:
            held = "none" if past is None else f"some of shape {list(past.shape[1:])}"
            raise RuntimeError(
                f"TimeMaxPool: expected past values of shape {list(value.shape)} for {key!r}, got {held}. Reset the "
                "environment before stepping it."
            )
        self._buffers[f"values_{index}"] = past = torch.cat([past[1:], value.unsqueeze(0)])
        return past.amax(0)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        for index, (in_key, out_key) in enumerate(self._pairs()):
            value = tensordict_reset.get(in_key, None)
            if value is None:
                continue
            fresh = self._fresh(tensordict, in_key, value)
            if self.reset_key is not None and (mask := tensordict.get(self.reset_key, None)) is not None:
                fresh = mask.reshape(mask.shape + (1,) * (value.ndim - mask.ndim))
            tensordict_reset.set(out_key, self._first(index, value, fresh))
        return tensordict_reset

    def _first(self, index: int, value: torch.Tensor, fresh: torch.Tensor | None) -> torch.Tensor:
        """The greatest of a value that begins a trajectory and zeros."""
        zeros = torch.zeros_like(value)
        begun = torch.stack([zeros] * (self.T - 1) + [value])
        past = self._buffers[f"values_{index}"]
        if fresh is not None and past is not None and past.shape == begun.shape:
            self._buffers[f"values_{index}"] = torch.where(fresh, begun, past)
        else:
            self._buffers[f"values_{index}"] = begun
        return begun.amax(0)

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """See :meth:`Transform.on_arrays`."""
        self._needs_all_rows(env)
        if self.reset_key is not None:
            raise NotNative("TimeMaxPool has a reset_key")
        entries: dict[NestedKey, Entry] = {}
        calls: list[tuple[int, NestedKey, NestedKey, Callable[[Any], torch.Tensor]]] = []
        for index, (key, out_key) in enumerate(self._pairs()):
            entry = {**env.entries, **entries}.get(key)
            if entry is None:
                raise NotNative(f"TimeMaxPool looks at {key!r}, which is no observation")
            entries[out_key] = entry.replace(column=False)
            calls.append((index, key, out_key, _as_tensor(entry)))

        def step(root: Values, out: Values) -> None:
            for index, key, out_key, convert in calls:
                out[out_key] = self._next(index, convert(out[key]), key).numpy()

        def restart(fresh: Values, rows: Rows | None) -> None:
            for index, key, out_key, convert in calls:
                value = convert(fresh[key])
                marked = None
                if rows is not None:
                    marked = torch.from_numpy(np.asarray(rows))
                    marked = marked.reshape(marked.shape + (1,) * (value.ndim - marked.ndim))
                fresh[out_key] = self._first(index, value, marked).numpy()

        return ArrayTransform(entries, [], step, lambda fresh: restart(fresh, None), restart=restart)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Observations that may be zero."""
        return map_spec(observation_spec, self._pairs(), self._with_zero)

    def _with_zero(self, spec: TensorSpec) -> TensorSpec:
        if self.T == 1 or not isinstance(spec, Bounded):
            return spec.clone()
        low, high = spec.low.clamp_max(0), spec.high.clamp_min(0)
        return Bounded(low, high, spec.shape, spec.device, spec.dtype)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """An error: it follows an environment from its reset on."""
        raise RuntimeError("TimeMaxPool follows an environment: TransformedEnv(env, TimeMaxPool(...)).")

    def __repr__(self) -> str:
        return f"TimeMaxPool(T={self.T}, keys={self.in_keys})"


def _as_tensor(entry: Entry) -> Callable[[Any], torch.Tensor]:
    return lambda value: torch.from_numpy(np.asarray(value, entry.dtype).reshape(entry.shape))
