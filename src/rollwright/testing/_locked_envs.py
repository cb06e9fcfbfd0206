"""Fakes whose observation counts on over resets, and one that keeps no state at all."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rollwright.data.specs import Categorical, Composite, TensorSpec, Unbounded
from rollwright.envs.base import EnvBase
from rollwright.testing._fakes import UnseededEnv, check_actions

__all__ = ["MockBatchedLockedEnv", "MockBatchedUnLockedEnv", "MockSerialEnv", "StateLessCountingEnv"]


class MockBatchedLockedEnv(EnvBase):
    """Counts the steps since it was seeded, one count for the whole batch; for seeds and batch sizes.

    The count starts at ``seed % 17`` and is both observation and reward; a reset does not set it back.
    Done when it reaches ``max(c + 100, 2 * c)``, where ``c`` is the count at the last reset.
    """

    def __init__(
        self,
        device: torch.device | str | None = "cpu",
        batch_size: torch.Size | tuple[int, ...] | list[int] | None = None,
        *,
        observation_spec: Composite | None = None,
        action_spec: TensorSpec | None = None,
        state_spec: Composite | None = None,
        reward_spec: TensorSpec | None = None,
        done_spec: TensorSpec | None = None,
    ) -> None:
        super().__init__(device=device, batch_size=batch_size)
        shape = (*self.batch_size, 1)
        counted = Composite(observation=Unbounded(shape, dtype=torch.get_default_dtype()), shape=self.batch_size)
        self.observation_spec = counted if observation_spec is None else observation_spec
        self.state_spec = self._default_state(counted) if state_spec is None else state_spec
        self.action_spec = Unbounded(shape) if action_spec is None else action_spec
        self.reward_spec = Unbounded(shape, dtype=torch.get_default_dtype()) if reward_spec is None else reward_spec
        self.done_spec = Categorical(2, shape=shape, dtype=torch.bool) if done_spec is None else done_spec
        self.counter = 0
        self.max_val = 100

    def _default_state(self, counted: Composite) -> Composite:
        return counted

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.counter = seed % 17
            self.max_val = max(self.counter + 100, self.counter * 2)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.max_val = max(self.counter + 100, self.counter * 2)
        return self._count(self.batch_size if tensordict is None else tensordict.batch_size)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        self.counter += 1
        counted = self._count(tensordict.batch_size)
        return counted.set("reward", counted["observation"].clone())

    def _count(self, batch: torch.Size) -> TensorDict:
        shape = (*batch, *self.full_observation_spec["observation"].shape[self.ndim :])
        observation = torch.full(shape, float(self.counter), dtype=torch.get_default_dtype())
        done = torch.full((*batch, 1), self.counter >= self.max_val)
        fields = {"observation": observation, "done": done, "terminated": done.clone()}
        return TensorDict(fields, batch, device=self.device)


class MockSerialEnv(MockBatchedLockedEnv):
    """:class:`MockBatchedLockedEnv` without a batch or a state; for tests of environments one by one."""

    def _default_state(self, counted: Composite) -> Composite:
        return Composite(shape=self.batch_size)


class MockBatchedUnLockedEnv(MockBatchedLockedEnv):
    """:class:`MockBatchedLockedEnv` that takes the batch size of the data it is given."""

    batch_locked = False


class StateLessCountingEnv(UnseededEnv):
    """Adds its action to the ``count`` that it is given until ``max_count``; for ``batch_locked=False``.

    A plain reset keeps ``count`` and ``max_count`` where the data has them; else, and where ``"_reset"``
    is given, it starts at 0 with a random ``max_count`` from 10 to 19.
    """

    batch_locked = False

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(
            count=Unbounded((1,), dtype=torch.int32), max_count=Unbounded((1,), dtype=torch.int32)
        )
        self.state_spec = self.observation_spec
        self.action_spec = Unbounded((1,), dtype=torch.int32)
        flag = Unbounded((1,), dtype=torch.bool)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone())
        self.reward_spec = Unbounded((1,), dtype=torch.float32)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        given = TensorDict({}, self.batch_size, device=self.device) if tensordict is None else tensordict
        shape = (*given.batch_size, 1)
        kept = given.empty() if given.get("_reset", None) is not None else given
        count, max_count = kept.get("count", None), kept.get("max_count", None)
        if count is None:
            count = torch.zeros(shape, dtype=torch.int32, device=given.device)
        if max_count is None:
            max_count = torch.randint(10, 20, shape, dtype=torch.int32, device=given.device)
        fields = {"count": count.clone(), "max_count": max_count.clone()}
        return TensorDict(fields, given.batch_size, device=given.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        check_actions(self, tensordict)
        max_count = tensordict["max_count"]
        count = tensordict["count"] + tensordict["action"]
        reward = torch.zeros(count.shape, device=count.device)
        fields = {
            "count": count,
            "max_count": max_count.clone(),
            "reward": reward,
            "terminated": count >= max_count,
        }
        return TensorDict(fields, tensordict.batch_size, device=tensordict.device)
