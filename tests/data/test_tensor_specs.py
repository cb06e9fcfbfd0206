"""Specs and their domains at the paths that programs import."""

from __future__ import annotations

import torch

from rollwright.data import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
    tensor_specs,
)
from rollwright.envs import EnvBase, GymEnv
from rollwright.envs.common import EnvBase as SameEnvBase


def test_domains_have_the_names_of_the_field():
    assert isinstance(Bounded(-1.0, 1.0, (2,)).space, tensor_specs.ContinuousBox)
    for spec in (Categorical(3), OneHot(3)):
        assert isinstance(spec.space, tensor_specs.CategoricalBox)
        assert spec.space.n == 3
    for spec in (MultiCategorical([2, 3]), MultiOneHot([2, 3])):
        assert isinstance(spec.space, tensor_specs.BoxList)
        assert [box.n for box in spec.space] == [box.n for box in spec.space.boxes] == [2, 3]


def test_classes_are_the_same_at_both_paths():
    assert tensor_specs.Bounded is Bounded
    assert SameEnvBase is EnvBase


def test_specs_of_one_environment_of_a_batch():
    env = GymEnv("CartPole-v1", num_envs=3)
    assert env.input_spec_unbatched["full_action_spec", "action"].shape == torch.Size([2])
    assert env.output_spec_unbatched["full_observation_spec", "observation"].shape == torch.Size([4])
    assert env.output_spec["full_observation_spec", "observation"].shape == torch.Size([3, 4])


def test_every_domain_is_a_box():
    specs = (Bounded(0, 3, (2,)), Unbounded(2), Categorical(3), OneHot(3), MultiOneHot([2, 3]), Binary(4))
    for space in (*(spec.space for spec in specs), tensor_specs.BinaryBox(4)):
        assert isinstance(space, tensor_specs.Box)
        assert space.clone() == space == space.to("cpu")
    assert isinstance(Categorical(3).space, tensor_specs.DiscreteBox)
    assert NonTensor().space is None


def test_intervals_are_compared_by_their_bounds():
    space = Bounded(-1.0, 1.0, (2, 3)).space
    assert space == Bounded(-1.0, 1.0, (2, 3)).space
    assert space != Bounded(-1.0, 2.0, (2, 3)).space
    assert space != space.to(torch.float64)
    assert space.to(torch.float64) == Bounded(-1.0, 1.0, (2, 3), dtype=torch.float64).space
    copy = space.clone()
    copy.low.zero_()
    assert torch.equal(space.low, torch.full((2, 3), -1.0))
    assert space.unbind(0) == (Bounded(-1.0, 1.0, (3,)).space,) * 2
    assert len({space, copy}) == 2


def test_numbers_of_outcomes_that_differ_along_the_batch_are_nested():
    boxes = MultiCategorical([[1, 2], [3, 4]]).space
    assert [[box.n for box in choice] for choice in boxes] == [[1, 3], [2, 4]]
    assert [box.n for box in MultiCategorical([5, 2], shape=(3, 2)).space] == [5, 2]
    assert tensor_specs.BoxList.from_nvec(torch.tensor([5, 2])) == MultiOneHot([5, 2]).space
