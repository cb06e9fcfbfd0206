"""step_mdp: what lies below "next" moves to the root."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase

from rollwright.envs import step_mdp
from rollwright.testing.mocking_classes import (
    CountingEnv,
    CountingEnvWithString,
    HeterogeneousCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
)


def step() -> TensorDict:
    return TensorDict(
        {
            "observation": torch.zeros(2, 3),
            "action": torch.ones(2, 1),
            "reward": torch.full((2, 1), 9.0),
            "done": torch.zeros(2, 1, dtype=torch.bool),
            "hidden": torch.zeros(2, 4),
            "other": torch.zeros(2),
            "next": {
                "observation": torch.ones(2, 3),
                "reward": torch.ones(2, 1),
                "done": torch.ones(2, 1, dtype=torch.bool),
                "terminated": torch.ones(2, 1, dtype=torch.bool),
                "truncated": torch.zeros(2, 1, dtype=torch.bool),
                "hidden": torch.ones(2, 4),
            },
        },
        [2],
    )


NEXT = {"observation", "hidden"}
FLAGS = {"done", "terminated", "truncated"}


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({}, {*NEXT, *FLAGS, "other"}),
        ({"keep_other": False}, {*NEXT, *FLAGS}),
        ({"exclude_reward": False}, {*NEXT, *FLAGS, "other", "reward"}),
        ({"exclude_done": True}, {*NEXT, "other"}),
        ({"exclude_action": False}, {*NEXT, *FLAGS, "other", "action"}),
        ({"keep_other": False, "exclude_action": False}, {*NEXT, *FLAGS, "action"}),
        ({"keep_other": False, "exclude_reward": False, "exclude_done": True}, {*NEXT, "reward"}),
    ],
)
def test_options_choose_the_entries(options: dict[str, bool], keys: set[str]) -> None:
    root = step_mdp(step(), **options)
    assert set(root.keys()) == keys
    assert root.batch_size == (2,)
    assert (root["observation"] == 1).all()
    assert (root["hidden"] == 1).all()
    if "reward" in keys:
        assert (root["reward"] == 1).all()


def test_the_step_is_left_alone() -> None:
    td = step()
    before = td.clone()
    step_mdp(td)["new"] = torch.zeros(2)
    assert set(td.keys(True, True)) == set(before.keys(True, True))
    assert (td == before).all()


def test_tensors_are_shared() -> None:
    td = step()
    assert step_mdp(td)["observation"] is td["next", "observation"]


def test_it_writes_into_a_given_tensordict() -> None:
    target = TensorDict({"old": torch.zeros(2)}, [2])
    out = step_mdp(step(), target)
    assert out is target
    assert {"old", "observation", "done"} <= set(target.keys())


def test_without_next_it_says_what_it_got() -> None:
    with pytest.raises(KeyError, match=r"expected an entry 'next', got 'observation'.*what env.step\(\) returned"):
        step_mdp(TensorDict({"observation": torch.zeros(1)}))


def test_missing_actions_are_no_error() -> None:
    assert "action" not in step_mdp(step().exclude("action"), keep_other=False, exclude_action=False)


@pytest.mark.parametrize("keep_other", [True, False])
@pytest.mark.parametrize("exclude_reward", [True, False])
@pytest.mark.parametrize("exclude_done", [True, False])
@pytest.mark.parametrize("exclude_action", [True, False])
@pytest.mark.parametrize("make_env", [NestedCountingEnv, MultiKeyCountingEnv])
def test_nested_keys(
    make_env: Any, exclude_action: bool, exclude_done: bool, exclude_reward: bool, keep_other: bool
) -> None:
    env = make_env(batch_size=[2])
    td = env.rand_step().set(("deep", "other"), torch.zeros(2))
    before = td.clone()
    root = step_mdp(
        td,
        keep_other=keep_other,
        exclude_reward=exclude_reward,
        exclude_done=exclude_done,
        exclude_action=exclude_action,
        reward_keys=env.reward_keys,
        done_keys=env.done_keys,
        action_keys=env.action_keys,
    )
    found = set(root.keys(True, True))
    assert found == {
        *env.observation_keys,
        *([] if exclude_reward else env.reward_keys),
        *([] if exclude_done else env.done_keys),
        *([] if exclude_action else env.action_keys),
        *([("deep", "other")] if keep_other else []),
    }
    assert all((root[key] == td["next"][key]).all() for key in env.observation_keys)
    # Writing into the new root reaches neither the step nor what came of it.
    for key in env.action_keys:
        root.set(key, torch.zeros_like(td[key]) + 5)
    assert set(td.keys(True, True)) == set(before.keys(True, True))
    assert (td == before).all()


def test_one_nested_key_is_a_tuple_of_strings() -> None:
    env = NestedCountingEnv()
    root = step_mdp(env.rand_step(), reward_keys=("data", "reward"), action_keys=("data", "action"))
    assert set(root["data"].keys()) == {"states", "done", "terminated"}


def test_objects_move() -> None:
    env = CountingEnvWithString()
    td = env.rand_step().set("note", NonTensorData("kept"))
    root = step_mdp(td)
    assert root["string"] == td["next", "string"]
    assert root["note"] == "kept"


def test_lazy_stacks_move() -> None:
    env = HeterogeneousCountingEnv(batch_size=[2])
    td = env.rand_step()
    root = step_mdp(td, action_keys=env.action_keys, reward_keys=env.reward_keys)
    assert isinstance(root["lazy"], LazyStackedTensorDict)
    assert set(root["lazy"][:, 0].keys()) == set(td["next", "lazy"][:, 0].keys()) - {"reward"}


@pytest.mark.parametrize("make_env", [CountingEnv, NestedCountingEnv, MultiKeyCountingEnv])
def test_it_agrees_with_the_environment(make_env: Any) -> None:
    env = make_env(batch_size=[3])
    td: TensorDictBase = env.rand_step()
    by_hand = step_mdp(td, exclude_action=False, reward_keys=env.reward_keys, action_keys=env.action_keys)
    assert (by_hand == env._step_mdp(td)).all()


def test_time_may_be_in_the_batch() -> None:
    rollout = CountingEnv(max_steps=9, batch_size=[2]).rollout(4)
    root = step_mdp(rollout)
    assert root.batch_size == (2, 4)
    assert torch.equal(root["observation"][:, :-1], rollout["observation"][:, 1:])


def test_a_nest_that_is_left_empty_goes() -> None:
    inside = {"reward": torch.ones(4, 3, 1)}
    td = TensorDict({"data": dict(inside), "next": {"data": dict(inside), "x": torch.ones(4)}}, [4])
    assert list(step_mdp(td, reward_keys=("data", "reward")).keys()) == ["x"]
