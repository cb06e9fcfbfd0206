"""ActionMask: random actions keep to those that the environment allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_keys, as_tuple, unravel
from rollwright.data.layout import DONE
from rollwright.data.specs import Categorical, Composite, MultiCategorical, MultiOneHot, OneHot
from rollwright.envs.arrays import ArrayEnv, ArrayTransform, Rows, Values
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

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        self._allow(self._read(next_tensordict, self.mask_key), self._done(next_tensordict))
        return next_tensordict

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        mask = self._read(tensordict_reset, self.mask_key)
        fresh = self._fresh(tensordict, self.mask_key, mask)
        past = tensordict.get(self.mask_key, None)
        if fresh is not None and past is not None:
            mask = torch.where(fresh, mask, past)
        self._allow(mask, self._done(tensordict))
        return tensordict_reset

    def _done(self, td: TensorDictBase) -> torch.Tensor | None:
        done: torch.Tensor | None = td.get(unravel((*as_tuple(self.action_key)[:-1], DONE)), td.get(DONE, None))
        return done

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
        """See :meth:`Transform.on_arrays`."""
        self._needs_all_rows(env)
        key, entry = self.mask_key, env.entries.get(self.mask_key)
        if entry is None or entry.column or entry.dtype != np.bool_:
            raise NotNative(f"ActionMask finds no mask at {key!r}, but {entry}")
        group = unravel((*as_tuple(self.action_key)[:-1], DONE))
        flag = env.flags.get(group)  # of the agents, if the action is theirs

        def step(root: Values, out: Values) -> None:
            done = out[DONE] if flag is None else out[group]
            self._allow(torch.from_numpy(out[key]), _flags(done, column=flag is None or flag.column))

        def restart(fresh: Values, rows: Rows | None) -> None:
            mask = torch.from_numpy(fresh[key])
            if rows is None:
                self._allow(mask, None)
                return
            marked = _flags(rows, column=True)
            if self._mask is not None:  # of the others, which go on
                mask = torch.where(_beside(marked, mask), mask, self._mask)
            self._allow(mask, marked)

        return ArrayTransform({}, [], step, lambda fresh: restart(fresh, None), restart=restart)

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


def _flags(values: Any, *, column: bool) -> torch.Tensor:
    """Flags of arrays as those of TensorDicts, ``[*batch, 1]``."""
    flags = torch.from_numpy(np.array(values))
    return flags.unsqueeze(-1) if column else flags


def _beside(flags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Flags ``[*batch, 1]``, shaped to broadcast against a mask, which may be of several agents."""
    return flags.reshape(flags.shape[:-1] + (1,) * (mask.ndim - flags.ndim + 1))
