"""Composite and NonTensor: keys, batches, samples, messages."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack, tensorclass

from rollwright.data import Binary, Bounded, Categorical, Composite, NonTensor, OneHot, Unbounded
from rollwright.errors import SpecError


def example(batch: tuple[int, ...] = (4,)) -> Composite:
    return Composite(
        {
            "obs": Bounded(-1.0, 1.0, (*batch, 3)),
            "agent": {
                "action": OneHot(5, (*batch, 5)),
                "inner": {"flag": Categorical(2, (*batch, 1), dtype=torch.bool)},
            },
            "text": NonTensor(batch, example_data="hello"),
        },
        shape=batch,
    )


LEAVES = ["obs", ("agent", "action"), ("agent", "inner", "flag"), "text"]


def test_keys_values_items() -> None:
    spec = example()
    assert list(spec) == list(spec.keys()) == ["obs", "agent", "text"]
    assert list(spec.keys(include_nested=True, leaves_only=True)) == LEAVES
    assert list(spec.keys(True)) == ["obs", "agent", ("agent", "action"), ("agent", "inner"), *LEAVES[2:]]
    assert list(spec.keys(leaves_only=True)) == ["obs", "text"]
    assert ("agent", "action") in spec.keys(True, True)
    assert spec.keys() & {"obs", "b"} == {"obs"}
    assert [spec[key] for key in spec.keys(True, True)] == list(spec.values(True, True))
    assert dict(spec.items(True, True)).keys() == set(LEAVES)
    assert len(spec) == 3


def test_what_is_a_leaf_may_be_said() -> None:
    spec = example()
    assert list(spec.keys(True, True, is_leaf=lambda kind: kind is Composite)) == ["agent", ("agent", "inner")]
    assert list(spec.keys(True, True, is_leaf=lambda kind: True)) == list(spec.keys(True))
    assert dict(spec.items(True, True, is_leaf=None)) == dict(spec.items(True, True))
    assert list(spec.values(is_leaf=lambda kind: kind is OneHot)) == list(spec.values())
    assert not spec.keys(True, step_mdp_static_only=True)


def test_look_up() -> None:
    spec = example()
    assert spec["agent", "action"] is spec["agent"]["action"] is spec.get(("agent", "action"))
    assert spec[("obs",)] is spec["obs"]
    assert "obs" in spec
    assert ("agent", "inner", "flag") in spec
    assert ("obs", "x") not in spec
    assert 3 not in spec
    assert spec.get("nope") is None
    assert spec.get(("obs", "x"), 7) == 7
    for key in ("nope", ("agent", "nope"), ("obs", "x")):
        with pytest.raises(KeyError, match="expected one of 'agent', "):
            spec[key]


def test_an_empty_composite_has_no_keys() -> None:
    with pytest.raises(KeyError, match=r"'a': expected one of no keys \(the spec is empty\)"):
        Composite()["a"]


def test_changes_in_place() -> None:
    spec = Composite(shape=(2,))
    assert spec.set(("a", "b", "c"), Unbounded((2, 1))) is spec
    assert spec["a"].shape == spec["a", "b"].shape == (2,)
    spec["d"] = {"e": Unbounded((2,))}
    assert list(spec.keys(True, True)) == [("a", "b", "c"), ("d", "e")]
    assert spec.pop(("a", "b", "c")) == Unbounded((2, 1))
    assert spec.pop("zzz", None) is None
    with pytest.raises(KeyError, match="'zzz': expected one of 'a', "):
        spec.pop("zzz")
    del spec["d", "e"]
    with pytest.raises(KeyError, match="expected one of"):
        del spec["d", "e"]
    assert not spec.is_empty()
    assert spec.is_empty(recurse=True)
    assert Composite().is_empty()
    assert list(spec.keys(True, True)) == []


def test_update_merges() -> None:
    spec = Composite(a={"x": Unbounded()}, b=Unbounded())
    other = {"a": {"y": Unbounded()}, "b": Unbounded((2,)), ("c", "d"): Unbounded()}
    assert spec.update(other) is spec
    assert list(spec.keys(True, True)) == [("a", "x"), ("a", "y"), "b", ("c", "d")]
    assert spec["b"].shape == (2,)
    spec.update(Composite(b=Composite(z=Unbounded())))
    assert ("b", "z") in spec


def test_select_and_exclude() -> None:
    spec = example()
    some = spec.select("obs", ("agent", "inner"))
    assert list(some.keys(True, True)) == ["obs", ("agent", "inner", "flag")]
    assert some.shape == some["agent"].shape == (4,)
    assert list(spec.exclude("obs", ("agent", "inner"), "zz").keys(True, True)) == [
        ("agent", "action"),
        "text",
    ]
    assert spec.exclude() == spec
    assert spec.select("agent", ("agent", "action"))["agent"] == spec["agent"]
    with pytest.raises(KeyError, match=r"\('agent', 'zz'\)"):
        spec.select(("agent", "zz"))
    assert list(spec.select("zz", "obs", strict=False)) == ["obs"]
    assert spec.empty() == Composite(shape=(4,))
    assert len(spec) == 3


def test_entries_must_begin_with_the_batch() -> None:
    with pytest.raises(ValueError, match=r"'obs': expected a spec whose shape begins with the Composite's \[4\]"):
        Composite(obs=Unbounded((3,)), shape=(4,))
    with pytest.raises(ValueError, match="'x': expected a spec whose shape"):
        Composite({("a", "x"): Unbounded((3,))}, shape=(4,))
    with pytest.raises(ValueError, match="'a': expected a spec whose shape"):
        Composite(a=Composite(shape=(3,)), shape=(4,))
    with pytest.raises(ValueError, match=r"'a': expected a spec whose first 1 dimensions .* belong to one value"):
        Composite(a=OneHot(4), shape=(4,))
    inner = Composite(b=Unbounded((4, 2)), t=NonTensor())
    outer = Composite(a=inner, t=NonTensor(), shape=(4,))
    assert outer["a"].shape == outer["a", "t"].shape == outer["t"].shape == (4,)
    assert inner.shape == ()
    assert Composite(a=Composite(x=Unbounded((4, 2)), shape=(4, 2)), shape=4)["a"].shape == (4, 2)


def test_bad_arguments_are_errors() -> None:
    with pytest.raises(TypeError, match="'a': expected a TensorSpec, a mapping of them or None, got int"):
        Composite(a=3)
    with pytest.raises(TypeError, match="key: expected a string or a tuple of strings, got 3"):
        Composite({3: Unbounded()})
    with pytest.raises(TypeError, match="specs: expected a mapping from keys to specs, got list"):
        Composite([Unbounded()])
    with pytest.raises(ValueError, match="batch_size: expected it or shape, got both"):
        Composite(shape=(), batch_size=())
    assert Composite(batch_size=[3]).shape == Composite(batch_size=[3]).batch_size == (3,)


def test_samples() -> None:
    spec = example()
    for sample in (spec.rand(), spec.sample((2,)), spec.zero((2,)), spec.one(2)):
        assert isinstance(sample, TensorDict)
        assert sample.batch_size[-1:] == (4,)
        assert sample["agent"].batch_size == sample.batch_size
        assert all(sample.get(key, None) is not None for key in LEAVES)
    assert spec.zeros()["obs"].count_nonzero() == 0
    assert bool((spec.ones((3,))["obs"] == 1).all())
    sample = spec.rand((2,))
    assert spec.is_in(sample)
    spec.assert_is_in(sample)
    spec.type_check(sample)
    assert spec.project(sample) is sample
    assert sample["text"] == "hello"
    assert spec.zero(2).batch_size == (2, 4)
    assert spec.numel() == 4
    assert spec.contains(sample)
    assert spec.is_in(sample.to_dict())


def test_membership_needs_every_entry_and_allows_others() -> None:
    spec = example()
    sample = spec.rand()
    assert spec.is_in(sample.copy().set("extra", torch.zeros(4)))
    assert not spec.is_in(sample.exclude("obs"))
    assert not spec.is_in(sample.exclude(("agent", "inner", "flag")))
    assert not spec.is_in(sample.copy().set("agent", torch.zeros(4)))
    assert not spec.is_in(torch.zeros(4))
    empty = Composite(a=Composite())
    assert empty.is_in(TensorDict())
    empty.assert_is_in(TensorDict())
    empty.type_check(TensorDict())
    assert empty.project(TensorDict()).is_empty()
    assert list(empty.encode({}).keys()) == ["a"]


def test_messages_name_the_nested_key() -> None:
    spec = example()
    sample = spec.rand()
    with pytest.raises(SpecError, match=r"\('agent', 'action'\): expected an entry for OneHot.*got only 'inner'"):
        spec.assert_is_in(sample.exclude(("agent", "action")))
    bad = sample.clone()
    bad["agent", "inner", "flag"] = torch.zeros(4, 1)
    with pytest.raises(SpecError, match=r"\('agent', 'inner', 'flag'\): expected torch.bool of shape"):
        spec.assert_is_in(bad)
    with pytest.raises(SpecError, match=r"\('agent', 'inner', 'flag'\): expected dtype torch.bool"):
        spec.type_check(bad)
    with pytest.raises(SpecError, match=r"\('next', 'agent', 'inner', 'flag'\): expected torch.bool"):
        spec.assert_is_in(bad, "next")
    with pytest.raises(SpecError, match=r"'obs': expected an entry .* got only 'agent', 'text'"):
        spec.type_check(sample.exclude("obs"))
    with pytest.raises(SpecError, match=r"value: expected a TensorDict with 'agent', 'obs', 'text', got Tensor"):
        spec.assert_is_in(torch.zeros(4))
    with pytest.raises(SpecError, match="'agent': expected a TensorDict with 'action', 'inner', got"):
        spec.assert_is_in(sample.copy().set("agent", torch.zeros(4)))


def test_project_leaves_its_input_alone() -> None:
    spec = example()
    sample = spec.rand()
    sample["obs"] = torch.full((4, 3), 5.0)
    sample["extra"] = torch.zeros(4)
    out = spec.project(sample)
    assert spec.is_in(out)
    assert bool((out["obs"] == 1).all())
    assert bool((sample["obs"] == 5).all())
    assert out["extra"] is sample["extra"]
    assert out["agent", "action"] is sample["agent", "action"]
    with pytest.raises(SpecError, match="'obs': expected an entry"):
        spec.project(sample.exclude("obs"))
    sample["obs"] = torch.zeros(4, 2)
    with pytest.raises(SpecError, match=r"'obs': value: expected a tensor whose shape ends in \[4, 3\]"):
        spec.project(sample)


def test_encode_and_to_numpy() -> None:
    spec = example()
    data = {
        "obs": np.zeros((4, 3)),
        "agent": {"action": [0, 1, 2, 3], "inner": {"flag": np.ones((4, 1), bool)}},
        "text": "south",
    }
    encoded = spec.encode(data)
    assert isinstance(encoded, TensorDictBase)
    assert encoded.batch_size == (4,)
    assert spec.is_in(encoded)
    assert encoded["text"] == "south"
    back = spec.to_numpy(encoded, safe=True)
    assert back["agent"]["action"].tolist() == [0, 1, 2, 3]
    assert back["text"] == "south"
    assert bool((spec.encode(back) == encoded).all())
    assert bool((spec.encode(encoded) == encoded).all())
    pair = Composite({"0": Unbounded(), "1": Categorical(3)})
    assert pair.encode((2.0, 1))["1"].item() == 1
    with pytest.raises(SpecError, match=r"value: expected the entries '0', '1', got '0'. Make data and spec agree"):
        pair.encode([2.0])
    with pytest.raises(SpecError, match="expected the entries '0', '1', got '0', '1', 'x'"):
        pair.encode({"0": 1, "1": 1, "x": 1})
    with pytest.raises(SpecError, match="value: expected a mapping with '0', '1', got int"):
        pair.encode(3)
    with pytest.raises(SpecError, match=r"'agent': 'action': value: expected outcomes that exist"):
        spec.encode({**data, "agent": {**data["agent"], "action": [0, 1, 2, 9]}})
    with pytest.raises(SpecError, match="'obs': expected"):
        spec.to_numpy(spec.zero().exclude("obs"), safe=True)


def test_shape_operations_touch_the_batch_only() -> None:
    spec = example((2, 3))
    assert spec[0].shape == (3,)
    assert spec[0]["obs"].shape == (3, 3)
    assert spec[..., 0]["obs"].shape == (2, 3)
    assert spec[..., 0] == spec[:, 1] == spec[:, 0]
    assert spec[0, 0] == example(())
    assert spec[torch.tensor([[True, False, True], [False, False, False]])].shape == (2,)
    assert spec[[1, 0, 1]]["agent", "inner", "flag"].shape == (3, 3, 1)
    assert spec[:, None]["text"].shape == (2, 1, 3)
    for idx in ((0, 0, 0), 5, 1.5):
        with pytest.raises(IndexError, match=r"batch dimensions \[2, 3\]"):
            spec[idx]
    assert spec.expand(5, 2, 3) == example((5, 2, 3))
    assert example(()).expand(5) == example((5,))
    assert example(()).expand(torch.Size([5, 2])) == example((5, 2))
    assert example((1,)).expand(4) == example((4,))
    assert spec.reshape(6) == spec.flatten() == spec.reshape(-1) == spec.view((6,)) == example((6,))
    assert spec.reshape(6).unflatten(0, (2, 3)) == spec
    assert spec.unsqueeze(-1) == example((2, 3, 1))
    assert spec.unsqueeze(0).squeeze() == spec
    assert example((1, 3, 1)).squeeze(-1) == example((1, 3))
    assert torch.stack([example((3,))] * 2) == torch.stack(spec.unbind(0)) == spec
    assert torch.stack([example((2,))] * 3, -1) == spec
    with pytest.raises(ValueError, match="dim: expected a dimension among the first 2"):
        spec.unbind(2)
    with pytest.raises(ValueError, match=r"expected one to which \[2, 3\] can be expanded"):
        spec.expand(2, 4)
    assert spec.is_in(spec.rand((2,)))


def test_nested_batches_of_more_dimensions() -> None:
    inner = Composite(x=Unbounded((4, 2, 3)), shape=(4, 2))
    spec = Composite(agents=inner, shape=(4,))
    assert spec.rand()["agents"].batch_size == (4, 2)
    assert spec[0]["agents"] == Composite(x=Unbounded((2, 3)), shape=(2,))
    assert spec.expand(7, 4)["agents"].shape == (7, 4, 2)
    assert spec.expand(7, 4)["agents", "x"].shape == (7, 4, 2, 3)
    assert spec.reshape(2, 2)["agents", "x"].shape == (2, 2, 2, 3)


def test_copies() -> None:
    spec = example()
    for other in (spec.clone(), copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):
        assert other == spec
        other["agent", "new"] = Unbounded((4,))
        other["obs"] = Unbounded((4,))
        other["agent", "action"].update_mask([True, False, False, False, False])
        assert other != spec
        assert list(spec.keys(True, True)) == LEAVES
        assert spec["agent", "action"].mask is None
    assert spec != example((5,))
    assert spec != example().set("obs", Bounded(-1.0, 2.0, (4, 3)))
    assert spec != {"obs": 1}
    assert Composite(a=Unbounded(), b=Unbounded()) == Composite(b=Unbounded(), a=Unbounded())
    assert Composite(device="cpu") != Composite()


def test_dtype_conversion() -> None:
    spec = Composite(a=Unbounded(), n={"b": Binary(2)}, t=NonTensor())
    out = spec.to(torch.float64)
    assert out["a"].dtype == out["n", "b"].dtype == torch.float64
    assert out["t"] == spec["t"]
    assert spec["a"].dtype == torch.float32
    assert spec.dtype is None
    assert spec.space is None


def test_device() -> None:
    spec = example()
    assert spec.device is None
    assert spec.rand().device is None
    assert spec.to(None) is spec
    there = spec.to("cpu")
    assert there.device == there["agent"].device == there["text"].device == torch.device("cpu")
    assert there.rand().device == torch.device("cpu")
    assert there.cpu() is there
    assert there != spec
    assert there.clear_device_() is there
    assert there["agent"].device is None
    there["obs"] = Unbounded((4,))
    there.device = "meta"
    assert there["agent", "action"].device == torch.device("meta")
    there["late"] = Unbounded((4,))
    assert there["late"].device == torch.device("meta")
    there.device = None
    assert there.device is None
    assert there["late"].device == torch.device("meta")
    assert Composite(a={"b": Unbounded()}, device="meta")["a", "b"].device == torch.device("meta")


def test_enumerate_combines_the_entries() -> None:
    spec = Composite(a=Categorical(3, (2,)), n={"b": Binary(shape=(2, 2))}, shape=(2,))
    values = spec.enumerate()
    assert spec.cardinality() == 12
    assert values.batch_size == (12, 2)
    assert spec.is_in(values)
    rows = torch.cat([values["a"].unsqueeze(-1), values["n", "b"]], -1)
    assert len(rows.unique(dim=0)) == 12
    assert Composite().enumerate().batch_size == (1,)
    assert example().cardinality() == float("inf")
    with pytest.raises(ValueError, match="expected a discrete spec"):
        example().enumerate()


def test_repr_is_indented() -> None:
    assert repr(Composite()) == "Composite(shape=[], device=None)"
    assert repr(Composite(a={"b": Unbounded()})).splitlines() == [
        "Composite(",
        "    a: Composite(",
        "        b: Unbounded(shape=[1], dtype=float32, device=cpu),",
        "        shape=[], device=None),",
        "    shape=[], device=None)",
    ]


def test_lazy_stacks_are_checked_part_by_part() -> None:
    spec = Composite(obs=Unbounded((2, -1)), shape=(2,))
    parts = [TensorDict({"obs": torch.zeros(n)}) for n in (3, 4)]
    ragged = lazy_stack(parts)
    assert spec.is_in(ragged)
    spec.assert_is_in(ragged)
    assert spec.is_in(lazy_stack([spec.rand(), spec.rand()]))
    assert not Composite(obs=Unbounded((2, 3)), shape=(2,)).is_in(ragged)
    with pytest.raises(SpecError, match=r"'obs': expected .* got torch.float32 of shape \[4\]"):
        Composite(obs=Unbounded((2, 3)), shape=(2,)).assert_is_in(ragged)
    assert not spec.is_in(lazy_stack([*parts, parts[0]]))
    with pytest.raises(SpecError, match=r"value: expected a batch size that ends in \[2\], got \[3\]"):
        spec.assert_is_in(lazy_stack([*parts, parts[0]]))


def test_non_tensors() -> None:
    spec = NonTensor((2,), example_data={"a": 1})
    assert spec.dtype is None
    assert spec.device is None
    assert isinstance(spec.rand(), NonTensorData)
    assert spec.rand((3,)).batch_size == spec.zero((3,)).batch_size == spec.one(3).batch_size == (3, 2)
    assert spec.is_in(spec.rand((3,)))
    assert spec.is_in("anything")
    assert spec.is_in(None)
    assert not spec.is_in(torch.zeros(2))
    assert not spec.is_in(TensorDict())
    assert not spec.is_in(NonTensorData("x"))
    encoded = spec.encode([1, 2])
    assert encoded.batch_size == (2,)
    assert spec.to_numpy(encoded, safe=True) == [1, 2]
    assert spec.encode(encoded) is encoded
    assert spec.project(encoded) is encoded
    assert spec.to_numpy("plain") == "plain"
    assert type(NonTensor().encode(np.str_("x")).data) is str
    with pytest.raises(SpecError, match="expected non-tensor data"):
        spec.project(torch.zeros(2))
    with pytest.raises(SpecError, match=r"got NonTensorData of shape \[\]"):
        spec.encode(NonTensorData("x"))
    assert spec.to(torch.float32) is spec
    assert spec.to("cpu").rand().device == torch.device("cpu")
    assert spec != NonTensor((2,), example_data={"a": 2})
    assert "example_data='" + "x" * 36 + "..." in repr(NonTensor(example_data="x" * 99))


def test_batched_non_tensors_hold_one_object_for_each_element() -> None:
    spec = NonTensor((2, 3), example_data="x", batched=True)
    assert isinstance(spec.rand(), NonTensorStack)
    assert spec.rand().tolist() == [["x"] * 3] * 2
    assert spec.is_in(spec.rand((4,)))
    assert spec.to_numpy(spec.rand()) == [["x"] * 3] * 2
    assert spec[0, 0].rand().data == "x"
    assert "batched=True" in repr(spec)
    td = Composite(t=spec, shape=(2, 3)).rand()
    assert Composite(t=spec, shape=(2, 3)).is_in(td)
    assert isinstance(lazy_stack([td[0], td[1]]), TensorDictBase)


def test_shape_can_be_set_where_entries_begin_with_it():
    spec = Composite(obs=Unbounded((3, 2, 4)), nested=Composite(obs=Unbounded((3, 2))))
    spec.shape = (3,)
    assert spec.batch_size == spec["nested"].shape == (3,)
    spec.shape = (3, 2)
    assert spec.rand().batch_size == spec.rand()["nested"].batch_size == (3, 2)
    spec.shape = ()
    assert spec.shape == ()
    with pytest.raises(ValueError, match=r"'obs': expected a spec whose shape begins with the Composite's \[4\]"):
        spec.shape = (4,)
    assert spec.shape == ()
    spec.lock_()
    with pytest.raises(RuntimeError, match="locked"):
        spec.shape = (3,)


def test_a_lock_may_leave_nested_specs_open():
    spec = Composite(nested=Composite(obs=Unbounded())).lock_(recurse=False)
    assert spec.locked
    assert not spec["nested"].locked
    spec["nested"].set("more", Unbounded())
    spec.lock_()
    spec.unlock_(recurse=False)
    assert spec["nested"].is_locked


def test_type_check_takes_the_value_of_an_entry():
    spec = Composite(obs=Unbounded((2,)), nested={"flag": Binary(1)})
    spec.type_check(torch.zeros(2), "obs")
    spec.type_check(torch.zeros(1, dtype=spec["nested", "flag"].dtype), ("nested", "flag"))
    with pytest.raises(SpecError, match=r"'obs': expected dtype torch\.float32, got torch\.int64"):
        spec.type_check(torch.zeros(2, dtype=torch.int64), "obs")


@tensorclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


@pytest.mark.parametrize("size", [(3,), (3, 2), ()])
def test_the_batch_size_of_a_composite_may_be_set(size):
    spec = Composite(x=Unbounded((3, 2)))
    spec.batch_size = size
    assert spec.shape == spec.batch_size == size
    with pytest.raises(ValueError, match="'x': expected a spec whose shape begins with"):
        spec.batch_size = (4,)


def test_tensorclasses_are_checked_projected_and_encoded_as_tensordicts_are():
    spec = Composite(a=Bounded(0.0, 1.0, (2,)), b=Unbounded((2, 1)), shape=(2,))
    member = Pair(torch.zeros(2), torch.ones(2, 1), batch_size=[2])
    other = Pair(torch.full((2,), 3.0), torch.ones(2, 1), batch_size=[2])
    assert spec.is_in(member)
    assert not spec.is_in(other)
    spec.type_check(other)
    with pytest.raises(SpecError, match=r"'a': expected torch\.float32"):
        spec.assert_is_in(other)
    projected = spec.project(other)
    assert isinstance(projected, Pair)
    assert (projected.a.tolist(), other.a.tolist()) == ([1.0, 1.0], [3.0, 3.0])
    assert spec.project(member) is member
    assert spec.encode(member)["b"].tolist() == spec.to_numpy(member)["b"].tolist() == [[1.0], [1.0]]
    assert spec.project({"a": torch.full((2,), 3.0), "b": torch.ones(2, 1)})["a"].tolist() == [1.0, 1.0]
