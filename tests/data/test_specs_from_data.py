"""Specs made from an example of the data describe it."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass

from rollwright.data import Composite, NonTensor, StackedComposite, Unbounded
from rollwright.envs import GymEnv, SerialEnv, make_composite_from_td
from rollwright.envs.utils import make_composite_from_td as same_function


@tensorclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


def test_data_lie_in_their_spec():
    assert same_function is make_composite_from_td
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    for data in (GymEnv("CartPole-v1").rollout(3), env.rollout(3), env.reset()):
        spec = make_composite_from_td(data)
        assert spec.is_in(data)
        assert spec.shape == data.batch_size
        assert (spec.zero() == data.clone().zero_()).all()


def test_numbers_without_a_dimension():
    data = TensorDict({"x": torch.tensor(3), "n": {"y": torch.zeros(2, 4)}}, device="cpu")
    assert make_composite_from_td(data)["x"] == Unbounded((1,), dtype=torch.int64)
    spec = make_composite_from_td(data, unsqueeze_null_shapes=False)
    assert spec["x"] == Unbounded((), dtype=torch.int64)
    assert spec.is_in(data)
    assert spec.device == torch.device("cpu")


def test_last_sizes_may_vary():
    data = TensorDict({"x": torch.zeros(2, 3), "flag": torch.zeros(2)}, [2])
    spec = make_composite_from_td(data, dynamic_shape=True)
    assert (spec["x"].shape, spec["flag"].shape) == ((2, -1), (2,))
    assert spec.is_in(TensorDict({"x": torch.zeros(2, 7), "flag": torch.zeros(2)}, [2]))


def test_objects_and_tensorclasses():
    words = NonTensorStack(NonTensorData("a"), NonTensorData("b"))
    pair = Pair(torch.zeros(2), torch.ones(2, 1), batch_size=[2])
    data = TensorDict({"one": NonTensorData("hi", batch_size=[2]), "words": words, "pair": pair}, [2])
    spec = make_composite_from_td(data)
    assert spec.is_in(data)
    assert spec["one"] == NonTensor((2,), example_data="hi")
    assert spec["words"] == NonTensor((2,), example_data="a", batched=True)
    assert spec["pair"].shape == (2,)
    assert spec.rand()["words"].tolist() == ["a", "a"]


def test_a_lazy_stack_gives_a_stack():
    data = lazy_stack([TensorDict({"x": torch.zeros(2)}), TensorDict({"x": torch.zeros(3), "y": torch.zeros(1)})])
    spec = make_composite_from_td(data)
    assert isinstance(spec, StackedComposite)
    assert spec.is_in(data)
    alike = make_composite_from_td(lazy_stack([TensorDict({"x": torch.zeros(2)})] * 3))
    assert alike == Composite(x=Unbounded((3, 2)), shape=(3,))


@pytest.mark.parametrize("data", [torch.zeros(3), {"x": torch.zeros(3)}, NonTensorData("x")])
def test_other_data_are_refused(data):
    with pytest.raises(TypeError, match="data: expected a TensorDict, got"):
        make_composite_from_td(data)
