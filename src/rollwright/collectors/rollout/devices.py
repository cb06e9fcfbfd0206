"""Devices of policy, environment and batch, and copies between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rollwright.collectors.options import CollectorOptions
from rollwright.data.specs.shapes import as_device
from rollwright.weight_update.policy_weights import weights_of


@dataclass(frozen=True)
class Devices:
    """The devices of a collector, resolved once.

    Attributes:
        policy: where the policy computes; None when it is not known (no parameters, no option).
        env: where the environment's data live; None for an environment without a device.
        storing: where batches are delivered; None when their entries share no device by promise.
    """

    policy: torch.device | None
    env: torch.device | None
    storing: torch.device | None

    @classmethod
    def resolve(cls, options: CollectorOptions, env: torch.device | None, policy: torch.device | None) -> Devices:
        """Fill in what the options leave open.

        Args:
            options: of the collector.
            env: the environment's device, once ``env_device`` was applied to it.
            policy: the device of the policy's parameters, if they have one.
        """
        policy_device = options.policy_device or options.device
        if policy_device is None and policy is not None and policy != (env or torch.device("cpu")):
            policy_device = policy  # the policy stays where it is, and data must go there
        storing = options.storing_device or options.device
        if storing is None and policy_device == env:
            storing = env
        return cls(as_device(policy_device), env, as_device(storing))

    @property
    def cast_to_policy(self) -> bool:
        """Whether data are copied to the policy's device before it reads them."""
        return self.policy is not None and self.policy != self.env

    @property
    def cast_to_env(self) -> bool:
        """Whether data are copied to the environment's device before it reads them."""
        return self.env is not None and (self.policy != self.env or self.storing != self.env)

    @property
    def current_has_no_device(self) -> bool:
        """Whether the current TensorDict has entries on several devices, or on none that was declared."""
        return self.env is None or self.policy != self.env


class Syncs(NamedTuple):
    """Functions to call after a copy to the policy's device, to the environment's, to that of batches."""

    policy: Callable[[], None]
    env: Callable[[], None]
    storage: Callable[[], None]

    @classmethod
    def of(cls, devices: Devices, *, skip: bool) -> Syncs:
        """For some devices; ``skip``: nothing is called."""
        made = [nothing if skip else sync_function(device) for device in (devices.policy, devices.env, devices.storing)]
        return cls(*made)


def module_device(policy: object) -> torch.device | None:
    """The one device of a policy's parameters and buffers; None when there is none, or several."""
    module = weights_of(policy)
    if module is None:
        return None
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return devices.pop() if len(devices) == 1 else None


def nothing() -> None:
    """The synchronisation that no copy to this device needs."""


def sync_function(device: torch.device | None) -> Callable[[], None]:
    """What to call after a non-blocking copy *to* ``device`` before its result may be read.

    ======================================  =============================
    destination                             call
    ======================================  =============================
    CUDA                                    nothing: the stream orders it
    not CUDA, where CUDA is in use          ``torch.cuda.synchronize``
    not CUDA, where MPS is available        ``torch.mps.synchronize``
    not CUDA, where an NPU is available     ``torch.npu.synchronize``
    CPU alone, or no device                 nothing
    ======================================  =============================
    """
    if device is None or device.type == "cuda":
        return nothing
    if torch.cuda.is_available():
        return _synchronize_cuda
    if torch.backends.mps.is_available():
        return torch.mps.synchronize
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        return npu.synchronize  # type: ignore[no-any-return]
    return nothing


def _synchronize_cuda() -> None:
    if torch.cuda.is_initialized():  # a forked worker that never touched CUDA must not start now
        torch.cuda.synchronize()
