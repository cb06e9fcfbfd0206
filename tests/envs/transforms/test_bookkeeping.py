"""InitTracker, StepCounter, RewardSum: rows with episodes of different lengths, nested flags, errors."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import Composite, Unbounded
from rollwright.envs import (
    Compose,
    InitTracker,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import (
    CountingEnv,
    MultiAgentCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
    StateLessCountingEnv,
)


def rows(rollout, key):
    return rollout[key].squeeze(-1).int().tolist()


def climb(env, steps, policy):
    return env.rollout(steps, policy, break_when_any_done=False)


def test_is_init_marks_first_steps_of_each_row(ladder, do_nothing):
    env = TransformedEnv(ladder([2, 3, 9]), InitTracker())
    check_env_specs(env)
    rollout = climb(env, 6, do_nothing)
    assert rows(rollout, "is_init") == [[1, 0, 1, 0, 1, 0], [1, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]]
    assert not rollout["next", "is_init"].any()
    assert rollout["is_init"].dtype == torch.bool


def test_step_count_restarts_for_each_row_alone(ladder, do_nothing):
    env = TransformedEnv(ladder([2, 3, 9]), StepCounter())
    check_env_specs(env)
    rollout = climb(env, 6, do_nothing)
    assert rows(rollout, "step_count") == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    assert rows(rollout, ("next", "step_count")) == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3], [1, 2, 3, 4, 5, 6]]
    assert rollout["step_count"].dtype == torch.int64
    assert "truncated" not in rollout


def test_max_steps_truncates_and_never_terminates(ladder, do_nothing):
    env = TransformedEnv(ladder([2, 3, 9]), StepCounter(max_steps=3))
    check_env_specs(env)
    assert "truncated" in env.done_spec
    rollout = climb(env, 6, do_nothing)
    assert rows(rollout, ("next", "truncated")) == [[0] * 6, [0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 1]]
    assert rows(rollout, ("next", "terminated")) == [[0, 1, 0, 1, 0, 1], [0, 0, 1, 0, 0, 1], [0] * 6]
    done = rollout["next", "terminated"] | rollout["next", "truncated"]
    assert torch.equal(rollout["next", "done"], done)
    assert not rollout["truncated"].any()


def test_done_can_be_left_alone(ladder, do_nothing):
    env = TransformedEnv(ladder([9]), StepCounter(max_steps=2, update_done=False))
    check_env_specs(env)
    rollout = climb(env, 4, do_nothing)
    assert rows(rollout, ("next", "truncated")) == [[0, 1, 1, 1]]
    assert not rollout["next", "done"].any()


def test_other_names(ladder, do_nothing):
    env = TransformedEnv(ladder([9]), StepCounter(2, truncated_key="time_is_up", step_count_key="t"))
    check_env_specs(env)
    rollout = climb(env, 4, do_nothing)
    assert rows(rollout, "t") == [[0, 1, 0, 1]]
    assert rows(rollout, ("next", "time_is_up")) == [[0, 1, 0, 1]]
    assert rows(rollout, ("next", "done")) == [[0, 1, 0, 1]]


def test_truncation_of_the_environment_is_kept(do_nothing):
    class Cut(CountingEnv):
        def __init__(self):
            super().__init__(max_steps=100)
            self.add_truncated_keys()

        def _step(self, tensordict):
            return super()._step(tensordict).exclude("done").set("truncated", self.count == 2)

    env = TransformedEnv(Cut(), StepCounter(max_steps=3))
    rollout = env.rollout(5, lambda td: td.set("action", torch.ones(1, dtype=torch.int8)))
    assert rows(rollout, ("next", "truncated")) == [0, 1]


def test_partial_reset_by_hand(ladder, do_nothing):
    env = TransformedEnv(ladder([9, 9]), Compose(StepCounter(), InitTracker(), RewardSum()))
    td = env.reset()
    for _ in range(3):
        td = env.step_and_maybe_reset(do_nothing(td))[1]
    td = env.reset(td.set("_reset", torch.tensor([[False], [True]])))
    assert td["step_count"].flatten().tolist() == [3, 0]
    assert td["is_init"].flatten().tolist() == [False, True]
    assert td["episode_reward"].flatten().tolist() == [6, 0]
    assert td["rung"][:, 0].tolist() == [3, 100]


def test_rows_at_their_first_step_stay_marked(ladder):
    env = TransformedEnv(ladder([9, 9]), InitTracker())
    td = env.reset(env.reset().set("_reset", torch.tensor([[False], [True]])))
    assert td["is_init"].all()


def test_episode_reward_is_the_return(ladder, do_nothing):
    env = TransformedEnv(ladder([2, 3, 9]), RewardSum())
    check_env_specs(env)
    rollout = climb(env, 6, do_nothing)
    assert rows(rollout, "episode_reward") == [[0, 1, 0, 1, 0, 1], [0, 1, 3, 0, 1, 3], [0, 1, 3, 6, 10, 15]]
    ends = rollout["next", "done"].squeeze(-1)
    assert rollout["next", "episode_reward"][ends].flatten().tolist() == [3, 3, 3, 6, 6]


def test_reward_sum_names_its_keys(ladder, do_nothing):
    assert (RewardSum().in_keys, RewardSum().out_keys) == (["reward"], ["episode_reward"])
    env = TransformedEnv(ladder([9]), RewardSum(in_keys=["reward"], out_keys=[("info", "return")]))
    check_env_specs(env)
    assert rows(climb(env, 3, do_nothing), ("next", "info", "return")) == [[1, 3, 6]]


def test_reward_sum_finds_all_rewards():
    env = TransformedEnv(MultiKeyCountingEnv(batch_size=(2,)), RewardSum())
    check_env_specs(env)
    assert env.transform.in_keys == list(env.reward_keys)
    assert len(env.transform.out_keys) == 3
    rollout = env.rollout(4)
    for key, total in env.transform._pairs():
        torch.testing.assert_close(rollout["next"].get(total), rollout["next"].get(key).cumsum(1))


def test_reward_sum_with_bounded_rewards_stays_in_its_spec(ladder, do_nothing):
    from rollwright.data import Bounded

    env = ladder([5])
    env.reward_spec = Bounded(0.0, 9.0, (1, 1))
    env = TransformedEnv(env, RewardSum())
    env.base_env.run_type_checks = True
    assert env.rollout(5, do_nothing)["next", "episode_reward"].max() == 15


def test_reset_keys_decide_for_sums_elsewhere():
    class TwoAgents(CountingEnv):
        """Flags below "a" and "b" only; "b" ends each second step."""

        def __init__(self):
            super().__init__(max_steps=100)
            flag = self.full_done_spec["done"]
            self.full_done_spec = Composite(a={"done": flag.clone()}, b={"done": flag.clone()})
            self.full_reward_spec = Composite(a={"reward": Unbounded((1,))}, b={"reward": Unbounded((1,))})

        def _reset(self, tensordict=None, **kwargs):
            return TensorDict({"observation": self.count.clone()})

        def _step(self, tensordict):
            self.count += 1
            agents = {
                name: {"reward": torch.ones(1), "done": self.count % period == 0}
                for name, period in (("a", 100), ("b", 2))
            }
            return TensorDict({"observation": self.count.clone(), **agents})

    sums = RewardSum([("a", "reward"), ("b", "reward")], ["sum_a", "sum_b"], [("a", "_reset"), ("b", "_reset")])
    env = TransformedEnv(TwoAgents(), Compose(sums, StepCounter(), InitTracker()))
    check_env_specs(env)
    env = TransformedEnv(TwoAgents(), env.transform.clone())
    rollout = env.rollout(5, break_when_any_done=False)
    assert rows(rollout, ("next", "sum_a")) == [1, 2, 3, 4, 5]
    assert rows(rollout, ("next", "sum_b")) == [1, 2, 1, 2, 1]
    assert rows(rollout, ("a", "step_count")) == [0, 1, 2, 3, 4]
    assert rows(rollout, ("b", "step_count")) == [0, 1, 0, 1, 0]
    assert rows(rollout, ("b", "is_init")) == [1, 0, 1, 0, 1]
    assert rows(rollout, ("a", "is_init")) == [1, 0, 0, 0, 0]


def test_nested_flags(do_nothing):
    env = TransformedEnv(NestedCountingEnv(max_steps=9, batch_size=[2]), Compose(StepCounter(3), InitTracker()))
    check_env_specs(env)
    rollout = env.rollout(4, break_when_any_done=False)
    assert rollout["data", "step_count"].shape == (2, 4, 3, 1)
    assert rollout["data", "step_count"][0, :, 0, 0].tolist() == [0, 1, 2, 0]
    assert rollout["data", "is_init"][0, :, 0, 0].tolist() == [True, False, False, True]
    assert rollout["next", "data", "truncated"][0, :, 0, 0].tolist() == [False, False, True, False]
    assert "step_count" not in rollout


def test_root_flags_decide_and_agents_follow(do_nothing):
    env = NestedCountingEnv(max_steps=9, has_root_done=True)
    env = TransformedEnv(env, Compose(StepCounter(3), InitTracker()))
    check_env_specs(env)
    rollout = env.rollout(4, break_when_any_done=False)
    assert rows(rollout, "step_count") == [0, 1, 2, 0]
    assert rows(rollout, "is_init") == [1, 0, 0, 1]
    for flag in ("truncated", "done"):
        assert rollout["next", "data", flag].shape == (4, 3, 1)
        assert rollout["next", "data", flag][:, :, 0].all(-1).tolist() == [False, False, True, False]
    assert not rollout["next", "data", "terminated"].any()


def test_flags_of_other_names_keep_their_truth():
    env = TransformedEnv(MultiAgentCountingEnv(2, max_steps=1), StepCounter(5))
    check_env_specs(env)
    rollout = env.rollout(4)
    assert rows(rollout, ("next", "env_done")) == rows(rollout, ("next", "terminated")) == [0, 1]
    assert not rollout["next", "truncated"].any()
    env = TransformedEnv(MultiAgentCountingEnv(2, max_steps=50), StepCounter(3))
    rollout = env.rollout(9)
    assert rows(rollout, ("next", "truncated")) == rows(rollout, ("next", "done")) == [0, 0, 1]
    assert not rollout["next", "env_done"].any()
    assert rollout["next", "agents", "agent_1", "truncated"].flatten().tolist() == [False, False, True]


@pytest.mark.parametrize("in_keys", [None, ["reward", ("nested_1", "gift"), ("nested_2", "reward")]])
def test_one_reset_key_decides_for_all_sums(in_keys):
    env = TransformedEnv(SerialEnv(2, lambda: MultiKeyCountingEnv()), RewardSum(in_keys, reset_keys=["_reset"]))
    td = env.reset()
    for _ in range(2):
        td = env.step_mdp(env.rand_step(td))
    td["_reset"] = torch.tensor([[True], [False]])
    sums = env.reset(td).select("episode_reward", ("nested_1", "episode_gift"), ("nested_2", "episode_reward"))
    assert len(list(sums.keys(True, True))) == 3
    assert not any(value[0].any() for value in sums.values(True, True))
    for keys, message in (
        (["_reset"] * 2, r"one for each of in_keys=.* got"),
        (["a"], r"reset_keys: expected some of .*, got 'a'"),
    ):
        with pytest.raises((EnvError, ValueError), match=message):
            TransformedEnv(MultiKeyCountingEnv(), RewardSum(in_keys, reset_keys=keys)).reset()


def test_batches_of_any_size():
    env = TransformedEnv(StateLessCountingEnv(), Compose(StepCounter(), InitTracker()))
    start = TensorDict({"action": torch.ones(5, 1)}, [5])
    td = env.reset(env.rand_action(TensorDict({}, [5])) if "action" in env.state_keys else start.empty())
    assert td["step_count"].shape == td["is_init"].shape == (5, 1)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: StepCounter(0), ValueError, "max_steps: expected at least 1, or None for no limit, got 0"),
        (lambda: StepCounter(truncated_key=("a", "b")), TypeError, "truncated_key: expected a plain name"),
        (lambda: StepCounter(step_count_key=None), TypeError, "step_count_key: expected a plain name"),
        (lambda: InitTracker(("a", "b")), TypeError, "init_key: expected a plain name"),
        (lambda: RewardSum(["a"], ["b", "c"]), ValueError, "one of out_keys for each of in_keys"),
        (lambda: RewardSum(out_keys=["b"]), ValueError, "out_keys: expected in_keys with them"),
        (
            lambda: RewardSum(["a"], reset_keys=["b", "c"]),
            ValueError,
            "reset_keys: expected one, or one for each of in_keys",
        ),
    ],
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_data_that_no_reset_made(ladder):
    env = TransformedEnv(ladder([3]), StepCounter())
    with pytest.raises(EnvError, match=r"has no 'step_count', which a reset writes. Begin from env.reset\(\)"):
        env.step(TensorDict({"action": torch.zeros(1, 1)}, [1]))


def test_reward_that_the_environment_lacks(ladder):
    env = TransformedEnv(ladder([3]), RewardSum(["rewards"]))
    with pytest.raises(EnvError, match=r"no reward 'rewards'; it has 'reward'. Correct in_keys"):
        env.reset()


@pytest.mark.parametrize("transform", [StepCounter(), InitTracker()])
def test_not_for_data(transform):
    with pytest.raises(RuntimeError, match=r"Put it on the environment: TransformedEnv\(env, "):
        transform(TensorDict({}))


def test_reward_sum_of_data(ladder, do_nothing):
    env = TransformedEnv(ladder([2, 3, 9]), RewardSum())
    rollout = climb(env, 7, do_nothing)
    offline = RewardSum([("next", "reward")], ["total"])(rollout.exclude("episode_reward"))
    assert torch.equal(offline["total"], rollout["next", "episode_reward"])
    by_time = rollout.transpose(0, 1)
    assert torch.equal(RewardSum([("next", "reward")], ["total"])(by_time)["total"], offline["total"].transpose(0, 1))
    with pytest.raises(ValueError, match="expected data with a time dimension"):
        RewardSum()(TensorDict({"reward": torch.zeros(1)}))


def test_reward_sum_of_data_without_flags():
    data = TensorDict({"reward": torch.ones(4, 1)}, [4])
    assert RewardSum()(data)["episode_reward"].flatten().tolist() == [1, 2, 3, 4]


def test_few_tensor_operations(ladder, do_nothing):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def count(transform, limits=(9, 9)):
        env = TransformedEnv(ladder(list(limits)), transform)
        td = do_nothing(env.reset())
        outcome = env.base_env.step_outcome(td)
        _ = env.specs, env.transform._step(td, outcome.clone())
        with Count() as counter:
            env.transform._step(td, outcome)
        return counter.calls

    assert count(InitTracker()) <= 1
    assert count(StepCounter()) <= 1
    assert count(StepCounter(5)) <= 4
    assert count(RewardSum()) <= 1


def test_the_keys_that_are_written_are_known():
    env = TransformedEnv(CountingEnv(), Compose(StepCounter(max_steps=3), InitTracker()))
    assert env.transform[0].step_count_keys == ["step_count"]
    assert env.transform[0].truncated_keys == ["truncated"]
    assert env.transform[1].init_keys == ["is_init"]
    nested = TransformedEnv(NestedCountingEnv(max_steps=9), StepCounter(max_steps=3))
    (count,), (flag,) = nested.transform.step_count_keys, nested.transform.truncated_keys
    rollout = nested.rollout(5)
    assert rollout["next", *count].max() == 3
    assert rollout["next", *flag][..., -1, :, :].all()


def test_sums_over_data_keep_their_digits():
    torch.manual_seed(0)
    rewards = 100 * (1 + torch.randn(2, 20_000, 1))
    done = torch.zeros(2, 20_000, 1, dtype=torch.bool)
    done[:, 49::50] = True
    data = TensorDict({"next": {"reward": rewards, "done": done}}, [2, 20_000])
    sums = RewardSum([("next", "reward")], [("next", "sum")])(data)["next", "sum"]
    exact = rewards.double().reshape(2, -1, 50).cumsum(-1).reshape(rewards.shape)
    torch.testing.assert_close(sums, exact.float(), rtol=1e-5, atol=1e-3)
    assert torch.equal(sums[:, ::50], rewards[:, ::50])
    assert sums.data_ptr() != data["next", "reward"].data_ptr()


def test_a_reward_that_is_no_number_stays_in_its_trajectory():
    rewards = torch.tensor([1.0, torch.nan, 3.0, 4.0, torch.inf, 6.0, 7.0]).unsqueeze(-1)
    done = torch.tensor([0, 0, 1, 0, 1, 0, 0], dtype=torch.bool).unsqueeze(-1)
    data = TensorDict({"next": {"reward": rewards, "done": done}}, [7])
    sums = RewardSum([("next", "reward")], ["sum"])(data)["sum"].flatten().tolist()
    assert str(sums) == str([1.0, torch.nan, torch.nan, 4.0, torch.inf, 6.0, 13.0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16])
def test_sums_over_data_of_other_numbers(dtype):
    data = TensorDict({"next": {"reward": torch.ones(300, 1, dtype=dtype)}}, [300])
    sums = RewardSum([("next", "reward")], ["sum"])(data)["sum"]
    assert sums.dtype == (dtype if dtype.is_floating_point else torch.int64)
    assert torch.equal(sums.flatten().long(), torch.arange(1, 301))
