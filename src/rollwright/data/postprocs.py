"""Post-processing of batches: returns over several steps, and over the rest of a trajectory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import nn

from rollwright._keys import NestedKey, as_keys, as_tuple, key_str, leaf_keys, unravel
from rollwright.data.compact import BOUNDARY
from rollwright.data.layout import DONE, TERMINATED, TRAJ_IDS, TRUNCATED, done_groups, end_of_trajectory
from rollwright.data.layout.boundaries import find_ends

__all__ = ["DensifyReward", "MultiStep", "Reward2GoTransform", "RewardToGo"]


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
        """The settings that ``repr`` shows."""
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


class RewardToGo(nn.Module):
    r"""Writes the discounted sum of the rewards from each step to the end of its trajectory.

    .. math::

        G_t = r_t + \gamma (1 - \text{done}_t) G_{t+1}

    Sums end where a trajectory ends (``done``, or another trajectory id), and where the batch does: those of a
    trajectory that goes on lack what comes later. So a batch, or each environment of one ``[*env, T]``, in which no
    trajectory ends is an error. A transform of a replay buffer, which changes what is written (:meth:`inv`) and leaves
    batches as they are; ``postproc=RewardToGo(...).inv`` of a collector does the same.

    Args:
        gamma: discount factor, a number from 0 to 1.
        in_keys: entries of rewards; default: ``("next", "reward")``.
        out_keys: where sums are written; default: over the rewards.
        done_key: entry below ``"next"`` of flags that end a trajectory.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage, ReplayBuffer
        >>> to_go = RewardToGo(gamma=0.5, out_keys=["reward_to_go"])
        >>> buffer = ReplayBuffer(storage=LazyTensorStorage(100), transform=to_go)
        >>> outcome = {"reward": torch.ones(4, 1), "done": torch.tensor([[False], [True], [False], [True]])}
        >>> _ = buffer.extend(TensorDict({"next": outcome}, [4]))
        >>> buffer[:]["reward_to_go"].squeeze(-1)
        tensor([1.5000, 1.0000, 1.5000, 1.0000])
    """

    def __init__(
        self,
        gamma: float | torch.Tensor | None = 1.0,
        in_keys: NestedKey | Sequence[NestedKey] | None = None,
        out_keys: NestedKey | Sequence[NestedKey] | None = None,
        done_key: NestedKey = DONE,
    ) -> None:
        super().__init__()
        self.gamma = _discount("gamma", 1.0 if gamma is None else gamma)
        self.in_keys: list[NestedKey] = as_keys([("next", "reward")] if in_keys is None else in_keys)
        self.out_keys = list(self.in_keys) if out_keys is None else as_keys(out_keys)
        if len(self.in_keys) != len(self.out_keys) or not self.in_keys:
            raise ValueError(f"out_keys: expected one for each of {self.in_keys}, got {self.out_keys}.")
        self.done_key = unravel(("next", *as_tuple(done_key)))

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Batches that are drawn stay as they are."""
        return batch

    def inv(self, data: TensorDictBase) -> TensorDictBase:
        """Data ``[*env, T]`` with the sums; a copy of each level, which shares the other entries.

        Raises:
            KeyError: there is no such reward, or no ``done``.
            ValueError: no trajectory ends, or there is no dimension of time.
        """
        ends = _ends(data, self.done_key)
        if not bool(ends.any(-1).all()):
            raise ValueError(
                "data: expected the end of a trajectory in each environment, to which rewards are summed, got none. "
                "Collect more frames at a time, or whole trajectories (trajs_per_batch)."
            )
        out = data.copy()
        for key, to in zip(self.in_keys, self.out_keys, strict=True):
            out.set(to, _to_go(_reward(data, key), ends, self.gamma, data.ndim - 1))
        return out

    def extra_repr(self) -> str:
        """The settings that ``repr`` shows."""
        return f"gamma={self.gamma}, in_keys={self.in_keys}, out_keys={self.out_keys}"


Reward2GoTransform = RewardToGo


