"""Bounded and Unbounded: bounds, sampling, projection."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollwright.data import Bounded, Unbounded
from rollwright.errors import SpecError

INF = torch.inf


def test_bounds_are_broadcast() -> None:
    spec = Bounded(-1, torch.tensor([1.0, 2.0]))
    assert spec.shape == (2,)
    assert spec.low.tolist() == [-1.0, -1.0]
    assert spec.high.tolist() == [1.0, 2.0]
    assert spec.space.low.shape == spec.space.high.shape == (2,)
    assert Bounded(0, 1).shape == ()
    assert Bounded(0, 1, 3).shape == (3,)
    assert Bounded(low=[0, 0], high=[[1], [2], [3]]).shape == (3, 2)
    assert Bounded(np.zeros(2), np.ones(2), (4, 2)).shape == (4, 2)


def test_positional_order_is_low_high_shape_device_dtype() -> None:
    spec = Bounded(0, 3, (2,), "cpu", torch.int32)
    assert spec.dtype == torch.int32
    assert spec.device == torch.device("cpu")


def test_default_dtype_is_that_of_tensors_else_torchs() -> None:
    assert Bounded(0, 3).dtype == torch.float32
    assert Bounded(np.zeros(2), 3).dtype == torch.float32
    assert Bounded(torch.tensor(0), 3).dtype == torch.int64
    assert Bounded(0, torch.tensor(3.0, dtype=torch.float64)).dtype == torch.float64


def test_equal_bounds_take_no_memory_for_each_element() -> None:
    for spec in (
        Bounded(0, 255, (84, 84, 3), dtype=torch.uint8),
        Bounded(torch.zeros(84, 84, 3), torch.ones(84, 84, 3)),
        Bounded(0.0, 1.0, (84, 84)).expand(64, 84, 84)[0].reshape(-1, 1).unsqueeze(0),
    ):
        assert spec.low.untyped_storage().nbytes() <= 4
        assert spec.is_in(spec.rand())


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((1.0, 0.0, (2,)), "expected low <= high everywhere and no NaN, got low=1.0, high=0.0"),
        ((float("nan"), 1.0), "no NaN"),
        ((torch.zeros(2), torch.zeros(3)), r"broadcast to each other, got shapes \[2\] and \[3\]"),
        ((torch.zeros(2), 1, (3,)), r"broadcast to shape \[3\], got shapes \[2\] and \[\]"),
        ((0, 300, (1,), None, torch.uint8), "high: expected bounds that torch.uint8 can hold, got 300"),
        ((0, INF, (1,), None, torch.int64), "high: expected bounds that torch.int64 can hold, got inf"),
        ((torch.tensor(-1), 3, (1,), None, torch.uint8), "low: expected bounds that torch.uint8 can hold"),
        (("a", 3), "low: expected bounds that torch.float32 can hold, got 'a'"),
        ((0, 1, (1,), None, torch.bool), "dtype: expected a floating-point or integer dtype, got torch.bool"),
    ],
)
def test_bad_bounds_are_errors(args: tuple[object, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Bounded(*args)


def test_membership() -> None:
    spec = Bounded(-1.0, 1.0, (2,))
    assert spec.is_in(torch.tensor([-1.0, 1.0]))
    assert spec.is_in(torch.zeros(7, 3, 2))
    for val in (
        torch.tensor([0.0, 1.5]),
        torch.tensor([0.0, torch.nan]),
        torch.tensor([0.0, INF]),
        torch.zeros(3),
        torch.zeros(2, 1),
        torch.zeros(()),
        torch.zeros(2, dtype=torch.float64),
        np.zeros(2, np.float32),
    ):
        assert not spec.is_in(val)
    assert Bounded(-INF, INF, (1,)).is_in(torch.tensor([INF]))
    assert not Bounded(-INF, INF, (1,)).is_in(torch.tensor([torch.nan]))
    assert Unbounded((1,)).is_in(torch.tensor([torch.nan]))


def test_uniform_samples_fill_the_interval() -> None:
    torch.manual_seed(0)
    sample = Bounded(torch.tensor([-2.0, 10.0]), torch.tensor([2.0, 11.0])).rand((20_000,))
    assert torch.allclose(sample.mean(0), torch.tensor([0.0, 10.5]), atol=0.05)
    assert torch.allclose(sample.std(0), torch.tensor([4.0, 1.0]) / 12**0.5, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_integer_samples_reach_both_ends(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for spec in (
        Bounded(3, 5, (1,), dtype=dtype),
        Bounded(torch.tensor([3, 3]), torch.tensor([5, 5]) + torch.tensor([0, 0]), dtype=dtype),
        Bounded(torch.tensor([3, 4]), torch.tensor([5, 6]), dtype=dtype),
    ):
        sample = spec.rand((500,))
        assert sample.unique(dim=0).amin(0).tolist() == spec.low.tolist()
        assert sample.unique(dim=0).amax(0).tolist() == spec.high.tolist()
        counts = torch.bincount(sample[:, 0].long())[3:6]
        assert counts.sum() == 500
        assert counts.min() > 100


def test_integer_samples_use_the_whole_range_of_the_dtype() -> None:
    torch.manual_seed(0)
    info = torch.iinfo(torch.int64)
    same = Bounded(info.min, info.max, (1,), dtype=torch.int64).rand((1000,))
    other = Bounded(torch.tensor([info.min, 0]), torch.tensor([info.max, info.max])).rand((1000,))
    for sample in (same, other[:, 0]):
        assert 350 < int((sample < 0).sum()) < 650
        assert sample.abs().double().mean() > 2.0**61
    assert bool((other[:, 1] >= 0).all())
    far = 2**62 + 1
    assert sorted(Bounded(torch.tensor([far, 0]), torch.tensor([far + 2, 0])).rand((99,))[:, 0].unique().tolist()) == [
        far,
        far + 1,
        far + 2,
    ]
    assert Bounded(0, 255, (4000,), dtype=torch.uint8).rand().unique().numel() == 256


def test_samples_with_infinite_bounds() -> None:
    torch.manual_seed(0)
    spec = Bounded(torch.tensor([-INF, 2.0, -INF, 0.0]), torch.tensor([INF, INF, -3.0, 1.0]))
    sample = spec.rand((20_000,))
    assert spec.is_in(sample)
    assert bool(sample.isfinite().all())
    assert torch.allclose(sample.mean(0), torch.tensor([0.0, 3.0, -4.0, 0.5]), atol=0.05)
    assert torch.allclose(sample.std(0), torch.tensor([1.0, 1.0, 1.0, 12**-0.5]), atol=0.05)


def test_samples_of_an_interval_whose_length_overflows() -> None:
    torch.manual_seed(0)
    most = torch.finfo(torch.float32).max
    sample = Bounded(-most, most, (1000,)).rand()
    assert bool(sample.isfinite().all())
    assert 350 < int((sample < 0).sum()) < 650


def test_project_gives_the_nearest_member() -> None:
    spec = Bounded(-1.0, 1.0, (3,))
    assert spec.project(torch.tensor([INF, -3.0, torch.nan])).tolist() == [1.0, -1.0, 0.0]
    assert spec.project(torch.tensor([2, 0, 1])).tolist() == [1.0, 0.0, 1.0]
    assert spec.project(torch.tensor([2.0, 0, 0.25], dtype=torch.float64)).tolist() == [1.0, 0.0, 0.25]
    whole = Bounded(0, 9, (3,), dtype=torch.int64)
    assert whole.project(torch.tensor([1e30, -INF, 2.6])).tolist() == [9, 0, 3]
    assert whole.project(torch.tensor([torch.nan, 7.4, 12.0])).tolist() == [0, 7, 9]
    assert Bounded(0, 255, (2,), dtype=torch.uint8).project(torch.tensor([256, -1])).tolist() == [255, 0]


def test_project_leaves_its_input_alone() -> None:
    val = torch.tensor([5.0])
    assert Bounded(0, 1, (1,)).project(val).tolist() == [1.0]
    assert val.tolist() == [5.0]


def test_conversion_of_bounds() -> None:
    spec = Bounded(0, 5, (2,), dtype=torch.int64)
    assert spec.to(torch.float32) == Bounded(0, 5, (2,))
    assert spec.to(torch.float32).to(torch.int64) == spec
    with pytest.raises(ValueError, match=r"expected bounds that torch.int64 can hold"):
        Bounded(0, INF, (2,)).to(torch.int64)


def test_equality_looks_at_everything() -> None:
    spec = Bounded(0, 1, (2,))
    assert spec == Bounded(torch.zeros(2), torch.ones(2))
    for other in (
        Bounded(0, 2, (2,)),
        Bounded(-1, 1, (2,)),
        Bounded(0, 1, (3,)),
        Bounded(0, 1, (2,), dtype=torch.float64),
        Unbounded((2,)),
    ):
        assert spec != other
    assert Unbounded((2,)) != Unbounded((2,), dtype=torch.float64)


def test_repr_is_short() -> None:
    assert repr(Bounded(-1, 1, (2,))) == "Bounded(low=-1.0, high=1.0, shape=[2], dtype=float32, device=cpu)"
    assert "low=[0.0, 1.0], high=2.0" in repr(Bounded(torch.tensor([0.0, 1.0]), 2.0))
    assert "low=0 to 9, high=9" in repr(Bounded(torch.arange(10), 9))
    assert repr(Unbounded()) == "Unbounded(shape=[1], dtype=float32, device=cpu)"
    assert "shape=[0]" in repr(Bounded(torch.zeros(0), torch.zeros(0)))


def test_empty_specs() -> None:
    spec = Bounded(0, 1, (0, 2))
    assert spec.rand((3,)).shape == (3, 0, 2)
    assert spec.is_in(spec.rand())
    assert Bounded(0, 4, (0,), dtype=torch.int8).rand().shape == (0,)


def test_unbounded_spaces_and_samples() -> None:
    assert Unbounded((2,), dtype=torch.int8).space.low.tolist() == [-128, -128]
    assert Unbounded((1,), dtype=torch.bool).space.high.tolist() == [True]
    assert Unbounded((1,)).space.high.item() == torch.finfo(torch.float32).max
    torch.manual_seed(0)
    assert Unbounded((2000,), dtype=torch.int8).rand().unique().numel() > 250
    assert Unbounded((50,), dtype=torch.bool).rand().unique().numel() == 2
    assert abs(float(Unbounded((2000,)).rand().std()) - 1) < 0.1
    assert Unbounded((2,), dtype=torch.complex64).rand().dtype == torch.complex64
    assert Unbounded((2,), dtype=torch.int64).project(torch.tensor([1.6, 2.2])).tolist() == [2, 2]


def test_to_numpy_can_check() -> None:
    spec = Bounded(0, 1, (1,))
    assert spec.to_numpy(torch.tensor([5.0])).tolist() == [5.0]
    with pytest.raises(SpecError, match=r"Map it in with spec.project"):
        spec.to_numpy(torch.tensor([5.0]), safe=True)
    assert spec.to_numpy(torch.tensor([0.5], requires_grad=True)).tolist() == [0.5]


def test_no_dtype_is_torchs_default():
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert Unbounded((2,)).dtype == Unbounded((2,), dtype=None).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert Unbounded(dtype=None).dtype == before


def test_names_of_the_field():
    spec = Bounded(0.0, 1.0)
    spec.memoize_encode()
    assert spec.encode(0.5) == 0.5
    spec.erase_memoize_cache()
    with pytest.raises(AssertionError, match="values in"):
        spec.assert_is_in(torch.tensor(2.0))
