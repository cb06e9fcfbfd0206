"""CategoricalAction: an index in place of a one-hot action."""

from __future__ import annotations

import torch

from rollwright._keys import NestedKey, key_str
from rollwright.data.specs import Categorical, Composite, OneHot
from rollwright.envs.arrays import ArrayEnv, ArrayTransform
from rollwright.envs.transforms.base import Transform
from rollwright.errors import EnvError

__all__ = ["CategoricalAction"]


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
