"""A module called by its signature, on tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from tensordict.nn import InteractionType, TensorDictModule
from torch import Tensor

from rollwright._keys import NestedKey, key_str, unravel
from rollwright.errors import NotNative
from rollwright.modules.signature import SignaturePolicy
from rollwright.policies.base import WatchedPolicy, own_arrays
from rollwright.policies.nodes import as_tensor
from rollwright.policies.program import Program
from rollwright.policies.watch import ModuleSnapshot, check_globals, is_special

__all__ = ["CalledModule"]


class CalledModule(WatchedPolicy):
    """A module that takes entries of the environment by name.

    Its further outputs, ``output1`` and so on, are known after the first call. One that has none is taken apart in the
    second, where it can be.

    Args:
        policy: the module, wrapped by its signature.
        batch_shape: of the entries.
        available: entries of the root.

    Attributes:
        program: the module taken apart, once it is.

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
        self.call = policy.module
        self.finite_keys: list[NestedKey] = []
        self._count = 0  # of outputs, once a call has shown them
        self.program: Program | None = None
        self._tried, self._why = policy.form is not None, ""

    @property
    def how(self) -> str:  # type: ignore[override]
        """See :class:`~rollwright.policies.ArrayPolicy`."""
        whole = f"{type(self.policy.module).__name__} called on tensors"
        return whole + (f" ({self._why})" if self._why else "") if self.program is None else self.program.how

    @property
    def varies(self) -> bool:  # type: ignore[override]
        """See :class:`~rollwright.policies.ArrayPolicy`."""
        return self.program is None or self.program.varies

    def start(self, steps: int) -> None:
        """See :class:`~rollwright.policies.ArrayPolicy`."""
        super().start(steps)
        if self.program is not None:
            self.program.start(steps)

    def settle(self, *inputs: Tensor) -> Program | None:
        """Take the module apart, if it was not tried; None: it cannot be."""
        if not self._count:
            self.tensors(*inputs)
        if not self._tried:
            self.tensors(*inputs)
        return self.program

    @property
    def out_keys(self) -> list[NestedKey]:  # type: ignore[override]
        """The policy's own list, which its first call completes."""
        return [unravel(key) for key in self.policy.out_keys]

    def tensors(self, *inputs: Tensor) -> Sequence[Tensor]:
        """One call of the module."""
        if self.program is not None:
            return self.program.tensors(*inputs)
        if self._count == 1 and not self._tried:
            return self._taken_apart(inputs)
        # It may return memory that it uses again.
        return [value.detach().clone() for value in self._values(inputs)]

    def __call__(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """One call of the module, its results copied as arrays: far cheaper than copies of tensors."""
        if self.program is not None:
            return self.program(*inputs)
        if self._count == 1 and not self._tried:
            return own_arrays(self._taken_apart([torch.from_numpy(value) for value in inputs]))
        tensors = [torch.from_numpy(value) for value in inputs]
        form = self.policy.form
        if form is None or not self._shapes_seen or self._count != 1:
            return own_arrays(self._values(tensors))
        made = self.policy.returned(tensors, self.call)
        action = form.array(made[0]) if len(made) == 1 else None
        # What is no action, or another number of outputs, is reported from the tensors.
        return own_arrays(self._formed(made)) if type(action) is not np.ndarray else [action]

    def _taken_apart(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """One call, in which the module is taken apart."""
        self._tried = True
        policy, keys = self.policy, list(self.in_keys)
        in_keys: Any = keys if policy.by_position else dict(zip(policy.in_keys, keys, strict=True))
        module = TensorDictModule(policy.module, in_keys=in_keys, out_keys=policy.out_keys)
        program = Program(module, InteractionType.DETERMINISTIC, tuple(self.batch_shape), keys)
        values = [value.detach().clone() for value in program.tensors(*inputs)]
        self._why = "; ".join(node.why for node in program.nodes if node.why)
        if not program.varies:
            self.program = program
        return values

    def _values(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the module returned, in memory that may be its own."""
        return self._formed(self.policy.returned(inputs, self.call))

    def _formed(self, outputs: tuple[Any, ...]) -> Sequence[Tensor]:
        policy = self.policy
        if policy.form is not None:
            outputs = (policy.form(outputs[0]), *outputs[1:])
        if self._shapes_seen and len(outputs) == self._count and all(type(value) is Tensor for value in outputs):
            return outputs
        for i in range(len(policy.out_keys), len(outputs)):
            policy.out_keys.append(f"output{i}")
        if len(outputs) != len(policy.out_keys):
            raise ValueError(
                f"policy: {type(policy.module).__name__} returned {len(outputs)} outputs after {len(policy.out_keys)} "
                "before. Return the same number at each call."
            )
        owner = type(policy.module).__name__
        values = [as_tensor(value, self.batch_shape, owner) for value in outputs]
        if not self._shapes_seen:
            self._check_shapes(values)
            self._count = len(values)
        return values
