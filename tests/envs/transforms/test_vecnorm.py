"""VecNorm: the formula, partial resets, freezing, state."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict

from rollwright.envs import Compose, ObservationNorm, TransformedEnv, VecNorm, VecNormV2, check_env_specs
from rollwright.testing.mocking_classes import ContinuousActionVecMockEnv, CountingEnv, NestedCountingEnv


def reference(batches, decay, eps=1e-4):
    """Mean and deviation by the definition: a value seen k batches ago weighs decay ** k."""
    weights = [decay ** (len(batches) - 1 - i) for i in range(len(batches))]
    total = sum(w * len(b) for w, b in zip(weights, batches, strict=True))
    mean = sum(w * b.sum(0) for w, b in zip(weights, batches, strict=True)) / total
    spread = sum(w * ((b - mean) ** 2).sum(0) for w, b in zip(weights, batches, strict=True)) / total
    return mean, spread.clamp_min(eps).sqrt()


@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_statistics_follow_the_formula(decay):
    torch.manual_seed(0)
    norm = VecNorm(["x"], decay=decay)
    batches = [torch.randn(4, 3, dtype=torch.float64) * 5 + 1000 for _ in range(20)]
    for seen in range(1, 21):
        data = norm(TensorDict({"x": batches[seen - 1]}, [4]))
        mean, deviation = reference(batches[:seen], decay)
        torch.testing.assert_close(norm.loc["x"], mean)
        torch.testing.assert_close(norm.scale["x"], deviation)
        torch.testing.assert_close(data["x"], (batches[seen - 1] - mean) / deviation)


def test_far_from_zero_in_single_precision():
    torch.manual_seed(0)
    values = torch.randn(500, 1) + 10_000
    norm = VecNorm(["x"], decay=1.0)
    for value in values:
        norm(TensorDict({"x": value}))
    torch.testing.assert_close(norm.scale["x"], values.std(0), rtol=0.05, atol=0)


def test_each_row_counts_once_where_it_begins_anew(ladder, do_nothing):
    env = TransformedEnv(ladder([2, 3, 9]), VecNorm(["rung"], decay=1.0))
    check_env_specs(env)
    raw = ladder([2, 3, 9]).rollout(5, do_nothing, break_when_any_done=False)
    env = TransformedEnv(ladder([2, 3, 9]), VecNorm(["rung"], decay=1.0))
    env.rollout(5, do_nothing, break_when_any_done=False)  # no row ends with the fifth step
    first = torch.ones(3, 5, dtype=torch.bool)
    first[:, 1:] = raw["next", "done"].squeeze(-1)[:, :-1]
    seen = torch.cat([raw["rung"][first], raw["next", "rung"].flatten(0, 1)])
    torch.testing.assert_close(env.transform.loc["rung"], seen.mean(0))
    torch.testing.assert_close(env.transform.scale["rung"], seen.std(0, correction=0))
    assert env.transform.weight_0[0] == len(seen)


def test_rows_that_go_on_keep_their_values(ladder, do_nothing):
    env = TransformedEnv(ladder([1, 9]), VecNorm(["rung"]))
    frame, td = env.step_and_maybe_reset(do_nothing(env.reset()))
    assert torch.equal(td["rung"][1], frame["next", "rung"][1])
    assert not torch.equal(td["rung"][0], frame["next", "rung"][0])


def test_agents_count_for_themselves():
    torch.manual_seed(0)
    norm = VecNorm([("data", "states")], decay=1.0)
    env = TransformedEnv(NestedCountingEnv(max_steps=2, batch_size=[2]), norm)
    check_env_specs(env)
    env = TransformedEnv(NestedCountingEnv(max_steps=2, batch_size=[2]), norm.clone())
    td = env.reset()
    weight = env.transform.weight_0.clone()
    mask = torch.zeros(2, 3, 1, dtype=torch.bool)
    mask[0, 1] = True
    env.reset(td.set(("data", "_reset"), mask))
    assert (env.transform.weight_0 - weight).squeeze(-1).tolist() == [0, 1, 0]


def test_unbatched_environment():
    env = TransformedEnv(ContinuousActionVecMockEnv(), VecNorm(decay=1.0))
    check_env_specs(env)
    env.rollout(5)
    assert env.transform.loc["observation"].shape == (7,)
    assert env.transform.loc["reward"].shape == (1,)


def test_freeze(ladder, do_nothing):
    env = TransformedEnv(ladder([9]), VecNorm(["rung"]))
    env.rollout(4, do_nothing)
    norm = env.transform
    loc, scale = norm.loc["rung"], norm.scale["rung"]
    assert norm.freeze() is norm
    rollout = env.rollout(4, do_nothing)
    assert torch.equal(norm.loc["rung"], loc)
    plain = ladder([9]).rollout(4, do_nothing)
    torch.testing.assert_close(rollout["rung"], (plain["rung"] - loc) / scale)
    norm.unfreeze()
    env.rollout(4, do_nothing)
    assert not torch.equal(norm.loc["rung"], loc)


def test_frozen_copy_is_independent(ladder, do_nothing):
    env = TransformedEnv(ladder([9]), VecNorm(["rung"]))
    env.rollout(4, do_nothing)
    frozen = env.transform.frozen_copy()
    loc = frozen.loc["rung"]
    assert frozen.frozen
    assert not env.transform.frozen
    assert frozen.container is None
    env.rollout(4, do_nothing)
    assert torch.equal(frozen.loc["rung"], loc)
    TransformedEnv(ladder([9]), frozen).rollout(2)


def test_clone_shares_statistics():
    norm = VecNorm(["x"])
    norm(TensorDict({"x": torch.ones(1)}))
    twin = norm.clone()
    norm(TensorDict({"x": torch.zeros(1)}))
    assert torch.equal(twin.loc["x"], norm.loc["x"])


def test_to_observation_norm(ladder, do_nothing):
    norm = VecNorm(["rung", "reward"])
    env = TransformedEnv(ladder([9]), norm)
    with pytest.raises(RuntimeError, match="has seen no 'rung' yet"):
        norm.to_observation_norm()
    env.rollout(4, do_nothing)
    fixed = norm.to_observation_norm()
    assert isinstance(fixed, Compose)
    expected = TransformedEnv(ladder([9]), norm.frozen_copy()).rollout(4, do_nothing)
    got = TransformedEnv(ladder([9]), fixed).rollout(4, do_nothing)
    for key in ("rung", ("next", "rung"), ("next", "reward")):
        torch.testing.assert_close(got[key], expected[key])
    single = VecNorm(["x"])
    single(TensorDict({"x": torch.ones(2)}))
    assert isinstance(single.to_observation_norm(), ObservationNorm)


def test_state_dict_round_trip(ladder, do_nothing):
    env = TransformedEnv(ladder([9]), VecNorm(["rung", "reward"]))
    env.rollout(4, do_nothing)
    state = copy.deepcopy(env.state_dict())
    fresh = TransformedEnv(ladder([9]), VecNorm(["rung", "reward"]))
    fresh.load_state_dict(state)
    assert (fresh.transform.loc == env.transform.loc).all()
    used = TransformedEnv(ladder([9]), VecNorm(["rung", "reward"]))
    used.rollout(7, do_nothing)
    used.load_state_dict(state)
    expected, got = env.rollout(4, do_nothing), used.rollout(4, do_nothing)
    assert (expected == got).all()


def test_out_keys_and_specs(ladder):
    env = TransformedEnv(ladder([9]), VecNorm(["rung"], ["normal"]))
    check_env_specs(env)
    assert env.observation_spec["rung"].high.max() == 1000
    assert not hasattr(env.observation_spec["normal"], "low")


@pytest.mark.parametrize("kind", [VecNorm, VecNormV2])
@pytest.mark.parametrize("out_key", ["x", "normal"])
def test_normalised_values_can_be_brought_back(kind, out_key):
    norm = kind(["x", "reward"], [out_key, "reward"])
    x = torch.randn(10, 2, dtype=torch.float64)
    td = norm(TensorDict({"x": x.clone(), "reward": torch.ones(10, 1)}, [10]))
    assert not torch.allclose(td[out_key], x)
    back = norm.denorm(td.exclude("reward"))
    assert torch.allclose(back["x"], x)
    assert set(back.keys()) == {"x", out_key}
    with pytest.raises(RuntimeError, match="has seen no 'y' yet"):
        kind(["y"]).denorm(TensorDict({"y": torch.ones(2)}))


def test_integers_become_floats():
    env = TransformedEnv(CountingEnv(), VecNorm(["observation"]))
    check_env_specs(env)
    assert env.reset()["observation"].dtype == torch.float32


def test_gradients_do_not_enter_the_statistics():
    norm = VecNorm(["x"])
    value = torch.ones(2, requires_grad=True)
    out = norm(TensorDict({"x": value}))
    out["x"].sum().backward()
    assert not norm.mean_0.requires_grad
    assert value.grad is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": 0.0}, "decay: expected a number above 0 and at most 1, got 0.0"),
        ({"decay": 1.5}, "decay: expected a number above 0 and at most 1, got 1.5"),
        ({"eps": 0.0}, "eps: expected a number above 0, got 0.0"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        VecNorm(["x"], **arguments)
