"""Specs and their domains at the paths that programs import."""

from __future__ import annotations

import torch

from rollwright.data import Bounded, Categorical, MultiCategorical, MultiOneHot, OneHot, tensor_specs
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
