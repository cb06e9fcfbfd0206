"""Elements come back in the structure in which they were given: lists, dictionaries, tuples, tensorclasses."""

from __future__ import annotations

import dataclasses
import io
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorClass, TensorDict, TensorDictBase

from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorStorage,
)
from rollwright.data.replay_buffers.storages import batches

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage]


class Step(TensorClass):
    obs: torch.Tensor
    reward: torch.Tensor


class Pair(NamedTuple):
    obs: torch.Tensor
    reward: torch.Tensor


@dataclasses.dataclass(kw_only=True)
class Record:
    obs: torch.Tensor
    reward: torch.Tensor


def leaves_of(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(n * 2.0).reshape(n, 2), torch.arange(n)


BATCHES: dict[str, Any] = {
    "dict": lambda n: dict(zip(("obs", "reward"), leaves_of(n), strict=True)),
    "tuple": lambda n: leaves_of(n),
    "namedtuple": lambda n: Pair(*leaves_of(n)),
    "dataclass": lambda n: Record(obs=leaves_of(n)[0], reward=leaves_of(n)[1]),
    "tensorclass": lambda n: Step(*leaves_of(n), batch_size=[n]),
    "nested": lambda n: {"a": [leaves_of(n)[0]], "b": (leaves_of(n)[1], {3: leaves_of(n)[1]})},
    "tensordict inside": lambda n: (TensorDict({"obs": leaves_of(n)[0]}, [n]), leaves_of(n)[1]),
    "tensorclass inside": lambda n: TensorDict({"step": Step(*leaves_of(n), batch_size=[n])}, [n]),
}


def same(one: Any, other: Any) -> bool:
    """Whether two structures are of the same types and hold the same numbers."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, TensorDictBase | TensorClass):
        return one.batch_size == other.batch_size and bool((one == other).all())
    if dataclasses.is_dataclass(one):
        return all(same(value, other.__dict__[name]) for name, value in vars(one).items())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return len(one) == len(other) and all(map(same, one, other))


def taken(data: Any, index: Any) -> Any:
    """Elements of a structure of batches, as NumPy would index each leaf."""
    if isinstance(data, torch.Tensor | TensorDictBase | TensorClass):
        return data[index]
    if isinstance(data, dict):
        return {name: taken(value, index) for name, value in data.items()}
    if dataclasses.is_dataclass(data):
        return type(data)(**{name: taken(value, index) for name, value in vars(data).items()})
    if isinstance(data, Pair):
        return Pair(*(taken(value, index) for value in data))
    return type(data)(taken(value, index) for value in data)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_a_structure_comes_back_as_it_was(storage, kind):
    data = BATCHES[kind](5)
    buffer = ReplayBuffer(storage=storage(10), batch_size=4)
    assert buffer.extend(data).tolist() == [0, 1, 2, 3, 4]
    batch, info = buffer.sample(return_info=True)
    assert same(batch, taken(data, info["index"]))
    assert same(buffer[:], data)
    assert same(buffer[1:3], taken(data, slice(1, 3)))
    assert same(buffer[3], taken(data, 3))
    assert same(buffer.storage[3], taken(data, 3))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", BATCHES)
def test_elements_are_added_one_by_one_and_in_lists(storage, kind):
    data = BATCHES[kind](5)
    one, many = (ReplayBuffer(storage=storage(10)) for _ in range(2))
    for place in range(5):
        assert one.add(taken(data, place)) == place
    many.extend([taken(data, place) for place in range(5)])
    assert same(one[:], data)
    assert same(many[:], data)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("batch_size", [[], [1], [3]])
def test_a_list_of_tensordicts_is_stacked(storage, batch_size):
    items = [TensorDict({"obs": torch.full((*batch_size, 2), float(n))}, batch_size) for n in range(4)]
    buffer = TensorDictReplayBuffer(storage=storage(10), batch_size=4)
    buffer.extend(items)
    assert len(buffer) == 4
    assert buffer.sample().shape == (4, *batch_size)
    assert torch.equal(buffer[:]["obs"], torch.stack(items)["obs"])


def test_the_ring_goes_on_over_its_seam_and_skips_what_has_no_room():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.extend(BATCHES["dict"](3))
    assert buffer.extend(BATCHES["dict"](3)).tolist() == [3, 0, 1]
    assert buffer[:]["reward"].tolist() == [1, 2, 2, 0]
    assert buffer.extend(BATCHES["dict"](6)).tolist() == [-1, -1, 2, 3, 0, 1]
    assert sorted(buffer[:]["reward"].tolist()) == [2, 3, 4, 5]


def test_arrays_and_numbers_become_tensors():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=3)
    buffer.add({"obs": np.zeros(4), "action": 2, "reward": 1.0, "done": False})
    buffer.extend([{"obs": np.ones(4), "action": np.int64(3), "reward": 2.0, "done": True}])
    stored = buffer[:]
    assert [stored[name].dtype for name in stored] == [torch.float64, torch.int64, torch.float32, torch.bool]
    assert stored["action"].tolist() == [2, 3]
    assert buffer.sample()["obs"].shape == (3, 4)
    numbers = ReplayBuffer(storage=LazyTensorStorage(10))
    numbers.extend([1.5, 2.5])
    assert numbers[:].tolist() == [1.5, 2.5]


def test_a_missing_entry_of_a_tensorclass_comes_back_as_none():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend((torch.arange(3), None))
    assert buffer[1] == (torch.tensor(1), None)


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"obs": torch.zeros(3, 2), "reward": torch.zeros(2)}, ValueError, r"same, got.*\[3, 2\].*\[2\].*add\(\)"),
        ({"obs": torch.zeros(3, 2), "name": "a"}, TypeError, "got str in 'name'.*ListStorage"),
        ([{"obs": torch.zeros(2)}, (torch.zeros(2),)], TypeError, "one structure, got a dict at 0 and a tuple at 1"),
        ([{"obs": torch.zeros(2)}, {"obs": torch.zeros(3)}], ValueError, r"'obs' of one shape.*\(2,\), \(3,\)"),
        ([TensorDict({"a": 1}), TensorDict({"b": 1})], KeyError, "entries 'a'.*got 'b'.*at 1"),
        ([{"obs": 1}, {"other": 1}], TypeError, "one structure"),
        ({(0, 1): torch.zeros(3)}, TypeError, "text or integers"),
        ([], (ValueError, TypeError), "at least one element|expected"),
        ({}, ValueError, "none"),
    ],
)
def test_structures_that_do_not_fit_are_refused_and_change_nothing(storage, data, error, message):
    buffer = ReplayBuffer(storage=storage(10))
    for held in (0, 3):
        with pytest.raises(error, match=message):
            buffer.extend(data)
        assert buffer.write_count == held
        buffer.extend({"obs": torch.zeros(3, 2)})


def test_another_structure_than_the_first_is_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(BATCHES["tuple"](3))
    for kind, message in (("dict", "a dict of 'obs', 'reward'"), ("namedtuple", "Pair"), ("tensorclass", "Step")):
        with pytest.raises(TypeError, match=rf"a tuple of 'tensor', 'tensor'.*got.*{message}"):
            buffer.extend(BATCHES[kind](3))
        with pytest.raises(TypeError, match="Convert them"):
            buffer.add(taken(BATCHES[kind](3), 0))
    assert buffer.write_count == 3


def test_a_buffer_of_tensordicts_names_what_it_cannot_write_its_index_into():
    for kind in ("dict", "tuple", "tensorclass", "dataclass"):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10))
        with pytest.raises(
            TypeError, match=r"TensorDictReplayBuffer.*TensorDicts, got.*ReplayBuffer.*return_info=True"
        ):
            buffer.extend(BATCHES[kind](3))
        with pytest.raises(TypeError, match="TensorDictReplayBuffer"):
            buffer.add(taken(BATCHES[kind](3), 0))


def test_priorities_of_a_list_of_tensordicts_are_read():
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=1e-12, storage=LazyTensorStorage(10), batch_size=64
    )
    buffer.extend([TensorDict({"obs": torch.tensor(n), "td_error": torch.tensor(float(n == 2))}) for n in range(4)])
    assert set(buffer.sample()["obs"].tolist()) == {2}


def test_priorities_of_a_structure_are_set_by_index():
    buffer = PrioritizedReplayBuffer(alpha=1.0, beta=1.0, eps=1e-12, storage=LazyTensorStorage(10), batch_size=32)
    index = buffer.extend(BATCHES["tuple"](4))
    buffer.update_priority(index, torch.tensor([0.0, 0.0, 0.0, 1.0]))
    _, rewards = buffer.sample()
    assert set(rewards.tolist()) == {3}


def test_slices_of_dictionaries_end_where_trajectories_do():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=4), batch_size=40)
    done = torch.arange(30) % 10 == 9
    buffer.extend({"step": torch.arange(30) % 10, "next": {"done": done}})
    batch = buffer.sample()
    ends = batch["next"]["done"].nonzero().reshape(-1)
    assert bool((batch["step"][ends[ends < len(batch["step"]) - 1] + 1] <= 6).all())
    assert torch.equal(batch["next"]["done"], batch["step"] == 9)


def test_two_dimensions():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), batch_size=8)
    data = {"obs": torch.arange(24).reshape(2, 4, 3), "inner": (torch.arange(8).reshape(2, 4),)}
    buffer.extend(data)
    assert same(buffer[:], data)
    assert same(buffer[1, 2:], taken(data, (1, slice(2, None))))
    assert buffer.sample()["obs"].shape == (8, 3)


@pytest.mark.parametrize("kind", BATCHES)
def test_structures_survive_saving(kind, tmp_path):
    data = BATCHES[kind](5)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    buffer.extend(data)
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for storage in (LazyTensorStorage, LazyMemmapStorage):
        again = ReplayBuffer(storage=storage(10))
        again.load_state_dict(state)
        assert same(again[:], data)
    buffer.dumps(tmp_path / "saved")
    again = ReplayBuffer(storage=LazyTensorStorage(10))
    again.loads(tmp_path / "saved")
    assert same(again[:], data)
    other = ReplayBuffer(storage=LazyTensorStorage(10))
    other.extend(torch.zeros(3))
    with pytest.raises(TypeError, match="like those of the storage"):
        other.load_state_dict(state)


def test_a_structure_in_files_is_there_after_a_restart(tmp_path):
    data = BATCHES["nested"](5)
    ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path)).extend(data)
    again = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True))
    assert same(again[:], data)


def test_a_structure_is_shared():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), shared=True, batch_size=3)
    buffer.extend(BATCHES["nested"](5))
    assert same(buffer[:], BATCHES["nested"](5))
    assert isinstance(buffer.sample()["b"], tuple)


def test_what_is_stored_is_a_copy():
    for storage in STORAGES:
        data = BATCHES["dict"](3)
        buffer = ReplayBuffer(storage=storage(10))
        buffer.extend(data)
        data["obs"].zero_()
        buffer[1]["obs"].zero_()
        assert same(buffer[:], BATCHES["dict"](3))


def test_given_data_may_be_a_structure():
    storage = TensorStorage(BATCHES["dict"](5))
    assert same(ReplayBuffer(storage=storage, batch_size=2)[:], BATCHES["dict"](5))
    assert len(storage) == 5


def test_classes_that_a_process_does_not_know_become_plain(monkeypatch):
    plain = {"namedtuple": tuple, "dataclass": dict, "tensorclass": TensorDict}
    for kind, found in plain.items():
        buffer = ReplayBuffer(storage=LazyTensorStorage(10))
        buffer.extend(BATCHES[kind](3))
        with monkeypatch.context() as patch:
            patch.setattr(batches, "_classes", {})
            patch.setattr(batches, "class_at", lambda path: None)
            assert type(buffer[:]) is found
        assert same(buffer[:], BATCHES[kind](3))


# Storages by place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
def test_a_storage_is_read_and_written_by_place(storage):
    kept = storage(6)
    kept.set(0, TensorDict({"obs": torch.tensor(0.0)}))
    kept.set(range(1, 4), TensorDict({"obs": torch.arange(1.0, 4.0)}, [3]))
    assert len(kept) == 4
    assert kept.get(2)["obs"] == 2.0
    assert not kept.is_full
    assert [float(element["obs"]) for element in kept] == [0.0, 1.0, 2.0, 3.0]
    kept[1] = TensorDict({"obs": torch.tensor(7.0)})
    kept[torch.tensor([0, 3])] = TensorDict({"obs": torch.tensor([8.0, 9.0])}, [2])
    assert [float(element["obs"]) for element in kept[:]] == [8.0, 7.0, 2.0, 9.0]
    kept[4:6] = TensorDict({"obs": torch.tensor([4.0, 5.0])}, [2])
    assert kept.is_full
    assert len(kept) == 6
    assert kept.contains(5)
    assert not kept.contains(6)
    assert 5 in kept
    assert torch.tensor([0, 6]) not in kept
    assert kept.contains(torch.tensor([0, 6])).tolist() == [True, False]
    for place in (6, range(6, 8)):
        with pytest.raises(IndexError, match="6 elements"):
            kept.set(place, TensorDict({"obs": torch.zeros(2)}, [2]))


def test_places_far_behind_the_last_are_refused():
    kept = LazyTensorStorage(10)
    kept.set(range(3), torch.arange(3.0))
    with pytest.raises(IndexError, match="3 elements"):
        kept.set(5, torch.tensor(1.0))
    assert len(kept) == 3


def test_programs_that_look_into_a_buffer_find_its_parts(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    assert buffer._storage._storage is None
    buffer.extend(TensorDict({"a": torch.arange(3), "b": {"c": torch.zeros(3, 2)}}, [3]))
    assert buffer._storage is buffer.storage
    assert (buffer._sampler, buffer._writer) == (buffer.sampler, buffer.writer)
    rows = buffer._storage._storage
    assert rows.batch_size == (10,)
    assert rows["a"][:3].tolist() == [0, 1, 2]
    assert rows["b", "c"].filename == str(tmp_path / "buffer.rows")
    in_memory = LazyTensorStorage(10)
    in_memory.append(torch.arange(3))
    assert in_memory._storage.filename is None


def test_whether_something_can_be_drawn():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    assert not buffer.can_sample()
    buffer.extend(torch.arange(3))
    assert buffer.can_sample(100)
    consuming = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, consume_after_n_samples=1)
    consuming.extend(torch.arange(6))
    assert consuming.can_sample()
    consuming.sample()
    assert not consuming.can_sample()
    assert consuming.can_sample(2)
