"""Transforms that follow trajectories: their first steps, their length, their return, and what is left of it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from rollwright._keys import NestedKey, as_keys, as_tuple, key_str, unravel
from rollwright.data.layout import IS_INIT, NEXT_DONE, TRAJ_IDS, DoneGroup
from rollwright.data.layout.boundaries import any_below, summed_reward
from rollwright.data.specs import Binary, Bounded, Composite, TensorSpec, Unbounded
from rollwright.envs.arrays import ArrayEnv, ArrayTransform
from rollwright.envs.columns import ArrayKind, Columns
from rollwright.envs.transforms.base import KeySeq, Transform, kept
from rollwright.errors import NotNative


def expand_right(rows: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``rows``, one number for each leading element of ``value``, expanded to its shape."""
    return rows.reshape(rows.shape + (1,) * (value.ndim - rows.ndim)).expand_as(value)


def time_axis(tensordict: TensorDictBase, who: str) -> int:
    """The batch dimension named "time", else the last.

    Raises:
        ValueError: there is no batch dimension.
    """
    if tensordict.ndim == 0:
        raise ValueError(
            f"{who}: expected data with a time dimension, got batch size []. Pass what rollout() returns or "
            "a collector yields; on single steps, put the transform on the environment."
        )
    names = list(tensordict.names)
    return names.index("time") if "time" in names else tensordict.ndim - 1


def trajectory_starts(tensordict: TensorDictBase, axis: int, done_key: NestedKey = NEXT_DONE) -> torch.Tensor:
    """For each frame the index along ``axis`` at which its trajectory, or its slice of one, begins.

    That is after a frame that is done, at another trajectory id, and at a frame marked ``"is_init"``,
    whichever are there; without any of them every row is one trajectory. One that began before the data counts as
    beginning with them.

    Returns:
        int64 of the batch size of ``tensordict``.
    """
    batch = tensordict.batch_size
    done, ids, first = (tensordict.get(key, None) for key in (done_key, TRAJ_IDS, IS_INIT))
    device = next((value.device for value in (done, ids, first) if value is not None), tensordict.device)
    begins = torch.zeros(batch, dtype=torch.bool, device=device)
    # What is rolled in at 0 counts for nothing there: it is the beginning in any case.
    if done is not None:
        begins = begins | any_below(done, len(batch)).roll(1, axis)
    if ids is not None:
        begins = begins | any_below(ids != ids.roll(1, axis), len(batch))
    if first is not None:
        begins = begins | any_below(first, len(batch))
    ordinal = torch.arange(batch[axis], device=begins.device).reshape([-1] + [1] * (len(batch) - axis - 1))
    return torch.where(begins, ordinal, 0).cummax(axis).values


Pairs = list[tuple[NestedKey, NestedKey]]
GroupEntries = list[tuple[DoneGroup, NestedKey]]


