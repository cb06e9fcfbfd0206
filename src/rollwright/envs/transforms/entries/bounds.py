"""Transforms that limit values: ClipTransform, RewardClipping, SignTransform, BinarizeReward."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch

from rollwright.data.specs import Binary, Bounded, TensorSpec
from rollwright.envs.arrays import Entry
from rollwright.envs.on_arrays.columns import cast, clip, sign
from rollwright.envs.transforms.base import EntryTransform, KeySeq

__all__ = ["BinarizeReward", "ClipTransform", "RewardClipping", "SignTransform"]

_FLOATS = (np.float32, np.float64)


def _bound(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Real) or isinstance(value, bool) or math.isnan(float(value)):
        raise TypeError(
            f"{name}: expected a number or None, got {value!r}. For bounds of each element, write a Transform."
        )
    return float(value)


class _Clip(EntryTransform):
    def __init__(self, names: tuple[str, str], low: object, high: object, *keys: KeySeq) -> None:
        super().__init__(*keys)
        self.low, self.high = _bound(names[0], low), _bound(names[1], high)
        if self.low is None and self.high is None:
            raise ValueError(f"{names[0]}, {names[1]}: expected at least one bound, got None. Pass one.")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(
                f"{names[0]}, {names[1]}: expected {names[0]} below {names[1]}, got {low} and {high}. Exchange them."
            )

    def _apply_transform(self, obs: Any) -> Any:
        return clip(obs, self.low, self.high)

    def _inv_apply_transform(self, state: torch.Tensor) -> torch.Tensor:
        return state.clamp(self.low, self.high)

    def _change_spec(self, spec: TensorSpec) -> TensorSpec:
        dtype = self._apply_transform(spec.zero()).dtype
        low: Any = -math.inf if self.low is None else self.low
        high: Any = math.inf if self.high is None else self.high
        if isinstance(spec, Bounded):
            low, high = (end.clamp(self.low, self.high) for end in (spec.low, spec.high))
        elif not dtype.is_floating_point and math.inf in (high, -low):
            limits = torch.iinfo(dtype)
            low, high = max(low, limits.min), min(high, limits.max)
        return Bounded(low, high, spec.shape, spec.device, dtype)

    def _change_spec_inv(self, spec: TensorSpec) -> TensorSpec:
        return spec

    def _array_function(self, entry: Entry) -> Callable[[Any], Any] | None:
        return self._apply_transform if entry.dtype in _FLOATS else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(low={self.low}, high={self.high}, keys={self.in_keys or self.in_keys_inv})"


class ClipTransform(_Clip):
    """Limits values to ``[low, high]``.

    Args:
        in_keys: observations and rewards to limit.
        out_keys: where to write; default: ``in_keys``.
        in_keys_inv: actions and states that the environment wants limited; the policy may write others.
        out_keys_inv: where the policy writes them; default: ``in_keys_inv``.
        low: least value; None: there is none.
        high: greatest value; None: there is none.

    Raises:
        ValueError: neither bound, bounds in the wrong order, or no keys.

    Example:
        >>> from tensordict import TensorDict
        >>> ClipTransform(in_keys=["x"], low=0.0, high=1.0)(TensorDict({"x": torch.tensor([-1.0, 0.5, 7.0])}))["x"]
        tensor([0.0000, 0.5000, 1.0000])
    """

    def __init__(
        self,
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        in_keys_inv: KeySeq = None,
        out_keys_inv: KeySeq = None,
        *,
        low: float | None = None,
        high: float | None = None,
    ) -> None:
        super().__init__(("low", "high"), low, high, in_keys, out_keys, in_keys_inv, out_keys_inv)
        _some_keys(self)


class RewardClipping(_Clip):
    """Limits rewards.

    Args:
        clamp_min: least reward; None: there is none.
        clamp_max: greatest reward; None: there is none.
        in_keys: rewards; default: ``"reward"``.
        out_keys: where to write; default: ``in_keys``.

    Raises:
        ValueError: neither bound, or bounds in the wrong order.

    Example:
        >>> from tensordict import TensorDict
        >>> RewardClipping(-1, 1)(TensorDict({"reward": torch.tensor([100.0])}))["reward"]
        tensor([1.])
    """

    def __init__(
        self,
        clamp_min: float | None = None,
        clamp_max: float | None = None,
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
    ) -> None:
        keys = "reward" if in_keys is None else in_keys
        super().__init__(("clamp_min", "clamp_max"), clamp_min, clamp_max, keys, out_keys)


class SignTransform(EntryTransform):
    """Replaces values by their signs: -1, 0 or 1.

    Args:
        in_keys: observations and rewards.
        out_keys: where to write; default: ``in_keys``.
        in_keys_inv: actions and states of which the environment wants the signs.
        out_keys_inv: where the policy writes them; default: ``in_keys_inv``.

    Raises:
        ValueError: no keys.

    Example:
        >>> from tensordict import TensorDict
        >>> SignTransform(in_keys=["reward"])(TensorDict({"reward": torch.tensor([-3.0, 0.0, 0.2])}))["reward"]
        tensor([-1.,  0.,  1.])
    """

    def __init__(
        self,
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        in_keys_inv: KeySeq = None,
        out_keys_inv: KeySeq = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        _some_keys(self)

    def _apply_transform(self, obs: Any) -> Any:
        return sign(obs)

    def _inv_apply_transform(self, state: torch.Tensor) -> torch.Tensor:
        return state.sign()

    def _change_spec(self, spec: TensorSpec) -> TensorSpec:
        dtype = spec.dtype or torch.float32
        low = -1 if dtype.is_signed else 0
        return Bounded(low, 1, spec.shape, spec.device, dtype)

    def _change_spec_inv(self, spec: TensorSpec) -> TensorSpec:
        return spec

    def _array_function(self, entry: Entry) -> Callable[[Any], Any] | None:
        return self._apply_transform if entry.dtype in _FLOATS else None


class BinarizeReward(EntryTransform):
    """Replaces rewards by 1 where they are positive, and 0 elsewhere, as int8.

    Args:
        in_keys: rewards; default: ``"reward"``.
        out_keys: where to write; default: ``in_keys``.

    Example:
        >>> from tensordict import TensorDict
        >>> BinarizeReward()(TensorDict({"reward": torch.tensor([-1.0, 0.0, 0.5])}))["reward"]
        tensor([0, 0, 1], dtype=torch.int8)
    """

    def __init__(self, in_keys: KeySeq = None, out_keys: KeySeq = None) -> None:
        super().__init__("reward" if in_keys is None else in_keys, out_keys)

    def _apply_transform(self, obs: Any) -> Any:
        return cast(obs > 0, torch.int8)

    def _change_spec(self, spec: TensorSpec) -> TensorSpec:
        return Binary(shape=spec.shape, device=spec.device, dtype=torch.int8)

    def _array_function(self, entry: Entry) -> Callable[[Any], Any] | None:
        return self._apply_transform


def _some_keys(transform: EntryTransform) -> None:
    if not transform.in_keys and not transform.in_keys_inv:
        name = type(transform).__name__
        raise ValueError(f"in_keys: expected entries for {name}, got None. Pass in_keys=['reward'], for example.")
