"""Transforms of values: affine maps, casts and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, unravel
from rollwright._tensors import as_tensor
from rollwright.data.specs import Binary, Bounded, Composite, TensorSpec, Unbounded
from rollwright.envs.arrays import Entry
from rollwright.envs.columns import cast, clip, quiet, sign
from rollwright.envs.transforms.base import EntryTransform, KeySeq

Number = float | torch.Tensor
Pairs = list[tuple[NestedKey, NestedKey]]


def _as_float(name: str, value: Number) -> torch.Tensor:
    try:
        given = as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a number or a tensor, got {value!r}. Pass a float.") from error
    given = given.detach().clone() if given.is_floating_point() else given.to(torch.get_default_dtype())
    if not bool(given.isfinite().all()):
        raise ValueError(f"{name}: expected finite numbers, got {value!r}. Look where they become NaN.")
    return given


def _mapped(spec: TensorSpec, change: Callable[[torch.Tensor], torch.Tensor]) -> TensorSpec:
    """The spec of ``change(x)``, a map that keeps or reverses order, for ``x`` of ``spec``."""
    if isinstance(spec, Bounded):
        ends = change(spec.low), change(spec.high)
        low, high = torch.minimum(*ends), torch.maximum(*ends)
        return Bounded(low, high, low.shape if -1 not in spec.shape else spec.shape, spec.device, low.dtype)
    example = change(spec.zero())
    shape = spec.shape if -1 in spec.shape else example.shape
    return Unbounded(shape, device=spec.device, dtype=example.dtype)


class _Affine(EntryTransform):
    """``x * scale + loc``, or with ``standard_normal`` its inverse ``(x - loc) / scale``."""

    loc: torch.Tensor | None
    scale: torch.Tensor | None

    def __init__(self, loc: Number | None, scale: Number | None, standard_normal: bool, *keys: KeySeq) -> None:
        if (loc is None) != (scale is None):
            raise ValueError(
                f"loc, scale: expected both or neither, got loc={loc!r}, scale={scale!r}. "
                "Pass both, or neither and call init_stats()."
            )
        super().__init__(*keys)
        self.standard_normal = bool(standard_normal)
        self._views: tuple[Any, Any, Any] = None, None, None  # loc, scale, and arrays over their memory
        self.register_buffer("loc", None if loc is None else _as_float("loc", loc))
        self.register_buffer("scale", None if scale is None else _as_float("scale", scale))
        if self.scale is not None and not bool((self.scale != 0).all()):
            raise ValueError(f"scale: expected numbers other than 0, got {scale!r}. Add a small number.")

    def _numbers(self, value: Any) -> Any:
        """``loc`` and ``scale`` of the kind of a value, an array or a tensor."""
        loc, scale = self._buffers["loc"], self._buffers["scale"]
        if loc is None or scale is None:
            raise RuntimeError(
                f"{type(self).__name__} has no loc and scale yet. Pass them to the constructor, call "
                "init_stats() once the transform is on its environment, or load a state_dict()."
            )
        if isinstance(value, torch.Tensor):
            return loc, scale
        if self._views[0] is not loc or self._views[1] is not scale:
            self._views = loc, scale, (loc.numpy(), scale.numpy())
        return self._views[2]

    def _apply_transform(self, obs: Any) -> Any:
        loc, scale = self._numbers(obs)
        return (obs - loc) / scale if self.standard_normal else obs * scale + loc

    def _inv_apply_transform(self, state: Any) -> Any:
        loc, scale = self._numbers(state)
        return state * scale + loc if self.standard_normal else (state - loc) / scale

    def _change_spec(self, spec: TensorSpec) -> TensorSpec:
        return _mapped(spec, self._apply_transform)

    def _array_function(self, entry: Entry) -> Callable[[Any], Any] | None:
        """See :class:`EntryTransform`: where NumPy computes in torch's dtype."""
        numbers = self._numbers(None)
        fits = entry.dtype.kind == "f" and not any(
            number.dtype != entry.dtype or (entry.column and number.ndim) for number in numbers
        )
        return quiet(self._apply_transform) if fits else None

    def __repr__(self) -> str:
        numbers = ""
        if self.loc is not None and self.scale is not None and self.loc.numel() == self.scale.numel() == 1:
            numbers = f"loc={float(self.loc):.4g}, scale={float(self.scale):.4g}, "
        return f"{type(self).__name__}({numbers}keys={self.in_keys})"


