"""ActionScaling: actions between -1 and 1."""

from __future__ import annotations

from typing import Any, Self

import torch

from rollwright._keys import key_str
from rollwright.data.specs import Bounded, Categorical, Composite, MultiOneHot, OneHot, TensorSpec, Unbounded
from rollwright.envs.arrays import ArrayEnv, ArrayTransform
from rollwright.envs.on_arrays.columns import Columns
from rollwright.envs.transforms.base import KeySeq, Transform

__all__ = ["ActionScaling"]

Number = float | torch.Tensor


class ActionScaling(Transform):
    r"""Lets a policy act between -1 and 1, whatever bounds the environment's actions have.

    With the bounds of the action spec

    .. math::
        loc = (high + low) / 2, \qquad scale = (high - low) / 2,

    the environment is given ``action * scale + loc``, or ``(2 * action - 1) * scale + loc`` for actions between 0 and 1
    (``standard_normal=False``). Called on data, as in a replay buffer, it does the reverse: actions of the environment
    become those of the policy. The numbers are buffers, part of ``state_dict()``.

    Args:
        in_keys_inv: the action that the environment wants, one key; default ``"action"``. ``[]``: for data alone.
        out_keys_inv: where the policy writes it; default: ``in_keys_inv``.
        in_keys: actions in data; default: ``in_keys_inv``.
        out_keys: where they are written; default: ``in_keys``.
        loc: in place of what the bounds give; a number, or a tensor as long as the action.
        scale: as ``loc``, not 0.
        standard_normal: actions between -1 and 1; False: between 0 and 1.

    Raises:
        ValueError: several actions, one of ``loc`` and ``scale``, tensors of different length, or a scale of 0; the
            action has no bounds.

    Example:
        >>> from rollwright.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("Pendulum-v1"), ActionScaling())
        >>> env.action_spec.low, env.base_env.action_spec.low
        (tensor([-1.]), tensor([-2.]))
    """

    loc: torch.Tensor | None
    scale: torch.Tensor | None

    def __init__(
        self,
        in_keys_inv: KeySeq = None,
        out_keys_inv: KeySeq = None,
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        *,
        loc: Number | None = None,
        scale: Number | None = None,
        standard_normal: bool = True,
    ) -> None:
        inverse: KeySeq = "action" if in_keys_inv is None else in_keys_inv
        forward: KeySeq = in_keys if in_keys is not None else (inverse or "action")
        super().__init__(forward, out_keys, inverse, out_keys_inv)
        if len(self.in_keys_inv) > 1:
            raise ValueError(
                f"in_keys_inv: expected one action, got {key_str(self.in_keys_inv)}. Use one ActionScaling for each."
            )
        if (loc is None) != (scale is None):
            raise ValueError(f"loc, scale: expected both or neither, got loc={loc!r}, scale={scale!r}. Pass both.")
        if loc is None and not self.in_keys_inv:
            raise ValueError("in_keys_inv: expected an action, whose bounds are known, got none. Pass loc= and scale=.")
        self._pairs(), self._pairs_inv()
        self.standard_normal = bool(standard_normal)
        self._explicit = loc is not None
        given = (None, None) if loc is None or scale is None else _alike("loc, scale", loc, scale)
        self.register_buffer("loc", given[0])
        self.register_buffer("scale", given[1])
        if self.scale is not None and not bool((self.scale != 0).all()):
            raise ValueError(f"scale: expected numbers other than 0, got {scale!r}. Leave out what is constant.")

    @classmethod
    def from_stats(
        cls,
        *,
        mean: Number | None = None,
        std: Number | None = None,
        low: Number | None = None,
        high: Number | None = None,
        eps: float = 1e-6,
        **options: Any,
    ) -> Self:
        """By statistics of data.

        Args:
            mean: with ``std``; a number, or a tensor as long as the action.
            std: deviation.
            low: with ``high``: least values, which become -1.
            high: greatest values, which become 1.
            eps: smallest scale.
            **options: go to the constructor.

        Raises:
            ValueError: there are neither or both, or two tensors of different length.
        """
        if mean is not None and std is not None and low is None and high is None:
            given = _alike("mean, std", mean, std)
            return cls(loc=given[0], scale=given[1].clamp_min(eps), **options)
        if low is not None and high is not None and mean is None and std is None:
            ends = _alike("low, high", low, high)
            scale = ((ends[1] - ends[0]) / 2).clamp_min(eps)
            return cls(loc=(ends[1] + ends[0]) / 2, scale=scale, **options)
        raise ValueError("mean, std, low, high: expected mean and std, or low and high. Pass one of these pairs.")

    @property
    def initialized(self) -> bool:
        """Whether the numbers are known."""
        return self.loc is not None

    def _numbers(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.loc is None or self.scale is None:
            parent = self.parent
            if parent is None:
                raise RuntimeError("ActionScaling has no loc and scale yet. Put it on an environment, or pass them.")
            self._learn(self._leaf(parent.full_action_spec))
        assert self.loc is not None  # for type checkers
        assert self.scale is not None
        return self.loc, self.scale

    def _leaf(self, action_spec: Composite) -> TensorSpec:
        (key,) = self.in_keys_inv
        if key not in action_spec:
            raise KeyError(f"ActionScaling: no action {key!r}; there are {key_str(action_spec.leaves())}.")
        leaf: TensorSpec = action_spec[key]
        return leaf

    def _learn(self, spec: TensorSpec) -> None:
        """Take the numbers from the bounds of an action."""
        if not isinstance(spec, Bounded):
            raise ValueError(
                f"ActionScaling: expected an action with bounds, got {spec}. Pass loc= and scale=, or leave it out."
            )
        low, high = spec.low, spec.high
        if not bool((_is_bound(low) & _is_bound(high) & _is_bound(high - low) & (low < high)).all()):
            raise ValueError(
                f"ActionScaling: expected finite bounds, low below high, got {low.tolist()} and {high.tolist()}. "
                "Pass loc= and scale=."
            )
        dtype = low.dtype if low.is_floating_point() else torch.get_default_dtype()
        for _ in () if self.parent is None else self.parent.batch_size:
            if not bool((low == low[:1]).all() & (high == high[:1]).all()):
                break
            low, high = low[0], high[0]  # rows have the same bounds
        self.loc, self.scale = ((high + low) / 2).to(dtype), ((high - low) / 2).to(dtype)

    def _apply_transform(self, obs: torch.Tensor) -> torch.Tensor:
        loc, scale = self._numbers()
        self._check_length(obs, loc)
        value = (obs - loc) / scale
        return value if self.standard_normal else (value + 1) / 2

    def _inv_apply_transform(self, state: torch.Tensor) -> torch.Tensor:
        loc, scale = self._numbers()
        self._check_length(state, loc)
        return (state if self.standard_normal else state * 2 - 1) * scale + loc

    def _check_length(self, action: torch.Tensor, loc: torch.Tensor) -> None:
        if loc.numel() > 1 and action.shape[-1:] != loc.shape[-1:]:
            raise ValueError(
                f"ActionScaling: expected an action of length {loc.shape[-1]}, as loc has, got shape "
                f"{tuple(action.shape)}."
            )

    def normalize(self, action: torch.Tensor) -> torch.Tensor:
        """The policy's action for one of the environment."""
        return self._apply_transform(action)

    def denormalize(self, action: torch.Tensor) -> torch.Tensor:
        """The environment's action for one of the policy."""
        return self._inv_apply_transform(action)

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        """What an environment returns holds no actions."""

    def _begin(self, kind: Any, given: Columns, fresh: Columns) -> None:
        """See :meth:`_change`."""

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The form of this transform for steps on NumPy arrays; see :meth:`Transform.on_arrays`."""
        return self.with_inverse(env, self._on_rows(env))

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        """Actions as the policy sees them."""
        changed = action_spec.clone()
        for in_key, out_key in self._pairs_inv():
            leaf = self._leaf(action_spec)
            if in_key != out_key:
                del changed[in_key]
            changed.set(out_key, self._scaled(leaf))
        return changed

    def _scaled(self, spec: TensorSpec) -> TensorSpec:
        if isinstance(spec, Categorical | OneHot | MultiOneHot):
            raise ValueError(f"ActionScaling: expected a continuous action, got {spec}. Leave it out.")
        if not self._explicit:
            self._learn(spec)
            low = -1.0 if self.standard_normal else 0.0
            return Bounded(low, 1.0, spec.shape, spec.device, spec.dtype)
        if not isinstance(spec, Bounded) or not bool((spec.low.isfinite() & spec.high.isfinite()).all()):
            return Unbounded(spec.shape, device=spec.device, dtype=spec.dtype or torch.float32)
        ends = self._apply_transform(spec.low), self._apply_transform(spec.high)
        return Bounded(torch.minimum(*ends), torch.maximum(*ends), spec.shape, spec.device, spec.dtype)

    def __repr__(self) -> str:
        return f"ActionScaling(keys={self.in_keys_inv or self.in_keys}, standard_normal={self.standard_normal})"


def _as_float(value: Number) -> torch.Tensor:
    given = torch.as_tensor(value).detach().clone()
    return given if given.is_floating_point() else given.to(torch.get_default_dtype())


def _alike(names: str, first: Number, second: Number) -> tuple[torch.Tensor, torch.Tensor]:
    """Two values that are used element by element."""
    found = _as_float(first), _as_float(second)
    if len({value.shape for value in found if value.ndim}) > 1:
        shapes = " and ".join(str(list(value.shape)) for value in found)
        raise ValueError(f"{names}: expected numbers, or tensors as long as the action, got shapes {shapes}.")
    return found


def _is_bound(value: torch.Tensor) -> torch.Tensor:
    """Where a number limits anything: it is below the greatest one of its dtype."""
    return value.abs() < torch.finfo(value.dtype).max if value.is_floating_point() else value == value
