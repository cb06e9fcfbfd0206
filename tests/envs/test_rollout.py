"""EnvBase.rollout: where it begins and stops, what it stacks and what it marks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import nn

from rollwright.envs import EnvBase
from rollwright.testing.mocking_classes import (
    CountingBatchedEnv,
    CountingEnv,
    CountingEnvCountPolicy,
    EnvThatDoesNothing,
    EnvWithDynamicSpec,
    HeterogeneousCountingEnv,
    MockNestedResetEnv,
    MultiKeyCountingEnv,
    MultiKeyCountingEnvPolicy,
    NestedCountingEnv,
    StateLessCountingEnv,
)

LIMITS = torch.tensor([1, 3])


def batched(**kwargs: Any) -> tuple[EnvBase, CountingEnvCountPolicy]:
    """Two environments that end after 2 and after 4 steps, and the policy that gets them there."""
    env = CountingBatchedEnv(max_steps=LIMITS, batch_size=[2], **kwargs)
    return env, CountingEnvCountPolicy(env.action_spec)


def seen(rollout: TensorDictBase) -> list[list[int]]:
    return rollout["next", "observation"].squeeze(-1).tolist()


def test_it_stops_when_any_is_done() -> None:
    env, policy = batched()
    for options in ({}, {"break_when_any_done": True}):
        assert seen(env.rollout(9, policy, **options)) == [[1, 2], [1, 2]]


def test_it_stops_when_all_are_done() -> None:
    env, policy = batched()
    rollout = env.rollout(9, policy, break_when_all_done=True)
    assert seen(rollout) == [[1, 2, 3, 4], [1, 2, 3, 4]]
    assert rollout["next", "done"].squeeze(-1).int().tolist() == [[0, 1, 1, 1], [0, 0, 0, 1]]


def test_done_at_different_times_counts_as_all_done() -> None:
    class Flashes(CountingEnv):
        """Each row is done for one step only, at its own time."""

        def _counted(self) -> TensorDictBase:
            ends = self.count.flatten() == torch.tensor([1, 3])
            flags = {name: ends.unsqueeze(-1).clone() for name in ("done", "terminated")}
            return TensorDict({"observation": self.count.clone(), **flags}, self.batch_size)

    env = Flashes(batch_size=[2])
    assert env.rollout(9, CountingEnvCountPolicy(env.action_spec), break_when_all_done=True).shape == (2, 3)


def test_it_goes_on_over_the_ends() -> None:
    env, policy = batched()
    rollout = env.rollout(5, policy, break_when_any_done=False)
    assert seen(rollout) == [[1, 2, 1, 2, 1], [1, 2, 3, 4, 1]]
    assert rollout["observation"].squeeze(-1).tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 3, 0]]


@pytest.mark.parametrize("max_steps", [1, 2, 3])
def test_it_takes_at_most_max_steps(max_steps: int) -> None:
    env, policy = batched()
    assert env.rollout(max_steps, policy, break_when_any_done=False).shape == (2, max_steps)


def test_the_last_dimension_is_time() -> None:
    env, policy = batched()
    assert env.rollout(2, policy).names == [None, "time"]
    assert CountingEnv().rollout(2).names == ["time"]
    assert env.rollout(2, policy, return_contiguous=False).names == [None, "time"]


def test_without_a_policy_actions_are_random() -> None:
    env = CountingEnv(max_steps=99, batch_size=[20])
    env.set_seed(0)
    actions = env.rollout(5)["action"]
    assert 0 < actions.float().mean() < 1


def test_a_policy_may_write_in_place_and_return_nothing() -> None:
    env = CountingEnv(max_steps=9)

    def policy(td: TensorDictBase) -> None:
        td["action"] = env.action_spec.one()

    assert env.rollout(3, policy)["next", "observation"].flatten().tolist() == [1, 2, 3]


def test_the_root_is_the_next_of_the_step_before() -> None:
    env = MultiKeyCountingEnv(batch_size=[2], max_steps=99)
    rollout = env.rollout(5, MultiKeyCountingEnvPolicy(env.full_action_spec))
    for key in [*env.observation_keys, *env.done_keys]:
        assert torch.equal(rollout[key][:, 1:], rollout["next"][key][:, :-1])


def test_callback_sees_environment_and_chosen_action() -> None:
    env, policy = batched()
    calls: list[tuple[EnvBase, int]] = []
    env.rollout(9, policy, lambda *args: calls.append((args[0], int(args[1]["action"].sum()))))
    assert calls == [(env, 2), (env, 2)]


def test_callback_may_change_the_data() -> None:
    env = CountingEnv(max_steps=9)
    rollout = env.rollout(2, callback=lambda _, td: td.set("action", env.action_spec.zero()))
    assert not rollout["next", "observation"].any()


# Where it begins ------------------------------------------------------------------------------------


def test_it_begins_where_it_is_told_to() -> None:
    env, policy = batched()
    start = env.reset()
    start = env._step_mdp(env.step(policy(start)))
    rollout = env.rollout(1, policy, auto_reset=False, tensordict=start)
    assert rollout["observation"].flatten().tolist() == [1, 1]


@pytest.mark.parametrize("reset_where_done", [True, False])
def test_one_goes_on_from_the_end_of_another(reset_where_done: bool) -> None:
    env, policy = batched()
    whole = env.rollout(8, policy, break_when_any_done=False)
    td, parts = env.reset(), []
    for _ in range(2):
        part = env.rollout(4, policy, auto_reset=False, break_when_any_done=False, tensordict=td)
        assert env.count.flatten().tolist() == seen(part)[0][-1:] + seen(part)[1][-1:]  # no reset follows the last step
        td = env.step_mdp(part[..., -1])
        if reset_where_done:
            td = env.maybe_reset(td)
        parts.append(part)
    assert (torch.cat(parts, -1) == whole).all()


def test_the_start_is_left_alone() -> None:
    env, policy = batched()
    start = env.reset()
    before = set(start.keys(True, True))
    env.rollout(2, policy, auto_reset=False, tensordict=start)
    assert set(start.keys(True, True)) == before


def test_without_reset_a_start_is_needed() -> None:
    with pytest.raises(ValueError, match=r"tensordict: expected the start .* auto_reset=False, got None"):
        CountingEnv().rollout(2, auto_reset=False)


def test_data_for_the_reset_reaches_it() -> None:
    env = StateLessCountingEnv()
    rollout = env.rollout(2, tensordict=TensorDict({"extra": torch.ones(4)}, [4]), break_when_any_done=False)
    assert rollout.batch_size == (4, 2)
    assert (rollout["extra"] == 1).all()


# What it marks --------------------------------------------------------------------------------------


def test_set_truncated_marks_the_last_step_of_what_has_not_ended() -> None:
    env, policy = batched()
    env.add_truncated_keys()
    outcome = env.rollout(2, policy, set_truncated=True)["next"]
    assert outcome["truncated"].squeeze(-1).tolist() == [[False, False], [False, True]]
    assert outcome["terminated"].squeeze(-1).tolist() == [[False, True], [False, False]]
    assert outcome["done"].squeeze(-1).tolist() == [[False, True], [False, True]]


@pytest.mark.parametrize("return_contiguous", [None, False])
@pytest.mark.parametrize("break_when_any_done", [True, False])
def test_set_truncated_never_overwrites_terminated(break_when_any_done: bool, return_contiguous: bool | None) -> None:
    env, policy = batched()
    env.add_truncated_keys()
    options = {"break_when_any_done": break_when_any_done, "return_contiguous": return_contiguous}
    for length in range(1, 6):
        plain = env.rollout(length, policy, **options)["next"]
        cut = env.rollout(length, policy, set_truncated=True, **options)["next"]
        assert torch.equal(cut["terminated"], plain["terminated"])
        assert torch.equal(cut["done"], cut["terminated"] | cut["truncated"])
        assert cut["done"][:, -1].all()
        assert torch.equal(cut["done"][:, :-1], plain["done"][:, :-1])


def test_set_truncated_marks_every_group() -> None:
    env = NestedCountingEnv(has_root_done=True)
    env.add_truncated_keys()
    outcome = env.rollout(2, set_truncated=True)["next"]
    assert outcome["truncated"].flatten().tolist() == [False, True]
    assert outcome["data", "truncated"].squeeze(-1).tolist() == [[False] * 3, [True] * 3]


def test_set_truncated_needs_a_flag_to_set() -> None:
    with pytest.raises(RuntimeError, match=r"no 'truncated' flag beside 'done'.*add_truncated_keys\(\)"):
        CountingEnv().rollout(2, set_truncated=True)


# How it stacks --------------------------------------------------------------------------------------


def test_a_lazy_stack_holds_the_same() -> None:
    env, policy = batched()
    lazy = env.rollout(2, policy, return_contiguous=False)
    assert isinstance(lazy, LazyStackedTensorDict)
    assert (lazy.contiguous() == env.rollout(2, policy)).all()


def test_growing_shapes_are_stacked_lazily() -> None:
    rollout = EnvWithDynamicSpec(max_count=3).rollout(9)
    assert isinstance(rollout, LazyStackedTensorDict)
    assert rollout.names == ["time"]
    assert [step["observation"].shape[1] for step in rollout.unbind(0)] == [1, 2, 3]


def test_unlike_agents_stay_lazy_below() -> None:
    rollout = HeterogeneousCountingEnv(batch_size=[2]).rollout(3)
    assert rollout.batch_size == (2, 3)
    assert rollout["next", "lazy"].batch_size == (2, 3, 3)
    assert rollout[0, 1]["next", "lazy"][0]["vector"].shape == (3,)


# Which flags decide -----------------------------------------------------------------------------------


@pytest.mark.parametrize("done_at_root", [True, False])
def test_the_root_decides_where_it_has_flags(done_at_root: bool) -> None:
    assert len(MockNestedResetEnv(3, done_at_root).rollout(9)) == 3
    assert len(MockNestedResetEnv(3, done_at_root).rollout(9, break_when_all_done=True)) == 3


def test_without_an_end_it_takes_all_steps() -> None:
    assert len(EnvThatDoesNothing().rollout(4)) == 4


# Arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_steps", [0, -1])
def test_max_steps_is_positive(max_steps: int) -> None:
    with pytest.raises(ValueError, match=f"max_steps: expected at least 1, got {max_steps}"):
        CountingEnv().rollout(max_steps)


def test_any_and_all_exclude_one_another() -> None:
    with pytest.raises(ValueError, match="break_when_any_done and break_when_all_done exclude"):
        CountingEnv().rollout(2, break_when_any_done=True, break_when_all_done=True)


def test_a_policy_is_callable() -> None:
    with pytest.raises(TypeError, match=r"policy: expected a callable .* got str"):
        CountingEnv().rollout(2, "random")  # type: ignore[arg-type]


def test_a_policy_returns_tensordicts() -> None:
    with pytest.raises(TypeError, match=r"policy: expected it to return a TensorDict \(or None\), got dict"):
        CountingEnv().rollout(2, lambda td: td.to_dict())


@pytest.mark.parametrize("device", [None, "cpu"])
def test_data_is_cast_to_the_policy_and_back(device: str | None) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.devices: set[torch.device | None] = set()

        def forward(self, td: TensorDictBase) -> TensorDictBase:
            self.devices.add(td.device)
            return td.set("action", torch.ones(1, dtype=torch.int8))

    env, policy = CountingEnv(device=device, max_steps=9), Policy()
    rollout = env.rollout(3, policy, auto_cast_to_device=True)
    assert policy.devices == {torch.device("cpu")}
    assert rollout["next", "observation"].flatten().tolist() == [1, 2, 3]
    assert env.rollout(2, lambda td: td.set("action", env.action_spec.one()), auto_cast_to_device=True).shape == (2,)


def test_a_policy_may_return_its_action_alone() -> None:
    def alone(td: TensorDictBase) -> TensorDictBase:
        return td.empty().set("action", torch.ones(1, dtype=torch.int8))

    def in_place(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", torch.ones(1, dtype=torch.int8))

    one, other = CountingEnv().rollout(4, alone), CountingEnv().rollout(4, in_place)
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    assert bool((one == other).all())


def test_a_module_takes_entries_by_name() -> None:
    class Always(nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(observation, dtype=torch.int8)

    assert CountingEnv().rollout(3, Always())["next", "observation"].flatten().tolist() == [1, 2, 3]


def test_a_trusted_module_gets_the_data_whatever_its_argument_is_called() -> None:
    class Confusing(nn.Module):
        def forward(self, observation: Any) -> Any:
            return observation.set("action", torch.ones(1, dtype=torch.int8))

    rollout = CountingEnv().rollout(3, Confusing(), trust_policy=True)
    assert rollout["next", "observation"].flatten().tolist() == [1, 2, 3]


def test_actions_that_were_given_are_taken() -> None:
    env = CountingEnv(max_steps=100)
    actions = [torch.tensor([i % 2], dtype=torch.int64) for i in range(5)]
    rollout = env.rollout(50, actions=actions)
    assert rollout.shape == (5,)
    assert rollout["action"].flatten().tolist() == [0, 1, 0, 1, 0]
    assert seen(rollout) == [0, 1, 1, 2, 2]
    taken = iter(actions)
    assert env.rollout(3, actions=taken, break_when_any_done=False)["action"].flatten().tolist() == [0, 1, 0]
    assert next(taken) is actions[3]
    assert seen(env.rollout(2, actions=[TensorDict(action=actions[1]), actions[1].numpy()])) == [1, 2]
    with pytest.raises(ValueError, match="policy and actions were both given"):
        env.rollout(3, CountingEnvCountPolicy(env.action_spec), actions=actions)
    with pytest.raises(ValueError, match="actions: expected at least one"):
        env.rollout(3, actions=[])


def test_frames_are_kept_where_they_are_asked_for() -> None:
    env = CountingEnv(max_steps=100)
    rollout = env.rollout(3, storing_device="meta")
    assert rollout.device == rollout["next", "observation"].device == torch.device("meta")
    assert env.rollout(3, storing_device="cpu").device == torch.device("cpu")
