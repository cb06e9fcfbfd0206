"""What holds for every leaf spec: members, shapes, copies, conversions."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.data import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    TensorSpec,
    Unbounded,
    stack,
)
from rollwright.errors import SpecError

sizes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
few = settings(max_examples=60, deadline=None)


@st.composite
def bounded(draw: st.DrawFn) -> Bounded:
    shape = draw(sizes)
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
        ends = st.one_of(st.integers(-8, 8).map(float), st.just(-torch.inf), st.just(torch.inf))
        low = draw(ends.filter(lambda end: end < torch.inf))
        high = draw(ends.filter(lambda end: end >= low and end > -torch.inf))
        return Bounded(low, high, shape, dtype=dtype)
    dtype = draw(st.sampled_from([torch.int8, torch.uint8, torch.int32, torch.int64]))
    info = torch.iinfo(dtype)
    count = int(np.prod(shape))
    low = torch.tensor(draw(st.lists(st.integers(info.min, info.max), min_size=count, max_size=count)))
    high = torch.tensor(draw(st.lists(st.integers(info.min, info.max), min_size=count, max_size=count)))
    low, high = torch.minimum(low, high), torch.maximum(low, high)
    return Bounded(low.reshape(shape), high.reshape(shape), shape, dtype=dtype)


def with_mask(draw: st.DrawFn, spec: TensorSpec, shape: tuple[int, ...], widths: list[int]) -> TensorSpec:
    if draw(st.booleans()):
        mask = torch.rand((*shape, sum(widths))) < 0.5
        ends = np.cumsum([0, *widths])[:-1].tolist()
        mask[..., ends] = True  # an allowed outcome for each choice
        spec.update_mask(mask)
    return spec


@st.composite
def choices(draw: st.DrawFn) -> TensorSpec:
    batch = draw(sizes)
    n = draw(st.integers(1, 5))
    nvec = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    start = draw(st.integers(-2, 2))
    dtype = draw(st.sampled_from([torch.int64, torch.uint8, torch.float32]))
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return with_mask(draw, Categorical(n, batch, dtype=dtype, start=start), batch, [n])
    if kind == 1:
        one_hot_dtype = draw(st.sampled_from([torch.bool, torch.int64, torch.float32]))
        return with_mask(draw, OneHot(n, (*batch, n), dtype=one_hot_dtype, start=start), batch, [n])
    if kind == 2:
        spec = MultiCategorical(nvec, (*batch, len(nvec)), dtype=dtype, start=start)
        return with_mask(draw, spec, batch, nvec)
    if kind == 3:
        return with_mask(draw, MultiOneHot(nvec, (*batch, sum(nvec)), start=start), batch, nvec)
    return Binary(shape=batch, dtype=draw(st.sampled_from([torch.int8, torch.bool])))


unbounded = st.builds(
    lambda shape, dtype: Unbounded(shape, dtype=dtype),
    sizes,
    st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.bool]),
)
dense = st.one_of(bounded(), choices(), unbounded)
leaves = st.one_of(dense, st.builds(lambda shape: NonTensor(shape, example_data="x"), sizes))


@few
@given(dense, sizes)
def test_samples_are_members_of_the_announced_shape(spec: TensorSpec, lead: tuple[int, ...]) -> None:
    for sample in (spec.rand(lead), spec.zero(lead), spec.one(lead)):
        assert sample.shape == (*lead, *spec.shape)
        assert sample.dtype == spec.dtype
        assert sample.device == spec.device
        spec.type_check(sample)
    sample = spec.rand(lead)
    assert spec.is_in(sample)
    assert spec.contains(sample)
    spec.assert_is_in(sample)
    assert spec.project(sample) is sample
    assert spec.numel() == spec.rand().numel()


@few
@given(st.one_of(bounded(), choices()), sizes, st.integers(-300, 300), st.booleans())
def test_projections_are_members(spec: TensorSpec, lead: tuple[int, ...], scale: int, real: bool) -> None:
    val = torch.randn((*lead, *spec.shape)) * scale
    assert spec.is_in(spec.project(val if real else val.long()))


@few
@given(dense)
def test_encode_inverts_to_numpy(spec: TensorSpec) -> None:
    sample = spec.rand()
    array = spec.to_numpy(sample, safe=True)
    assert isinstance(array, (np.ndarray, np.generic))
    again = spec.encode(array)
    assert again.dtype == spec.dtype
    assert torch.equal(again, sample)
    assert torch.equal(spec.encode(sample), sample)


@few
@given(leaves)
def test_copies_are_equal(spec: TensorSpec) -> None:
    for other in (spec.clone(), copy.copy(spec), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert other == spec
        assert other is not spec
        assert repr(other) == repr(spec)
    assert spec.to(None) is spec
    assert spec.to(spec.dtype) is spec
    assert spec.cpu().device == torch.device("cpu")
    assert spec.cpu().to("cpu") == spec.cpu()
    assert spec != "a spec"
    assert "\n" not in repr(spec)
    assert {spec: 1}[spec.clone()] == 1


@few
@given(leaves, sizes)
def test_expand_and_index_are_inverse(spec: TensorSpec, lead: tuple[int, ...]) -> None:
    wide = spec.expand(*lead, *spec.shape) if lead or spec.shape else spec
    assert wide.shape == (*lead, *spec.shape)
    assert wide == spec.expand((*lead, *spec.shape))
    assert wide[(0,) * len(lead)] == spec
    if isinstance(spec, NonTensor):
        return
    assert wide.is_in(wide.rand())
    assert wide.is_in(spec.rand(lead))


INDICES = [
    0,
    -1,
    slice(1),
    slice(None, None, 2),
    (slice(None), 0),
    (0, None),
    (..., 0),
    (..., slice(0, 1)),
    [0, 0],
    range(1),
    torch.tensor([1, 0]),
    np.array([0]),
    (torch.tensor([0, 1]), torch.tensor([0, 1])),
    torch.tensor([[True, False], [True, True]]),
    None,
    ...,
]


@pytest.mark.parametrize("idx", INDICES, ids=str)
@pytest.mark.parametrize("make", [0, 1, 2, 3, 4, 5, 6], ids=lambda i: ["B", "U", "C", "O", "MC", "MO", "Bi"][i])
def test_an_indexed_spec_describes_the_indexed_sample(make: int, idx: object) -> None:
    batch = (2, 2)
    mask = torch.rand(2, 2, 3) < 0.5
    mask[..., [0, 2]] = True
    spec = [
        Bounded(torch.arange(4.0).reshape(batch), torch.arange(4.0).reshape(batch) + 0.5),
        Unbounded(batch),
        Categorical(3, batch, mask=mask),
        OneHot(3, (*batch, 3), mask=mask),
        MultiCategorical([2, 1], (*batch, 2), mask=mask),
        MultiOneHot([2, 1], (*batch, 3), mask=mask),
        Binary(shape=batch),
    ][make]
    sample = spec.rand()
    # The dimension of one value is kept out of the index.
    event = sample.ndim - 2
    full = idx if isinstance(idx, tuple) else (list(idx) if isinstance(idx, range) else idx,)
    if event and any(item is Ellipsis for item in full):
        full = (*full, slice(None))
    picked = sample[full]
    assert spec[idx].shape == picked.shape
    assert spec[idx].is_in(picked)


@pytest.mark.parametrize(
    "spec", [OneHot(3), MultiOneHot([3, 2]), MultiCategorical([3, 2])], ids=lambda spec: type(spec).__name__
)
def test_the_dimension_of_one_value_stays_whole(spec: TensorSpec) -> None:
    with pytest.raises(IndexError, match=r"batch dimensions \[\].*cannot be indexed"):
        spec[0]
    with pytest.raises(ValueError, match="belong to one value"):
        spec.unsqueeze(-1)
    with pytest.raises(ValueError, match="belongs to one value"):
        spec.reshape(-1, 1)
    with pytest.raises(ValueError, match="belong to one value"):
        spec.unbind(-1)
    with pytest.raises(ValueError, match="belong to one value"):
        torch.index_select(spec, -1, torch.tensor([0]))  # type: ignore[call-overload]
    assert spec.unsqueeze(0).shape == (1, *spec.shape)
    assert spec.unsqueeze(-2).shape == (1, *spec.shape)
    assert spec.expand(4, -1, *spec.shape).shape == (4, 1, *spec.shape) if spec.ndim > 1 else True


def test_indices_that_do_not_fit_are_errors() -> None:
    for idx in (2, (0, 0, 0), "a", 1.5):
        with pytest.raises(IndexError, match=r"index: expected one that fits the batch dimensions \[2, 3\]"):
            Unbounded((2, 3))[idx]


@few
@given(leaves, sizes)
def test_reshaping_keeps_the_samples(spec: TensorSpec, lead: tuple[int, ...]) -> None:
    lead = (2, *lead, 3)
    wide = spec.expand(*lead, *spec.shape)
    event = spec.ndim - spec.batch_ndim
    tail = tuple(spec.shape[spec.ndim - event :])
    assert wide.reshape(-1, *tail).reshape(wide.shape) == wide
    assert wide.view(-1, *tail).shape == (int(np.prod(wide.shape[: wide.ndim - event])), *tail)
    assert wide.unsqueeze(1).squeeze(1) == wide
    assert wide.squeeze(0) is wide
    assert wide.squeeze().squeeze() == wide.squeeze()
    assert wide.flatten(0, len(lead) - 1).unflatten(0, lead) == wide
    assert wide.flatten(0, len(lead) - 1).unflatten(0, (-1, *lead[1:])) == wide
    assert stack(list(wide.unbind(0))) == wide
    assert torch.stack(list(wide.unbind(len(lead) - 1)), len(lead) - 1) == wide
    assert torch.unsqueeze(wide, 0).shape == (1, *wide.shape)
    assert torch.squeeze(wide.unsqueeze(0), 0) == torch.clone(wide)
    assert torch.flatten(wide, 0, 1).shape[0] == wide.shape[0] * wide.shape[1]
    assert torch.index_select(wide, dim=0, index=torch.tensor([1, 0, 1])) == wide[[1, 0, 1]]  # type: ignore[call-overload]
    assert wide.ndim == wide.ndimension() == len(wide.shape)


def test_a_torch_function_without_meaning_for_specs_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="add"):
        torch.add(Unbounded(), 1)


def test_shapes_that_do_not_fit_are_errors() -> None:
    spec = Unbounded((2, 1))
    for shape in [(3, 1), (1,), (), (2, -2), (-1, 2, 1)]:
        with pytest.raises(ValueError, match=r"shape: expected one to which \[2, 1\] can be expanded, got"):
            spec.expand(shape)
    assert spec.expand(3, -1, 4).shape == (3, 2, 4)
    with pytest.raises(ValueError, match=r"shape: expected as many elements as in \[2, 1\], got \[3\]"):
        spec.reshape(3)
    with pytest.raises(ValueError, match="dim: expected a dimension among the first 2"):
        spec.squeeze(2)
    with pytest.raises(ValueError, match="dim: expected a dimension among the first 3"):
        spec.unsqueeze(-4)


def test_sizes_that_vary_are_written_as_minus_one() -> None:
    spec = Unbounded((2, -1, 3))
    assert spec.zero().shape == (2, 1, 3)
    assert spec.is_in(torch.zeros(2, 7, 3))
    assert not spec.is_in(torch.zeros(2, 7, 4))
    assert spec[0].shape == (-1, 3)
    assert spec.expand(5, 2, -1, 3).shape == (5, 2, -1, 3)
    assert spec.unsqueeze(1).shape == (2, 1, -1, 3)
    assert spec.encode(np.zeros((2, 4, 3))).shape == (2, 4, 3)
    assert spec != Unbounded((2, 1, 3))
    with pytest.raises(ValueError, match="belong to one value"):
        spec.unsqueeze(2)
    bounds = Bounded(0, 1, (-1,))
    assert bounds.is_in(torch.ones(9))
    assert bounds.project(torch.full((4,), 3.0)).tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("spec", "val", "text"),
    [
        (Unbounded((3,)), "south", r"value: expected torch.float32 of shape \[\.\.\., 3\].*got str. Convert"),
        (Unbounded((3,)), torch.zeros(2), r"got torch.float32 of shape \[2\]\. Reshape it so"),
        (
            Unbounded((3,)),
            torch.zeros(3).int(),
            r"got torch.int32 of shape \[3\]\. Convert it with value.to\(",
        ),
        (Bounded(0, 1, (2,)), torch.tensor([0.0, 2.0]), r"\[0\.0, 1\.0\], got .* \[0\.0, 2\.0\]\. Map it in"),
        (Bounded(0, 1, (20,)), torch.full((20,), 3.0), r"values from 3\.0 to 3\.0"),
        (Bounded(0, 1, (20,)), torch.full((20,), torch.nan), r"values with 20 NaN"),
        (Categorical(2), torch.tensor(2), r"outcomes 0 to 1, got torch.int64 of shape \[\], values 2"),
        (OneHot(2), torch.tensor([True, True]), r"exactly one 1 along the last dimension, got"),
        (MultiCategorical([2, 3]), torch.tensor([2, 0]), r"outcomes below nvec=\[2, 3\], got"),
        (MultiOneHot([1, 1]), torch.tensor([True, False]), r"one 1 in each group of nvec=\[1, 1\]"),
        (Binary(2), torch.tensor([0, 2]).to(torch.int8), r"zeros and ones, got"),
        (
            NonTensor((2,)),
            torch.zeros(2),
            r"expected non-tensor data of shape \[2\], got Tensor of shape \[2\]",
        ),
    ],
)
def test_messages_say_what_came_and_what_to_do(spec: TensorSpec, val: object, text: str) -> None:
    assert not spec.is_in(val)
    with pytest.raises(SpecError, match=text):
        spec.assert_is_in(val)
    with pytest.raises(SpecError, match=r"^\('agent', 'obs'\): expected"):
        spec.assert_is_in(val, key=("agent", "obs"))


def test_type_check_looks_at_the_dtype_alone() -> None:
    Bounded(0, 1, (2,)).type_check(torch.full((5,), 9.0))
    with pytest.raises(SpecError, match=r"'reward': expected dtype torch.float32, got torch.int64. Convert it"):
        Unbounded().type_check(torch.zeros(1).long(), "reward")
    with pytest.raises(SpecError, match="got list"):
        Unbounded().type_check([1])
    NonTensor().type_check(torch.zeros(1))


def test_encode_takes_numbers_lists_and_arrays() -> None:
    spec = Unbounded((1,))
    for val in (2, 2.0, [2], np.float64(2), np.array(2), torch.tensor(2), True + 1):
        assert spec.encode(val).tolist() == [2.0]
        assert spec.encode(val).dtype == torch.float32
    assert Unbounded(()).encode([3.0]).shape == ()
    assert Unbounded((2, 3)).encode(np.zeros((2, 3))[::-1]).shape == (2, 3)
    assert Unbounded((2, 3)).encode(np.zeros((2, 1, 3, 1))).shape == (2, 3)
    assert Unbounded((2,)).encode([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1.0, 2.0]


def test_encode_owns_its_memory() -> None:
    array = np.zeros(3, np.float32)
    encoded = Unbounded((3,)).encode(array)
    array[:] = 1.0
    assert encoded.tolist() == [0.0, 0.0, 0.0]
    array.flags.writeable = False
    assert Unbounded((3,)).encode(array).tolist() == [1.0, 1.0, 1.0]


def test_encode_says_what_does_not_fit() -> None:
    for val, got in ((np.zeros((3, 2)), r"\[3, 2\]"), (np.zeros((5, 2, 3)), r"\[5, 2, 3\]")):
        with pytest.raises(SpecError, match=rf"expected the shape \[2, 3\], got {got}"):
            Unbounded((2, 3)).encode(val)
    for val in ("text", None, [[1], [1, 2]], {"a": 1}):
        with pytest.raises(SpecError, match=r"expected numbers in an array.*Use a NonTensor"):
            Unbounded((2,)).encode(val)


def test_project_maps_values_not_shapes() -> None:
    with pytest.raises(SpecError, match=r"whose shape ends in \[2\], got torch.float32 of shape \[3\]"):
        Bounded(0, 1, (2,)).project(torch.zeros(3))
    with pytest.raises(SpecError, match="got list"):
        Bounded(0, 1, (2,)).project([0, 1])


def test_specs_that_cannot_be_enumerated_say_so() -> None:
    for spec in (Bounded(0, 1, (2,)), Unbounded(), NonTensor()):
        assert spec.cardinality() == float("inf")
        with pytest.raises(ValueError, match="expected a discrete spec"):
            spec.enumerate()


def test_aliases() -> None:
    spec = Unbounded((2,))
    assert spec.sample((3,)).shape == (3, 2)
    assert torch.equal(spec.zeros(3), spec.zero((3,)))
    assert torch.equal(spec.ones(), spec.one())


def test_rand_follows_the_global_generator() -> None:
    for spec in (Bounded(0, 1, (3,)), Unbounded(), Categorical(9), OneHot(9), MultiOneHot([4, 4]), Binary(9)):
        torch.manual_seed(3)
        first = spec.rand((4,))
        torch.manual_seed(3)
        assert torch.equal(spec.rand((4,)), first)


def test_a_dtype_must_be_one() -> None:
    with pytest.raises(TypeError, match=r"dtype: expected a torch.dtype, got 'float32'"):
        Unbounded((1,), dtype="float32")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@settings(max_examples=20, deadline=None)
@given(dense)
def test_specs_move_to_a_device(spec: TensorSpec) -> None:
    there = spec.cuda()
    assert there.device == torch.device("cuda", torch.cuda.current_device())
    assert there.to("cuda") is there
    assert there != spec
    assert there.cpu() == spec
    sample = there.rand((2,))
    assert sample.device == there.device
    assert there.is_in(sample)
    assert spec.is_in(sample)
    assert spec.project(sample) is sample
    assert there.encode(sample.cpu()).device == there.device
