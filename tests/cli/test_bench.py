"""``rollwright bench``, and the loops by hand that it measures against."""

from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
import torch
from tensordict.nn import NormalParamExtractor
from torch import distributions, nn

from rollwright.cli import bench
from rollwright.cli.measuring import SingleLoop, VectorLoop, alternate, categorical, gaussian, make_vector, rate, ratios


def copied(loop):
    return {name: value.clone() for name, value in loop.collect().items()}


def net(inputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(inputs, 2)


# The command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("--num-envs", 3)])
def test_prints_both_ways_and_their_ratio(run, arguments):
    before = torch.get_num_threads()
    result = run("bench", "CartPole-v1", "--frames", 200, *arguments)
    assert result.status == 0, result.err
    rows = [line.split() for line in result.out.splitlines()]
    (by_hand,) = (row for row in rows if row[:2] == ["by", "hand"])
    (collector,) = (row for row in rows if row[:1] == ["collector"])
    assert by_hand[-2:] == ["1.00", "(1.00-1.00)"]
    assert len(by_hand) == len(collector) + 1 == 6
    assert torch.get_num_threads() == before


def test_continuous_actions_are_measured(run):
    assert run("bench", "Pendulum-v1", "--frames", 50).status == 0


def test_prints_the_paths_that_the_collector_names(capsys):
    bench._print({"by hand": [2.0], "collector": [1.0]}, {"collector": {"policy": "native"}})
    out = capsys.readouterr().out
    assert "collector: policy: native" in out
    assert "0.50" in out


def test_an_unknown_environment_is_an_error_that_names_it(run):
    result = run("bench", "CartPol-v1")
    assert (result.status, result.out) == (2, "")
    assert "CartPol" in result.err


def test_spaces_that_it_does_not_know_are_refused(run):
    result = run("bench", "Blackjack-v1")
    assert result.status == 2
    assert "bench knows Box spaces only" in result.err


def test_a_count_of_nothing_is_refused(run):
    assert run("bench", "--frames", 0).status == 2


# The loops --------------------------------------------------------------------------------------------


def test_a_single_loop_stores_what_the_environment_did():
    env = gymnasium.make("CartPole-v1")
    batch = copied(SingleLoop(env, env.reset(seed=1)[0], net(), categorical, steps=300))
    again = gymnasium.make("CartPole-v1")
    observation, _ = again.reset(seed=1)
    traj_id = 0
    for t, action in enumerate(batch["action"].tolist()):
        assert np.array_equal(batch["observation"][t], observation)
        observation, reward, terminated, truncated, _ = again.step(action)
        assert np.array_equal(batch["next_observation"][t], observation)
        found = tuple(batch[name][t].item() for name in ("reward", "terminated", "truncated", "done", "traj_id"))
        assert found == (reward, terminated, truncated, terminated or truncated, traj_id)
        if terminated or truncated:
            observation, _ = again.reset()
            traj_id += 1
    assert traj_id > 1


def test_a_vector_loop_stores_what_each_environment_did():
    env = make_vector("CartPole-v1", 3)
    loop = VectorLoop(env, env.reset(seed=1)[0], net(), categorical, steps=150)
    batches = [copied(loop), copied(loop)]
    batch = {name: torch.cat([part[name] for part in batches]) for name in batches[0]}
    ids = []
    for i in range(3):
        again = gymnasium.make("CartPole-v1")
        observation, _ = again.reset(seed=1 + i)
        for t, action in enumerate(batch["action"][:, i].tolist()):
            assert np.array_equal(batch["observation"][t, i], observation)
            observation, reward, terminated, truncated, _ = again.step(action)
            assert np.array_equal(batch["next_observation"][t, i], observation)
            found = tuple(batch[name][t, i].item() for name in ("reward", "terminated", "truncated", "done"))
            assert found == (reward, terminated, truncated, terminated or truncated)
            if terminated or truncated:
                observation, _ = again.reset()
        own, lengths = batch["traj_id"][:, i].unique_consecutive(return_counts=True)
        assert len(own) == 1 + batch["done"][:-1, i].sum()
        assert torch.equal(lengths.cumsum(0)[:-1] - 1, batch["done"][:-1, i].nonzero().flatten())
        ids += own.tolist()
    assert len(ids) == len(set(ids)) > 6


def test_categorical_log_probabilities_are_those_of_the_distribution():
    logits = torch.randn(500, 3)
    action, log_prob, _ = categorical(logits)
    torch.testing.assert_close(log_prob, distributions.Categorical(logits=logits).log_prob(action))
    assert set(action.tolist()) == {0, 1, 2}


def test_normal_parameters_and_log_probabilities_are_those_of_the_modules():
    output = torch.randn(500, 4)
    action, log_prob, (loc, scale) = gaussian(output)
    expected_loc, expected_scale = NormalParamExtractor()(output)
    torch.testing.assert_close((loc, scale), (expected_loc, expected_scale))
    torch.testing.assert_close(log_prob, distributions.Normal(loc, scale).log_prob(action))
    assert ((action - loc) / scale).std() == pytest.approx(1.0, abs=0.1)


# The timing -------------------------------------------------------------------------------------------


def test_rate_takes_at_least_the_frames_asked_for(monkeypatch):
    clock = iter([0.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr("rollwright.cli.measuring.time.perf_counter", lambda: next(clock))
    assert rate(lambda: 10, frames=25) == 10.0  # three batches of 10 in three seconds


def test_sides_take_turns_and_the_order_turns_round():
    order = []
    sides = {name: lambda name=name: order.append(name) or 1.0 for name in "ab"}
    alternate(sides, rounds=3)
    assert "".join(order) == "abbaab"


def test_ratios_are_taken_round_by_round():
    assert ratios([1.0, 20.0, 3.0], [2.0, 40.0, 6.0]) == (0.5, 0.5, 0.5)


def test_json_has_the_rates_of_both_sides(run):
    result = run("bench", "CartPole-v1", "--frames", 200, "--json")
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert set(found["sides"]) == {"by hand", "collector"}
    assert found["sides"]["by hand"]["times_by_hand"]["median"] == 1.0
    assert found["sides"]["collector"]["frames_per_second"]["median"] > 0
    assert "env" in found["sides"]["collector"]["paths"]
