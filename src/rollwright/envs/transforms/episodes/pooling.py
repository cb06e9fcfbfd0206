"""TimeMaxPool: the greatest of the last values."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys
from rollwright.data.specs import Bounded, Composite, TensorSpec
from rollwright.envs.transforms.base import KeySeq, map_spec
from rollwright.envs.transforms.entries.stateful import StatefulTransform

__all__ = ["TimeMaxPool"]


class TimeMaxPool(StatefulTransform):
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

    def _next(self, kind: Any, index: int, value: torch.Tensor) -> torch.Tensor:
        past = self._buffers[f"values_{index}"]
        if past is None or past.shape[1:] != value.shape:
            held = "none" if past is None else f"some of shape {list(past.shape[1:])}"
            raise RuntimeError(
                f"TimeMaxPool: expected past values of shape {list(value.shape)} for {self.in_keys[index]!r}, got "
                f"{held}. Reset the environment before stepping it."
            )
        self._buffers[f"values_{index}"] = past = torch.cat([past[1:], value.unsqueeze(0)])
        return past.amax(0)

    def _first(self, kind: Any, index: int, value: torch.Tensor, fresh: torch.Tensor | None) -> torch.Tensor:
        zeros = torch.zeros_like(value)
        begun = torch.stack([zeros] * (self.T - 1) + [value])
        self._keep(kind, f"values_{index}", begun, fresh)
        return begun.amax(0)

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
