"""A function from an observation to an action, on tensors or arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from rollwright._keys import NestedKey, unravel
from rollwright.errors import NotNative, PolicyError
from rollwright.modules.functions import FunctionPolicy
from rollwright.policies.base import ArrayPolicy

__all__ = ["CalledFunction"]


class CalledFunction(ArrayPolicy):
    """A function of the one observation, which it is given as a tensor or as a NumPy array.

    Args:
        policy: the function, what it takes, and how its results are read.
        batch_shape: of the entries.
        available: entries of the root.

    Raises:
        NotNative: it is one of a TensorDict, or its first call has yet to show what it takes; the observation is no
            array.
    """

    def __init__(self, policy: FunctionPolicy, batch_shape: tuple[int, ...], available: Collection[NestedKey]) -> None:
        name = policy.__qualname__
        if policy.takes is None:
            raise NotNative(f"the first call of {name} shows what it takes")
        if policy.takes == "tensordict" or policy.observation_key is None:
            raise NotNative(f"{name} takes a TensorDict: give its argument the observation instead")
        if unravel(policy.observation_key) not in {unravel(key) for key in available}:
            raise NotNative(f"it reads {policy.observation_key!r}, which is no tensor of the environment")
        self.in_keys, self.out_keys = [unravel(policy.observation_key)], [unravel(policy.action_key)]
        self.finite_keys: list[NestedKey] = []
        self.how = f"{name} called on {'tensors' if policy.takes == 'tensor' else 'arrays'}"
        self.varies = True
        self._policy, self._batch = policy, tuple(batch_shape)
        self._of_tensor = policy.takes == "tensor"

    def start(self, steps: int) -> None:
        """See :class:`~rollwright.policies.ArrayPolicy`."""

    def __call__(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """One call of the function."""
        (observation,) = inputs
        policy = self._policy
        value: Any = policy.function(torch.from_numpy(observation) if self._of_tensor else observation)
        action = policy.form.array(value)
        if type(action) is not np.ndarray:
            raise policy.no_action(value)
        batch = self._batch
        if batch and action.shape[: len(batch)] != batch:
            raise PolicyError(
                f"policy: {policy.__qualname__} returned actions of shape {list(action.shape)}, which must begin with "
                f"the batch size of the environment, {list(batch)}. Return an action for each environment."
            )
        return (action,)
