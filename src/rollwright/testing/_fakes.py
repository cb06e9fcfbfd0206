"""Shared parts of the fake environments, which refuse actions outside their specs."""

from __future__ import annotations

import random
import string

import torch
from tensordict import TensorDict, TensorDictBase

from rollwright._keys import NestedKey, key_str, leaf_keys
from rollwright.data.specs import NonTensor
from rollwright.envs.base import EnvBase
from rollwright.errors import EnvError, EnvKeyError

__all__ = ["RandomStrings", "UnseededEnv", "check_actions", "put_first", "reset_rows"]


class UnseededEnv(EnvBase):
    """An environment with no randomness of its own; what is random comes from torch's global generator."""

    def _set_seed(self, seed: int | None) -> None:
        """Nothing to do."""


def check_actions(env: EnvBase, tensordict: TensorDictBase) -> None:
    """Test that ``tensordict`` holds every action of ``env`` with as many elements as its spec.

    Policies that are ported from elsewhere write actions of other dtypes, or without a trailing dimension
    of one; the fakes cast and reshape them.

    Raises:
        EnvKeyError: an action is missing.
        EnvError: an action has another number of elements, or is NaN.
    """
    for key in env.action_keys:
        value = tensordict.get(key, None)
        if value is None:
            raise EnvKeyError(
                f"{env}: step got no {key!r}. It got {key_str(leaf_keys(tensordict)) or 'nothing'}. "
                "Let the policy write it."
            )
        spec = env.full_action_spec[key]
        if not isinstance(spec, NonTensor):
            check_action(env, key, value, tensordict.batch_size + spec.shape[env.ndim :])


def check_action(env: EnvBase, key: NestedKey, value: torch.Tensor, shape: torch.Size) -> None:
    """Test one action; see :func:`check_actions`."""
    if value.numel() != shape.numel():
        raise EnvError(
            f"{env}: step got {key!r} with shape {list(value.shape)}, expected {list(shape)}. "
            "Reshape the policy's output."
        )
    if value.is_floating_point() and bool(value.isnan().any()):
        raise EnvError(f"{env}: step got NaN in {key!r}. Look for the first NaN in the policy.")


def reset_rows(env: EnvBase, tensordict: TensorDictBase | None) -> torch.Tensor:
    """Which environments of the batch are to be reset: bool ``[*batch, 1]``, True in all for a plain reset.

    Where several groups of flags hold a ``"_reset"``, one that is marked suffices.
    """
    rows: torch.Tensor | None = None
    given = TensorDict() if tensordict is None else tensordict
    for key in env.reset_keys:
        mask = given.get(key, None)
        if mask is not None:
            marked = mask.flatten(env.ndim).any(-1, keepdim=True)
            rows = marked if rows is None else rows | marked
    if rows is None:
        return torch.ones((*env.batch_size, 1), dtype=torch.bool, device=env.device)
    return rows


def put_first(value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """``value`` with dimensions of one added at its end, expanded to ``shape``."""
    return value.reshape(value.shape + (1,) * (len(shape) - value.ndim)).expand(shape)


class RandomStrings:
    """Lower-case text of ``min_size`` to ``max_size`` letters from a generator of its own."""

    def __init__(self, min_size: int, max_size: int) -> None:
        self.min_size, self.max_size = min_size, max_size
        self.generator = random.Random(0)

    def __call__(self) -> str:
        size = self.generator.randint(self.min_size, self.max_size)
        return "".join(self.generator.choices(string.ascii_lowercase, k=size))
