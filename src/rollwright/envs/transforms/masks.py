"""ActionMask: random actions keep to those that the environment allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys, as_tuple, unravel
from rollwright.data.layout import DONE, RESET
from rollwright.data.specs import Categorical, Composite, MultiCategorical, MultiOneHot, OneHot
from rollwright.envs.arrays import ArrayEnv, ArrayTransform
from rollwright.envs.on_arrays.columns import Columns
from rollwright.envs.transforms.base import Transform
from rollwright.errors import NotNative

__all__ = ["ActionMask"]

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
