"""HERReplayBuffer: hindsight experience replay, goals replaced by what was achieved."""

from __future__ import annotations

import enum
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from rollwright._keys import NestedKey, as_tuple, checked_key, key_str, leaf_keys, unravel
from rollwright._options import with_options
from rollwright._warnings import warn_user
from rollwright.data.layout import NEXT_DONE
from rollwright.data.replay_buffers._arguments import stacked
from rollwright.data.replay_buffers.buffer import ReplayBuffer
from rollwright.data.replay_buffers.kinds import TensorDictReplayBuffer
from rollwright.data.replay_buffers.samplers.runs import Boundaries
from rollwright.data.replay_buffers.samplers.sampler import Draw
from rollwright.data.replay_buffers.samplers.uniform import RandomSampler
from rollwright.data.replay_buffers.storages.rows import RowStorage

if TYPE_CHECKING:
    from rollwright.data.replay_buffers.keywords import BufferKeywords

Index = NDArray[np.int64]


class HindsightStrategy(enum.Enum):
    """Where goals are taken from.

    Attributes:
        FUTURE: the same step or a later one of the same trajectory, each with the same probability.
        FINAL: the last step of the trajectory that is stored; where it ended, with ``achieved_goal_key=("next",
            "achieved_goal")``.
        EPISODE: any step of the trajectory that is stored.
        RANDOM: any element of the buffer.
    """

    FUTURE = "future"
    FINAL = "final"
    EPISODE = "episode"
    RANDOM = "random"


