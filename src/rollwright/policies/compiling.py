"""Compiles a policy on arrays: to a NumPy program where all of it is known, else through ``torch.compile``."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from tensordict.nn import set_interaction_type
from torch import nn

from rollwright._keys import NestedKey
from rollwright.errors import NotNative
from rollwright.policies.base import ArrayPolicy, TensorPolicy
from rollwright.policies.calls import CalledModule
from rollwright.policies.numpy_program import NumpyProgram
from rollwright.policies.program import Program, RandomActions
from rollwright.policies.staging import Staged
from rollwright.policies.torch_program import TorchProgram

_NOTICEABLE_S = 1.0


def compile_policy(
    policy: ArrayPolicy, *, arguments: Mapping[str, Any] | None = None, example: Mapping[NestedKey, np.ndarray]
) -> ArrayPolicy:
    """A cheaper program that does what ``policy`` does, to rounding, and equal in its actions for equal random numbers.

    It is run on the example. Random numbers and buffers are as if it had not been.

    Args:
        policy: from :func:`~rollwright.policies.array_policy`.
        arguments: of ``torch.compile``, which they choose; without any, a small known network becomes NumPy calls.
        example: an array per in_key, as the calls will bring them.

    Raises:
        NotNative: it cannot be compiled; the message gives the reason.

    Example:
        >>> from tensordict.nn import InteractionType, TensorDictModule
        >>> from rollwright.policies import array_policy
        >>> policy = TensorDictModule(torch.nn.Tanh(), in_keys=["observation"], out_keys=["action"])
        >>> policy = array_policy(
        ...     policy, exploration_type=InteractionType.RANDOM, batch_shape=(), available=["observation"]
        ... )
        >>> compile_policy(policy, example={"observation": np.zeros(2, np.float32)}).how
        'NumPy program of 1 call'
    """
    if isinstance(policy, RandomActions):
        return policy
    inputs = [np.asarray(example[key], order="C") for key in policy.in_keys]  # a number stays one
    inner = policy.policy if isinstance(policy, Staged) else policy
    acting = set_interaction_type(inner.exploration_type) if isinstance(inner, Program) else nullcontext()
    with torch.no_grad(), acting, _same_random_numbers(), _same_buffers(getattr(inner, "policy", None)):
        why = ""
        if isinstance(inner, Program | CalledModule):
            device = policy.device if isinstance(policy, Staged) else "cpu"
            inner = inner.settle(*[torch.from_numpy(array).to(device) for array in inputs])
            policy = Staged(inner, policy.device) if isinstance(policy, Staged) else inner
        if not arguments and isinstance(policy, Program):
            try:
                return _agrees(policy, NumpyProgram(policy, inputs), inputs)
            except NotNative as error:
                why = f"{error}; "
        try:
            with _announced("compiling the policy"), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of the compiler about its own parts
                compiled = _through_torch(policy, inputs, arguments or {})
                compiled.start(1)
                compiled(*inputs)
        except NotNative:
            raise
        except Exception as error:
            reason = " ".join(str(error).split("\n")[:2])
            raise NotNative(f"{why}torch.compile failed with {type(error).__name__}: {reason}") from error
    return compiled


def _through_torch(policy: ArrayPolicy, inputs: list[np.ndarray], arguments: Mapping[str, Any]) -> ArrayPolicy:
    if isinstance(policy, Staged):
        device = policy.device
        tensors = [torch.from_numpy(array).to(device) for array in inputs]
        return Staged(_compiled_on(policy.policy, tensors, arguments), device)
    return _compiled_on(policy, [torch.from_numpy(array) for array in inputs], arguments)


def _compiled_on(policy: Any, tensors: list[torch.Tensor], arguments: Mapping[str, Any]) -> TensorPolicy:
    if isinstance(policy, Program):
        return TorchProgram(policy, tensors, arguments)
    raise NotNative(f"{type(policy).__name__} cannot be compiled")


def _agrees(policy: Program, compiled: NumpyProgram, inputs: list[np.ndarray]) -> NumpyProgram:
    """``compiled``, tested against ``policy`` on the inputs."""
    state = torch.get_rng_state()
    compiled.start(1)
    with np.errstate(all="ignore"):
        ours = compiled(*inputs)
    torch.set_rng_state(state)
    for key, value, expected in zip(policy.out_keys, ours, policy(*inputs), strict=True):
        if value.shape != expected.shape or value.dtype != expected.dtype:
            raise NotNative(f"NumPy gives {key!r} as {value.dtype} {list(value.shape)}")
        if not np.allclose(value, expected, rtol=1e-3, atol=1e-4, equal_nan=True):
            raise NotNative(f"NumPy gives other values of {key!r} than torch")
    return compiled


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Put torch's generators back as they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def _same_buffers(policy: Any) -> Iterator[None]:
    """Put the buffers of the policy's modules back as they were."""
    buffers = list(policy.buffers()) if isinstance(policy, nn.Module) else []
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            if not torch.equal(buffer, value):
                buffer.copy_(value)


@contextmanager
def _announced(what: str) -> Iterator[None]:
    """Say what takes so long, once it takes long."""
    timer = threading.Timer(_NOTICEABLE_S, lambda: print(f"rollwright: {what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
