"""Categorical, OneHot, their Multi forms and Binary: outcomes, masks, encodings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollwright.data import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot
from rollwright.errors import SpecError

SPECS = [
    Categorical(4, (2,)),
    OneHot(4, (2, 4)),
    MultiCategorical([3, 2], (2, 2)),
    MultiOneHot([3, 2], (2, 5)),
]
BY_NAME = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)


def test_defaults() -> None:
    assert Categorical(3).shape == ()
    assert Categorical(3).dtype == torch.int64
    assert OneHot(3).shape == (3,)
    assert OneHot(3).dtype == torch.bool
    assert MultiCategorical([3, 2]).shape == (2,)
    assert MultiCategorical(3).shape == (1,)
    assert MultiOneHot([3, 2]).shape == (5,)
    assert Binary(3).shape == (3,)
    assert Binary(3).dtype == torch.int8
    assert Categorical(3).space.n == OneHot(3).n == 3
    assert [space.n for space in MultiOneHot([3, 2]).space] == [3, 2]
    assert [space.n for space in MultiCategorical([3, 2], (4, 2)).space] == [3, 2]
    assert Binary(3).space.n == 2


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Categorical(0), "n: expected a whole number of outcomes, at least 1, got 0"),
        (lambda: OneHot(True), "n: expected a whole number of outcomes, at least 1, got True"),
        (lambda: OneHot(2.5), "n: expected a whole number"),
        (lambda: OneHot(3, (2, 4)), r"shape: expected one that ends in n=3, got \[2, 4\]"),
        (lambda: OneHot(3, ()), r"shape: expected one that ends in n=3, got \[\]"),
        (lambda: Categorical(3, dtype=torch.bool), "dtype: expected one that can count 3 outcomes"),
        (lambda: Categorical(257, dtype=torch.uint8), "can count 257 outcomes, got torch.uint8"),
        (lambda: Categorical(3).to(torch.bool), "can count 3 outcomes, got torch.bool"),
        (lambda: MultiCategorical([2, 200], dtype=torch.int8), "can count 200 outcomes"),
        (
            lambda: MultiCategorical([2, 0]),
            r"nvec: expected whole numbers of outcomes, at least 1, got \[2, 0\]",
        ),
        (lambda: MultiCategorical([2.0]), "nvec: expected whole numbers"),
        (lambda: MultiCategorical([2, 3], (4,)), r"nvec of shape \[2\] and start broadcast, got \[4\]"),
        (lambda: MultiOneHot([]), "nvec: expected numbers of outcomes"),
        (lambda: MultiOneHot([2, 3], (4,)), r"ends in sum\(nvec\)=5, got \[4\]"),
        (lambda: Binary(), "n, shape: expected one of them, got neither"),
        (lambda: Binary(3, (2,)), r"shape: expected one that ends in n=3, got \[2\]"),
    ],
)
def test_bad_arguments_are_errors(make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()  # type: ignore[operator]


def test_flags() -> None:
    done = Categorical(2, (4, 1), dtype=torch.bool)
    assert done.is_in(torch.zeros(4, 1, dtype=torch.bool))
    assert not done.is_in(torch.zeros(4, 1, dtype=torch.int64))
    assert done.rand((50,)).unique().tolist() == [False, True]
    assert done.zero().dtype == torch.bool
    assert done.encode([[1], [0], [True], [False]]).tolist() == [[True], [False], [True], [False]]
    assert not Categorical(1, dtype=torch.bool).is_in(torch.tensor(True))
    assert done.enumerate().shape == (2, 4, 1)


def test_samples_are_uniform() -> None:
    torch.manual_seed(0)
    for spec in (Categorical(4), OneHot(4), MultiCategorical([4]), MultiOneHot([4])):
        counts = spec.to_categorical(spec.rand((8000,))).flatten().bincount(minlength=4)
        assert bool(((counts > 1800) & (counts < 2200)).all())


def test_membership_of_numbers() -> None:
    spec = Categorical(3, (2,))
    assert spec.is_in(torch.tensor([[0, 2], [1, 1]]))
    for val in (torch.tensor([0, 3]), torch.tensor([-1, 0]), torch.tensor([0]), torch.tensor([0.0, 1.0])):
        assert not spec.is_in(val)
    assert not Categorical(3, dtype=torch.float32).is_in(torch.tensor(0.5))
    assert not Categorical(3, dtype=torch.float32).is_in(torch.tensor(torch.nan))
    assert not MultiCategorical([3], dtype=torch.float32).is_in(torch.tensor([0.5]))


def test_membership_of_one_hot_vectors() -> None:
    spec = OneHot(3, dtype=torch.int64)
    assert spec.is_in(torch.tensor([[0, 1, 0], [1, 0, 0]]))
    for val in ([0, 0, 0], [1, 1, 0], [2, -1, 0], [0, 0, 2], [1, 0]):
        assert not spec.is_in(torch.tensor(val))
    multi = MultiOneHot([1, 2], dtype=torch.int64)
    assert multi.is_in(torch.tensor([1, 0, 1]))
    assert not multi.is_in(torch.tensor([0, 1, 1]))


def test_project_gives_the_nearest_outcome() -> None:
    assert Categorical(3, (4,)).project(torch.tensor([-5.0, 0.6, 1e9, torch.nan])).tolist() == [0, 1, 2, 0]
    assert Categorical(3, (2,)).project(torch.tensor([-1, 7])).tolist() == [0, 2]
    assert Categorical(5, mask=[False, True, False, False, True]).project(torch.tensor(3)).item() == 4
    assert OneHot(3).project(torch.tensor([0.1, 0.7, 0.2])).tolist() == [False, True, False]
    assert OneHot(3, dtype=torch.int64).project(torch.tensor([0, 3, 9])).tolist() == [0, 0, 1]
    assert OneHot(3, mask=[True, False, True]).project(torch.tensor([0.1, 0.7, 0.2])).tolist() == [
        False,
        False,
        True,
    ]
    assert OneHot(2).project(torch.tensor([-torch.inf, torch.nan])).tolist() == [False, True]
    assert MultiCategorical([2, 3]).project(torch.tensor([4.0, -1.0])).tolist() == [1, 0]
    assert MultiCategorical([2, 3], mask=[True, False, False, True, False]).project(torch.tensor([1, 2])).tolist() == [
        0,
        1,
    ]
    assert MultiOneHot([2, 2]).project(torch.tensor([0.0, 1.0, 3.0, 2.0])).tolist() == [
        False,
        True,
        True,
        False,
    ]
    assert Binary(3).project(torch.tensor([0.4, 3.0, -1.0])).tolist() == [0, 1, 0]
    assert Binary(1, dtype=torch.bool).project(torch.tensor([1])).tolist() == [True]


@BY_NAME
def test_both_encodings_agree(spec: Categorical) -> None:
    one_hot, numbers = spec.to_one_hot_spec(), spec.to_categorical_spec()
    assert one_hot.dtype == torch.bool
    assert numbers.dtype == torch.int64
    sample = spec.rand((7,))
    assert one_hot.is_in(spec.to_one_hot(sample))
    assert numbers.is_in(spec.to_categorical(sample))
    as_numbers = spec.to_categorical(sample)
    assert torch.equal(one_hot.to_categorical(numbers.to_one_hot(as_numbers)), as_numbers)
    assert one_hot.to_categorical_spec() == numbers
    assert numbers.to_one_hot_spec() == one_hot
    assert one_hot.to_one_hot_spec() is one_hot
    assert numbers.to_categorical_spec() is numbers
    as_one_hot = spec.to_one_hot(sample)
    assert one_hot.to_one_hot(as_one_hot) is as_one_hot
    assert numbers.to_categorical(as_numbers) is as_numbers


@BY_NAME
def test_enumerate_lists_every_value_once(spec: Categorical) -> None:
    values = spec.enumerate()
    assert values.shape == (spec.cardinality(), *spec.shape)
    assert spec.is_in(values)
    assert len(values.unique(dim=0)) == spec.cardinality()


def test_enumerate_of_bits() -> None:
    assert Binary(2).enumerate().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert Binary(shape=(3, 2)).enumerate().shape == (4, 3, 2)
    assert Binary(shape=()).enumerate().tolist() == [0, 1]
    assert Binary(shape=()).cardinality() == 2
    assert Binary(shape=(3, 2)).cardinality() == 4


def test_enumerate_leaves_out_what_the_mask_forbids() -> None:
    mask = torch.tensor([True, False, True])
    assert Categorical(3, mask=mask).enumerate(use_mask=True).tolist() == [0, 2]
    assert Categorical(3, mask=mask).enumerate().tolist() == [0, 1, 2]
    assert OneHot(3, (2, 3), mask=mask).enumerate(use_mask=True).shape == (2, 2, 3)
    assert OneHot(3, mask=mask).enumerate(use_mask=True)[1].tolist() == [False, False, True]
    assert MultiCategorical([1, 2], mask=[True, False, True]).enumerate(use_mask=True).tolist() == [[0, 1]]
    assert MultiOneHot([1, 2], mask=mask).enumerate(True).tolist() == [[True, False, True]]
    with pytest.raises(ValueError, match="use_mask: expected a mask that is the same along the batch"):
        Categorical(2, (2,), mask=torch.eye(2).bool()).enumerate(use_mask=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda mask: Categorical(5, (2,), mask=mask),
        lambda mask: OneHot(5, (2, 5), mask=mask),
        lambda mask: MultiCategorical([3, 2], (2, 2), mask=mask),
        lambda mask: MultiOneHot([3, 2], (2, 5), mask=mask),
    ],
    ids=["Categorical", "OneHot", "MultiCategorical", "MultiOneHot"],
)
def test_masks(make: object) -> None:
    mask = torch.tensor([[False, True, False, False, True], [True, True, False, True, True]])
    spec, free = make(mask), make(None)  # type: ignore[operator]
    torch.manual_seed(0)
    sample = spec.rand((400,))
    one_hot = spec.to_one_hot(sample)
    assert torch.equal(one_hot.any(0), mask)  # every allowed outcome is drawn, and no other
    assert spec.is_in(sample)
    assert free.is_in(sample)
    other = free.rand((400,))
    assert not spec.is_in(other)
    assert spec.is_in(spec.project(other))
    fine = (free.to_one_hot(other) & ~mask).sum((1, 2)) == 0
    assert torch.equal(spec.project(other)[fine], other[fine])
    with pytest.raises(SpecError, match="mask allows"):
        spec.assert_is_in(other)
    assert spec != free
    assert "masked=True" in repr(spec)
    assert spec[1].is_in(sample[:, 1])
    assert not spec[1].is_in(other[:, 1])
    wide = spec.expand(3, *spec.shape)
    assert wide.rand((2,)).shape == (2, 3, *spec.shape)
    assert wide.reshape(-1, *spec.shape[1:])[3] == spec[1]
    assert spec.to_one_hot_spec().to_categorical_spec() == spec.to_categorical_spec()
    assert spec.to(torch.float32).is_in(sample.float())
    spec.update_mask(None)
    assert spec == free
    spec.update_mask(mask[0])
    assert spec.mask.shape == mask.shape
    assert not spec.is_in(sample)
    assert make(mask).rand((0,)).shape == (0, *spec.shape)  # type: ignore[operator]


def test_copies_keep_their_own_mask() -> None:
    spec = Categorical(2, mask=[True, False])
    other = spec.clone()
    other.update_mask([False, True])
    assert spec.rand().item() == 0
    assert other.rand().item() == 1


def test_bad_masks_are_errors() -> None:
    with pytest.raises(ValueError, match=r"mask: expected a shape that broadcasts to \[3\], got \[2\]"):
        Categorical(3, mask=[True, True])
    with pytest.raises(ValueError, match=r"mask: expected dtype bool, got torch.int64.*mask.astype\(bool\)"):
        OneHot(3, mask=[1, 0, 1])
    with pytest.raises(ValueError, match=r"expected an allowed outcome for each choice, got \[False, False\]"):
        OneHot(2, mask=[False, False])
    with pytest.raises(ValueError, match="expected an allowed outcome for each choice"):
        MultiOneHot([2, 1], mask=[True, True, False])
    with pytest.raises(ValueError, match="nvec: expected the same numbers along the batch"):
        MultiCategorical([[2, 3], [3, 2]], mask=[True] * 5)


def test_encode_takes_outcomes() -> None:
    assert OneHot(3, dtype=torch.int64).encode(np.int64(2)).tolist() == [0, 0, 1]
    assert OneHot(3, (2, 3)).encode(np.array([[0], [2]])).int().tolist() == [[1, 0, 0], [0, 0, 1]]
    assert OneHot(3).encode([1]).tolist() == [False, True, False]
    assert OneHot(3).encode(torch.tensor([False, True, False])).tolist() == [False, True, False]
    assert OneHot(3).encode(torch.tensor(1.0)).tolist() == [False, True, False]
    assert Categorical(3, (1,)).encode(2).tolist() == [2]
    assert MultiOneHot([2, 3], dtype=torch.int64).encode((1, 0)).tolist() == [0, 1, 1, 0, 0]
    assert MultiCategorical([2, 3]).encode([1, 2]).tolist() == [1, 2]
    assert Binary(2).encode([True, False]).tolist() == [1, 0]


def test_encode_refuses_outcomes_that_do_not_exist() -> None:
    for spec, val in (
        (Categorical(3), 3),
        (OneHot(3), -1),
        (MultiCategorical([2, 3]), [2, 0]),
        (MultiOneHot([2, 3]), [0, 3]),
    ):
        with pytest.raises(SpecError, match=r"value: expected outcomes that exist in .*, got .*Correct the value"):
            spec.encode(val)
    with pytest.raises(SpecError, match=r"value: expected whole numbers for OneHot.* got 0\.5\. Round"):
        OneHot(3).encode(0.5)
    with pytest.raises(SpecError, match=r"value: expected the shape \[2\], got \[2, 3\]"):
        OneHot(3, (2, 3)).encode(np.eye(3)[:2])


def test_start_shifts_what_the_environment_sees() -> None:
    for spec in (Categorical(3, start=-1), OneHot(3, start=-1)):
        assert [int(spec.to_categorical(spec.encode(val))) for val in (-1, 0, 1)] == [0, 1, 2]
        assert [int(spec.to_numpy(spec.encode(val))) for val in (-1, 0, 1)] == [-1, 0, 1]
        assert spec != type(spec)(3)
        assert "start=-1" in repr(spec)
        assert spec.rand().min() >= 0
        with pytest.raises(SpecError, match="outcomes that exist"):
            spec.encode(2)
    for spec in (MultiCategorical([2, 3], start=[5, 0]), MultiOneHot([2, 3], start=[5, 0])):
        assert spec.to_numpy(spec.encode([6, 2])).tolist() == [6, 2]
        assert spec.to_categorical(spec.encode([6, 2])).tolist() == [1, 2]
        assert "start=[5, 0]" in repr(spec)
        assert spec.expand(4, *spec.shape)[2] == spec
        assert spec.to_one_hot_spec().to_categorical_spec().start.tolist() == [5, 0]
    small = Categorical(3, dtype=torch.uint8, start=-1)
    assert small.to_numpy(small.encode(-1)) == -1


def test_rows_of_multi_categorical_may_differ() -> None:
    spec = MultiCategorical([[2, 3], [4, 1]])
    assert spec.shape == (2, 2)
    assert spec.is_in(torch.tensor([[1, 2], [3, 0]]))
    assert not spec.is_in(torch.tensor([[3, 0], [1, 0]]))
    assert spec[0] == MultiCategorical([2, 3])
    assert spec.is_in(spec.rand((200,)))
    assert spec.rand((200,)).amax(0).tolist() == [[1, 2], [3, 0]]
    assert "nvec=[[2, 3], [4, 1]]" in repr(spec)
    for call in (spec.enumerate, spec.cardinality, spec.to_one_hot_spec):
        with pytest.raises(ValueError, match="nvec: expected the same numbers along the batch"):
            call()


def test_repr_is_short() -> None:
    assert repr(Categorical(3)) == "Categorical(n=3, shape=[], dtype=int64, device=cpu)"
    assert repr(OneHot(3)) == "OneHot(n=3, shape=[3], dtype=bool, device=cpu)"
    assert repr(MultiCategorical([3, 2])) == "MultiCategorical(nvec=[3, 2], shape=[2], dtype=int64, device=cpu)"
    assert repr(MultiOneHot([3, 2])) == "MultiOneHot(nvec=[3, 2], shape=[5], dtype=bool, device=cpu)"
    assert repr(Binary(2)) == "Binary(shape=[2], dtype=int8, device=cpu)"


def test_a_sample_costs_few_tensor_operations() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.calls += 1
            return func(*args, **(kwargs or {}))

    for spec, most in (
        (Categorical(4), 1),
        (OneHot(4), 3),
        (OneHot(4, dtype=torch.int64), 4),
        (Binary(4), 1),
    ):
        with Count() as count:
            spec.rand()
        assert count.calls <= most


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        (Categorical(3), torch.tensor(3)),
        (Categorical(3, (2,)), torch.tensor([[0, -1]])),
        (Categorical(3), torch.tensor(1.5)),
        (Categorical(3), torch.tensor(torch.nan)),
        (MultiCategorical([2, 3]), torch.tensor([1, 5])),
        (MultiCategorical([2, 3]), torch.tensor([[0, 0], [2, 0]])),
    ],
)
def test_outcomes_that_do_not_exist_have_no_one_hot_form(spec, value):
    with pytest.raises(SpecError, match=r"value: expected (outcomes that exist|whole numbers)"):
        spec.to_one_hot(value)


@pytest.mark.parametrize("spec", [Categorical(3), OneHot(3), MultiCategorical([3, 2]), MultiOneHot([3, 2])])
def test_members_are_checked_where_that_is_asked_for(spec):
    member = spec.rand()
    for form in (spec.to_one_hot, spec.to_categorical):
        assert torch.equal(form(member, safe=True), form(member))
        with pytest.raises(SpecError, match=r"value: expected torch\.\w+ of shape"):
            form(member.to(torch.int16), safe=True)
    assert spec.clear_device_() is spec
