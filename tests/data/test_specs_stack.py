"""Stacks of specs: dense where they agree, lazy where they do not."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from rollwright.data import (
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    NonTensor,
    OneHot,
    Stacked,
    StackedComposite,
    Unbounded,
    stack,
)
from rollwright.errors import SpecError


def parts() -> list[Composite]:
    return [
        Composite(obs=Unbounded((3, n)), agent={"act": OneHot(n, (3, n))}, shape=(3,)).set(f"only{n}", NonTensor((3,)))
        for n in (2, 4)
    ]


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_equal_specs_give_one(dim: int) -> None:
    spec = Bounded(torch.zeros(2, 3), torch.arange(6.0).reshape(2, 3))
    out = torch.stack([spec] * 4, dim)
    assert out == stack([spec.clone() for _ in range(4)], dim)
    assert torch.equal(out.high, torch.stack([spec.high] * 4, dim))
    assert type(out) is Bounded
    assert out.unbind(dim) == (spec,) * 4


def test_specs_that_differ_in_bounds_or_masks_give_one() -> None:
    out = stack([Bounded(0, 1, (2,)), Bounded(-1, 3, (2,))], 1)
    assert out.low.tolist() == [[0.0, -1.0], [0.0, -1.0]]
    assert out.is_in(out.rand((50,)))
    assert out.rand((50,))[..., 1].max() > 1
    masked = stack([OneHot(2, mask=[True, False]), OneHot(2, mask=[False, True])])
    assert masked.rand().int().tolist() == [[1, 0], [0, 1]]
    assert type(stack([Categorical(2, mask=[True, False]), Categorical(2)])) is Stacked
    rows = stack([MultiCategorical([2, 3]), MultiCategorical([4, 1])])
    assert rows == MultiCategorical([[2, 3], [4, 1]])
    nested = stack([Composite(a=Bounded(0, 1, (2,))), Composite(a=Bounded(0, 2, (2,)))])
    assert type(nested) is Composite
    assert nested["a"].high.tolist() == [[1.0, 1.0], [2.0, 2.0]]


def test_the_dimension_of_one_value_is_not_split() -> None:
    assert stack([OneHot(3), OneHot(3)], -2).shape == (2, 3)
    with pytest.raises(ValueError, match="dim: expected a new dimension among the first 1, got 1"):
        stack([OneHot(3), OneHot(3)], 1)


def test_what_cannot_be_stacked() -> None:
    with pytest.raises(ValueError, match="specs: expected at least one spec to stack, got none"):
        stack([])
    for pair in (
        [Unbounded(), Composite()],
        [Unbounded(), Unbounded(dtype=torch.float64)],
        [Unbounded((2,)), Unbounded((2, 2))],
        [Composite(shape=(2,)), Composite(shape=(3,))],
        [Composite(device="cpu"), Composite()],
    ):
        with pytest.raises(ValueError, match="specs: expected leaves of one dtype, device and number of dim"):
            stack(pair)


def test_stacked_of_one_shape_has_samples() -> None:
    spec = stack([Categorical(2, (3,)), Categorical(5, (3,))], 1)
    assert type(spec) is Stacked
    assert spec.shape == (3, 2)
    assert spec.dtype == torch.int64
    for sample in (spec.rand((7,)), spec.zero((7,)), spec.one((7,))):
        assert sample.shape == (7, 3, 2)
        assert spec.is_in(sample)
        spec.assert_is_in(sample)
        spec.type_check(sample)
        assert spec.project(sample) is sample
    bad = torch.full((7, 3, 2), 4)
    assert not spec.is_in(bad)
    assert spec.project(bad)[0].tolist() == [[1, 4]] * 3
    with pytest.raises(SpecError, match=r"'a': expected .* outcomes 0 to 1"):
        spec.assert_is_in(bad, "a")
    with pytest.raises(SpecError, match=r"'a': expected a tensor whose shape ends in \[3, 2\], got \[3\]"):
        spec.assert_is_in(torch.zeros(3).long(), "a")
    with pytest.raises(SpecError, match=r"value: expected a tensor .* got str"):
        spec.project("x")
    assert not spec.is_in("x")
    assert not spec.is_in(torch.zeros(3, 4).long())
    sample = spec.rand()
    assert torch.equal(spec.encode(spec.to_numpy(sample, safe=True)), sample)
    assert torch.equal(spec.encode(sample), sample)
    assert spec.to_numpy(spec.rand((4,))).shape == (4, 3, 2)
    with pytest.raises(SpecError, match="value: expected 2 parts"):
        spec.encode(np.zeros((3, 4)))


def test_stacked_of_different_shapes_says_what_to_do() -> None:
    spec = stack([Unbounded((3,)), Unbounded((4,))])
    assert spec.shape == (2, -1)
    assert spec.numel() == 2
    for call in (spec.rand, spec.zero, spec.one):
        with pytest.raises(SpecError, match=r"expected parts of one shape.*\[\[3\], \[4\]\]\. Stack Composites"):
            call()
    with pytest.raises(ValueError, match="expected a discrete spec"):
        spec.enumerate()


def test_stacked_index_and_shapes() -> None:
    one, two = Unbounded((3, 5)), Unbounded((4, 5))
    spec = stack([one, two, one])
    assert spec.shape == (3, -1, 5)
    assert spec[0] == spec[-1] == one
    assert spec[1] == spec[1, ...] == two
    assert spec[:2] == spec[[0, 1]] == spec[torch.tensor([True, True, False])] == stack([one, two])
    assert spec[::2] == stack([one, one])
    assert type(spec[::2]) is Unbounded
    assert spec[...] == spec
    assert spec[torch.tensor(1)] == two
    assert spec.unbind(0) == (one, two, one)
    wide = spec.expand(7, 3, -1, 5)
    assert wide.shape == (7, 3, -1, 5)
    assert wide[0] == spec
    assert wide[:, 1] == two.expand(7, 4, 5)
    assert wide.is_in(torch.zeros(7, 3, 3, 5)) is False
    assert spec.unsqueeze(0).shape == (1, 3, -1, 5)
    assert spec.unsqueeze(0).squeeze(0) == spec
    assert wide.reshape(7, 1, 3, -1, 5).shape == (7, 1, 3, -1, 5)
    later = stack([Categorical(2, (2, 3)), Categorical(3, (2, 3))], 1)
    assert later[0] == stack([Categorical(2, (3,)), Categorical(3, (3,))])
    assert later[0, 1] == Categorical(3, (3,))
    assert later[:, 1] == later[:, -1] == Categorical(3, (2, 3))
    assert later[..., 0].shape == (2, 2)
    assert later[..., 1, :] == Categorical(3, (2, 3))
    assert later.reshape(2, 1, 2, 3).shape == (2, 1, 2, 3)
    with pytest.raises(ValueError, match="expected one that keeps the stack dimension 1"):
        later.reshape(12)
    with pytest.raises(IndexError, match="index: expected numbers and slices"):
        later[[0, 1], 0]
    with pytest.raises(IndexError):
        later[0, 0, 0, 0]
    with pytest.raises(IndexError):
        spec[3]
    single = Stacked([Categorical(2)])
    assert single.expand(3).shape == (3,)
    assert single.expand(3)[2] == Categorical(2)
    twice = stack([spec, spec])
    assert twice.shape == (2, 3, -1, 5)
    assert twice[1] == spec


def test_a_stack_of_vectors_keeps_them_whole() -> None:
    spec = stack([OneHot(3, (2, 3), mask=[True, False, True]), OneHot(3, (2, 3))])
    assert type(spec) is Stacked
    assert spec.rand((4,)).shape == (4, 2, 2, 3)
    assert spec[..., 0].shape == (2, 3)
    assert spec[0, 1] == OneHot(3, mask=[True, False, True])
    with pytest.raises(IndexError):
        spec[0, 0, 0]


def test_stacked_copies() -> None:
    spec = stack([Categorical(2), Categorical(3)])
    for other in (spec.clone(), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec)), spec.to("cpu")):
        assert other == spec
    assert spec.to(torch.int32)[0].dtype == torch.int32
    assert spec != stack([Categorical(3), Categorical(2)])
    assert repr(spec).startswith("Stacked([Categorical(n=2,")


def test_stacked_composite_mapping() -> None:
    spec = stack(parts(), 1)
    assert type(spec) is StackedComposite
    assert spec.shape == spec.batch_size == (3, 2)
    assert spec.device is None
    assert list(spec.keys()) == ["obs", "agent"]
    assert list(spec.keys(True, True)) == ["obs", ("agent", "act")]
    assert spec["obs"].shape == (3, 2, -1)
    assert spec["agent", "act"].shape == (3, 2, -1)
    assert type(spec["agent"]) is StackedComposite
    assert ("agent", "act") in spec
    assert "only2" not in spec
    assert spec.get("only2") is None
    assert spec.get(("agent", "zz"), 3) == 3
    with pytest.raises(KeyError, match="expected one of"):
        spec["only2"]
    assert len(spec) == 2
    assert list(spec) == ["obs", "agent"]


def test_stacked_composite_samples() -> None:
    spec = stack(parts(), 1)
    for sample in (spec.rand((2,)), spec.zero((2,)), spec.one((2,))):
        assert isinstance(sample, LazyStackedTensorDict)
        assert sample.batch_size == (2, 3, 2)
        assert [part["obs"].shape[-1] for part in sample.unbind(-1)] == [2, 4]
    sample = spec.rand((2,))
    assert spec.is_in(sample)
    spec.assert_is_in(sample)
    spec.type_check(sample)
    assert spec.project(sample) is sample
    bad = sample.clone()
    bad.unbind(-1)[1]["agent", "act"].zero_()
    assert not spec.is_in(bad)
    assert spec.is_in(spec.project(bad))
    with pytest.raises(SpecError, match=r"\('agent', 'act'\): expected .* one 1"):
        spec.assert_is_in(bad)
    assert not spec.is_in(torch.zeros(3, 2))
    with pytest.raises(SpecError, match=r"'x': expected a TensorDict whose batch size ends in .* got Tensor"):
        spec.assert_is_in(torch.zeros(3, 2), "x")
    with pytest.raises(SpecError, match=r"got \[3, 3\]"):
        spec.project(TensorDict(batch_size=(3, 3)))
    arrays = spec.to_numpy(spec.rand(), safe=True)
    assert [part["obs"].shape for part in arrays] == [(3, 2), (3, 4)]
    assert spec.is_in(spec.encode(arrays))
    assert spec.is_in(spec.encode(spec.rand()))
    with pytest.raises(SpecError, match="value: expected a sequence of 2 mappings"):
        spec.encode({"obs": 1})


def test_stacked_composite_in_place_changes() -> None:
    spec = stack(parts())
    spec.set("new", Categorical(2, (2, 3)))
    assert spec["new"] == Categorical(2, (2, 3))
    spec["ragged"] = spec["obs"]
    assert spec["ragged"] == spec["obs"]
    with pytest.raises(ValueError, match=r"'bad': expected a spec whose shape begins with .*\[2, 3\]"):
        spec["bad"] = Unbounded((3,))
    spec.update({"agent": {"more": Unbounded((2, 3))}})
    assert list(spec["agent"]) == ["act", "more"]
    assert spec.pop("new") == Categorical(2, (2, 3))
    del spec["ragged"], spec["only2"]
    assert list(spec) == ["obs", "agent"]
    with pytest.raises(KeyError):
        del spec["only2"]
    spec.device = "cpu"
    assert spec.device == spec.specs[1]["agent"].device == torch.device("cpu")
    assert spec.clear_device_().device is None


def test_stacked_composite_index_and_shapes() -> None:
    one, two = parts()
    spec = stack([one, two])
    assert spec[0] == one
    assert spec[1] == two
    assert spec[:1] == stack([one])
    assert spec[:, 0].shape == (2,)
    assert spec[..., 0] == spec[:, 0] == stack([one[0], two[0]])
    assert spec[1, 2] == two[0]
    assert spec.unbind(0) == (one, two)
    assert spec.unbind(1)[0] == spec[:, 0]
    wide = spec.expand(5, 2, 3)
    assert wide.shape == (5, 2, 3)
    assert wide.is_in(wide.rand())
    assert wide[:, 1] == two.expand(5, 3)
    assert spec.unsqueeze(0).shape == (1, 2, 3)
    assert spec.select("obs")[0] == one.select("obs")
    assert spec.exclude("obs", "only2")[1] == two.exclude("obs")
    assert spec.empty().is_empty()
    assert not spec.is_empty()
    outer = Composite(a=spec, shape=(2,))
    assert outer[1]["a"] == two
    assert outer.rand()["a"].batch_size == (2, 3)
    assert outer.is_in(outer.rand())
    assert outer.expand(4, 2)["a"].shape == (4, 2, 3)
    assert Composite(a=stack([one[0], two[0]]), shape=(2,))["a"].shape == (2,)
    replicated = StackedComposite([one[0]]).expand(3)
    replicated[0].set("new", Unbounded())
    assert "new" not in replicated[1]


def test_a_smaller_stacked_composite_takes_over_the_batch() -> None:
    spec = stack([Composite(obs=Unbounded((3, n))) for n in (2, 4)])
    outer = Composite(a=spec, shape=(2, 3))
    assert outer["a"].shape == (2, 3)
    assert outer[:, 0]["a"].shape == (2,)


def test_stacked_composite_copies() -> None:
    spec = stack(parts())
    for other in (
        spec.clone(),
        copy.deepcopy(spec),
        pickle.loads(pickle.dumps(spec)),
        spec.to(torch.float32).to(None),
    ):
        assert type(other) is StackedComposite
        assert list(other.keys(True)) == list(spec.keys(True))
    assert spec.clone() == spec == pickle.loads(pickle.dumps(spec))
    assert spec != stack(parts()[::-1])
    assert spec.to("cpu").device == torch.device("cpu")
    other = spec.clone()
    other.set("new", Unbounded((2, 3)))
    assert "new" not in spec
    assert repr(spec).startswith("StackedComposite([Composite(")
    assert spec.cardinality() == float("inf")
    assert stack([Composite(a=Categorical(2)), Composite(a=Categorical(3))]).cardinality() == 6
    with pytest.raises(ValueError, match="enumerate: expected specs that agree"):
        spec.enumerate()


def test_entries_of_unlike_kinds_are_not_in_common() -> None:
    spec = stack([Composite(a=Unbounded(), b=Unbounded()), Composite(a=Composite(), b=Unbounded())])
    assert list(spec) == ["b"]
    assert spec.specs[1]["a"] == Composite()


def test_the_shape_of_stacked_composites_keeps_the_stack():
    spec = stack([Composite(obs=Unbounded((2, n))) for n in (3, 4)])
    spec.shape = (2, 2)
    assert [part.shape for part in spec.specs] == [(2,), (2,)]
    assert (spec.shape, spec.stack_dim) == ((2, 2), 0)
    with pytest.raises(ValueError, match="whose dimension 0, along which Composites are stacked, is 2"):
        spec.shape = (3, 2)


def hetero(dim: int = 0, batch: tuple[int, ...] = (2, 3)) -> StackedComposite:
    """Two Composites, one of which has an entry more."""
    one = Composite(a=Unbounded((*batch, 4)), shape=batch)
    two = Composite(a=Unbounded((*batch, 5)), b=Unbounded(batch), shape=batch)
    found = stack([one, two], dim)
    assert isinstance(found, StackedComposite)
    return found


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_stack_is_unsqueezed_at_any_place(dim: int, nested: bool) -> None:
    spec: Composite = hetero(dim)
    if nested:
        spec = Composite(sub=spec, shape=spec.shape)
    torch.manual_seed(0)
    sample = spec.rand()
    for place in range(-4, 4):
        wide = spec.unsqueeze(place)
        assert wide.shape == sample.unsqueeze(place).shape
        assert wide.is_in(sample.unsqueeze(place))
        assert wide.squeeze(place) == spec
        assert wide.squeeze() == spec
    assert spec.squeeze(0) == spec


def test_a_stack_is_reshaped_beside_its_dimension() -> None:
    spec = hetero(1)
    assert spec.shape == (2, 2, 3)
    for sizes in [(2, 2, 1, 3), (1, 2, 2, 3), (2, 2, 3, 1)]:
        assert spec.reshape(sizes).shape == sizes
    assert hetero(0, (2, 3)).flatten(1, 2).shape == (2, 6)
    assert hetero(2, (2, 3)).flatten(0, 1).shape == (6, 2)
    assert hetero(0, (6,)).unflatten(1, (2, 3)) == hetero(0)
    with pytest.raises(ValueError, match="keeps the stack dimension 1"):
        spec.reshape(4, 3)
    with pytest.raises(ValueError, match="keeps the stack dimension 1"):
        spec.flatten(1, 2)


def test_leaves_of_different_sizes_are_unsqueezed_at_their_end() -> None:
    spec = stack([Unbounded((2, 3)), Unbounded((2, 4))], 1)
    assert spec.shape == (2, 2, -1)
    assert spec.unsqueeze(-1).shape == (2, 2, -1, 1)
    assert spec.unsqueeze(-1)[:, 1].shape == (2, 4, 1)
    assert spec.unsqueeze(-1).squeeze(-1) == spec
    assert spec.unsqueeze(0).squeeze(0) == spec
    assert spec.squeeze(1) is spec


def test_what_is_set_in_a_part_of_a_stack_is_set_in_the_stack() -> None:
    spec = hetero()
    spec[1]["c"] = Unbounded((2, 3))
    del spec[0]["a"]
    assert [sorted(part) for part in spec.specs] == [[], ["a", "b", "c"]]
    assert spec[1] is spec[..., 1, :, :] is spec[-1]
    assert spec[0, 0].shape == (3,)
    spec[1].unbind(0)[0]["d"] = Unbounded((3,))
    assert "d" not in spec[1]


def test_the_type_of_one_entry_of_a_stack_is_checked() -> None:
    spec = stack([Composite(a=Unbounded(3)), Composite(a=Unbounded(3), b=Unbounded(1))])
    spec.type_check(torch.zeros(2, 3), "a")
    with pytest.raises(SpecError, match=r"'a': expected dtype torch.float32, got torch.int64"):
        spec.type_check(torch.zeros(2, 3, dtype=torch.int64), "a")
