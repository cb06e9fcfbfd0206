"""A policy on a CUDA device: what is packed comes out again, and the bits are those of the plain path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType as Type
from tensordict.nn import set_interaction_type

from rollwright.policies import array_policy, compile_policy
from rollwright.policies.staging import PackedArrays, Staged


def test_packing_keeps_values_shapes_and_dtypes():
    values = [
        torch.tensor(True),
        torch.arange(6).reshape(2, 3),
        torch.randn(3, 2).t(),
        torch.zeros(0, 4),
        torch.randn((), dtype=torch.float64),
    ]
    packing = PackedArrays([value.shape for value in values], [value.dtype for value in values], pinned=False)
    assert packing.fits(values)
    packing.host.copy_(packing.pack(values))
    for array, view, value in zip(packing.arrays, packing.views(packing.host), values, strict=True):
        assert array.dtype == value.numpy().dtype
        assert np.array_equal(array, value.numpy())
        assert torch.equal(view, value)


def test_a_packing_knows_what_does_not_fit():
    packing = PackedArrays([torch.Size([2])], [torch.float32], pinned=False)
    assert not packing.fits([torch.zeros(3)])
    assert not packing.fits([torch.zeros(2, dtype=torch.float64)])
    assert not packing.fits([])


@pytest.mark.cuda
@pytest.mark.parametrize("policy_name", ["categorical", "normal", "one-hot", "recurrent", "independent normal"])
def test_staged_equals_plain_to_the_bit(lab, policy_name):
    policy = lab.policies[policy_name]().cuda()
    flat = array_policy(policy, exploration_type=Type.RANDOM, batch_shape=(8,), available=lab.available)
    assert isinstance(flat, Staged)
    if policy_name == "recurrent":
        policy.module.kept.zero_()
    torch.manual_seed(3)
    expected = []
    with torch.no_grad(), set_interaction_type(Type.RANDOM):
        for i in range(20):
            td = TensorDict(dict(lab.root((8,), i)), batch_size=(8,), device="cuda")
            expected.append(policy(td).cpu())
    if policy_name == "recurrent":
        policy.module.kept.zero_()
    torch.manual_seed(3)
    for ours, theirs in zip(lab.flat_steps(flat, (8,), Type.RANDOM, 20), expected, strict=True):
        for key, value in ours.items():
            assert np.array_equal(value, theirs[key].numpy()), key


@pytest.mark.cuda
def test_staged_outputs_are_never_overwritten(lab):
    flat = array_policy(
        lab.policies["identity"](), exploration_type=Type.RANDOM, batch_shape=(3,), available=lab.available
    )
    staged = Staged(flat, torch.device("cuda", 0))
    staged.start(2)
    first = staged(np.ones((3, 4), np.float32))[0]
    staged(np.zeros((3, 4), np.float32))
    assert (first == 1).all()


@pytest.mark.cuda
def test_a_compiled_policy_may_be_on_the_device(lab):
    policy = lab.logits_policy().cuda()
    flat = array_policy(policy, exploration_type=Type.DETERMINISTIC, batch_shape=(8,), available=lab.available)
    compiled = compile_policy(flat, arguments={"backend": "eager"}, example=lab.root((8,)))
    pairs = zip(
        lab.flat_steps(compiled, (8,), Type.DETERMINISTIC), lab.flat_steps(flat, (8,), Type.DETERMINISTIC), strict=True
    )
    for ours, theirs in pairs:
        np.testing.assert_allclose(ours["logits"], theirs["logits"], rtol=1e-4, atol=1e-5)
        assert np.array_equal(ours["action"], theirs["action"])