def gae(
    batch: TensorDictBase,
    value: torch.Tensor,
    next_value: torch.Tensor,
    *,
    gamma: float = 0.99,
    lmbda: float = 0.95,
    reward_key: NestedKey = "reward",
) -> torch.Tensor:
    r"""Generalized advantage estimation (arXiv:1506.02438, equation 16).

    .. math::

        \delta_t = r_t + \gamma (1 - \text{terminated}_t) V(s_{t+1}) - V(s_t) \qquad
        A_t = \delta_t + \gamma \lambda (1 - \text{end}_t) A_{t+1}

    The value that follows a termination is zero; after a truncation, and at the end of a batch or a slice, it is
    ``next_value``. Sums end where a trajectory does (``done``, another id, ``is_init``), and with the batch.

    Args:
        batch: ``[*env, T]``, or flat: slices, or trajectories one after another.
        value: of ``observation``, the shape of the reward.
        next_value: of ``("next", "observation")``, the shape of the reward.
        gamma: discount factor, from 0 to 1.
        lmbda: from 0 (least variance) to 1 (least bias).
        reward_key: entry below ``"next"``; of agents, flags beside it are read, else those of ``"next"``.

    Returns:
        Advantages, of the shape and dtype of ``value``; 0 in padding. The critic's target is ``advantage + value``.

    Raises:
        KeyError: there is no such reward, or there are no flags.
        ValueError: values have another shape than the reward.

    Example:
        >>> from tensordict import TensorDict
        >>> flags = {"done": torch.tensor([[False], [True]]), "terminated": torch.tensor([[False], [True]])}
        >>> batch = TensorDict({"next": {"reward": torch.ones(2, 1), **flags}}, [2])
        >>> gae(batch, torch.zeros(2, 1), torch.zeros(2, 1), gamma=0.5, lmbda=1.0)
        tensor([[1.5000],
                [1.0000]])
    """
    reward = _reward(batch, unravel(("next", *as_tuple(reward_key))))
    for name, given in {"value": value, "next_value": next_value}.items():
        if given.shape != reward.shape:
            raise ValueError(
                f"{name}: expected the shape of the reward, {list(reward.shape)}, got {list(given.shape)}. Give a "
                "value for each reward."
            )
    group = as_tuple(reward_key)[:-1]
    ends, real = find_ends(batch, None, None, None)
    done, terminated = (
        batch.get(("next", *group, name), batch.get(("next", name), None)) for name in (DONE, TERMINATED)
    )
    if terminated is None:
        raise KeyError(f"batch: expected the flags of steps, got {key_str(leaf_keys(batch))}. Keep 'terminated'.")
    delta = reward + gamma * torch.where(_beside(terminated, reward, batch.ndim), 0.0, next_value) - value
    if real is not None:
        delta = torch.where(_beside(real, reward, batch.ndim), delta, 0.0)
    stops = _beside(ends, reward, batch.ndim) | _beside(terminated if done is None else done, reward, batch.ndim)
    return _to_go(delta, stops, gamma * lmbda, batch.ndim - 1).to(value.dtype)


def _beside(flag: torch.Tensor, reward: torch.Tensor, dims: int) -> torch.Tensor:
    """A flag with as many dimensions as a reward; one of all agents counts for each of them.

    Args:
        flag: ``[*env, T, ...]``, or ``[rows, T]``.
        reward: ``[*env, T, ...]``.
        dims: of ``[*env, T]``.
    """
    if flag.ndim == reward.ndim and flag.shape[:-1] == reward.shape[:-1]:
        return flag
    return flag.reshape(*reward.shape[:dims], *(1,) * (reward.ndim - dims))


