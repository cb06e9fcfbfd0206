"""Snapshots: what shares memory goes on sharing it, what only draws is left out, classes are found by name."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from rollwright.envs import GymEnv
from rollwright.envs.checkpoint import load_env, save_env
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import CountingEnv


class Holding(CountingEnv):
    """Has an attribute ``held``."""

    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.held = held


def restored(held: Any) -> Any:
    again = Holding()
    checkpoint = save_env(Holding(held))
    assert checkpoint.unsaved == []
    load_env(again, checkpoint.state)
    return again.held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_arrays_that_share_memory_go_on_sharing_it(dtype: torch.dtype) -> None:
    memory = torch.zeros(12, dtype=dtype)
    row, column = restored([memory[4:8], memory.view(3, 4)[:, 2]])
    row[2] = 1
    assert column.tolist() == [0, 1, 0]
    assert not memory.any()


def test_an_array_and_a_tensor_over_one_memory_stay_together() -> None:
    memory = np.arange(6.0)
    fixed = memory[2:]
    fixed.flags.writeable = False
    back, tensor, fixed = restored([memory[::-2], torch.from_numpy(memory), fixed])
    assert back.tolist() == [5, 3, 1]
    tensor[3] = 9
    assert back.tolist() == [5, 9, 1]
    assert fixed.tolist() == [2, 9, 4, 5]
    assert not fixed.flags.writeable


def test_views_of_buffers_are_views_of_the_live_buffers() -> None:
    env, again = Holding(), Holding()
    env.held = env.count.numpy()
    env.count += 3
    count = again.count
    load_env(again, save_env(env).state)
    again.held += 1
    assert again.count is count
    assert count.item() == 4


def test_views_that_reach_beyond_a_buffer_are_named() -> None:
    env = Holding()
    env.held = torch.zeros(3)
    env.count = env.held[1:2]
    (line,) = save_env(env).unsaved
    assert "shares memory with a parameter or buffer" in line


def test_a_small_view_of_much_memory_is_saved_small() -> None:
    state = save_env(Holding(torch.zeros(1_000_000)[5:7])).state
    assert state["attributes"].numel() < 10_000


@pytest.mark.parametrize("name", ["Blackjack-v1", "CartPole-v1", "FrozenLake-v1"])
def test_what_has_drawn_can_be_saved_and_the_restored_draws_anew(name: str) -> None:
    env, again = GymEnv(name, render_mode="rgb_array"), GymEnv(name, render_mode="rgb_array")
    env.set_seed(0)
    env.reset()
    env.render()
    checkpoint = save_env(env)
    assert checkpoint.unsaved == []
    for _ in range(2):
        load_env(again, checkpoint.state)
        assert (env.render() == again.render()).all()


def test_classes_of_the_main_program_are_looked_up_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own:
        pass

    Own.__module__, Own.__qualname__ = "__main__", "Own"
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "Own", Own, raising=False)
    again, state = Holding(), save_env(Holding(Own())).state
    load_env(again, state)
    assert type(again.held) is Own
    monkeypatch.delattr(main, "Own")
    with pytest.raises(EnvError, match=r"cannot be read here: AttributeError(.|\n)*Define its classes"):
        load_env(again, state)
