"""Checked arguments of an Evaluator, and its own copies of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from tensordict import TensorDictBase
from torch import nn

from rollwright._keys import NestedKey, as_tuple, unravel
from rollwright._options import check_fields, whole
from rollwright._warnings import warn_user
from rollwright.collectors.rollout.policy_copies import copied_policy, never_copied_in
from rollwright.weight_update.forms import State, flat_state, tensordict_of

EVALUATOR_OPTIONS = (  # of CollectorOptions: those that leave an evaluation what it is
    "auto_register_policy_transforms",
    "create_env_kwargs",
    "device",
    "env_device",
    "frames_per_batch",
    "no_cuda_sync",
    "policy_device",
    "post_collect_hook",
    "pre_collect_hook",
    "storing_device",
    "trust_policy",
    "use_buffers",
)


@dataclass(frozen=True)
class CheckedArguments:
    """Arguments of an Evaluator, checked by their types.

    Raises:
        ValueError, TypeError: one is wrong.
    """

    num_trajectories: Annotated[int | None, whole(1)]
    seed: Annotated[int | None, whole()]
    backend: Literal["thread", "process", "ray"]
    busy_policy: Literal["skip", "error", "queue"]
    on_result: Callable[..., Any] | None
    metrics_fn: Callable[..., Any] | None
    env_step_timeout: Any

    def __post_init__(self) -> None:
        check_fields(self)
        given = self.env_step_timeout
        if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
            raise ValueError(f"env_step_timeout: expected seconds above 0, got {given!r}.")


def one_of(name: str, given: Any, other: str, alias: Any) -> Any:
    """An argument that has two names.

    Raises:
        TypeError: it was given by both, or by none.
    """
    if (given is None) == (alias is None):
        raise TypeError(
            f"{name}: expected it, or {other}, got {'none' if given is None else 'both'}. Pass one of them."
        )
    return alias if given is None else given


def reward_key_of(reward_key: NestedKey | None, reward_keys: Any, done_keys: Any) -> NestedKey | None:
    """The key below ``"next"`` of the reward that counts; None: of the only one.

    Raises:
        ValueError, TypeError: keys of other packages are not what an evaluation can go by.
    """
    if done_keys is not None and as_tuple(done_keys) not in (("done",), ("next", "done")):
        raise ValueError(
            "done_keys: expected ('next', 'done'), where the environment says that an episode ends, got "
            f"{done_keys!r}. Leave it out."
        )
    if reward_keys is None:
        return reward_key
    path = as_tuple(reward_keys)
    return unravel(one_of("reward_key", reward_key, "reward_keys", path[1:] if path[0] == "next" else path))


def own_policy(policy: Any, factory: Any, backend: str) -> tuple[Any, nn.Module | None, nn.Module | None]:
    """What acts, where its weights are read when none are given, and the module in it that takes them."""
    if factory is not None:
        if policy is not None and not isinstance(policy, nn.Module):
            raise TypeError(
                f"policy: beside policy_factory it serves for weights only; expected an nn.Module, got "
                f"{type(policy).__name__}. Leave one of them out."
            )
        return None, policy, None
    if policy is None:
        return None, None, None
    if backend != "thread" and (found := never_copied_in(policy)):
        raise TypeError(
            f"policy: it holds {type(found[0]).__name__}, which is never copied, and so cannot be sent to another "
            "process. Pass policy_factory=, a function that makes it there, or backend='thread'."
        )
    copied = copied_policy(policy)
    if copied.shares_modules:
        if backend != "thread":
            raise TypeError(
                "policy: got a function around a module, or something with modules in it that cannot be copied; in "
                "another process it would never see new weights. Pass an nn.Module, a TensorDictModule, or "
                "policy_factory."
            )
        warn_user(
            "Evaluator: the policy is a function around a module, or uses one that cannot be copied with it; it acts "
            "with weights that training may change in the middle of an evaluation. Pass an nn.Module or a "
            "TensorDictModule.",
            UserWarning,
        )
    return copied.policy, copied.source, copied.target


def copy_of(weights: Any, name: str) -> State:
    """Weights in any form as a flat state that nobody else writes, on the CPU.

    Raises:
        TypeError: they have none of the forms of weights.
    """
    with torch.no_grad():
        return {key: _value_copy(value) for key, value in flat_state(weights, name).items()}


def weights_of(policy: nn.Module) -> TensorDictBase:
    """A copy of a module's parameters and buffers, on the CPU, to be passed as ``weights`` later.

    Extra state (``get_extra_state``) is not in it; the module itself brings that along.

    Args:
        policy: the module.
    """
    return tensordict_of(policy).data.to("cpu").clone()


def _value_copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
