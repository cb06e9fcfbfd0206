"""Layers of images run as calls of their own, with the bits of the module."""

import copy

import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn

from rollwright.policies import array_policy

IMAGES = [
    nn.Conv2d(3, 4, 3),
    nn.Conv2d(3, 4, 3, bias=False, padding=1, padding_mode="reflect"),
    nn.BatchNorm2d(3),
    nn.BatchNorm2d(3).eval(),
    nn.GroupNorm(3, 3),
    nn.MaxPool2d(2),
    nn.AvgPool2d(2),
    nn.AdaptiveAvgPool2d(2),
    nn.AdaptiveMaxPool2d(1),
    nn.ZeroPad2d(1),
    nn.Unflatten(1, (1, 3)),
    nn.Upsample(scale_factor=2),
    nn.PReLU(3),
]


@pytest.mark.parametrize("layer", IMAGES, ids=str)
def test_a_layer_of_images_has_the_bits_of_its_module(layer):
    reference = copy.deepcopy(layer)
    policy = TensorDictModule(nn.Sequential(layer, nn.Flatten(1)), ["pixels"], ["action"])
    flat = array_policy(policy, exploration_type=InteractionType.RANDOM, batch_shape=(2,), available=["pixels"])
    flat.start(3)
    pictures = np.random.default_rng(0).random((3, 2, 3, 8, 8), np.float32)
    with torch.no_grad():
        for picture in pictures:
            (ours,) = flat(picture)
            assert np.array_equal(ours, reference(torch.from_numpy(picture)).flatten(1).numpy())
    assert not flat.varies
    padded = getattr(layer, "padding_mode", "zeros") != "zeros"  # by a call of its own
    assert flat.how == f"{2 + padded} calls on tensors"
    for name, value in layer.state_dict().items():  # statistics are counted in both
        assert torch.equal(value, reference.state_dict()[name])
    if list(layer.parameters()):
        layer(torch.from_numpy(pictures[0])).square().sum().backward()


def test_a_pool_with_indices_gives_both_outputs():
    policy = TensorDictModule(nn.MaxPool2d(2, return_indices=True), ["pixels"], ["action", "where"])
    flat = array_policy(policy, exploration_type=InteractionType.RANDOM, batch_shape=(2,), available=["pixels"])
    flat.start(1)
    for _ in range(2):
        picture = np.random.default_rng(0).random((2, 3, 8, 8), np.float32)
        ours = flat(picture)
        expected = nn.functional.max_pool2d(torch.from_numpy(picture), 2, return_indices=True)
        assert all(np.array_equal(one, other.numpy()) for one, other in zip(ours, expected, strict=True))