@with_options(ReplayBuffer)
class HERReplayBuffer(TensorDictReplayBuffer):
    """A replay buffer whose batches pretend, in part, that what was achieved had been the goal.

    In a share of each batch, drawn at random, the goal is replaced by what was achieved in another step of the same
    trajectory, and the reward is computed again (Andrychowicz et al., 2017, "Hindsight Experience Replay", section
    3.3). What is stored stays as it is. Trajectories are distinguished as
    :class:`~rollwright.data.replay_buffers.samplers.slices.SliceSampler` does; the ring's seam is no boundary.

    Args:
        reward_fn: makes rewards, ``[k]`` or ``[k, 1]``, from transitions, a TensorDict ``[k]``, whose goal is the new
            one.
        her_ratio: the share that is changed, from 0 to 1, rounded down to whole elements.
        strategy: see :class:`HindsightStrategy`, or its value.
        goal_key: entry of the goal; where ``("next", goal_key)`` is stored, it is replaced, too.
        achieved_goal_key: entry of what was achieved, of the goal's shape. ``("next", "achieved_goal")`` is what a step
            has led to, and the one to take wherever it is stored. ``"achieved_goal"`` is what was achieved before the
            action of the step: a final goal lacks what the last action did, and a goal of the same step is reached
            before it begins. ``reward_fn`` compares the goal with the same entry.
        reward_key: entry of the reward.
        end_key: entry of flags that mark the last step of a trajectory.
        **options: those of :class:`ReplayBuffer`.

    Raises:
        ValueError: ``her_ratio`` is out of its range, or there is no such strategy.

    Warns:
        UserWarning: final goals are what was achieved before the last action, and what it led to is stored; once.

    Example:
        >>> from tensordict import TensorDict
        >>> from rollwright.data import LazyTensorStorage
        >>> reached = lambda td: (td["next", "achieved_goal"] == td["desired_goal"]).float()
        >>> options = {"storage": LazyTensorStorage(10), "batch_size": 4}
        >>> key = ("next", "achieved_goal")
        >>> buffer = HERReplayBuffer(reached, her_ratio=1.0, strategy="final", achieved_goal_key=key, **options)
        >>> steps = {"achieved_goal": torch.arange(3.0)[:, None], "desired_goal": torch.full((3, 1), 9.0)}
        >>> outcome = {"reward": torch.zeros(3, 1), "done": torch.tensor([[False], [False], [True]])}
        >>> outcome["achieved_goal"] = steps["achieved_goal"] + 1
        >>> _ = buffer.extend(TensorDict({**steps, "next": outcome}, [3]))
        >>> buffer.sample()["desired_goal"].squeeze(-1)
        tensor([3., 3., 3., 3.])
    """

    def __init__(
        self,
        reward_fn: Callable[[TensorDictBase], torch.Tensor],
        *,
        her_ratio: float = 0.8,
        strategy: HindsightStrategy | Literal["future", "final", "episode", "random"] = "future",
        goal_key: NestedKey = "desired_goal",
        achieved_goal_key: NestedKey = "achieved_goal",
        reward_key: NestedKey = ("next", "reward"),
        end_key: NestedKey = NEXT_DONE,
        **options: Unpack[BufferKeywords],
    ) -> None:
        if not callable(reward_fn):
            raise TypeError(f"reward_fn: expected a callable, got {type(reward_fn).__name__}: {reward_fn!r}.")
        if isinstance(her_ratio, bool) or not isinstance(her_ratio, int | float) or not 0 <= her_ratio <= 1:
            raise ValueError(f"her_ratio: expected a number from 0 to 1, got {her_ratio!r}.")
        values = [kind.value for kind in HindsightStrategy]
        if not isinstance(strategy, HindsightStrategy) and strategy not in values:
            raise ValueError(f"strategy: expected one of {', '.join(values)}, got {strategy!r}.")
        self.reward_fn, self.her_ratio, self.strategy = reward_fn, float(her_ratio), HindsightStrategy(strategy)
        self.goal_key = checked_key("goal_key", goal_key)
        self.achieved_goal_key = checked_key("achieved_goal_key", achieved_goal_key)
        self.reward_key, self.end_key = checked_key("reward_key", reward_key), checked_key("end_key", end_key)
        self._may_come_early = (
            self.strategy is HindsightStrategy.FINAL and as_tuple(self.achieved_goal_key)[0] != "next"
        )
        ends = () if self.end_key == NEXT_DONE else (self.end_key,)
        self._boundaries = Boundaries(None, ends, None, None)
        super().__init__(**options)

    def _read(self, size: int) -> tuple[Draw, Any]:
        with self.storage.ledger.reading():
            draw, data = super()._read(size)
            count = int(len(draw.index) * self.her_ratio)
            chosen = torch.randperm(len(draw.index), generator=self.generator, device="cpu")[:count]
            goals = self._achieved(self._sources(draw.index[chosen.numpy()])) if count else None
        batch = stacked(data) if isinstance(data, list) else data
        return draw, batch if goals is None else self._relabelled(batch, chosen, goals)

    def _sources(self, index: Index) -> Index:
        """For each element, the one whose achieved goal becomes its goal."""
        storage = self.storage
        if self.strategy is HindsightStrategy.RANDOM:
            return RandomSampler().draw(storage, len(index), self.generator).index
        runs, grid = self._boundaries.follow(storage, storage.ledger.span()), self._boundaries.grid
        if runs is None or grid is None:
            raise self._boundaries.missing(storage)
        lane, tick = grid.place(index, runs.high)
        first, last = runs.around(lane, tick)
        if self.strategy is HindsightStrategy.FINAL:
            return grid.elements(lane, last)
        begin = tick if self.strategy is HindsightStrategy.FUTURE else first
        share = torch.rand(len(index), dtype=torch.float64, generator=self.generator, device="cpu").numpy()
        return grid.elements(lane, begin + (share * (last - begin + 1)).astype(np.int64))

    def _achieved(self, index: Index) -> torch.Tensor:
        storage, key = self.storage, self.achieved_goal_key
        if isinstance(storage, RowStorage):
            if key not in storage.fields:
                raise KeyError(
                    f"achieved_goal_key: there is no entry {key!r}; the storage has {key_str(storage.keys())}."
                )
            self._warn_of_early_goals(storage.fields)
            return storage.read_entry(key, index)
        found = storage.read(index)
        batch = stacked(found) if isinstance(found, list) else found
        achieved = _entry("achieved_goal_key", batch, key)
        self._warn_of_early_goals(leaf_keys(batch))
        return achieved

    def _warn_of_early_goals(self, stored: Container[NestedKey]) -> None:
        """Warn, once, where final goals are not what the last step led to, though that is stored."""
        key = unravel(("next", *as_tuple(self.achieved_goal_key)))
        if self._may_come_early and key in stored:
            warn_user(
                f"achieved_goal_key: strategy='final' takes {self.achieved_goal_key!r} of the last step, which was "
                f"achieved before its action. What that led to is in {key!r}: pass achieved_goal_key={key!r}, and "
                "compare the goal with it in reward_fn.",
                UserWarning,
            )
        self._may_come_early = False

    def _relabelled(self, batch: Any, chosen: torch.Tensor, goals: torch.Tensor) -> TensorDictBase:
        goal = _entry("goal_key", batch, self.goal_key).clone()
        reward = _entry("reward_key", batch, self.reward_key).clone()
        chosen = chosen.to(goal.device)
        if goals.shape[1:] != goal.shape[1:]:
            raise ValueError(
                f"goal_key, achieved_goal_key: expected entries of one shape, got {list(goal.shape[1:])} for "
                f"{self.goal_key!r} and {list(goals.shape[1:])} for {self.achieved_goal_key!r}."
            )
        goals = goals.to(goal.dtype)
        changed = batch[chosen].clone()
        for key in (self.goal_key, unravel(("next", *as_tuple(self.goal_key)))):
            before = batch.get(key, None)
            if before is not None:
                changed.set(key, goals)
                batch.set(key, before.index_copy(0, chosen, goals))
        found = self.reward_fn(changed)
        if not isinstance(found, torch.Tensor) or found.numel() != reward[chosen].numel():
            got = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ValueError(
                f"reward_fn: expected a reward for each transition, of shape {list(reward[chosen].shape)}, got {got}."
            )
        reward[chosen] = found.detach().to(reward).reshape(reward[chosen].shape)
        relabelled: TensorDictBase = batch.set(self.reward_key, reward)
        return relabelled


def _entry(name: str, batch: Any, key: NestedKey) -> torch.Tensor:
    value = batch.get(key, None) if isinstance(batch, TensorDictBase) else None
    if not isinstance(value, torch.Tensor):
        has = key_str(leaf_keys(batch)) if isinstance(batch, TensorDictBase) else f"a {type(batch).__name__}"
        raise KeyError(f"{name}: there is no tensor {key!r}; the batch has {has}. Store it, or name another entry.")
    return value
