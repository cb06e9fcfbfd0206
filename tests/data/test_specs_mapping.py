"""Composites as mappings: entries of which only the key is known, and locks."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import Bounded, Categorical, Composite, Unbounded


def partly_known(batch: tuple[int, ...] = ()) -> Composite:
    """Of ``b`` and ``("c", "d")`` only the keys are known."""
    return Composite(a=Bounded(-1, 1, (*batch, 3)), b=None, c={"d": None, "e": Unbounded((*batch, 2))}, shape=batch)


def test_of_an_entry_only_the_key_may_be_known() -> None:
    spec = partly_known()
    assert list(spec.keys(True, True)) == ["a", "b", ("c", "d"), ("c", "e")]
    assert list(spec.leaves()) == ["a", ("c", "e")]
    assert spec["b"] is spec["c", "d"] is spec.get("b", 1) is dict(spec.items())["b"] is None
    assert list(spec.values()).count(None) == 1
    assert "b" in spec
    assert ("c", "d") in spec
    assert not Composite(b=None).is_empty()
    assert not Composite(b=None).is_empty(recurse=True)
    assert "b: None" in repr(spec)
    assert spec == partly_known() == spec.clone() == pickle.loads(pickle.dumps(spec))
    assert hash(spec) == hash(partly_known())
    assert spec != spec.exclude("b")
    assert spec != spec.clone().set("b", Unbounded())
    assert spec.pop("b", 3) is None
    assert "b" not in spec
    spec["a"] = spec["n", "m"] = None
    spec.update({"c": {"e": None}, "n": {"m": Unbounded((4,))}})
    assert list(spec.leaves()) == [("n", "m")]
    assert list(spec.select("c", ("n", "m")).keys(True, True)) == [("c", "d"), ("c", "e"), ("n", "m")]
    del spec["c", "d"]
    assert list(spec["c"]) == ["e"]


def test_samples_leave_unknown_entries_out_and_checks_take_anything() -> None:
    spec = partly_known()
    for sample in (spec.rand(), spec.zero((2,)), spec.one(2)):
        assert list(sample.keys(True, True)) == ["a", ("c", "e")]
        assert spec.is_in(sample)
        spec.assert_is_in(sample)
        spec.type_check(sample)
        assert spec.project(sample) is sample
    sample = spec.rand().set("b", torch.ones(7))
    sample["c", "d"] = torch.ones(1)
    sample["a"] = torch.full((3,), 5.0)
    assert not spec.is_in(sample)
    assert spec.is_in(spec.project(sample))
    assert spec.project(sample)["b"] is sample["b"]
    assert list(spec.encode(spec.to_numpy(spec.rand())).keys(True, True)) == ["a", ("c", "e")]
    assert spec.encode({"a": [0, 0, 0], "b": torch.ones(1), "c": {"e": [1, 1]}})["b"].item() == 1
    assert Composite(a=Categorical(3), b=None).cardinality() == 3
    assert list(Composite(a=Categorical(3), b=None).enumerate().keys()) == ["a"]
    assert Composite(c=Composite(d=None)).is_in(TensorDict())


def test_unknown_entries_have_any_shape() -> None:
    spec = partly_known()
    for changed in (
        spec.expand(4),
        partly_known((2, 4))[0],
        partly_known((2, 2)).flatten(),
        spec.expand(1, 4).squeeze(0),
        torch.stack([spec] * 4),
        spec.expand(2, 4).unbind(0)[0],
    ):
        assert changed == partly_known((4,))
    assert spec.expand(4).unsqueeze(0).shape == spec.expand(4).unsqueeze(0)["c"].shape == (1, 4)
    assert spec.to(torch.float64)["a"].dtype == torch.float64
    assert spec.to("cpu")["b"] is spec.cpu()["c", "d"] is None
    spec.device = "cpu"
    assert spec["b"] is None
    assert spec["c"].device == torch.device("cpu")


def test_a_stack_knows_an_entry_that_all_know() -> None:
    spec = torch.stack([partly_known(), partly_known().set("b", Unbounded())])
    assert spec["b"] is None
    assert list(spec.keys()) == ["a", "b", "c"]
    assert list(spec.leaves()) == ["a", ("c", "e")]
    assert [part["b"] for part in spec.unbind(0)] == [None, Unbounded()]
    assert spec.set("a", None)["a"] is None
    missing = torch.stack([partly_known(), partly_known().exclude("b")])
    assert "b" not in missing


# Locks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
def test_a_locked_composite_cannot_be_changed(stacked: bool) -> None:
    spec = Composite(a=Unbounded((3,)), c={"e": Unbounded((2,))})
    if stacked:
        spec = torch.stack([spec, Composite(a=Unbounded((4,)), c={"e": Unbounded((2,))})])
    batch = (2,) if stacked else ()
    assert not spec.is_locked
    assert spec.lock_() is spec
    assert spec.is_locked
    new = Unbounded((*batch, 1))
    changes = [
        lambda: spec.set("q", new),
        lambda: spec.set(("c", "q"), new),
        lambda: spec.__setitem__("a", None),
        lambda: spec.__delitem__("a"),
        lambda: spec.pop("a"),
        lambda: spec.update({"q": new}),
    ]
    for change in changes:
        with pytest.raises(RuntimeError, match="Cannot modify a locked"):
            change()
    assert list(spec.keys(True, True)) == ["a", ("c", "e")] or stacked
    for copied in (spec.clone(), spec.expand(5, *spec.shape), spec.unsqueeze(0), spec.exclude("a")):
        assert not copied.is_locked
        copied.set("q", Unbounded((*copied.shape, 1)))
    assert pickle.loads(pickle.dumps(spec)).is_locked
    assert spec.clone() == spec
    assert spec.unlock_() is spec
    spec.set(("c", "q"), new)
    assert ("c", "q") in spec


def test_nested_composites_are_locked_with_it() -> None:
    spec = Composite(c={"e": Unbounded()}).lock_(recurse=True)
    assert spec["c"].is_locked
    with pytest.raises(RuntimeError, match="Cannot modify a locked"):
        spec["c"].set("q", Unbounded())
    spec.unlock_(recurse=True)["c"].set("q", Unbounded())


def test_entries_of_nested_composites_that_are_not_locked_may_be_set() -> None:
    spec = Composite(a=Composite(b=Unbounded(1))).lock_(recurse=False)
    spec["a", "c"] = Unbounded(2)
    del spec["a", "b"]
    assert list(spec.keys(True, True)) == [("a", "c")]
    for change in (lambda: spec.set("d", None), lambda: spec.set(("d", "e"), None), lambda: spec.pop("a")):
        with pytest.raises(RuntimeError, match="Cannot modify a locked"):
            change()
    spec.lock_()
    with pytest.raises(RuntimeError, match="Cannot modify a locked"):
        spec["a", "c"] = Unbounded(3)
    with pytest.raises(RuntimeError, match="Cannot modify a locked"):
        del spec["a", "c"]