class DensifyReward(nn.Module):
    """Writes the sum of the rewards from each step to the end of its trajectory over the reward.

    For rewards that are 0 but at the end: each step gets that one. See :class:`RewardToGo`; here the last trajectory
    may go on, and is summed as far as the batch goes.

    Args:
        reward_key: entry below ``"next"``.
        done_key: entry below ``"next"`` of flags that end a trajectory.
        reward_key_out: entry below ``"next"`` for the sums; None: ``reward_key``.
        time_dim: accepted for programs of the field; time is the last dimension of the batch.
        discount: from 0 to 1.

    Example:
        >>> from tensordict import TensorDict
        >>> outcome = {"reward": torch.tensor([0.0, 3.0, 0.0]), "done": torch.tensor([False, True, False])}
        >>> DensifyReward()(TensorDict({"next": outcome}, [3]))["next", "reward"]
        tensor([3., 3., 0.])
    """

    def __init__(
        self,
        *,
        reward_key: NestedKey = "reward",
        done_key: NestedKey = DONE,
        reward_key_out: NestedKey | None = None,
        time_dim: int = 2,
        discount: float = 1.0,
    ) -> None:
        super().__init__()
        self.reward_key = unravel(("next", *as_tuple(reward_key)))
        self.done_key = unravel(("next", *as_tuple(done_key)))
        self.reward_key_out = (
            self.reward_key if reward_key_out is None else unravel(("next", *as_tuple(reward_key_out)))
        )
        self.time_dim, self.discount = time_dim, _discount("discount", discount)

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """A batch ``[*env, T]`` with the sums; a copy of each level, which shares the other entries.

        Raises:
            KeyError: there is no such reward, or no ``done``.
            ValueError: there is no dimension of time.
        """
        ends = _ends(batch, self.done_key)
        to_go = _to_go(_reward(batch, self.reward_key), ends, self.discount, batch.ndim - 1)
        return batch.copy().set(self.reward_key_out, to_go)


def _discount(name: str, value: float | torch.Tensor) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, got {value!r}. Pass a discount factor such as 0.99.")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: expected 0 <= {name} <= 1, got {value}. Pass a discount factor such as 0.99.")
    return float(value)


def _reward(batch: TensorDictBase, key: NestedKey) -> torch.Tensor:
    reward: torch.Tensor | None = batch.get(key, None)
    if reward is None:
        raise KeyError(f"data: expected the reward {key!r}, got {key_str(leaf_keys(batch))}. Name another entry.")
    return reward if reward.is_floating_point() else reward.to(torch.get_default_dtype())


def _ends(batch: TensorDictBase, done_key: NestedKey) -> torch.Tensor:
    """Whether a trajectory ends with each step, bool ``[*env, T]``."""
    if not isinstance(batch, TensorDictBase) or not batch.ndim:
        got = list(batch.batch_size) if isinstance(batch, TensorDictBase) else type(batch).__name__
        raise ValueError(f"data: expected a TensorDict with a dimension of time, got {got}. Pass batches to extend().")
    done = batch.get(done_key, None)
    if done is None:
        raise KeyError(f"done_key: there is no entry {done_key!r}; the data have {key_str(leaf_keys(batch))}.")
    ends: torch.Tensor = done.bool().reshape(*batch.batch_size, -1).any(-1)
    ids = batch.get(TRAJ_IDS, None)
    if ids is not None:
        ids = ids.reshape(batch.batch_size)
        changes = (ids[..., 1:] != ids[..., :-1]).to(ends.device)
        ends = torch.cat([ends[..., :-1] | changes, ends[..., -1:]], -1)
    return ends


def _to_go(reward: torch.Tensor, ends: torch.Tensor, gamma: float, time: int) -> torch.Tensor:
    """Discounted sums ``[*env, T, ...]`` up to the next end, or the end of the batch, along dimension ``time``.

    Doubles how far each sum reaches, so that T steps take log2(T) passes over all of them.
    """
    total = reward.to(torch.float64).clone()
    weight = (gamma * (~ends).to(torch.float64)).to(reward.device)
    weight = weight.reshape(*ends.shape, *(1,) * (reward.ndim - ends.ndim))
    length, reach = ends.shape[time], 1
    while reach < length:
        kept = length - reach
        here, later = weight.narrow(time, 0, kept), total.narrow(time, reach, kept)
        ahead = torch.where(here != 0, here * later, 0.0)  # chosen, for 0 times infinity is no number
        total = torch.cat([total.narrow(time, 0, kept) + ahead, total.narrow(time, kept, reach)], time)
        further = here * weight.narrow(time, reach, kept)
        weight = torch.cat([further, torch.zeros_like(weight.narrow(time, kept, reach))], time)
        reach *= 2
    return total.to(reward.dtype)


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
