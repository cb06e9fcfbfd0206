"""Entries of stored elements are changed by place, alone and all at once."""

from __future__ import annotations

import math

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler

STORAGES = [LazyTensorStorage, LazyMemmapStorage]


def frames(n: int, start: int = 0) -> TensorDict:
    value = torch.arange(start, start + n)
    return TensorDict({"a": value, "next": {"b": torch.zeros(n, 2)}}, [n])


def filled(storage=LazyTensorStorage, **options) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=storage(10), **options)
    buffer.extend(frames(6))
    return buffer


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("index", [[1, 3], torch.tensor([1, 3]), slice(1, 4, 2)])
def test_an_entry_of_some_elements(storage, index):
    buffer = filled(storage)
    assert buffer.set_at_("a", torch.tensor([10, 30]), index) is buffer
    assert buffer[:]["a"].tolist() == [0, 10, 2, 30, 4, 5]
    buffer.set_at_(("next", "b"), torch.tensor([1.0, 2.0]), index)  # for each of them
    assert buffer["next", "b"].tolist() == [[0, 0], [1, 2], [0, 0], [1, 2], [0, 0], [0, 0]]


def test_an_entry_of_one_element():
    buffer = filled()
    buffer.set_at_("a", 7, 5)
    buffer.set_at_(("next", "b"), torch.ones(2), torch.tensor(0))
    assert buffer[5]["a"] == 7
    assert buffer[0]["next", "b"].tolist() == [1, 1]


def test_an_entry_of_all_elements():
    buffer = filled()
    buffer.set_("a", torch.arange(6) + 20)
    assert buffer[:]["a"].tolist() == list(range(20, 26))
    buffer.set_("a", 3)
    assert buffer[:]["a"].tolist() == [3] * 6


def test_several_entries_of_all_elements():
    buffer, fresh = filled(), frames(6, 50)
    fresh["next", "b"] += 1
    buffer.update_(fresh)
    assert (buffer[:] == fresh).all()
    buffer.update_({"a": torch.zeros(6, dtype=torch.int64), ("next", "b"): torch.zeros(6, 2)}, keys_to_update=["a"])
    assert buffer[:]["a"].tolist() == [0] * 6
    assert (buffer["next", "b"] == 1).all()


@pytest.mark.parametrize("given", [{"next": {"b": torch.ones(6, 2)}}, {"next": TensorDict({"b": torch.ones(6, 2)})}])
def test_dictionaries_of_entries_may_be_nested(given):
    buffer = filled()
    buffer.update_({"a": 3, **given})
    assert buffer[:]["a"].tolist() == [3] * 6
    assert (buffer["next", "b"] == 1).all()


def test_the_index_of_a_batch_names_elements_after_the_ring_has_moved():
    buffer = filled(batch_size=20)
    index = buffer.extend(frames(6, 100))
    assert index.tolist() == [6, 7, 8, 9, 0, 1]
    buffer.set_at_("a", torch.arange(6), index)
    assert buffer[:]["a"].tolist() == [4, 5, 2, 3, 4, 5, 0, 1, 2, 3]
    batch, info = buffer.sample(return_info=True)
    buffer.set_at_("a", batch["a"] * 2, info["index"])
    assert torch.equal(buffer.storage.read(info["index"].numpy())["a"], batch["a"] * 2)


def test_rows_of_several_dimensions():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2))
    index = buffer.extend(TensorDict({"a": torch.arange(6).reshape(2, 3)}, [2, 3]))
    buffer.set_("a", torch.arange(6).reshape(2, 3) * 10)
    assert buffer[:]["a"].tolist() == [[0, 10, 20], [30, 40, 50]]
    buffer.set_at_("a", torch.arange(6).reshape(2, 3), index)  # of the batch that was written
    assert buffer[:]["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    buffer.set_at_("a", torch.tensor([1, 2]), index[:2])
    changed = buffer.storage.read(buffer.storage.flat(index[:2]))["a"]
    assert changed.tolist() == [1, 2]


def test_slices_see_boundaries_that_were_changed():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=6, traj_key="a"), batch_size=6)
    buffer.extend(frames(6))
    assert len(buffer.sample()) == 1
    buffer.set_("a", 0)
    assert len(buffer.sample()) == 6


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda b: b.set_("c", 1), KeyError, r"data: expected entries among .*'a'.*, got 'c'"),
        (lambda b: b.set_("a", torch.zeros(5, dtype=torch.int64)), ValueError, r"'a' of shape \[6\]"),
        (lambda b: b.set_("a", torch.zeros(6)), ValueError, r"int64, got \[6\] and torch.float32"),
        (lambda b: b.set_at_("a", 1, [6]), IndexError, "places of elements that are stored"),
        (lambda b: b.set_at_("a", 1, torch.tensor([-1])), IndexError, "places of elements that are stored"),
    ],
)
def test_what_does_not_fit_changes_nothing(change, error, message):
    buffer = filled()
    with pytest.raises(error, match=message):
        change(buffer)
    assert (buffer[:] == frames(6)).all()


def test_a_list_of_objects_has_no_entries_to_change():
    with pytest.raises(TypeError, match="ListStorage has no entries that can be changed alone"):
        filled(ListStorage).set_("a", 1)


def test_elements_are_read_and_written_by_place():
    buffer = filled()
    data = buffer.read_all_in_order()
    assert (data == buffer[:]).all()
    assert buffer.read_all_in_order(end=2)["a"].tolist() == [0, 1]
    data["a"] = data["a"] + 10
    buffer.write_all(data[:2])
    assert buffer[:]["a"].tolist() == [10, 11, 2, 3, 4, 5]
    buffer.write_all(data)
    assert buffer[:]["a"].tolist() == list(range(10, 16))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
@pytest.mark.parametrize("shape", [(), (2,), (0, 3)])
def test_unsigned_integers_are_changed_in_place(dtype, shape):
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    rows = torch.arange(5 * math.prod(shape)).to(dtype).reshape(5, *shape)
    buffer.extend(TensorDict({"entry": rows}, [5]))
    buffer[1:3] = TensorDict({"entry": rows[3:]}, [2])
    buffer.set_at_("entry", rows[4:], torch.tensor([0]))
    assert buffer[:]["entry"].tolist() == [rows.tolist()[n] for n in (4, 3, 4, 3, 4)]


def test_an_entry_without_numbers_is_changed():
    buffer = ReplayBuffer(storage=LazyTensorStorage(5))
    buffer.extend(TensorDict({"entry": torch.zeros(5, 0)}, [5]))
    buffer.set_at_("entry", torch.zeros(2, 0), torch.tensor([0, 1])).set_("entry", torch.zeros(5, 0))
    assert buffer[:]["entry"].shape == (5, 0)
