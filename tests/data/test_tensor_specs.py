"""Specs and their domains at the paths that programs import."""

from __future__ import annotations

import pickle

import pytest
import torch

from rollwright.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Unbounded,
    stack,
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


def test_kinds_of_numbers_have_names():
    continuous, whole = Unbounded(2), Unbounded(2, dtype=torch.bool)
    assert isinstance(continuous, tensor_specs.UnboundedContinuous)
    assert isinstance(whole, tensor_specs.UnboundedDiscrete)
    assert not isinstance(whole, tensor_specs.UnboundedContinuous)
    assert not isinstance(continuous, tensor_specs.BoundedContinuous)
    assert isinstance(Bounded(0.0, 1.0), tensor_specs.BoundedContinuous)
    assert isinstance(Bounded(0, 1, dtype=torch.uint8), tensor_specs.BoundedDiscrete)
    assert not isinstance(Bounded(0.0, 1.0), tensor_specs.BoundedDiscrete)
    assert not isinstance("spec", tensor_specs.BoundedDiscrete)
    for made, plain in (
        (tensor_specs.UnboundedContinuous(3, dtype=torch.float64), Unbounded(3, dtype=torch.float64)),
        (tensor_specs.UnboundedContinuous(), Unbounded()),
        (tensor_specs.UnboundedDiscrete((2, 3)), Unbounded((2, 3), dtype=torch.int64)),
        (tensor_specs.BoundedContinuous(low=-1.0, high=1.0, shape=(2,)), Bounded(-1.0, 1.0, (2,))),
        (tensor_specs.BoundedDiscrete(0, 3, (2,)), Bounded(0, 3, (2,), dtype=torch.int64)),
    ):
        assert type(made) is type(plain)
        assert made == plain == pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tensor_specs.UnboundedContinuous(dtype=torch.int64), "continuous, got torch.int64. Use UnboundedDisc"),
        (lambda: tensor_specs.UnboundedDiscrete(dtype=torch.float32), "discrete, got torch.float32. Use UnboundedCont"),
        (lambda: tensor_specs.BoundedContinuous(0, 1, dtype=torch.int8), "got torch.int8. Use BoundedDiscrete"),
        (lambda: tensor_specs.BoundedDiscrete(0, 1, dtype=torch.float16), "got torch.float16. Use BoundedContinuous"),
    ],
)
def test_numbers_of_the_other_kind_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_specs_say_their_domain():
    discrete = (
        Categorical(2),
        OneHot(2),
        MultiOneHot([2]),
        MultiCategorical([2]),
        Binary(2),
        Unbounded(1, dtype=torch.int8),
    )
    assert {spec.domain for spec in discrete} == {"discrete"}
    assert Bounded(0, 1).domain == Unbounded().domain == stack([Unbounded(1), Unbounded(2)]).domain == "continuous"
    assert Bounded(0, 1).to(torch.int32).domain == "discrete"
    assert NonTensor().domain is None
    assert Composite(a=Unbounded()).domain == stack([Composite(a=Unbounded()), Composite()]).domain == "composite"
