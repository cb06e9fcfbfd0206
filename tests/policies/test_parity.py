"""A policy on arrays writes the bits of the plain path and uses the random numbers that it uses."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType as Type

from rollwright.policies import array_policy

MIXTURES = [
    *((Type.RANDOM, batch) for batch in [(), (3,), (64,), (2, 3)]),
    *((Type.DETERMINISTIC, batch) for batch in [(), (2, 3)]),
    (Type.MODE, (3,)),
    (Type.MEAN, ()),
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
