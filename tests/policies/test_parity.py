"""A policy on arrays writes the bits of the plain path and uses the random numbers that it uses."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType as Type
from torch import distributions as D

from rollwright.modules import TanhNormal
from rollwright.policies import array_policy, distributions
from rollwright.policies.draws.built import Built

MIXTURES = [  # torch draws 16 numbers and more in another way than fewer
    (Type.RANDOM, ()),
    (Type.RANDOM, (4, 16)),
    (Type.DETERMINISTIC, (2, 3)),
    (Type.MODE, (3,)),
    (Type.MEAN, ()),
    pytest.param(Type.RANDOM, (3,), marks=pytest.mark.slow),
    pytest.param(Type.RANDOM, (64,), marks=pytest.mark.slow),
    pytest.param(Type.DETERMINISTIC, (), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "batch"), MIXTURES, ids=str)
@pytest.mark.filterwarnings("ignore:deterministic_sample wasn't found")
def test_flat_equals_plain_to_the_bit(lab, policy_name, batch, kind):
    if "several categoricals" in policy_name and kind is Type.MEAN:
        pytest.skip("has no mean")
    policy = lab.policies[policy_name]()
    flat = array_policy(copy.deepcopy(policy), exploration_type=kind, batch_shape=batch, available=lab.available)
    torch.manual_seed(5)
    try:
        expected = lab.plain_steps(policy, batch, kind)
    except (RuntimeError, ValueError):  # such as the log-prob of a categorical distribution's mean
        with pytest.raises((RuntimeError, ValueError)):
            lab.flat_steps(flat, batch, kind)
        return
    state = torch.get_rng_state()
    torch.manual_seed(5)
    written = lab.flat_steps(flat, batch, kind)
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(written, expected, strict=True):
        assert set(ours) == set(theirs)
        for key, value in ours.items():
            other = theirs[key].numpy()
            assert (value.dtype, value.shape) == (other.dtype, other.shape)
            np.testing.assert_array_equal(value, other, err_msg=str(key))


BOUNDS = {"low": -2.0, "high": torch.tensor([1.0, 2.0, 3.0])}


@pytest.mark.parametrize("batch", [(), (64,), (2, 3)], ids=str)
@pytest.mark.parametrize("options", [{}, BOUNDS, {"event_dims": 0, "safe_tanh": False}], ids=["", "bounds", "numbers"])
def test_a_tanh_normal_that_is_sampled_first_is_scored_by_the_inverse(lab, monkeypatch, batch, options):
    """What a module of tensordict 0.14 writes: it does not ask for a sample and its log-prob at once."""
    monkeypatch.setattr(distributions, "scores_its_draw", lambda module: False)
    policy = lab.gaussian_policy(kind=TanhNormal, distribution_kwargs=options)
    policy.module[0].module[0][-1].bias.data[:] = torch.tensor([0.0, -1.0, 7.0, 0.0, 0.0, 2.0])  # the last saturates
    flat = array_policy(policy, exploration_type=Type.RANDOM, batch_shape=batch, available=lab.available)
    torch.manual_seed(5)
    written = lab.flat_steps(flat, batch, Type.RANDOM)
    torch.manual_seed(5)
    for i, ours in enumerate(written):
        dist = TanhNormal(torch.from_numpy(ours["loc"]), torch.from_numpy(ours["scale"]), **options)
        value = dist.rsample()
        np.testing.assert_array_equal(ours["action"], value.numpy(), err_msg=str(i))
        np.testing.assert_array_equal(ours["action_log_prob"], dist.log_prob(value).numpy(), err_msg=str(i))


@pytest.mark.parametrize("name", ["normal", "normal without log-prob", "independent normal"])
def test_normal_distributions_that_test_nothing_are_known(lab, monkeypatch, name):
    """TorchRL turns off the tests of all distributions when it is imported."""
    monkeypatch.setattr(D.Distribution, "_validate_args", False)
    policy = lab.policies[name]()
    policy.module[0].module[0][-1].bias.data[0] = torch.nan
    flat = array_policy(copy.deepcopy(policy), exploration_type=Type.RANDOM, batch_shape=(3,), available=lab.available)
    assert not any(isinstance(node, Built) for node in flat.nodes)
    torch.manual_seed(5)
    expected = lab.plain_steps(policy, (3,), Type.RANDOM)
    torch.manual_seed(5)
    for ours, theirs in zip(lab.flat_steps(flat, (3,), Type.RANDOM), expected, strict=True):
        for key, value in ours.items():
            np.testing.assert_array_equal(value, theirs[key].numpy(), err_msg=str(key))


def untested(loc: torch.Tensor, scale: torch.Tensor) -> D.Distribution:
    return D.Independent(D.Normal(loc, scale, validate_args=False), 1)


def test_a_function_that_turns_tests_off_makes_its_distribution_at_each_step(lab):
    policy = lab.gaussian_policy(kind=untested)
    flat = array_policy(policy, exploration_type=Type.RANDOM, batch_shape=(), available=lab.available)
    assert any(isinstance(node, Built) for node in flat.nodes)