class RewardScaling(_Affine):
    """Scales rewards: ``reward * scale + loc``.

    Args:
        loc: number, or tensor that broadcasts to the reward.
        scale: as ``loc``, not 0.
        in_keys: rewards; ``"reward"`` by default.
        out_keys: where to write; default: ``in_keys``.
        standard_normal: compute ``(reward - loc) / scale`` instead.

    Raises:
        ValueError: ``scale`` is 0, or a number is not finite.

    Example:
        >>> from tensordict import TensorDict
        >>> RewardScaling(loc=1.0, scale=0.1)(TensorDict({"reward": torch.tensor([10.0])}))["reward"]
        tensor([2.])
    """

    def __init__(
        self,
        loc: Number,
        scale: Number,
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        standard_normal: bool = False,
    ) -> None:
        keys = "reward" if in_keys is None else in_keys
        super().__init__(loc, scale, standard_normal, keys, out_keys)


class ObservationNorm(_Affine):
    """Shifts and scales observations by fixed numbers: ``obs * scale + loc``.

    The inverse is applied on the way in to ``in_keys_inv``, if there are any. The numbers are buffers.

    Args:
        loc: number, or tensor that broadcasts to the observation; None: set by :meth:`init_stats` or
            by ``load_state_dict``.
        scale: as ``loc``.
        in_keys: observations; all are treated with the same numbers.
        out_keys: where to write; default: ``in_keys``.
        in_keys_inv: actions or states that the environment wants in its own scale.
        out_keys_inv: where the policy writes them; default: ``in_keys_inv``.
        standard_normal: compute ``(obs - loc) / scale`` instead.
        eps: the smallest scale that :meth:`init_stats` sets.

    Raises:
        ValueError: one of ``loc`` and ``scale`` only, or no keys.

    Example:
        >>> from tensordict import TensorDict
        >>> norm = ObservationNorm(loc=4.0, scale=2.0, in_keys=["x"], standard_normal=True)
        >>> norm(TensorDict({"x": torch.tensor([8.0])}))["x"]
        tensor([2.])
    """

    def __init__(
        self,
        loc: Number | None = None,
        scale: Number | None = None,
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        in_keys_inv: KeySeq = None,
        out_keys_inv: KeySeq = None,
        standard_normal: bool = False,
        eps: float = 1e-6,
    ) -> None:
        if in_keys is None and in_keys_inv is None:
            raise ValueError("in_keys: expected observations, got None. Pass in_keys=['observation'].")
        keys = (in_keys, out_keys, in_keys_inv, out_keys_inv)
        super().__init__(loc, scale, standard_normal, *keys)
        self.eps = eps

    @property
    def initialized(self) -> bool:
        """Whether there are numbers to normalise with."""
        return self.loc is not None

    def init_stats(
        self,
        num_iter: int,
        reduce_dim: int | tuple[int, ...] = 0,
        cat_dim: int | None = None,
        key: NestedKey | None = None,
        keep_dims: tuple[int, ...] | None = None,
    ) -> None:
        """Set ``loc`` and ``scale`` by which observations under random actions get mean 0 and deviation 1.

        The environment is stepped; reset it afterwards.

        Args:
            num_iter: number of frames to look at, at least.
            reduce_dim: dimensions of the data ``[*batch, T, ...]`` to compute the statistics over.
            cat_dim: the one of them along which rollouts are joined; default: ``reduce_dim``.
            key: observation to look at; needed where there are several ``in_keys``.
            keep_dims: those of ``reduce_dim`` to keep as dimensions of size one.

        Raises:
            RuntimeError: there are numbers already, or the transform is on no environment.
            ValueError: dimensions that do not go together.
        """
        dims = (reduce_dim,) if isinstance(reduce_dim, int) else tuple(reduce_dim)
        cat_dim = dims[0] if cat_dim is None and len(dims) == 1 else cat_dim
        if cat_dim is None:
            raise ValueError(f"cat_dim: expected one of reduce_dim={reduce_dim}, got None. Pass one.")
        if key is None and len(self.in_keys) > 1:
            raise ValueError(f"key: expected one of in_keys={self.in_keys} to look at, got None. Pass key=.")
        data = self._observe(num_iter, self.in_keys[0] if key is None else unravel(key), cat_dim, dims)
        dims = tuple(dim % data.ndim for dim in dims)
        kept = {dim % data.ndim for dim in keep_dims or ()}
        if not kept <= set(dims):
            raise ValueError(f"keep_dims: expected some of reduce_dim={reduce_dim}, got {keep_dims}.")
        squeezed = [dim for dim in dims if dim not in kept]
        loc = data.mean(dims, keepdim=True).squeeze(squeezed)
        scale = data.std(dims, keepdim=True).squeeze(squeezed).clamp_min(self.eps)
        if not bool((loc.isfinite() & scale.isfinite()).all()):
            raise RuntimeError(
                f"init_stats: {num_iter} frames give loc={loc}, scale={scale}. Take more frames, and look "
                "for NaN and infinity in the observations."
            )
        self.loc, self.scale = (loc, scale) if self.standard_normal else (-loc / scale, 1 / scale)
        if (env := self.container) is not None:
            env.empty_cache()

    def _observe(self, num_iter: int, key: NestedKey, cat_dim: int, dims: Sequence[int]) -> torch.Tensor:
        if self.initialized:
            raise RuntimeError("init_stats: loc and scale are set already. Make a new ObservationNorm.")
        parent = self.parent
        if parent is None:
            raise RuntimeError("init_stats: expected an environment, got none. Call TransformedEnv first.")
        frames, rollouts = 0, []
        while frames < num_iter:
            rollout = parent.rollout(num_iter)
            found = rollout.get(key)
            if cat_dim % found.ndim not in {dim % found.ndim for dim in dims}:
                raise ValueError(
                    f"cat_dim: expected one of reduce_dim={dims} of data {list(found.shape)}, got {cat_dim}. Pass one."
                )
            frames += rollout.numel()
            rollouts.append(found)
        data = torch.cat(rollouts, cat_dim)
        return data if data.is_floating_point() else data.to(torch.get_default_dtype())


