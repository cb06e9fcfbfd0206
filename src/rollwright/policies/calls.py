"""Functions and modules that are called on tensors or arrays of the entries that they read."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType, TensorDictModule
from torch import Tensor

from rollwright._keys import NestedKey, key_str, unravel
from rollwright.errors import NotNative, PolicyError
from rollwright.modules.functions import FunctionPolicy
from rollwright.modules.signature import SignaturePolicy
from rollwright.policies.base import ArrayPolicy, WatchedPolicy
from rollwright.policies.nodes import as_tensor
from rollwright.policies.program import Program
from rollwright.policies.watch import ModuleSnapshot, check_globals, is_special


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
        """Prepare a rollout of ``steps`` calls."""

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


class CalledModule(WatchedPolicy):
    """A module that takes entries of the environment by name.

    Its first call shows its further outputs, ``output1`` and so on. From then on it is a program.

    Args:
        policy: the module, wrapped by its signature.
        batch_shape: of the entries.
        available: entries of the root.

    Attributes:
        program: runs from the second call on.

    Raises:
        NotNative: the wrapper has hooks, or an entry is missing.
    """

    def __init__(self, policy: SignaturePolicy, batch_shape: tuple[int, ...], available: Collection[NestedKey]) -> None:
        check_globals()
        special = is_special(policy)
        if special is not None:
            raise NotNative(special)
        self.in_keys = [unravel(key) for key in policy.in_keys]
        missing = [key for key in self.in_keys if key not in {unravel(key) for key in available}]
        if missing:
            raise NotNative(f"it reads {key_str(missing)}, which is no tensor of the environment")
        super().__init__(ModuleSnapshot(), batch_shape)
        self._watch.add(policy)
        self.policy = policy
        self.finite_keys: list[NestedKey] = []
        self.program: Program | None = None

    @property
    def how(self) -> str:  # type: ignore[override]
        """What runs, in a short phrase."""
        return f"{type(self.policy.module).__name__} called on tensors" if self.program is None else self.program.how

    @property
    def varies(self) -> bool:  # type: ignore[override]
        """Whether shapes and dtypes of the outputs may differ from call to call."""
        return self.program is None or self.program.varies

    @property
    def out_keys(self) -> list[NestedKey]:  # type: ignore[override]
        """The policy's own list, which its first call completes."""
        return [unravel(key) for key in self.policy.out_keys]

    def start(self, steps: int) -> None:
        """Prepare a rollout of ``steps`` calls."""
        super().start(steps)
        if self.program is not None:
            self.program.start(steps)

    def settle(self, *inputs: Tensor) -> Program:
        """Take the first steps, if there were none, in which the outputs show and the module is taken apart."""
        if self.program is None:
            self._first(inputs)
        assert self.program is not None
        return self.program.settle(*inputs)

    def tensors(self, *inputs: Tensor) -> Sequence[Tensor]:
        """One call of the module."""
        return self._first(inputs) if self.program is None else self.program.tensors(*inputs)

    def __call__(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """One call of the module."""
        return super().__call__(*inputs) if self.program is None else self.program(*inputs)

    def _first(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        policy = self.policy
        outputs = policy.outputs(inputs)
        policy.out_keys.extend(f"output{i}" for i in range(len(policy.out_keys), len(outputs)))
        if len(outputs) != len(policy.out_keys):
            raise ValueError(
                f"policy: {type(policy.module).__name__} returned {len(outputs)} outputs after {len(policy.out_keys)} "
                "before. Return the same number at each call."
            )
        values = [as_tensor(value, self.batch_shape, type(policy.module).__name__) for value in outputs]
        self._check_shapes(values)
        keys: Any = self.in_keys
        if policy.form is not None:
            module = TensorDictModule(_formed(policy), keys, policy.out_keys)
        else:
            named = keys if policy.by_position else dict(zip(policy.in_keys, keys, strict=True))
            module = TensorDictModule(policy.module, named, policy.out_keys)
        self.program = Program(module, InteractionType.DETERMINISTIC, tuple(self.batch_shape), self.in_keys)
        return [value.detach().clone() for value in values]  # it may return memory that it uses again


def _formed(policy: SignaturePolicy) -> Any:
    """A function of several entries, which returns an action in any form, as one that returns tensors."""

    @functools.wraps(policy.module)
    def call(*values: Any) -> Any:
        return policy.outputs(values)

    return call
