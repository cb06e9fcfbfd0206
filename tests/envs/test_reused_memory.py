"""Environments and policies that write into the same memory each time: what was recorded stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from rollwright.data import Binary, Composite, Unbounded
from rollwright.envs import EnvBase
from rollwright.testing.mocking_classes import CountingEnv


class WritesOneBuffer(EnvBase):
    """Counts to 3 in buffers that every step and reset overwrites, and returns one TensorDict over them."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(count=Unbounded((1,)))
        self.action_spec = Binary(1)
        self.td = TensorDict({"count": torch.zeros(1), "done": torch.zeros(1, dtype=torch.bool)})

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.td["count"].zero_()
        self.td["done"].zero_()
        return self.td.select("count", "done")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.td["count"].add_(1)
        self.td["done"].copy_(self.td["count"] >= 3)
        return self.td.set("reward", self.td["count"])

    def _set_seed(self, seed: int | None) -> None:
        pass


def test_buffers_that_are_written_again_do_not_rewrite_the_past() -> None:
    def notes_what_it_sees(td: TensorDictBase) -> TensorDictBase:
        return td.set("seen", td["count"].clone()).set("action", torch.ones(1, dtype=torch.int8))

    rollout = WritesOneBuffer().rollout(5, notes_what_it_sees, break_when_any_done=False)
    assert rollout["count"].squeeze(-1).tolist() == [0, 1, 2, 0, 1]
    assert rollout["seen"].squeeze(-1).tolist() == [0, 1, 2, 0, 1]
    assert rollout["next", "count"].squeeze(-1).tolist() == [1, 2, 3, 1, 2]
    assert rollout["next", "reward"].squeeze(-1).tolist() == [1, 2, 3, 1, 2]
    assert rollout["next", "done"].squeeze(-1).tolist() == [False, False, True, False, False]
    assert not rollout["done"].any()


@pytest.mark.parametrize("break_when_any_done", [True, False])
def test_a_policy_that_writes_in_place_does_not_rewrite_the_past(break_when_any_done: bool) -> None:
    action = torch.ones(1, dtype=torch.int8)

    def in_place(td: TensorDictBase) -> TensorDictBase:
        td["observation"].mul_(-1)
        return td.set("action", action.bitwise_xor_(torch.ones_like(action)))

    rollout = CountingEnv(max_steps=5).rollout(4, in_place, break_when_any_done=break_when_any_done)
    assert rollout["action"].squeeze(-1).tolist() == [0, 1, 0, 1]
    assert rollout["next", "observation"].squeeze(-1).tolist() == [0, 1, 1, 2]
    assert rollout["observation"].squeeze(-1).tolist() == [0, 0, -1, -1]