class DoubleToFloat(EntryTransform):
    """Casts float64 to float32 on the way out of the environment, and back on the way in.

    Args:
        in_keys: entries to cast; None: every float64 observation and reward (and every float64 action and
            state on the way in, unless ``in_keys_inv`` names them).
        out_keys: where to write; default: ``in_keys``.
        in_keys_inv: actions and states that the environment wants in float64.
        out_keys_inv: where the policy writes them; default: ``in_keys_inv``.

    Example:
        >>> from tensordict import TensorDict
        >>> DoubleToFloat()(TensorDict({"x": torch.zeros(1, dtype=torch.float64)}))["x"].dtype
        torch.float32
    """

    def __init__(
        self,
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        in_keys_inv: KeySeq = None,
        out_keys_inv: KeySeq = None,
    ) -> None:
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        self._finds = in_keys is None, in_keys is None and in_keys_inv is None
        if (in_keys is None and out_keys is not None) or (in_keys_inv is None and out_keys_inv is not None):
            raise ValueError("out_keys: expected in_keys with them, in the same order, got None. Pass both.")

    def _pairs(self) -> Pairs:
        return self._remember("pairs", self._find)

    def _pairs_inv(self) -> Pairs:
        return self._remember("pairs_inv", self._find_inv)

    def _find(self) -> Pairs:
        parent = self.parent
        if self._finds[0] and parent is not None:
            self.in_keys = [*_doubles(parent.full_observation_spec), *_doubles(parent.full_reward_spec)]
            self.out_keys = list(self.in_keys)
        return super()._pairs()

    def _find_inv(self) -> Pairs:
        parent = self.parent
        if self._finds[1] and parent is not None:
            self.in_keys_inv = [*_doubles(parent.full_action_spec), *_doubles(parent.full_state_spec)]
            self.out_keys_inv = list(self.in_keys_inv)
        return super()._pairs_inv()

    @property
    def inverts(self) -> bool:
        """Whether this transform changes what the environment gets."""
        return bool(self._pairs_inv())

    def _apply_transform(self, obs: Any) -> Any:
        return cast(obs, torch.float32)

    def _inv_apply_transform(self, state: torch.Tensor) -> torch.Tensor:
        return state.to(torch.float64)

    def _array_function(self, entry: Entry) -> Callable[[Any], Any] | None:
        return quiet(self._apply_transform)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Cast ``in_keys``; without an environment and without keys, every float64 entry."""
        if self._finds[0] and self.parent is None:
            for key, value in list(tensordict.items(True, True)):
                if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
                    tensordict.set(key, self._apply_transform(value))
            return tensordict
        return super().forward(tensordict)

    def _change_spec(self, spec: TensorSpec) -> TensorSpec:
        if spec.dtype != torch.float64:
            raise TypeError(f"DoubleToFloat: expected an entry of float64, got {spec}. Leave its key out.")
        return spec.to(torch.float32)


def _doubles(spec: Composite) -> list[NestedKey]:
    return [unravel(key) for key, leaf in spec.leaves().items() if leaf.dtype == torch.float64]


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
