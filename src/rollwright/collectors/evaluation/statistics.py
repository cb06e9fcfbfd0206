"""Running statistics of transforms and policies, which evaluation reads and never updates."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from rollwright.collectors.rollout.policy_copies import never_copied_in
from rollwright.envs.base import EnvBase
from rollwright.envs.batched.base import BatchedEnv
from rollwright.envs.batched.hosting.host import Hosted
from rollwright.envs.recreation.env import RecreatedEnv
from rollwright.envs.transforms import Transform
from rollwright.envs.transforms.entries.running import RunningNorm
from rollwright.weight_update.forms import State, prepare
from rollwright.weight_update.policy_weights import is_never_copied, weights_of


def freeze(env: EnvBase) -> EnvBase:
    """Stop the running statistics of an environment's transforms (all that have ``freeze()``); returns it."""
    env.eval()
    for module in env.modules():
        halt: Any = getattr(module, "freeze", None) if isinstance(module, Transform) else None
        if callable(halt):
            halt()
        if isinstance(module, RecreatedEnv):
            module.on_recreation(_inherit)
        if isinstance(module, BatchedEnv):
            module.call_in_hosts(_freeze_hosted)
    return env


def _inherit(env: EnvBase, before: EnvBase | None) -> None:
    """Freeze an environment that takes the place of a frozen one, with the statistics of that."""
    freeze(env)
    if before is None:  # they were in a process that is lost
        check_statistics(env)
        return
    for new, old in zip(env.modules(), before.modules(), strict=False):
        if isinstance(new, Transform) and type(new) is type(old) and hasattr(new, "freeze"):
            prepare_weights(new, dict(old.state_dict()), type(new).__name__)()


def check_statistics(env: EnvBase) -> None:
    """Test that frozen statistics are there to normalise by.

    Raises:
        RuntimeError: they are not.
    """
    for name, module in env.named_modules():
        if isinstance(module, BatchedEnv):
            module.call_in_hosts(_check_hosted)
        if not isinstance(module, RunningNorm):
            continue
        written = {*env.observation_keys, *env.reward_keys}
        for index, (key, out_key) in enumerate(zip(module.in_keys, module.out_keys, strict=True)):
            seen = module.has_seen(index)
            if out_key in written if seen is None else not seen:
                raise RuntimeError(
                    f"evaluation: {module} has no statistics of {key!r}, and evaluation does not gather any. Pass "
                    f"evaluate() or trigger_eval() weights_dict={{{_model_id(name)!r}: that transform of the training "
                    "environment}, or let create_env_fn put a frozen_copy() of it on the environment."
                )


def _model_id(name: str) -> str:
    """How a user names a transform of an environment, given its name among the modules."""
    return "env." + re.sub(r"\.(?:transforms\.)?(\d+)", r"[\1]", name)


def _freeze_hosted(hosted: Hosted) -> None:
    freeze(hosted.env)


def _check_hosted(hosted: Hosted) -> None:
    check_statistics(hosted.env)


def prepare_weights(target: Any, weights: State, name: str) -> Callable[[], None]:
    """Check weights for a model; returns the call that copies them, see :func:`prepare`.

    A transform takes statistics that it has no memory for yet, too.
    """
    if isinstance(target, Transform):
        for path, module in target.named_modules():
            buffers = _buffers_of(module)
            for held, buffer in buffers.items():
                saved = weights.get(f"{path}.{held}" if path else held)
                if isinstance(saved, torch.Tensor) and (buffer is None or buffer.shape != saved.shape):
                    buffers[held] = torch.zeros_like(saved, device=None if buffer is None else buffer.device)
    return prepare(target, weights, name)


def _buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Buffers by name, those that are None included, which ``named_buffers`` leaves out."""
    buffers: dict[str, torch.Tensor | None] = vars(module)["_buffers"]
    return buffers


class _SavedBuffer(NamedTuple):
    buffers: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor | None
    saved: torch.Tensor | None


class FrozenBuffers:
    """Puts buffers and extra state of a policy back, after each step in which they moved.

    Args:
        policy: anything; only modules have buffers.

    Example:
        >>> class Counts(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_buffer("seen", torch.zeros(()))
        ...     def forward(self, x):
        ...         self.seen += 1
        ...         return x
        >>> policy = Counts()
        >>> guard = FrozenBuffers(policy)
        >>> _ = policy(torch.ones(1))
        >>> guard.restore()
        >>> policy.seen
        tensor(0.)
    """

    def __init__(self, policy: Any) -> None:
        weights = None if is_never_copied(policy) else weights_of(policy)
        engines = set() if weights is None else {id(part) for part in never_copied_in(policy)}
        self._modules = [] if weights is None else [part for part in weights.modules() if id(part) not in engines]
        self.hold()

    def hold(self) -> None:
        """What buffers hold now is what they keep."""
        self._held = [
            _SavedBuffer(buffers, name, tensor, None if tensor is None else tensor.detach().clone())
            for buffers in map(_buffers_of, self._modules)
            for name, tensor in buffers.items()
        ]
        self._versions = [_version(held.tensor) for held in self._held]
        self._extra = [
            (module, copy.deepcopy(module.get_extra_state()))
            for module in self._modules
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]

    def restore(self) -> None:
        """Undo what a step did to them."""
        for index, (buffers, name, tensor, saved) in enumerate(self._held):
            if buffers.get(name) is tensor and _version(tensor) == self._versions[index]:
                continue
            buffers[name] = tensor
            if tensor is not None and saved is not None:
                with torch.no_grad():
                    tensor.copy_(saved)
                self._versions[index] = _version(tensor)
        for module, extra in self._extra:
            module.set_extra_state(copy.deepcopy(extra))


def _version(tensor: torch.Tensor | None) -> int:
    """A number that changes with each write; -1, as if it never did, for None."""
    return -1 if tensor is None else tensor._version
