"""Rewards of one number for each step, and rewards of one number for each token of a turn."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright._keys import NestedKey


def summed_reward(td: TensorDictBase, key: NestedKey, ndim: int) -> torch.Tensor:
    """The reward of each step: where a row has one number for each of its tokens, their sum.

    Args:
        td: ``[*batch]``.
        key: of the reward.
        ndim: dimensions of a reward below the batch, where it is one number.

    Returns:
        ``[*batch, ...]``, with ``ndim`` dimensions below the batch.
    """
    if isinstance(td, LazyStackedTensorDict):
        rows: list[Any] = [summed_reward(row, key, ndim) for row in td.unbind(td.stack_dim)]
        return torch.stack(rows, td.stack_dim)
    reward: torch.Tensor = td.get(key)
    return reward.sum(td.batch_dims) if reward.ndim - td.batch_dims > ndim else reward


def take_token_rewards(td: TensorDictBase, key: NestedKey, ndim: int) -> list[tuple[TensorDictBase, torch.Tensor]]:
    """Put sums in place of rewards that have one number for each token.

    Args:
        td: ``[*batch]``, lazily stacked where there is any.
        key: of the reward.
        ndim: dimensions of a reward below the batch, where it is one number.

    Returns:
        The rows that had one, with it.
    """
    if not isinstance(td, LazyStackedTensorDict):
        reward = td.get(key, None)
        if not isinstance(reward, torch.Tensor) or reward.ndim - td.batch_dims <= ndim:
            return []
        td.set(key, reward.sum(td.batch_dims))
        return [(td, reward)]
    return [found for row in td.tensordicts for found in take_token_rewards(row, key, ndim)]
