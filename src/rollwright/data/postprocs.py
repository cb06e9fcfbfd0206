"""Post-processing of batches: returns over several steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import nn

from rollwright._keys import NestedKey, as_keys, as_tuple, key_str, unravel
from rollwright.data.compact import BOUNDARY
from rollwright.data.layout import DONE, TERMINATED, TRUNCATED, done_groups, end_of_trajectory
from rollwright.data.layout.runs import find_ends

__all__ = ["MultiStep"]


class MultiStep(nn.Module):
    r"""Rewrites every transition of a batch into one over up to ``n_steps`` steps of its trajectory.

    .. math::

        R_t = \sum_{k=0}^{m_t - 1} \gamma^k r_{t+k}, \qquad
        m_t = \min(n,\; 1 + (\text{steps of the trajectory that follow } t \text{ in the batch}))

    so that :math:`R_t + \gamma^{m_t} (1 - \text{terminated}_{t + m_t - 1}) V(s_{t + m_t})` is the target of a value at
    t, with what lies below ``"next"`` after the rewrite (Sutton, "Learning to predict by the methods of temporal
    differences", 1988). ``n_steps=1`` leaves rewards and ``"next"`` as they are.

    Trajectories are distinguished as :func:`~rollwright.data.layout.trajectory_runs` says, and end at ``done``: no sum
    crosses a boundary. At the end of the batch there are no later frames, so the last frames of a trajectory that goes
    on take fewer steps: ``"steps_to_next_obs"`` holds how many.

    Made for ``postproc=`` of a collector, and for batches that a sampler of slices returns. It is a module without
    weights, so it can stand in an ``nn.Sequential``. The rewritten ``done`` no longer marks one frame a trajectory but
    up to ``n_steps``: afterwards, distinguish trajectories by their ids.

    Args:
        gamma: discount factor, ``0 < gamma <= 1``.
        n_steps: the most steps to look ahead, at least 1.
        reward_keys: entries below ``"next"`` that are summed, ``"reward"`` unless given.

    Raises:
        TypeError, ValueError: an argument is of another type, or out of its range.

    Example:
        >>> from tensordict import TensorDict
        >>> flags = torch.tensor([[False], [False], [True], [False]])
        >>> outcome = TensorDict({"x": torch.arange(1, 5), "reward": torch.ones(4, 1), "done": flags}, [4])
        >>> batch = MultiStep(gamma=0.5, n_steps=2)(TensorDict({"x": torch.arange(4), "next": outcome}, [4]))
        >>> batch["next", "reward"].squeeze(-1)
        tensor([1.5000, 1.5000, 1.0000, 1.0000])
        >>> batch["next", "x"], batch["steps_to_next_obs"]
        (tensor([2, 3, 3, 4]), tensor([2, 2, 1, 1]))
        >>> batch["next", "done"].squeeze(-1)
        tensor([False,  True,  True, False])
    """

    def __init__(self, gamma: float, n_steps: int, *, reward_keys: NestedKey | Sequence[NestedKey] = "reward") -> None:
        super().__init__()
        if isinstance(gamma, bool) or not isinstance(gamma, int | float):
            raise TypeError(f"gamma: expected a number, got {gamma!r}. Pass a discount factor such as 0.99.")
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma: expected 0 < gamma <= 1, got {gamma}. Pass a discount factor such as 0.99.")
        if isinstance(n_steps, bool) or not isinstance(n_steps, int):
            raise TypeError(f"n_steps: expected a whole number, got {n_steps!r}. Pass how many rewards to sum.")
        if n_steps < 1:
            raise ValueError(
                f"n_steps: expected at least 1, got {n_steps}. 1 sums no further rewards; leave the post-processing "
                "out if that is what you want."
            )
        self.gamma = float(gamma)
        self.n_steps = n_steps
        self.reward_keys = as_keys(reward_keys)
        if not self.reward_keys:
            raise ValueError("reward_keys: expected at least one entry below 'next', got none. Leave it out.")

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Rewrite a batch.

        Args:
            batch: ``[*env, T]``, time last: as a collector delivers it, flat, or padded with its mask, bool
                ``[*env, T]`` or ``[*env, T, 1]``.

        Returns:
            A new TensorDict of the same shape; the batch is left as it is, and the root's entries are shared.

            - ``("next", "reward")``: the discounted sum, of the reward's dtype (the default one if that is integer).
              It replaces the reward, which is now ``("next", "original_reward")``.
            - Everything else below ``"next"``, flags included: that of the last step summed.
            - ``"steps_to_next_obs"`` int64 ``[*env, T]``: how many steps were summed.
            - ``"gamma"`` ``[*env, T]``, of the reward's dtype: ``gamma ** steps_to_next_obs``.
            - ``"nonterminal"`` bool ``[*env, T]``: a further step of the trajectory follows in the batch.

            Padding, and frames that were not taken, stay as they are, with one step and ``nonterminal`` False.

        Raises:
            KeyError: there is no such reward, or nothing that marks where trajectories end.
            ValueError: there is no dimension of time, or next observations were left out (``compact_obs=True``).
        """
        self._check(batch)
        outcome = batch.get("next")
        steps, follows = self._steps(batch, outcome)
        shape = (batch.batch_size[:-1].numel(), batch.batch_size[-1])
        rewritten = batch.copy()  # of each level: the batch keeps its own
        shifted = _shifted(outcome.exclude(*self.reward_keys), steps)
        for key in self.reward_keys:
            reward = outcome.get(key)
            summed = self._sums(reward.reshape(*shape, -1), steps.reshape(shape))
            shifted.set(key, summed.reshape(reward.shape))
            shifted.set(_original(key), reward)
        shifted.names = batch.names
        rewritten.set("next", shifted)
        rewritten.set("steps_to_next_obs", steps)
        rewritten.set("gamma", self.gamma ** steps.to(summed.dtype))
        rewritten.set("nonterminal", follows)
        return rewritten

    def extra_repr(self) -> str:
        """See :meth:`torch.nn.Module.extra_repr`."""
        return f"gamma={self.gamma}, n_steps={self.n_steps}"

    def _check(self, batch: TensorDictBase) -> None:
        if batch.get(BOUNDARY, None) is not None:
            raise ValueError(
                "batch: its next observations are kept aside (compact_obs=True). Call rollwright.data.restore_next on "
                "it first, or collect without compact_obs."
            )
        outcome = batch.get("next", None)
        missing = [key for key in self.reward_keys if outcome is None or outcome.get(key, None) is None]
        if missing:
            below = "nothing" if outcome is None else key_str(outcome.keys(True, True))
            raise KeyError(
                f"batch: expected {key_str(missing)} below 'next', which has {below}. Name the rewards with "
                "reward_keys=."
            )
        written = [key for key in map(_original, self.reward_keys) if outcome.get(key, None) is not None]
        if written:
            raise ValueError(
                f"batch: it has {key_str(written)} below 'next', so its rewards are sums already. Rewrite a batch once."
            )

    def _steps(self, batch: TensorDictBase, outcome: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
        """How many steps each frame sums, int64, and whether a further one follows, bool, both ``[*env, T]``."""
        ends, taken = find_ends(batch, None, None, None)
        flags = [key for key in outcome.keys(True, True) if as_tuple(key)[-1] in (DONE, TERMINATED, TRUNCATED)]
        groups = [group for group in done_groups(flags) if outcome.get(group.done, None) is not None]
        ends |= end_of_trajectory(outcome, groups, batch.ndim).to(ends.device).reshape(ends.shape)
        if taken is not None:
            ends |= ~taken  # each of them by itself
        ends = ends.flatten()
        stops = ends.nonzero().squeeze(-1)
        frames = torch.arange(len(ends), device=ends.device)
        left = stops[torch.searchsorted(stops, frames)] - frames
        return (left + 1).clamp(max=self.n_steps).reshape(batch.batch_size), (left > 0).reshape(batch.batch_size)

    def _sums(self, rewards: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Discounted sums ``[rows, T, features]`` of as many rewards as ``steps`` ``[rows, T]`` says."""
        if not rewards.dtype.is_floating_point:
            rewards = rewards.to(torch.get_default_dtype())
        ahead = torch.arange(self.n_steps, device=rewards.device)
        time = torch.arange(rewards.shape[1], device=rewards.device).unsqueeze(-1) + ahead
        window = rewards[:, time.clamp(max=rewards.shape[1] - 1)]  # [rows, T, n_steps, features]
        summed = (ahead < steps.to(rewards.device).unsqueeze(-1)).unsqueeze(-1)
        discounts = self.gamma ** ahead.to(rewards.dtype).unsqueeze(-1)
        return torch.where(summed, window * discounts, 0.0).sum(-2)  # chosen, for 0 times infinity is no number


def _original(key: NestedKey) -> NestedKey:
    """Where a reward goes that its sum replaces."""
    *place, name = as_tuple(key)
    return unravel((*place, f"original_{name}"))


def _shifted(outcome: TensorDictBase, steps: torch.Tensor) -> TensorDictBase:
    """``outcome`` ``[*env, T]`` of the last of ``steps`` steps, in memory of its own."""
    *envs, length = outcome.batch_size
    index = torch.meshgrid(*(torch.arange(size, device=steps.device) for size in (*envs, length)), indexing="ij")
    shifted: TensorDictBase = outcome[(*index[:-1], index[-1] + steps - 1)]
    if isinstance(shifted, LazyStackedTensorDict) or any(
        isinstance(value, LazyStackedTensorDict) for value in shifted.values(True)
    ):
        return shifted.clone()  # a lazy stack is indexed by reference
    return shifted
