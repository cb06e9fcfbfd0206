"""Gymnasium spaces to specs and back."""

from __future__ import annotations

from typing import Any

import gymnasium.spaces as spaces
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TensorSpec,
    Unbounded,
    from_gym_space,
    stack,
    to_gym_space,
    to_gym_value,
)

INF = np.inf

CONVERSIONS: list[tuple[spaces.Space[Any], TensorSpec, TensorSpec]] = [
    (spaces.Box(-1.0, 1.0, (2,)), Bounded(-1.0, 1.0, (2,)), Bounded(-1.0, 1.0, (2,))),
    (spaces.Box(0, 255, (2, 2), np.uint8), *[Bounded(0, 255, (2, 2), dtype=torch.uint8)] * 2),
    (spaces.Box(-INF, INF, (3,), np.float64), *[Unbounded((3,), dtype=torch.float64)] * 2),
    (spaces.Box(np.array([-INF, 0], np.float32), np.array([1, INF], np.float32)),
     *[Bounded(torch.tensor([-INF, 0.0]), torch.tensor([1.0, INF]))] * 2),
    (spaces.Box(0.0, 1.0, ()), *[Bounded(0.0, 1.0)] * 2),
    (spaces.Discrete(3), OneHot(3, dtype=torch.int64), Categorical(3)),
    (spaces.Discrete(3, start=2), OneHot(3, dtype=torch.int64, start=2), Categorical(3, start=2)),
    (spaces.Discrete(3, dtype=np.int32), OneHot(3, dtype=torch.int64), Categorical(3, dtype=torch.int32)),
    (spaces.MultiDiscrete([3, 2]), MultiOneHot([3, 2], dtype=torch.int64), MultiCategorical([3, 2])),
    (spaces.MultiDiscrete([2, 2]), MultiOneHot([2, 2], dtype=torch.int64), MultiCategorical([2, 2])),
    (spaces.MultiDiscrete([3, 2], start=[1, 5]), MultiOneHot([3, 2], dtype=torch.int64, start=[1, 5]),
     MultiCategorical([3, 2], start=[1, 5])),
    (spaces.MultiDiscrete([[3, 2], [1, 4]]), *[MultiCategorical([[3, 2], [1, 4]])] * 2),
    (spaces.MultiBinary(3), *[Binary(3)] * 2),
    (spaces.MultiBinary([2, 3]), *[Binary(shape=(2, 3))] * 2),
    (spaces.Dict(a=spaces.Discrete(2), b=spaces.Dict(c=spaces.MultiBinary(2))),
     Composite(a=OneHot(2, dtype=torch.int64), b={"c": Binary(2)}),
     Composite(a=Categorical(2), b={"c": Binary(2)})),
    (spaces.Tuple([spaces.Discrete(2), spaces.Box(0.0, 1.0, (1,))]),
     Composite({"0": OneHot(2, dtype=torch.int64), "1": Bounded(0.0, 1.0, (1,))}),
     Composite({"0": Categorical(2), "1": Bounded(0.0, 1.0, (1,))})),
]  # fmt: skip


@pytest.mark.parametrize(("space", "one_hot", "numbers"), CONVERSIONS, ids=lambda value: str(value)[:40])
def test_conversions(space: spaces.Space[Any], one_hot: TensorSpec, numbers: TensorSpec) -> None:
    assert from_gym_space(space) == one_hot
    assert from_gym_space(space, categorical_action_encoding=True) == numbers
    for spec in (one_hot, numbers):
        batched = from_gym_space(space, categorical_action_encoding=spec is numbers, batch_size=(5,))
        assert batched.shape[0] == 5
        assert batched[0] == spec