def _check_name(argument: str, name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{argument}: expected a plain name, to be used beside each group of flags, got {name!r}.")
    return name


class Adding(Transform):
    """A transform that adds entries to observations; each step reads those of the step before."""

    _reads_root = True

    @abstractmethod
    def _added(self, batch: torch.Size) -> dict[NestedKey, TensorSpec]:
        """Specs of the entries, for the batch of the environment."""

    def _remembered(self) -> dict[NestedKey, TensorSpec]:
        memo = self.__dict__["_memo"]
        if "added" not in memo:
            memo["added"] = self._added(torch.Size() if self.parent is None else self.parent.batch_size)
        return cast(dict[NestedKey, TensorSpec], memo["added"])

    def _first(self, kind: Any, key: NestedKey, spec: TensorSpec) -> Any:
        """The column that an entry has at a reset."""
        return kind.full(spec, 0)

    def _reset_key(self, index: int) -> NestedKey | None:
        """The ``"_reset"`` entry that decides about the entry at ``index``; None: as for the environment."""
        return None

    def _begin(self, kind: Any, given: Columns, fresh: Columns) -> None:
        for index, (key, spec) in enumerate(self._remembered().items()):
            first, decides = self._first(kind, key, spec), self._reset_key(index)
            fresh[key] = first if decides is None else kept(given, decides, key, first)

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """See :meth:`Transform.on_arrays`."""
        kind, added = ArrayKind(env.batch), self._remembered()
        if any(self._reset_key(index) is not None for index in range(len(added))):
            raise NotNative(f"{type(self).__name__} has a reset_key, or reset_keys")
        entries = {key: kind.entry(spec) for key, spec in added.items()}
        return self._on_rows(env, entries=entries, reads=list(entries) if self._reads_root else [])

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Announce the entries."""
        return self._announce(observation_spec)

    def transform_state_spec(self, state_spec: Composite) -> Composite:
        """A step reads the entries."""
        return self._announce(state_spec) if self._reads_root else state_spec

    def _announce(self, spec: Composite) -> Composite:
        changed = spec.clone()
        for key, leaf in self._added(spec.shape).items():
            changed.set(key, leaf.clone())
        return changed


class Bookkeeping(Transform):
    """A transform that has one entry beside the flags of each group."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @property
    def _entries(self) -> GroupEntries:
        return self._remember("entries", lambda: [(g, unravel((*g.prefix, self.name))) for g in self._groups])

    @property
    def _keys(self) -> list[NestedKey]:
        return [key for _, key in self._entries]

    def _beside_flags(self) -> list[tuple[NestedKey, TensorSpec]]:
        """The entries, each with the spec of the flag beside it."""
        parent = self.parent
        flags = Composite(done=Binary(shape=(1,))) if parent is None else parent.full_done_spec
        return [(key, flags[group.done]) for group, key in self._entries]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """An error: collected data have the entry already, and others lack what it takes."""
        raise RuntimeError(
            f"{type(self).__name__} follows an environment from its reset on and cannot be applied to data. "
            f"Put it on the environment: TransformedEnv(env, {type(self).__name__}(...))."
        )


class InitTracker(Adding, Bookkeeping):
    """Marks the first step of each trajectory.

    ``is_init``, bool ``[*batch, 1]``, is True at the root of the first step after a reset and False
    elsewhere, below ``"next"`` always. Where flags lie below the root, there is one beside each group.

    Args:
        init_key: name of the entry.

    Example:
        >>> from rollwright.envs import TransformedEnv
        >>> from rollwright.testing.mocking_classes import CountingEnv
        >>> TransformedEnv(CountingEnv(), InitTracker()).rollout(3)["is_init"].squeeze(-1)
        tensor([ True, False, False])
    """

    def __init__(self, init_key: str = IS_INIT) -> None:
        super().__init__(_check_name("init_key", init_key))
        self.init_key = init_key

    @property
    def init_keys(self) -> list[NestedKey]:
        """The entries that are written, one for each group of flags; for a transform of an environment."""
        return self._keys

    _reads_root = False

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        for key, spec in self._remembered().items():
            out[key] = kind.full(spec, False)

    def _first(self, kind: Any, key: NestedKey, spec: TensorSpec) -> Any:
        return kind.full(spec, True)

    def _added(self, batch: torch.Size) -> dict[NestedKey, TensorSpec]:
        return dict(self._beside_flags())

    def __repr__(self) -> str:
        return f"InitTracker(init_key={self.init_key!r})"


class Cutting(Bookkeeping):
    """A transform that may cut trajectories short, by setting a flag."""

    def __init__(self, name: str, truncated_key: str, update_done: bool) -> None:
        super().__init__(name)
        self.truncated_key = _check_name("truncated_key", truncated_key)
        self.update_done = update_done

    @property
    def truncated_keys(self) -> list[NestedKey]:
        """The flags that may be set, one for each group; for a transform of an environment."""
        return [unravel((*group.prefix, self.truncated_key)) for group in self._groups]

    def _cut(self, out: Columns, group: DoneGroup, cut: Any) -> None:
        """Set the flag of the group, and those of agents below it."""
        for place, flag, done_key in self._remember(f"flags {group.prefix}", lambda: self._flags_below(group)):
            done, truncated = out[place.done], out.get(flag, None)
            here = cut if place.prefix == group.prefix else _as_deep(cut, done)
            out[flag] = here.clone() if truncated is None else truncated | here
            if done_key != place.done:  # a flag of another name: it stays as it is
                out[self._beside(place, "terminated")] = out[place.terminated]
                out[done_key] = done
            if self.update_done:
                out[done_key] = done | here

    def _flags_below(self, group: DoneGroup) -> list[tuple[DoneGroup, NestedKey, NestedKey]]:
        """The groups in the place of ``group`` and below it, with the keys of the flags that are set there."""
        below = [place for place in self._all_groups if place.prefix[: len(group.prefix)] == group.prefix]
        return [(place, self._beside(place, self.truncated_key), self._beside(place, "done")) for place in below]

    @staticmethod
    def _beside(group: DoneGroup, name: str) -> NestedKey:
        return unravel((*group.prefix, name))

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        """Announce what is set."""
        flags = done_spec.clone()
        for group in self._all_groups:
            for name in ("done", "terminated", self.truncated_key):
                if self._beside(group, name) not in flags:
                    flags.set(self._beside(group, name), flags[group.done].clone())
        return flags


class StepCounter(Adding, Cutting):
    """Counts the steps of each trajectory, and may cut it short.

    ``step_count``, int64 ``[*batch, 1]``, is 0 at a reset and grows by one with each step. Where flags lie
    below the root, there is one beside each group.

    Args:
        max_steps: set ``truncated`` when the count reaches it; None counts only.
        truncated_key: name of the flag to set.
        step_count_key: name of the count.
        update_done: set ``done`` with it. ``terminated`` is never touched.

    Raises:
        ValueError: ``max_steps`` is below 1.

    Example:
        >>> from rollwright.envs import TransformedEnv
        >>> from rollwright.testing.mocking_classes import CountingEnv
        >>> rollout = TransformedEnv(CountingEnv(), StepCounter(max_steps=2)).rollout(9)
        >>> rollout["next", "step_count"].squeeze(-1), rollout["next", "truncated"].squeeze(-1)
        (tensor([1, 2]), tensor([False,  True]))
    """

    def __init__(
        self,
        max_steps: int | None = None,
        truncated_key: str = "truncated",
        step_count_key: str = "step_count",
        update_done: bool = True,
    ) -> None:
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps: expected at least 1, or None for no limit, got {max_steps}.")
        super().__init__(_check_name("step_count_key", step_count_key), truncated_key, update_done)
        self.max_steps = max_steps
        self.step_count_key = step_count_key

    @property
    def step_count_keys(self) -> list[NestedKey]:
        """The entries that are written, one for each group of flags; for a transform of an environment."""
        return self._keys

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        for group, key in self._entries:
            out[key] = count = self._carried(root, key) + 1
            if self.max_steps is not None:
                self._cut(out, group, count >= self.max_steps)

    def on_arrays(self, env: ArrayEnv) -> ArrayTransform:
        """The form of this transform for steps on NumPy arrays; see :meth:`Transform.on_arrays`."""
        if self.max_steps is not None and not self.update_done:
            raise NotNative("StepCounter sets another flag than done")
        return super().on_arrays(env)

    def _added(self, batch: torch.Size) -> dict[NestedKey, TensorSpec]:
        most = torch.iinfo(torch.int64).max
        return {
            key: Bounded(0, most, shape=flag.shape, dtype=torch.int64, device=flag.device)
            for key, flag in self._beside_flags()
        }

    def transform_done_spec(self, done_spec: Composite) -> Composite:
        """Announce the flag that may be set."""
        return done_spec if self.max_steps is None else super().transform_done_spec(done_spec)

    def __repr__(self) -> str:
        return f"StepCounter(max_steps={self.max_steps})"


def _as_deep(flag: Any, deep: Any) -> Any:
    """An environment's flag ``[*batch, 1]``, repeated over the agents of ``deep`` ``[*batch, agents, 1]``."""
    if isinstance(deep, np.ndarray):  # and the flag is a column
        flag = np.asarray(flag)
        return np.broadcast_to(flag.reshape(*flag.shape, *(1,) * (deep.ndim - flag.ndim)), deep.shape)
    return flag.reshape(*flag.shape[:-1], *(1,) * (deep.ndim - flag.ndim), 1).expand_as(deep)


class RewardSum(Adding):
    """Sums the rewards of each trajectory.

    ``episode_reward``, of the reward's shape and dtype, is 0 at a reset and grows by each reward; below
    ``"next"`` of a last step it is the return (undiscounted) of the trajectory.

    Args:
        in_keys: rewards; None: all of the environment's (``"reward"`` without an environment).
        out_keys: sums; None: ``"episode_"`` before each reward's name, beside it.
        reset_keys: for each reward, or for all, the ``"_reset"`` entry that starts its sum over; None: that of the
            environment, or of the group of agents that the sum is of.

    Raises:
        ValueError: the numbers of keys differ.

    Example:
        >>> from rollwright.envs import TransformedEnv
        >>> from rollwright.testing.mocking_classes import DiscreteActionVecMockEnv
        >>> env = TransformedEnv(DiscreteActionVecMockEnv(), RewardSum())
        >>> rollout = env.rollout(3)
        >>> bool((rollout["next", "episode_reward"] == rollout["next", "reward"].cumsum(0)).all())
        True
    """

    def __init__(self, in_keys: KeySeq = None, out_keys: KeySeq = None, reset_keys: KeySeq = None) -> None:
        super().__init__(in_keys, out_keys)
        self.reset_keys = as_keys(reset_keys)
        self._given = bool(self.in_keys), out_keys is not None
        if self._given == (False, True):
            raise ValueError("out_keys: expected in_keys with them, in the same order, got None. Pass both.")
        self._pairs()

    def _pairs(self) -> Pairs:
        return self._remember("pairs", self._find)

    def _find(self) -> list[tuple[NestedKey, NestedKey]]:
        has_rewards, has_sums = self._given
        parent = self.parent
        if not has_rewards:
            self.in_keys = ["reward"] if parent is None else list(parent.reward_keys)
        unknown = [] if parent is None else [key for key in self.in_keys if key not in parent.reward_keys]
        if unknown and parent is not None:
            raise KeyError(
                f"RewardSum: the environment has no reward {unknown[0]!r}; it has {key_str(parent.reward_keys)}. "
                "Correct in_keys."
            )
        if not has_sums:
            self.out_keys = [_sibling(key, "episode_") for key in self.in_keys]
        if parent is not None and (unknown_resets := set(self.reset_keys) - set(parent.reset_keys)):
            raise ValueError(f"reset_keys: expected some of {parent.reset_keys}, got {key_str(unknown_resets)}.")
        if len(self.reset_keys) not in (0, 1, len(self.in_keys)) and (has_rewards or parent is not None):
            raise ValueError(
                f"reset_keys: expected one, or one for each of in_keys={self.in_keys}, got {self.reset_keys}."
            )
        return super()._pairs()

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        for in_key, out_key in self._pairs():
            out[out_key] = self._carried(root, out_key) + self._reward(out, in_key)

    def _reward(self, out: Columns, key: NestedKey) -> Any:
        """The reward of each step; of an answer whose tokens have one each, their sum."""
        if isinstance(out, LazyStackedTensorDict) and self.parent is not None and self.parent.has_token_rewards:
            return summed_reward(out, key, 1)
        return self._read(out, key)

    def _reset_key(self, index: int) -> NestedKey | None:
        return self.reset_keys[index % len(self.reset_keys)] if self.reset_keys else None

    def _added(self, batch: torch.Size) -> dict[NestedKey, TensorSpec]:
        parent = self.parent
        keys = [in_key for in_key, _ in self._pairs()]
        rewards = [Unbounded((1,)) if parent is None else parent.full_reward_spec[key] for key in keys]
        sums = [Unbounded(reward.shape, dtype=reward.dtype, device=reward.device) for reward in rewards]
        return dict(zip(self.out_keys, sums, strict=True))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sum rewards over the time dimension of data, from 0 where a trajectory, or a slice of one, begins."""
        axis = time_axis(tensordict, "RewardSum")
        starts = trajectory_starts(tensordict, axis)
        steps = torch.arange(starts.shape[axis], device=starts.device).reshape([-1] + [1] * (starts.ndim - axis - 1))
        steps = steps - starts  # since the trajectory began
        for in_key, out_key in self._pairs():
            reward = self._read(tensordict, in_key)
            is_inexact = reward.is_floating_point() or reward.is_complex()
            total = reward.clone() if is_inexact else reward.to(torch.int64, copy=True)
            place, longest = expand_right(steps, total), int(steps.max()) if steps.numel() else 0
            # Sums of 2, 4, 8, … rewards: a difference of sums over all trajectories would lose digits.
            for width in (1 << exponent for exponent in range(longest.bit_length())):
                total = torch.where(place >= width, total + total.roll(width, axis), total)
            tensordict.set(out_key, total)
        return tensordict

    def __repr__(self) -> str:
        return f"RewardSum(in_keys={self.in_keys}, out_keys={self.out_keys})"


def _sibling(key: NestedKey, before: str) -> NestedKey:
    *prefix, name = as_tuple(key)
    return unravel((*prefix, before + name))


MODES = ("reduce", "constant")


class TargetReturn(Adding):
    """Gives policies a return to reach, as decision transformers read it.

    The entry has the shape and dtype of the reward. With each reset it is ``target_return``; with each step the reward
    is taken from it (``mode="reduce"``), or it stays (``"constant"``).

    Args:
        target_return: at the begin of a trajectory.
        mode: ``"reduce"`` or ``"constant"``.
        in_keys: rewards; None: all of the environment's.
        out_keys: where to write; None: ``"target_return"`` beside each reward.
        reset_key: ``"_reset"`` entry that begins it again; None: that of the environment, or of the group of agents
            that the reward is of.

    Raises:
        ValueError: ``mode`` is another one, or ``target_return`` is no number.

    Example:
        >>> from rollwright.envs import TransformedEnv
        >>> from rollwright.testing.mocking_classes import ContinuousActionVecMockEnv
        >>> rollout = TransformedEnv(ContinuousActionVecMockEnv(), TargetReturn(10.0)).rollout(3)
        >>> rewards = rollout["next", "reward"].cumsum(0)
        >>> bool(torch.allclose(rollout["next", "target_return"], 10 - rewards))
        True
    """

    def __init__(
        self,
        target_return: float,
        mode: str = "reduce",
        in_keys: KeySeq = None,
        out_keys: KeySeq = None,
        reset_key: NestedKey | None = None,
    ) -> None:
        super().__init__(in_keys, out_keys)
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {MODES}, got {mode!r}.")
        if isinstance(target_return, bool) or not isinstance(target_return, (int, float)):
            raise ValueError(f"target_return: expected a number, got {target_return!r}.")
        self.target_return = target_return
        self.mode = mode
        self.reset_key = None if reset_key is None else as_keys(reset_key)[0]
        self._given = in_keys is not None, out_keys is not None
        if self._given[0] and self._given[1]:
            super()._pairs()

    def _pairs(self) -> Pairs:
        return self._remember("pairs", self._find)

    def _find(self) -> Pairs:
        parent = self.parent
        if not self._given[0]:
            self.in_keys = ["reward"] if parent is None else list(parent.reward_keys)
        if not self._given[1]:
            self.out_keys = [unravel((*as_tuple(key)[:-1], "target_return")) for key in self.in_keys]
            if len(set(self.out_keys)) < len(self.out_keys):
                raise ValueError(
                    f"out_keys: expected names that differ, got {key_str(self.out_keys)} for the rewards "
                    f"{key_str(self.in_keys)}, which lie side by side. Pass out_keys=."
                )
        return super()._pairs()

    def _change(self, kind: Any, root: Columns, out: Columns) -> None:
        for in_key, out_key in self._pairs():
            left = self._carried(root, out_key)
            out[out_key] = left - self._read(out, in_key) if self.mode == "reduce" else left

    def _first(self, kind: Any, key: NestedKey, spec: TensorSpec) -> Any:
        return kind.full(spec, self.target_return)

    def _reset_key(self, index: int) -> NestedKey | None:
        return self.reset_key

    def _specs(self) -> list[TensorSpec]:
        """The specs of ``in_keys``."""
        parent = self.parent
        if parent is None:
            return [Unbounded((1,)) for _ in self._pairs()]
        found = []
        for key, _ in self._pairs():
            holder = next(
                (full for full in (parent.full_reward_spec, parent.full_observation_spec) if key in full), None
            )
            if holder is None:
                raise KeyError(
                    f"TargetReturn: the environment has no reward {key!r}; it has {key_str(parent.reward_keys)}. "
                    "Correct in_keys."
                )
            found.append(holder[key])
        return found

    def _added(self, batch: torch.Size) -> dict[NestedKey, TensorSpec]:
        left = [Unbounded(spec.shape, dtype=spec.dtype or torch.float32, device=spec.device) for spec in self._specs()]
        return dict(zip([key for _, key in self._pairs()], left, strict=True))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """An error: it follows an environment from its reset on."""
        raise RuntimeError("TargetReturn follows an environment: TransformedEnv(env, TargetReturn(...)).")

    def __repr__(self) -> str:
        return f"TargetReturn(target_return={self.target_return}, mode={self.mode!r})"
