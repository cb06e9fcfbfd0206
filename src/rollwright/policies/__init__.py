"""Policies on arrays: a policy as a short list of calls on tensors, or as a compiled program.

What runs here gives the bits of the plain path (TensorDict in, TensorDict out) and draws the same random numbers.
Whether a policy can is decided by what it is made of; :class:`NotNative` gives the reason.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from tensordict.nn import InteractionType, TensorDictModuleBase

from rollwright._keys import NestedKey
from rollwright.errors import NotNative
from rollwright.modules import RandomPolicy
from rollwright.modules.functions import FunctionPolicy
from rollwright.modules.signature import SignaturePolicy
from rollwright.policies.base import ArrayPolicy, TensorPolicy
from rollwright.policies.calls import CalledFunction, CalledModule
from rollwright.policies.compiling import compile_policy
from rollwright.policies.program import Program, RandomActions, parameters_of
from rollwright.policies.registration import register_distribution, register_layer
from rollwright.policies.staging import Staged

__all__ = ["ArrayPolicy", "array_policy", "compile_policy", "register_distribution", "register_layer"]


def array_policy(
    policy: Any,
    *,
    exploration_type: InteractionType,
    batch_shape: tuple[int, ...],
    available: Collection[NestedKey],
    device: torch.device | None = None,
) -> ArrayPolicy:
    """The policy as calls on tensors.

    Args:
        policy: what the plain path calls.
        exploration_type: how distributions give a value. Calls must run under it.
        batch_shape: of the environment's entries.
        available: entries that the root has at each step, all tensors.
        device: where they are, and the policy; None: on the host, wherever the policy is.

    Raises:
        NotNative: it must take the plain path; the message gives the reason.

    Example:
        >>> import numpy as np, torch
        >>> from tensordict.nn import TensorDictModule
        >>> policy = TensorDictModule(torch.nn.Tanh(), in_keys=["observation"], out_keys=["action"])
        >>> acting = array_policy(
        ...     policy, exploration_type=InteractionType.RANDOM, batch_shape=(), available=["observation"]
        ... )
        >>> acting.start(1)
        >>> acting.in_keys, acting.out_keys, acting(np.zeros(2, np.float32))
        (['observation'], ['action'], [array([0., 0.], dtype=float32)])
    """
    if type(policy) is FunctionPolicy:
        if device is not None:
            raise NotNative(f"its entries are on {device}")
        return CalledFunction(policy, tuple(batch_shape), available)
    made = _on_tensors(policy, exploration_type, tuple(batch_shape), available)
    devices = {tensor.device for tensor in parameters_of(policy)}
    if len(devices) > 1:
        raise NotNative("its parameters lie on several devices")
    for lies in devices:
        if device is None and lies.type == "cuda":
            return Staged(made, lies)
        if lies != (torch.device("cpu") if device is None else device):
            raise NotNative(f"its parameters lie on {lies}")
    return made


def _on_tensors(
    policy: Any, exploration_type: InteractionType, batch_shape: tuple[int, ...], available: Collection[NestedKey]
) -> TensorPolicy:
    if type(policy) is RandomPolicy:
        return RandomActions(policy, batch_shape)
    if type(policy) is SignaturePolicy:
        return CalledModule(policy, batch_shape, available)
    if isinstance(policy, TensorDictModuleBase):
        return Program(policy, exploration_type, batch_shape, available)
    raise NotNative(f"{type(policy).__name__} is no TensorDict module")
