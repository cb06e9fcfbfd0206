"""Options of buffers that programs use: inverted transforms, include_info, update_priority, empty, consumption."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import (
    ConsumingSampler,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedReplayBuffer,
    PrioritizedSampler,
    RaggedStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from rollwright.envs import RewardScaling


def frames(n: int, start: int = 0) -> TensorDict:
    return TensorDict({"obs": torch.arange(start, start + n)}, [n])


class Doubled:
    """A transform with an inverse."""

    def __call__(self, batch):
        return batch.set("obs", batch["obs"] * 2)

    def inv(self, data):
        return data.clone().set("obs", data["obs"] * 10)


# Transforms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("insert", [False, True])
def test_an_inverted_function_is_applied_to_what_is_written_alone(insert):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    add_one = lambda data: data + 1  # noqa: E731
    buffer.insert_transform(0, add_one, invert=True) if insert else buffer.append_transform(add_one, invert=True)
    buffer.extend(frames(4))
    assert buffer[:]["obs"].tolist() == [1, 2, 3, 4]
    assert set(buffer.sample()["obs"].tolist()) <= {1, 2, 3, 4}


def test_an_inverted_transform_changes_both_sides():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=1)
    buffer.append_transform(Doubled(), invert=True)
    buffer.extend(frames(1, 3))
    assert buffer.storage[:]["obs"].tolist() == [6]
    assert buffer[:]["obs"].tolist() == [60]
    assert buffer.sample()["obs"].tolist() == [60]


@pytest.mark.parametrize("give", ["extend", "add", "list", "set"])
def test_what_is_written_past_an_inverted_transform_is_left_as_it_is(give):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=1)
    buffer.append_transform(RewardScaling(1.0, 2.0, in_keys=["obs", ("next", "obs")]), invert=True)
    data = TensorDict({"obs": torch.full((2,), 3.0), "next": {"obs": torch.full((2,), 4.0)}}, [2])
    given = {"extend": data, "add": data[0], "list": [data[0], data[1]], "set": data}[give]
    if give == "set":
        buffer.extend(data.clone())
        buffer[:2] = given
    else:
        buffer.add(given) if give == "add" else buffer.extend(given)
    for part in given if isinstance(given, list) else [given]:
        assert part["obs"].unique().tolist() == [3.0]
        assert part["next", "obs"].unique().tolist() == [4.0]
    assert buffer.storage[:]["next", "obs"].unique().tolist() == [9.0]


def test_writes_pass_inverses_from_the_last_transform_to_the_first():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=1)
    buffer.append_transform(Doubled()).append_transform(lambda data: data + 1, invert=True)
    buffer.extend(frames(1, 3))
    assert buffer.storage[:]["obs"].tolist() == [40]  # (3 + 1) * 10
    assert buffer.sample()["obs"].tolist() == [80]
    assert buffer.direct_writes() is not None


# What sample() returns ----------------------------------------------------------------------------


def test_info_is_included_as_asked():
    for buffer, default in (
        (ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2), False),
        (TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=2), True),
    ):
        buffer.extend(frames(4))
        assert ("index" in buffer.sample().keys()) is default  # noqa: SIM118
        for asked in (True, False):
            batch, info = buffer.sample(return_info=True, include_info=asked)
            assert ("index" in batch.keys()) is asked  # noqa: SIM118
            assert torch.equal(batch["obs"], info["index"])


def test_info_is_not_included_in_what_is_no_tensordict():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    buffer.extend(torch.arange(4))
    assert buffer.sample(include_info=False).shape == (2,)
    with pytest.raises(TypeError, match=r"include_info.*TensorDicts, got Tensor.*return_info=True"):
        buffer.sample(include_info=True)


# Priorities ---------------------------------------------------------------------------------------


def prioritized() -> TensorDictPrioritizedReplayBuffer:
    return TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=1.0, eps=1e-12, storage=LazyTensorStorage(10), batch_size=64
    )


@pytest.mark.parametrize("asked", [None, True, False])
def test_first_priorities_are_read_unless_told_otherwise(asked):
    buffer = prioritized()
    buffer.extend(frames(4).set("td_error", torch.tensor([0.0, 0.0, 1.0, 0.0])), update_priority=asked)
    assert (len(set(buffer.sample()["obs"].tolist())) == 1) is (asked is not False)


def test_members_of_an_ensemble_are_told_too():
    ensemble = ReplayBufferEnsemble(prioritized(), prioritized(), batch_size=64, sample_from_all=True)
    for member in range(2):
        ensemble.extend(
            frames(4).set("td_error", torch.tensor([0.0, 0.0, 1.0, 0.0])), member=member, update_priority=False
        )
    assert len(set(ensemble.sample()["obs"].reshape(-1).tolist())) > 1


def test_priorities_are_ignored_where_all_elements_matter_alike():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    index = buffer.extend(frames(4))
    buffer.update_priority(index, torch.rand(4))
    buffer.update_priority(2, 1.0)
    assert len(buffer.sample()) == 4


def test_a_sampler_takes_priorities_by_index_alone():
    sampler = PrioritizedSampler(12, alpha=1.0, beta=1.0, eps=1e-12)
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), sampler=sampler, batch_size=32)
    index = buffer.extend(TensorDict({"obs": torch.arange(6).reshape(2, 3)}, [2, 3]))
    sampler.update_priority(index, torch.zeros(6))
    sampler.update_priority(index[3], 1.0)
    assert set(buffer.sample()["obs"].tolist()) == {int(buffer.storage.read(buffer.storage.flat(index[3]))["obs"])}


def test_an_index_may_be_one_tensor_for_each_dimension():
    sampler = PrioritizedSampler(12, alpha=1.0, beta=1.0, eps=1e-12)
    buffer = ReplayBuffer(storage=LazyTensorStorage(12, ndim=2), sampler=sampler, batch_size=32)
    index = buffer.extend(TensorDict({"obs": torch.arange(6).reshape(2, 3)}, [2, 3]))
    buffer.update_priority(tuple(index.unbind(-1)), torch.zeros(6))
    buffer.update_priority((torch.tensor([1, 2]), torch.tensor([0, 1])), torch.ones(2))
    assert set(buffer.sample()["obs"].tolist()) == {1, 5}


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_another_storage_may_bring_its_own_collation(storage):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    buffer.set_storage(storage(10), collate_fn=lambda batch: {"collated": batch})
    buffer.extend(frames(4))
    assert set(buffer.sample()) == {"collated"}
    buffer.set_storage(storage(10))
    buffer.extend(frames(4))
    assert set(buffer.sample()) == {"collated"}
    with pytest.raises(TypeError, match="collate_fn: expected a callable"):
        buffer.set_storage(storage(10), collate_fn=3)


@pytest.mark.parametrize("kind", [PrioritizedReplayBuffer, TensorDictPrioritizedReplayBuffer])
def test_options_of_where_and_when_priorities_change_are_accepted(kind):
    options = {"alpha": 0.7, "beta": 0.5, "sync": False, "sampler_device": "cpu"}
    buffer = kind(storage=LazyTensorStorage(10), shared=True, batch_size=4, **options)
    buffer.extend(frames(4))
    assert buffer.sample()["obs"].shape == (4,)


# Emptying -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage, ListStorage, RaggedStorage])
@pytest.mark.parametrize("shared", [False, True])
def test_an_index_names_places_after_a_buffer_was_emptied(kind, shared):
    if shared and kind is ListStorage:
        return
    sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0)
    buffer = ReplayBuffer(storage=kind(10), sampler=sampler, batch_size=20, shared=shared)
    for start in (0, 100, 200):
        index = buffer.extend(frames(6, start))
        assert index.tolist() == list(range(6))
        assert buffer[index]["obs"].tolist() == list(range(start, start + 6))
        batch, info = buffer.sample(return_info=True)
        assert torch.equal(buffer[info["index"]]["obs"], batch["obs"])
        assert set(batch["obs"].tolist()) <= set(range(start, start + 6))
        buffer.update_priority(index, 9.0)
        buffer.empty()
    assert buffer.write_count == 18
    twin = ReplayBuffer(storage=kind(10))
    buffer.extend(frames(2))
    twin.load_state_dict(buffer.state_dict())
    assert (twin.write_count, twin[:]["obs"].tolist()) == (20, [0, 1])


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_the_count_of_writes_starts_again_where_that_is_asked(storage):
    buffer = ReplayBuffer(storage=storage(10), batch_size=2)
    buffer.extend(frames(4))
    buffer.empty()
    assert (len(buffer), buffer.write_count) == (0, 4)
    buffer.extend(frames(3))
    buffer.empty(empty_write_count=True)
    assert (len(buffer), buffer.write_count) == (0, 0)
    buffer.extend(frames(12))
    assert buffer.write_count == 12
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    again = ReplayBuffer(storage=storage(10))
    again.load_state_dict(torch.load(file, weights_only=False))
    assert again.write_count == 12


def test_the_count_survives_in_files(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path))
    buffer.extend(frames(4))
    buffer.empty(True)
    buffer.extend(frames(3))
    again = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path, existsok=True))
    assert (len(again), again.write_count) == (3, 3)


# Consumption --------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
def test_each_element_is_drawn_so_often_and_no_more(times):
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4, consume_after_n_samples=times)
    buffer.extend(frames(10))
    drawn = torch.cat([batch["obs"] for batch in buffer])
    assert torch.equal(drawn.bincount(), torch.full((10,), times))
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match=f"drawn {times} times.*extend"):
        buffer.sample()
    buffer.extend(frames(3, 10))
    assert len(buffer) == 3
    assert sorted(buffer.sample()["obs"].tolist()) == [10, 11, 12]


def test_what_is_overwritten_is_not_drawn():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), batch_size=2, sampler=ConsumingSampler())
    buffer.extend(frames(4))
    first = buffer.sample()["obs"].tolist()
    buffer.extend(frames(3, 4))
    left = [4, 5, 6] + ([3] if 3 not in first else [])
    assert len(buffer) == len(left)
    assert sorted(torch.cat([batch["obs"] for batch in buffer]).tolist()) == sorted(left)
    buffer.extend(frames(2, 7))
    buffer.empty()
    assert len(buffer) == 0


def test_consumption_survives_saving():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, consume_after_n_samples=1)
    buffer.extend(frames(6))
    first = buffer.sample()["obs"]
    again = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, consume_after_n_samples=1)
    again.load_state_dict(buffer.state_dict())
    copy = pickle.loads(pickle.dumps(buffer))
    for other in (again, copy):
        assert len(other) == 2
        assert sorted(torch.cat([first, other.sample()["obs"]]).tolist()) == list(range(6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consume_after_n_samples": 0}, "consume_after_n_samples.*at least 1"),
        ({"consume_after_n_samples": 1, "sampler": SamplerWithoutReplacement()}, "expected no sampler beside it"),
        ({"consume_after_n_samples": 1, "prefetch": 2}, "prefetch=None"),
        ({"consume_after_n_samples": 1, "shared": True}, "service_backend='process'"),
    ],
)
def test_consumption_that_could_not_be_kept_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2, **options)


# Names of the field -------------------------------------------------------------------------------


def test_options_that_change_nothing_are_taken():
    buffer = ReplayBuffer(
        storage=lambda: LazyTensorStorage(10, compilable=True),
        batch_size=2,
        delayed_init=True,
        compilable=True,
        service_backend="direct",
    )
    buffer.extend(frames(4))
    assert len(buffer.sample()) == 2


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_storages_may_be_shared_from_the_start(storage):
    buffer = ReplayBuffer(storage=storage(10, shared_init=True), batch_size=2)
    assert buffer.storage.shared
    twin = pickle.loads(pickle.dumps(PrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=storage(10))))
    assert not twin.storage.shared or storage is LazyMemmapStorage
    buffer.extend(frames(4))
    assert len(buffer) == 4
