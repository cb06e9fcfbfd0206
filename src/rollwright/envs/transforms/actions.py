"""Transforms of actions: their scale, an index in place of a one-hot action, and masks of those allowed."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys, as_tuple, key_str, unravel
from rollwright.data.layout import DONE, RESET
from rollwright.data.specs import (
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from rollwright.envs.arrays import ArrayEnv, ArrayTransform
from rollwright.envs.columns import Columns
from rollwright.envs.transforms.base import KeySeq, Transform
from rollwright.errors import EnvError, NotNative

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
        """What an environment returns holds no actions."""

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


class CategoricalAction(Transform):
    """Lets a policy write the index of an action that the environment takes as a one-hot vector.

    Data hold what the policy wrote, int64 ``[*batch]``; the environment is given the vector ``[*batch, n]``.
    Collectors, and environments with ``policy=``, add it where the policy's values or distribution are categorical.
    Collectors also add it for a module that says neither, where a call on zeros gives an index.

    Args:
        key: the action.

    Raises:
        ValueError: it is not one-hot.

    Example:
        >>> from rollwright.envs import GymEnv, TransformedEnv
        >>> env = TransformedEnv(GymEnv("CartPole-v1"), CategoricalAction())
        >>> env.action_spec.shape, env.base_env.action_spec.shape, env.rand_action()["action"].shape
        (torch.Size([]), torch.Size([2]), torch.Size([]))
    """

    def __init__(self, key: NestedKey = "action") -> None:
        super().__init__([], [], [key], [key])

    @property
    def key(self) -> NestedKey:
        """The action."""
        return self.in_keys_inv[0]

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        """Actions as the policy sees them."""
        leaf = self._leaf(action_spec)
        changed = action_spec.clone()
        changed.set(self.key, Categorical(leaf.n, leaf.shape[:-1], leaf.device, torch.int64, leaf.mask))
        return changed

    def _leaf(self, action_spec: Composite) -> OneHot:
        leaf = action_spec.get(self.key, None)
        if not isinstance(leaf, OneHot):
            found = f"there are {key_str(action_spec.leaves())}" if leaf is None else f"got {leaf}"
            raise ValueError(f"CategoricalAction: expected a one-hot action {self.key!r}, {found}. Leave it out.")
        return leaf

    def _inv_apply_transform(self, state: torch.Tensor) -> torch.Tensor:
        parent = self.parent
        if parent is None:
            raise RuntimeError("CategoricalAction: the number of actions is not known. Put it on an environment.")
        leaf = self._remember("leaf", lambda: self._leaf(parent.full_action_spec))
        index = state.long()
        if state.is_floating_point() or bool(((index < 0) | (index >= leaf.n)).any()):
            raise EnvError(
                f"CategoricalAction: expected an index from 0 to {leaf.n - 1} in {self.key!r}, got {state.tolist()}."
            )
        vector = torch.zeros(*index.shape, leaf.n, dtype=leaf.dtype, device=index.device)
        return vector.scatter_(-1, index.unsqueeze(-1), 1)

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The form of this transform for steps on NumPy arrays; see :meth:`Transform.on_arrays`."""
        return self.with_inverse(env, self._on_rows(env))

    def __repr__(self) -> str:
        return f"CategoricalAction(key={self.key!r})"


DISCRETE = (Categorical, MultiCategorical, MultiOneHot, OneHot)


class ActionMask(Transform):
    """Sets the mask of a discrete action spec to the mask that the environment last returned.

    ``env.rand_action`` and everything else that draws from ``env.action_spec`` then takes allowed actions
    only. The mask is bool, in the shape of a one-hot action: ``[*batch, n]``, True where an action is
    allowed. A row that is done may allow none.

    Args:
        action_key: the action.
        mask_key: the mask, an observation.

    Raises:
        TypeError: the action's spec is not discrete, or a key is none.

    Example:
        >>> from rollwright.data import Categorical
        >>> spec = Categorical(3)
        >>> spec.update_mask(torch.tensor([False, False, True]))  # what it does with each step
        >>> spec.rand()
        tensor(2)
    """

    def __init__(self, action_key: NestedKey = "action", mask_key: NestedKey = "action_mask") -> None:
        for argument, key in (("action_key", action_key), ("mask_key", mask_key)):
            if not isinstance(key, (str, tuple)):
                raise TypeError(f"{argument}: expected a string or a tuple of strings, got {key!r}.")
        super().__init__([action_key, mask_key], [])
        (self.action_key,), (self.mask_key,) = as_keys(action_key), as_keys(mask_key)
        self._mask: torch.Tensor | None = None

    resets_by_mask = False

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        self._allow(kind.tensor(0, self._read(out, self.mask_key)), self._done(kind, out))

    def _begin(self, kind: Any, given: Columns, fresh: Columns) -> None:
        mask = kind.tensor(0, self._read(fresh, self.mask_key))
        marks, past = self._fresh(kind, given, self.mask_key, mask), given.get(self.mask_key, self._mask)
        if marks is not None and past is not None:  # the others go on
            mask = torch.where(marks, mask, past)
        done = self._done(kind, given)
        self._allow(mask, given.get(RESET, None) if done is None else done)

    def _done(self, kind: Any, columns: Columns) -> torch.Tensor | None:
        done = columns.get(unravel((*as_tuple(self.action_key)[:-1], DONE)), columns.get(DONE, None))
        return None if done is None else kind.flags(done)

    def _allow(self, mask: torch.Tensor, done: torch.Tensor | None) -> None:
        env = self.container
        if env is None:
            raise RuntimeError("ActionMask needs an environment: TransformedEnv(env, ActionMask()).")
        spec = self._spec(env.full_action_spec)
        if done is not None:
            done = _beside(done, mask)
            parts = mask.split(spec.widths(), -1)
            mask = torch.cat([part | (done & ~part.any(-1, keepdim=True)) for part in parts], -1)
        self._mask = mask
        spec.update_mask(mask)

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The form of this transform for steps on NumPy arrays; see :meth:`Transform.on_arrays`."""
        self._needs_all_rows(env)
        key, entry = self.mask_key, env.entries.get(self.mask_key)
        if entry is None or entry.column or entry.dtype != np.bool_:
            raise NotNative(f"ActionMask finds no mask at {key!r}, but {entry}")
        return self._on_rows(env, [entry], restarts=True)

    def _spec(self, action_spec: Composite) -> Categorical | MultiCategorical | MultiOneHot | OneHot:
        spec = action_spec.get(self.action_key, None)
        if not isinstance(spec, DISCRETE):
            raise TypeError(
                f"ActionMask: expected a discrete spec at action_key={self.action_key!r}, got {spec}. "
                f"The actions are {list(action_spec.leaves())}; name one that is discrete."
            )
        return spec

    def transform_action_spec(self, action_spec: Composite) -> Composite:
        """The same, with the last mask."""
        action_spec = action_spec.clone()
        spec = self._spec(action_spec)
        if self._mask is not None:
            spec.update_mask(self._mask)
        return action_spec

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """An error: there is no action to draw in data."""
        raise RuntimeError("ActionMask needs an environment: TransformedEnv(env, ActionMask()).")

    def __repr__(self) -> str:
        return f"ActionMask(action_key={self.action_key!r}, mask_key={self.mask_key!r})"


def _beside(flags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Flags ``[*batch, 1]``, shaped to broadcast against a mask, which may be of several agents."""
    return flags.reshape(flags.shape[:-1] + (1,) * (mask.ndim - flags.ndim + 1))
