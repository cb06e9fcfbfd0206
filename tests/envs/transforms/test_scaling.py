"""RewardScaling, ObservationNorm, DoubleToFloat: values, specs, inverses, statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from rollwright.collectors import Collector
from rollwright.data import Bounded, Composite, Unbounded
from rollwright.envs import (
    Compose,
    DoubleToFloat,
    GymEnv,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    TransformedEnv,
    check_env_specs,
)
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import ContinuousActionVecMockEnv, CountingEnv


def test_reward_scaling(ladder, do_nothing):
    env = TransformedEnv(ladder([3]), RewardScaling(loc=1.0, scale=0.5))
    assert env.rollout(3, do_nothing)["next", "reward"].flatten().tolist() == [1.5, 2.0, 2.5]
    standard = TransformedEnv(ladder([3]), RewardScaling(loc=1.0, scale=0.5, standard_normal=True))
    assert standard.rollout(3, do_nothing)["next", "reward"].flatten().tolist() == [0, 2, 4]


@pytest.mark.parametrize(("scale", "low", "high"), [(2.0, 1.0, 21.0), (-2.0, -19.0, 1.0)])
def test_bounds_are_scaled(ladder, scale, low, high):
    env = ladder([3])
    env.reward_spec = Bounded(0.0, 10.0, (1, 1))
    env = TransformedEnv(env, RewardScaling(loc=1.0, scale=scale))
    assert env.reward_spec == Bounded(low, high, (1, 1))
    check_env_specs(env)


def test_scaled_rewards_are_summed(ladder, do_nothing):
    for chain, total in (
        (Compose(RewardScaling(0.0, 0.5), RewardSum()), 3.0),
        (Compose(RewardSum(), RewardScaling(0.0, 0.5)), 6.0),
    ):
        assert TransformedEnv(ladder([3]), chain).rollout(3, do_nothing)["next", "episode_reward"][0, -1] == total


def test_observation_norm_and_its_spec(ladder, do_nothing):
    norm = ObservationNorm(loc=100.0, scale=torch.tensor([50.0, 10.0]), in_keys=["rung"], standard_normal=True)
    env = TransformedEnv(ladder([3, 3]), norm)
    assert env.reset()["rung"].tolist() == [[-2.0, -10.0], [0.0, -20.0]]
    assert env.observation_spec["rung"].low[0].tolist() == [-22, -110]
    check_env_specs(env)


def test_observation_norm_of_integers():
    norm = ObservationNorm(0.0, 0.5, in_keys=["observation"], out_keys=["half"])
    env = TransformedEnv(CountingEnv(), norm)
    check_env_specs(env)
    assert env.observation_spec["half"].dtype == torch.float32
    assert env.observation_spec["observation"].dtype == torch.int32


def test_inverse_and_action_spec(ladder):
    env = ladder([3])
    env.action_spec = Bounded(-1.0, 1.0, (1, 1))
    norm = ObservationNorm(loc=5.0, scale=2.0, in_keys=[], in_keys_inv=["action"])
    env = TransformedEnv(env, norm)
    assert (env.action_spec.low.item(), env.action_spec.high.item()) == (3, 7)
    env.step(env.reset().set("action", torch.full((1, 1), 7.0)))
    assert env.base_env.actions[-1].item() == 1
    check_env_specs(env)


def test_init_stats_of_what_the_transform_meets():
    torch.manual_seed(0)
    chain = Compose(ObservationNorm(10.0, 2.0, ["observation"]), ObservationNorm(None, None, ["observation"]))
    env = TransformedEnv(ContinuousActionVecMockEnv(), chain)
    norm = env.transform[1]
    assert not norm.initialized
    norm.init_stats(200)
    rollout = env.transform[1].parent.rollout(50)
    assert norm.loc.shape == rollout["observation"].shape[1:]
    assert norm.initialized
    check_env_specs(env)


@pytest.mark.parametrize("standard_normal", [True, False])
def test_init_stats_gives_mean_zero_and_deviation_one(ladder, standard_normal):
    env = TransformedEnv(ladder([8, 8]), ObservationNorm(in_keys=["rung"], standard_normal=standard_normal))
    env.transform.init_stats(16, reduce_dim=(0, 1), cat_dim=-2)
    data = env.rollout(8)["rung"]
    torch.testing.assert_close(data.mean((0, 1)), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.std((0, 1)), torch.ones(2), atol=1e-5, rtol=0)


def test_init_stats_keeps_dimensions(ladder):
    env = TransformedEnv(ladder([8, 8]), ObservationNorm(in_keys=["rung"]))
    env.transform.init_stats(16, reduce_dim=(0, 1, 2), cat_dim=1, keep_dims=(2,))
    assert env.transform.loc.shape == (1,)


def test_numbers_travel_by_state_dict(ladder):
    env = TransformedEnv(ladder([8]), ObservationNorm(in_keys=["rung"]))
    env.transform.init_stats(8, reduce_dim=1)
    other = TransformedEnv(ladder([8, 8]), ObservationNorm(in_keys=["rung"]))
    other.transform.load_state_dict(env.transform.state_dict())
    assert torch.equal(other.transform.loc, env.transform.loc)
    other.reset()


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda env: env.reset(), (EnvError, RuntimeError), "has no loc and scale yet. Pass them .* init_stats"),
        (lambda env: env.observation_spec, RuntimeError, "has no loc and scale yet"),
        (lambda env: env.transform.init_stats(4, reduce_dim=(0, 1)), ValueError, r"cat_dim: expected one of"),
        (
            lambda env: env.transform.init_stats(4, cat_dim=1),
            ValueError,
            r"cat_dim: expected .*, got 1",
        ),
        (lambda env: env.transform.init_stats(4, keep_dims=(1,)), ValueError, "keep_dims: expected some of"),
        (lambda env: ObservationNorm(in_keys=["x"]).init_stats(4), RuntimeError, "expected an environment, got none"),
        (lambda env: ObservationNorm(1.0, in_keys=["x"]), ValueError, "loc, scale: expected both or neither"),
        (lambda env: ObservationNorm(1.0, 1.0), ValueError, "in_keys: expected observations, got None"),
        (lambda env: ObservationNorm(1.0, 0.0, ["x"]), ValueError, "scale: expected numbers other than 0"),
        (lambda env: RewardScaling(float("nan"), 1.0), ValueError, "loc: expected finite numbers"),
        (lambda env: RewardScaling("one", 1.0), TypeError, "loc: expected a number or a tensor, got 'one'"),
        (lambda env: DoubleToFloat(out_keys=["x"]), ValueError, "expected in_keys with them"),
        (lambda env: TransformedEnv(env.base_env, DoubleToFloat(["rung"])).reset(), (EnvError, TypeError), "float64"),
    ],
)
def test_errors(ladder, act, error, message):
    with pytest.raises(error, match=message):
        act(TransformedEnv(ladder([8, 8]), ObservationNorm(in_keys=["rung"])))


def test_stats_are_set_once(ladder):
    env = TransformedEnv(ladder([8]), ObservationNorm(in_keys=["rung"]))
    env.transform.init_stats(8, reduce_dim=1)
    with pytest.raises(RuntimeError, match="set already"):
        env.transform.init_stats(8, reduce_dim=1)
    short = TransformedEnv(ladder([1]), ObservationNorm(in_keys=["rung"]))
    with pytest.warns(UserWarning, match="degrees of freedom"), pytest.raises(RuntimeError, match="Take more frames"):
        short.transform.init_stats(1, reduce_dim=1)


def test_doubles_become_floats_both_ways(ladder):
    env = TransformedEnv(ladder([3, 4], dtype=torch.float64), DoubleToFloat())
    check_env_specs(env)
    assert env.transform.in_keys == ["rung", "reward"]
    assert env.transform.in_keys_inv == ["action"]
    rollout = env.rollout(3)
    assert {rollout[key].dtype for key in ("rung", "action", ("next", "reward"))} == {torch.float32}
    assert {action.dtype for action in env.base_env.actions} == {torch.float64}


def test_doubles_by_name(ladder):
    env = TransformedEnv(ladder([3], dtype=torch.float64), DoubleToFloat(in_keys=["rung"], out_keys=["single"]))
    check_env_specs(env)
    assert env.observation_spec["rung"].dtype == torch.float64
    assert env.observation_spec["single"].dtype == torch.float32
    assert env.action_spec.dtype == torch.float64


def test_doubles_of_later_transforms_are_not_seen(ladder):
    env = ladder([3])
    loc = torch.tensor([0.0, 1.0], dtype=torch.float64)
    norm = ObservationNorm(loc, loc + 1, in_keys=["rung"])
    env = TransformedEnv(env, Compose(norm, DoubleToFloat()))
    check_env_specs(env)
    assert env.reset()["rung"].dtype == torch.float32
    assert env.transform[1].in_keys == ["rung"]


def test_doubles_in_data():
    data = TensorDict({"a": torch.zeros(2, dtype=torch.float64), "b": {"c": torch.zeros(2, dtype=torch.int64)}}, [2])
    data = DoubleToFloat()(data)
    assert (data["a"].dtype, data["b", "c"].dtype) == (torch.float32, torch.int64)
    named = DoubleToFloat(["a"], ["z"])(TensorDict({"a": torch.zeros(2, dtype=torch.float64)}))
    assert (named["a"].dtype, named["z"].dtype) == (torch.float64, torch.float32)


def test_states_are_cast(ladder):
    class Stateful(ladder):
        def __init__(self):
            super().__init__([3], dtype=torch.float64)
            self.state_spec = Composite(rung=Unbounded((1, 2), dtype=torch.float64), shape=(1,))

        def _step(self, tensordict):
            assert tensordict["rung"].dtype == torch.float64
            return super()._step(tensordict)

    env = TransformedEnv(Stateful(), DoubleToFloat())
    assert set(env.transform._pairs_inv()) == {("action", "action"), ("rung", "rung")}
    check_env_specs(env)


# On arrays --------------------------------------------------------------------------------------------------------


def scaled_pole(seed):
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    norm = ObservationNorm(torch.zeros(4), torch.full((4,), 1.5), ["observation"])
    env = TransformedEnv(env, Compose(norm, RewardScaling(0.1, 1 / 3), RewardSum()))
    env.set_seed(seed)
    return env


def as_on_tensordicts(native, plain):
    """Whether the next batches of two collectors are equal to the bit."""
    one, other = native.next(), plain.next()
    keys = set(one.keys(True, True))
    return keys == set(other.keys(True, True)) and all(torch.equal(one.get(key), other.get(key)) for key in keys)


def collect(seed, **options):
    torch.manual_seed(0)
    policy = TensorDictModule(torch.nn.Linear(4, 1), ["observation"], ["value"])
    act = TensorDictModule(lambda value: (value[..., 0] > 0).long(), ["value"], ["action"])
    return Collector(scaled_pole(seed), TensorDictSequential(policy, act), frames_per_batch=40, **options)


def test_runs_on_arrays_are_those_on_tensordicts_when_numbers_change_and_are_restored():
    native, plain = collect(3), collect(3, use_buffers=False)
    assert native.stats()["paths"]["env"].startswith("native")
    assert as_on_tensordicts(native, plain)
    for collector in (native, plain):  # in place, as new weights are written
        collector.update_policy_weights_(
            {"loc": torch.full((4,), 0.25), "scale": torch.full((4,), 2.0)}, model_id="env.transform[0]"
        )
    assert as_on_tensordicts(native, plain)
    for collector in (native, plain):  # other tensors
        collector.env.transform[0].loc = torch.full((4,), -0.5)
        collector.env.transform[1].scale = torch.tensor(0.7)
    assert as_on_tensordicts(native, plain)
    state = copy.deepcopy(native.state_dict())
    restored = collect(4)
    restored.load_state_dict(state)
    assert torch.equal(restored.env.transform[0].loc, torch.full((4,), -0.5))
    assert as_on_tensordicts(restored, plain)
    for collector in (native, plain, restored):
        collector.shutdown()


def test_numbers_that_overflow_do_so_in_silence():
    env = TransformedEnv(GymEnv("CartPole-v1"), RewardScaling(3e38, 3e38))
    with Collector(env, frames_per_batch=4) as collector:
        assert collector.stats()["paths"]["env"].startswith("native")
        assert bool(collector.next()["next", "reward"].isinf().all())
