"""The fakes keep the contract that they are to test others with, and refuse what does not fit."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rollwright.errors import EnvError, EnvKeyError
from rollwright.testing import check_env, mocking_classes
from rollwright.testing.mocking_classes import (
    ActionObsMergeLinear,
    ContinuousActionConvMockEnv,
    ContinuousActionVecMockEnv,
    CountingBatchedEnv,
    CountingEnv,
    CountingEnvCountModule,
    CountingEnvCountPolicy,
    CountingEnvWithString,
    DiscreteActionConvMockEnv,
    DiscreteActionVecMockEnv,
    DiscreteActionVecPolicy,
    EnvThatDoesNothing,
    EnvThatErrorsAfter10Iters,
    EnvWithDynamicSpec,
    EnvWithMetadata,
    EnvWithScalarAction,
    FastImageEnv,
    HeterogeneousCountingEnv,
    HeterogeneousCountingEnvPolicy,
    IncrementingEnv,
    MockBatchedLockedEnv,
    MockBatchedUnLockedEnv,
    MockNestedResetEnv,
    MockSerialEnv,
    MultiAgentCountingEnv,
    MultiKeyCountingEnv,
    MultiKeyCountingEnvPolicy,
    NestedCountingEnv,
    StateLessCountingEnv,
    Str2StrEnv,
)

LIMITS = torch.tensor([2, 4])

MAKERS = {
    "counting": lambda: CountingEnv(max_steps=3),
    "counting-2x3": lambda: CountingEnv(max_steps=3, batch_size=[2, 3]),
    "incrementing": lambda: IncrementingEnv(max_steps=3, batch_size=[2]),
    "counting-batched": lambda: CountingBatchedEnv(max_steps=LIMITS, batch_size=[2]),
    "counting-string": lambda: CountingEnvWithString(max_steps=3),
    "stateless": StateLessCountingEnv,
    "serial": MockSerialEnv,
    "locked": lambda: MockBatchedLockedEnv(batch_size=[2]),
    "unlocked": lambda: MockBatchedUnLockedEnv(batch_size=[2]),
    "discrete-vec": DiscreteActionVecMockEnv,
    "discrete-vec-2": lambda: DiscreteActionVecMockEnv(batch_size=[2], categorical_action_encoding=True),
    "discrete-conv": lambda: DiscreteActionConvMockEnv(batch_size=[2]),
    "continuous-vec": lambda: ContinuousActionVecMockEnv(batch_size=[2]),
    "continuous-conv": lambda: ContinuousActionConvMockEnv(batch_size=[2], pixel_shape=[3, 5, 5]),
    "nested": lambda: NestedCountingEnv(max_steps=3, batch_size=[2]),
    "nested-root-done": lambda: NestedCountingEnv(max_steps=3, batch_size=[2], has_root_done=True),
    "nested-done-only": lambda: NestedCountingEnv(max_steps=3, nest_obs_action=False, nest_reward=False),
    "nested-no-done": lambda: NestedCountingEnv(max_steps=3, nest_done=False, batch_size=[2]),
    "nested-no-reward": lambda: NestedCountingEnv(max_steps=3, nest_reward=False, batch_size=[2]),
    "agents": lambda: MultiAgentCountingEnv(2, max_steps=3, batch_size=[2]),
    "nested-reset": lambda: MockNestedResetEnv(3, done_at_root=False),
    "nested-reset-root": lambda: MockNestedResetEnv(3, done_at_root=True),
    "multikey": lambda: MultiKeyCountingEnv(max_steps=3, batch_size=[2]),
    "heterogeneous": lambda: HeterogeneousCountingEnv(max_steps=3, batch_size=[2]),
    "metadata": EnvWithMetadata,
    "dynamic": EnvWithDynamicSpec,
    "scalar-action": EnvWithScalarAction,
    "scalar-action-singleton": lambda: EnvWithScalarAction(singleton=True, batch_size=[2]),
    "nothing": lambda: EnvThatDoesNothing(batch_size=[2]),
    "strings": Str2StrEnv,
    "images": lambda: FastImageEnv(img_shape=(1, 4, 4), batch_size=[2]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_fake_keeps_the_contract(name: str) -> None:
    check_env(MAKERS[name], num_steps=6)  # episodes that end take four


@pytest.mark.parametrize(
    "make_env",
    [CountingEnvWithString, Str2StrEnv, ContinuousActionVecMockEnv, StateLessCountingEnv, MockSerialEnv],
)
def test_seeds_matter_where_something_is_random(make_env: type) -> None:
    check_env(make_env, num_steps=3, stochastic=True)


def test_module_exports_what_it_lists() -> None:
    assert mocking_classes.__all__ == sorted(mocking_classes.__all__)
    assert all(name in (mocking_classes.__doc__ or "") for name in MAKERS if hasattr(mocking_classes, name))
    assert all(hasattr(mocking_classes, name) for name in mocking_classes.__all__)


def test_every_fake_has_a_docstring() -> None:
    assert all(getattr(mocking_classes, name).__doc__ for name in mocking_classes.__all__)


# Counting -----------------------------------------------------------------------------------------


def counts(rollout: TensorDict, key: object = ("next", "observation")) -> list[int]:
    return rollout[key].flatten().int().tolist()


def test_counting_env_is_done_above_max_steps() -> None:
    env = CountingEnv(max_steps=3)
    rollout = env.rollout(20, CountingEnvCountPolicy(env.action_spec))
    assert counts(rollout) == [1, 2, 3, 4]
    assert rollout["next", "done"].flatten().tolist() == [False, False, False, True]
    assert (rollout["next", "reward"] == 0).all()
    assert rollout["observation"].dtype == torch.int32


def test_counting_env_adds_its_action_to_the_start() -> None:
    env = CountingEnv(max_steps=9, start_val=4)
    actions = iter([1, 0, 0, 1])
    rollout = env.rollout(4, lambda td: td.set("action", torch.tensor([next(actions)], dtype=torch.int8)))
    assert counts(rollout) == [5, 5, 5, 6]
    assert env.reset()["observation"].item() == 4


def test_incrementing_env_ignores_its_action() -> None:
    env = IncrementingEnv(max_steps=9)
    assert counts(env.rollout(3, lambda td: td.set("action", env.action_spec.zero()))) == [1, 2, 3]


def test_counting_batched_env_has_limits_and_starts_by_row() -> None:
    env = CountingBatchedEnv(max_steps=LIMITS, start_val=torch.tensor([0, 2]), batch_size=[2])
    rollout = env.rollout(6, CountingEnvCountPolicy(env.action_spec), break_when_any_done=False)
    assert rollout["next", "observation"].squeeze(-1).tolist() == [[1, 2, 3, 1, 2, 3], [3, 4, 5, 3, 4, 5]]
    assert rollout["next", "done"].squeeze(-1).int().tolist() == [[0, 0, 1, 0, 0, 1]] * 2


@pytest.mark.parametrize("wrong", [{"max_steps": torch.tensor([1, 2, 3])}, {"start_val": torch.zeros(3)}])
def test_counting_batched_env_refuses_other_shapes(wrong: dict[str, torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"expected .*\[2\], got \[3\]"):
        CountingBatchedEnv(**{"max_steps": LIMITS, **wrong}, batch_size=[2])


def test_counting_module_and_policy_agree() -> None:
    spec = CountingEnv(batch_size=[2]).action_spec
    action = CountingEnvCountModule(spec)(torch.zeros(()))
    assert torch.equal(action, CountingEnvCountPolicy(spec)(TensorDict({}, [2]))["action"])
    assert torch.equal(action, torch.ones(2, 1, dtype=torch.int8))


def test_counting_policy_wants_the_spec_of_one_action() -> None:
    with pytest.raises(TypeError, match=r"expected the spec of one action, got a Composite"):
        CountingEnvCountPolicy(CountingEnv().full_action_spec)


def test_strings_come_from_the_seed() -> None:
    env = CountingEnvWithString(max_size=8, min_size=6)
    env.set_seed(3)
    first = env.rollout(4)["next", "string"]
    env.set_seed(3)
    assert env.rollout(4)["next", "string"] == first
    assert all(6 <= len(word) <= 8 and word.islower() for word in first)


def test_stateless_env_takes_any_batch_and_keeps_what_it_is_given() -> None:
    env = StateLessCountingEnv()
    start = env.reset(TensorDict({}, [3]))
    assert start.batch_size == (3,)
    assert ((start["max_count"] >= 10) & (start["max_count"] < 20)).all()
    start["max_count"] = torch.tensor([[1], [2], [3]], dtype=torch.int32)
    kept = env.reset(start)
    assert kept["max_count"].flatten().tolist() == [1, 2, 3]
    rollout = env.rollout(
        3,
        lambda td: td.set("action", torch.ones(3, 1, dtype=torch.int32)),
        auto_reset=False,
        tensordict=kept,
        break_when_all_done=True,
    )
    assert rollout["next", "terminated"].squeeze(-1).int().tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert not rollout["next", "truncated"].any()


# Counters that go on over resets -----------------------------------------------------------------


@pytest.mark.parametrize("make_env", [MockSerialEnv, MockBatchedLockedEnv, MockBatchedUnLockedEnv])
def test_mock_counters_start_at_the_seed_and_survive_resets(make_env: type) -> None:
    env = make_env()
    env.set_seed(20)  # 20 % 17 == 3
    assert env.reset()["observation"].item() == 3
    rollout = env.rollout(2, lambda td: td.set("action", torch.zeros(1)))
    assert counts(rollout) == [4, 5]
    assert counts(rollout, ("next", "reward")) == [4, 5]
    assert env.reset()["observation"].item() == 5


def test_mock_counters_end_a_hundred_steps_after_a_reset() -> None:
    env = MockSerialEnv()
    env.set_seed(1)
    assert len(env.rollout(200)) == 100
    assert len(env.rollout(200)) == 101  # the limit is twice the count, once that exceeds a hundred more


def test_unlocked_mock_takes_the_batch_of_its_data() -> None:
    env = MockBatchedUnLockedEnv()
    td = env.reset(TensorDict({}, [4]))
    assert td["observation"].shape == (4, 1)
    assert env.rand_step(td)["next", "reward"].shape == (4, 1)


def test_locked_mock_refuses_another_batch() -> None:
    with pytest.raises(EnvError, match=r"batch size \[2\], got \[4\]"):
        MockBatchedLockedEnv(batch_size=[2]).reset(TensorDict({}, [4]))


# Vectors and images -------------------------------------------------------------------------------


def test_discrete_env_starts_at_its_counter_and_is_moved_by_the_policy() -> None:
    env = DiscreteActionVecMockEnv(seed=2)
    rollout = env.rollout(3, DiscreteActionVecPolicy())
    assert rollout["observation"][0].tolist() == [3.0] * 7
    assert rollout["action"].argmax(-1).tolist() == [0, 1, 2]
    assert torch.allclose(rollout["next", "observation"][-1].sum(), torch.tensor(21.03))
    assert rollout["next", "observation_orig"].equal(rollout["next", "observation"])
    assert not rollout["next", "done"].any()


def test_discrete_env_rewards_reaching_the_counter() -> None:
    env = DiscreteActionVecMockEnv()
    action = torch.nn.functional.one_hot(torch.tensor(0), 7)
    rollout = env.rollout(101, lambda td: td.set("action", action))
    assert rollout["next", "reward"].nonzero()[:, 0].tolist() == [99]


def test_conv_env_shows_the_same_numbers_on_a_diagonal() -> None:
    flat, image = DiscreteActionVecMockEnv(), DiscreteActionConvMockEnv()
    env_actions = [torch.nn.functional.one_hot(torch.tensor(i % 7), 7) for i in range(4)]
    seen = []
    for env in (flat, image):
        actions = iter(env_actions)
        rollout = env.rollout(4, lambda td, actions=actions: td.set("action", next(actions)))
        seen.append(rollout["next", env.out_key])
    assert seen[1].shape == (4, 1, 7, 7)
    assert torch.equal(seen[1].diagonal(0, -1, -2).squeeze(-2), seen[0])


def test_continuous_env_moves_by_a_hundredth_and_ends_at_its_counter() -> None:
    env = ContinuousActionVecMockEnv()
    td = env.reset()
    td["action"] = torch.full((7,), 0.5)
    assert torch.allclose(env.step(td)["next", "observation"], td["observation_orig"] + 0.005)
    td["observation_orig"] = torch.full((7,), float(env.counter + 1)) - 0.005
    ended = env.step(td)["next"]
    assert ended["done"].item()
    assert ended["reward"].item() == 1.0


def test_continuous_conv_env_takes_other_images() -> None:
    env = ContinuousActionConvMockEnv(pixel_shape=[3, 5, 5])
    assert env.action_spec.shape == (5,)
    assert env.rollout(2)["next", "pixels"].shape == (2, 3, 5, 5)


def test_vector_envs_take_other_specs_and_dtypes() -> None:
    env = ContinuousActionVecMockEnv(dtype=torch.float64, batch_size=[2])
    assert env.rollout(2)["next", "reward"].dtype == torch.float64
    assert (env.custom_fun(), env.custom_attr, env.custom_prop) == (0, 1, 2)
    assert env.custom_td["a"].shape == (3,)


# Nests and agents ---------------------------------------------------------------------------------


def test_nested_env_puts_entries_in_the_nest() -> None:
    env = NestedCountingEnv(max_steps=2, batch_size=[2], nested_dim=4)
    rollout = env.rollout(9, CountingEnvCountPolicy(env.full_action_spec[env.action_key], env.action_key))
    assert env.action_key == ("data", "action")
    assert env.reward_key == ("data", "reward")
    assert env.done_keys == [("data", "done"), ("data", "terminated")]
    assert rollout["next", "data"].batch_size == (2, 3, 4)
    assert rollout["next", "data", "states"][0, :, 0, 0].tolist() == [1, 2, 3]


def test_nested_env_counts_the_largest_action() -> None:
    env = NestedCountingEnv()
    td = env.reset()
    td["data", "action"] = torch.tensor([[0], [1], [0]], dtype=torch.int8)
    assert env.step(td)["next", "data", "states"].flatten().tolist() == [1, 1, 1]


def test_multi_agent_env_has_a_flag_of_another_name_at_the_root() -> None:
    env = MultiAgentCountingEnv(3, max_steps=2)
    assert env.group_map == {"agents": ["agent_0", "agent_1", "agent_2"]}
    assert env.done_keys[0] == "env_done"
    assert env.reset_keys[0] == "_reset"
    rollout = env.rollout(7, break_when_any_done=False)
    assert rollout["next", "env_done"].flatten().int().tolist() == [0, 0, 1, 0, 0, 1, 0]
    assert rollout["next", "agents", "agent_2", "observation"].shape == (7, 3, 4)


def test_multi_agent_env_takes_groups_and_checks_them() -> None:
    groups = {"left": ["agent_0"], "right": ["agent_1"]}
    assert ("right", "agent_1", "action") in MultiAgentCountingEnv(2, groups).action_keys
    with pytest.raises(ValueError, match=r"group_map: expected each of .* once"):
        MultiAgentCountingEnv(2, {"left": ["agent_0"]})


@pytest.mark.parametrize("done_at_root", [True, False])
def test_nested_reset_env_ends_after_num_steps(done_at_root: bool) -> None:
    env = MockNestedResetEnv(3, done_at_root)
    rollout = env.rollout(7, break_when_any_done=False)
    key = "done" if done_at_root else ("agent_1", "done")
    assert rollout["next"][key].flatten().int().tolist() == [0, 0, 1, 0, 0, 1, 0]
    assert rollout["next", "agent_1", "done"].all() == done_at_root


def test_multikey_env_rewards_each_action() -> None:
    env = MultiKeyCountingEnv(max_steps=2)
    rollout = env.rollout(9, MultiKeyCountingEnvPolicy(env.full_action_spec, deterministic=True))
    assert len(rollout) == 3
    nest_1, nest_2 = rollout["next", "nested_1"], rollout["next", "nested_2"]
    assert all((reward == 1).all() for reward in (rollout["next", "reward"], nest_1["gift"], nest_2["reward"]))
    assert nest_1["observation"][:, 0, 0].tolist() == [1, 2, 3]
    assert env.reward_keys == ["reward", ("nested_1", "gift"), ("nested_2", "reward")]


def test_multikey_policy_acts_in_one_place_at_random_or_in_none() -> None:
    env = MultiKeyCountingEnv()
    torch.manual_seed(0)
    policy = MultiKeyCountingEnvPolicy(env.full_action_spec)
    for _ in range(5):
        td = policy(TensorDict())
        moved = [td["action"][1] == 1, td["nested_1", "action"].any(), td["nested_2", "azione"].any()]
        assert sum(map(bool, moved)) == 1
    still = MultiKeyCountingEnvPolicy(env.full_action_spec, count=False, deterministic=True)(TensorDict())
    assert not still["nested_1", "action"].any()
    with pytest.raises(ValueError, match="deterministic"):
        MultiKeyCountingEnvPolicy(env.full_action_spec, count=False)


def test_heterogeneous_env_fills_every_shape_with_its_count() -> None:
    env = HeterogeneousCountingEnv(max_steps=2, batch_size=[2])
    policy = HeterogeneousCountingEnvPolicy(env.full_action_spec)
    rollout = env.rollout(5, policy, break_when_any_done=False)
    assert rollout["next", "state"][0, :, 0, 0, 0].tolist() == [1, 2, 3, 1, 2]
    assert rollout["next", "lazy"][0, :, 0]["vector"].tolist() == [[float(n)] * 3 for n in (1, 2, 3, 1, 2)]
    assert rollout["next", "lazy"][0, :, 2]["vector"].shape == (5, 2)
    still = env.rollout(2, HeterogeneousCountingEnvPolicy(env.full_action_spec, count=False))
    assert not still["next", "state"].any()


# Oddities -----------------------------------------------------------------------------------------


def test_metadata_counts_in_its_state() -> None:
    assert EnvWithMetadata().rollout(3)["next", "non_tensor"] == [1, 2, 3]


def test_dynamic_observations_grow() -> None:
    rollout = EnvWithDynamicSpec(max_count=3).rollout(9)
    shapes = [frame["next", "observation"].shape for frame in rollout]
    assert shapes == [(3, n, 2) for n in (2, 3, 4)]
    assert rollout["next", "truncated"].flatten().tolist() == [False, False, True]


def test_scalar_actions_have_the_shape_of_the_batch() -> None:
    assert EnvWithScalarAction().rollout(3)["action"].shape == (3,)
    assert EnvWithScalarAction(singleton=True).rollout(3)["action"].shape == (3, 1)


def test_nothing_comes_of_doing_nothing() -> None:
    rollout = EnvThatDoesNothing().rollout(3)
    assert {*rollout.keys(True, True)} == {
        *("done", "terminated"),
        *(("next", "done"), ("next", "terminated")),
    }


def test_eleventh_step_raises() -> None:
    env = EnvThatErrorsAfter10Iters()
    env.rollout(10)
    with pytest.raises(RuntimeError, match="max steps!"):
        env.rand_step()


def test_string_env_refuses_other_actions() -> None:
    env = Str2StrEnv()
    with pytest.raises(EnvError, match="expected a string in 'action', got Tensor"):
        env.step(env.reset().set("action", torch.zeros(())))


def test_image_env_shows_one_image() -> None:
    one, other = (FastImageEnv(img_shape=(1, 2, 2), batch_size=[2]).rollout(2) for _ in range(2))
    assert torch.equal(one["pixels"], other["next", "pixels"])
    assert (one["next", "reward"] == 1).all()


def test_merge_linear_puts_observation_and_action_side_by_side() -> None:
    assert ActionObsMergeLinear(5, 2)(torch.zeros(3, 4), torch.zeros(3, 1)).shape == (3, 2)


# What they refuse ---------------------------------------------------------------------------------

WRONG_ACTIONS = {
    "missing": (CountingEnv, {}, EnvKeyError, "'action'"),
    "shape": (
        CountingEnv,
        {"action": torch.ones(2, dtype=torch.int8)},
        EnvError,
        r"shape \[2\], expected \[1\]",
    ),
    "nan": (ContinuousActionVecMockEnv, {"action": torch.full((7,), torch.nan)}, EnvError, "NaN in 'action'"),
    "not-one-hot": (
        DiscreteActionVecMockEnv,
        {"action": torch.ones(7, dtype=torch.bool)},
        EnvError,
        "not one-hot",
    ),
    "nested": (NestedCountingEnv, {"data": {"action": torch.ones(3, 2)}}, EnvError, r"\('data', 'action'\)"),
    "no-batch": (
        lambda: CountingEnv(batch_size=[2]),
        {"action": torch.ones(2, 3, dtype=torch.int8)},
        EnvError,
        r"shape \[2, 3\], expected \[2, 1\]",
    ),
}


@pytest.mark.parametrize("name", WRONG_ACTIONS)
def test_wrong_actions_are_refused(name: str) -> None:
    make_env, actions, error, message = WRONG_ACTIONS[name]
    env = make_env()
    td = env.reset()
    with pytest.raises(error, match=message):
        env.step(td.update(actions))


def test_heterogeneous_actions_are_checked_by_agent() -> None:
    env = HeterogeneousCountingEnv()
    td = env.rand_action(env.reset())
    td["lazy"].tensordicts[1]["action"] = torch.zeros(3)
    with pytest.raises(EnvError, match=r"shape \[3\], expected \[2\]"):
        env.step(td)