def same(left: Any, right: Any) -> bool:
    """Equality of the values of a space."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(np.array_equal(left, right))


leaf_spaces = st.one_of(
    st.builds(
        lambda shape, low, span, dtype: spaces.Box(low, low + span, tuple(shape), dtype),
        st.lists(st.integers(1, 3), max_size=2),
        st.integers(0, 3),
        st.integers(1, 5),
        st.sampled_from([np.float32, np.float64, np.uint8, np.int64]),
    ),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 5), st.integers(-3, 3)),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).flatmap(
        lambda nvec: st.lists(st.integers(-2, 2), min_size=len(nvec), max_size=len(nvec)).map(
            lambda start: spaces.MultiDiscrete(nvec, start=start)
        )
    ),
    st.builds(spaces.MultiBinary, st.integers(1, 3)),
)
any_space = st.recursive(
    leaf_spaces,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(spaces.Dict),
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(any_space, st.booleans(), st.integers(0, 99))
def test_samples_go_both_ways(space: spaces.Space[Any], categorical: bool, seed: int) -> None:
    space.seed(seed)
    spec = from_gym_space(space, categorical_action_encoding=categorical)
    sample = space.sample()
    encoded = spec.encode(sample)
    assert spec.is_in(encoded)
    assert same(to_gym_value(spec, space, encoded), sample)
    drawn = to_gym_value(spec, space, spec.rand())
    assert space.contains(drawn)


@settings(max_examples=60, deadline=None)
@given(any_space)
def test_spaces_come_back(space: spaces.Space[Any]) -> None:
    def plain(space: spaces.Space[Any]) -> spaces.Space[Any]:
        """The space with tuples written as dicts, as specs have them."""
        if isinstance(space, spaces.Tuple):
            return spaces.Dict({str(i): plain(sub) for i, sub in enumerate(space)})
        if isinstance(space, spaces.Dict):
            return spaces.Dict({key: plain(sub) for key, sub in space.items()})
        return space

    for categorical in (False, True):
        spec = from_gym_space(space, categorical_action_encoding=categorical)
        assert to_gym_space(spec) == plain(space)
        assert from_gym_space(to_gym_space(spec), categorical_action_encoding=categorical) == spec


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(3)),
        spaces.Graph(spaces.Box(0.0, 1.0, (2,)), None),
        spaces.OneOf([spaces.Discrete(2), spaces.Box(0.0, 1.0, (2,))]),
    ],
    ids=lambda space: type(space).__name__,
)
def test_other_spaces_become_non_tensors(space: spaces.Space[Any]) -> None:
    space.seed(7)
    before = space.sample()
    space.seed(7)
    spec = from_gym_space(space)
    assert isinstance(spec, NonTensor)
    assert space.contains(spec.example_data)
    assert repr(space.sample()) == repr(before)  # the space's own generator was left alone
    assert spec.to_numpy(spec.encode(before)) is before
    with pytest.raises(ValueError, match=r"spec: expected one of numbers or of choices.*got NonTensor"):
        to_gym_space(spec)


def test_wide_unsigned_numbers_become_signed() -> None:
    for dtype, wanted in ((np.uint16, torch.int32), (np.uint32, torch.int64), (np.uint64, torch.int64)):
        spec = from_gym_space(spaces.Box(0, np.iinfo(dtype).max, (2,), dtype))
        assert spec.dtype == wanted
        assert spec.low.tolist() == [0, 0]
        assert spec.high.tolist() == [min(np.iinfo(dtype).max, 2**63 - 1)] * 2
        assert spec.is_in(spec.encode(np.array([3, 4], dtype)))
        assert spec.is_in(spec.rand((9,)))


def test_the_device_reaches_every_entry() -> None:
    space = spaces.Dict(a=spaces.Discrete(2), b=spaces.Dict(c=spaces.MultiBinary(2)), t=spaces.Text(3))
    spec = from_gym_space(space, device="cpu", batch_size=3)
    assert spec.shape == (3,)
    assert {child.device for child in spec.values(True)} == {torch.device("cpu")}


def test_what_is_no_space_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"space: expected a gymnasium\.spaces\.Space, got builtins\.int"):
        from_gym_space(3)


@pytest.mark.parametrize(
    ("spec", "space"),
    [
        (Unbounded((2,)), spaces.Box(-INF, INF, (2,), np.float32)),
        (Unbounded((2,), dtype=torch.int8), spaces.Box(-128, 127, (2,), np.int8)),
        (Unbounded((2,), dtype=torch.bool), spaces.MultiBinary(2)),
        (Unbounded((2,), dtype=torch.bfloat16), spaces.Box(-INF, INF, (2,), np.float32)),
        (Bounded(0.0, 1.0, (2,), dtype=torch.bfloat16), spaces.Box(0.0, 1.0, (2,), np.float32)),
        (Categorical(3, (2,)), spaces.MultiDiscrete([3, 3])),
        (Categorical(3, (2,), start=1), spaces.MultiDiscrete([3, 3], start=[1, 1])),
        (OneHot(3, (2, 3)), spaces.MultiDiscrete([3, 3])),
        (OneHot(3, mask=[True, False, True]), spaces.Discrete(3)),
        (MultiOneHot([2, 3], (4, 5)), spaces.MultiDiscrete([[2, 3]] * 4)),
        (Categorical(2, (1,), dtype=torch.bool), spaces.MultiBinary(1)),
        (Categorical(2, dtype=torch.bool), spaces.Discrete(2)),
        (Composite(a={"b": Binary(2)}), spaces.Dict(a=spaces.Dict(b=spaces.MultiBinary(2)))),
    ],
    ids=str,
)
def test_spaces_of_specs(spec: TensorSpec, space: spaces.Space[Any]) -> None:
    assert to_gym_space(spec) == space


def test_stacks_of_unlike_specs_have_no_space() -> None:
    with pytest.raises(ValueError, match="got Stacked"):
        to_gym_space(stack([Categorical(2), Categorical(3)]))
    with pytest.raises(ValueError, match="got Stacked"):
        to_gym_space(stack([Composite(a=Categorical(2)), Composite(a=Categorical(3))]))
