"""Writers: where new elements go."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rollwright.collectors import Collector
from rollwright.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    RoundRobinWriter,
    SampleToInsertRatio,
    TensorDictMaxValueWriter,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
    TensorStorage,
)
from rollwright.testing.mocking_classes import CountingEnv


def ranked(values, start: int = 0, key="value") -> TensorDict:
    values = torch.as_tensor(values, dtype=torch.float32)
    return TensorDict({key: values, "serial": torch.arange(start, start + len(values))}, [len(values)])


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictRoundRobinWriter])
def test_round_robin_goes_over_the_oldest(writer):
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), writer=writer())
    assert buffer.extend(torch.arange(2)).tolist() == [0, 1]
    assert buffer.extend(torch.arange(2, 4)).tolist() == [2, 0]
    assert buffer[:].tolist() == [3, 1, 2]


def test_an_immutable_buffer_is_read_and_not_written():
    buffer = ReplayBuffer(storage=TensorStorage(torch.arange(3)), writer=ImmutableDatasetWriter(), batch_size=2)
    for call in (buffer.extend, buffer.add):
        with pytest.raises(RuntimeError, match="read-only"):
            call(torch.arange(3))
    assert buffer[:].tolist() == [0, 1, 2]
    assert buffer.sample().shape == (2,)


@pytest.mark.parametrize("writer", [RoundRobinWriter, TensorDictMaxValueWriter, ImmutableDatasetWriter])
def test_programs_that_compile_may_say_so(writer):
    assert isinstance(writer(compilable=True), writer)
    assert not RoundRobinWriter(True).tracks_generations


# Generations -------------------------------------------------------------------------------------


def test_a_writer_tells_how_often_places_were_written_before():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=RoundRobinWriter(track_generations=True), batch_size=4)
    first = buffer.extend(torch.arange(3))
    assert buffer.writer.generations_of(first).tolist() == [0, 0, 0]
    second = buffer.extend(torch.arange(3, 6))
    assert second.tolist() == [3, 0, 1]
    assert buffer.writer.generations_of(second).tolist() == [0, 1, 1]
    assert buffer.writer.generations_of(buffer.add(torch.tensor(6))).tolist() == 1
    assert buffer.writer.generations_of(torch.tensor([-1, 4, 99])).tolist() == [-1, -1, -1]
    _, info = buffer.sample(return_info=True)
    assert torch.equal(buffer.writer.generations_of(info["index"]), info["index_generation"])


def test_generations_of_a_storage_of_two_dimensions():
    buffer = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2), writer=RoundRobinWriter(track_generations=True))
    index = buffer.extend(torch.arange(4).reshape(2, 2))
    assert buffer.writer.generations_of(index).tolist() == [0] * 4
    again = buffer.extend(torch.arange(4).reshape(2, 2))  # 3 rows of 2: over the first
    assert buffer.writer.generations_of(again).tolist() == [0, 0, 1, 1]
    assert buffer.writer.generations_of(torch.tensor([[2, 0], [3, 0], [0, 2]])).tolist() == [0, -1, -1]
    assert buffer.writer.generations_of(index[0]).tolist() == 1


def test_a_writer_that_tracks_nothing_knows_no_generations():
    buffer = ReplayBuffer(storage=LazyTensorStorage(6, ndim=2))
    index = buffer.extend(torch.arange(4).reshape(2, 2))
    assert buffer.writer.generations_of(index).tolist() == [-1] * 4
    assert RoundRobinWriter(track_generations=True).generations_of(torch.arange(2)).tolist() == [-1, -1]


def test_a_writer_follows_its_buffer_to_another_storage():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    buffer.set_writer(RoundRobinWriter(track_generations=True))
    index = buffer.extend(torch.arange(4))
    assert buffer.writer.generations_of(index).tolist() == [0] * 4
    buffer.set_storage(LazyTensorStorage(4))
    assert buffer.writer.generations_of(index).tolist() == [-1] * 4
    twin = pickle.loads(pickle.dumps(buffer))
    assert twin.writer.storage is twin.storage


@pytest.mark.parametrize("writer", [RoundRobinWriter(), TensorDictMaxValueWriter("value")])
def test_a_writer_is_saved_by_itself(writer, tmp_path):
    writer.dumps(tmp_path / "writer")
    writer.loads(tmp_path / "writer")
    with pytest.raises(FileNotFoundError, match=r"writer\.pt"):
        writer.loads(tmp_path)


# The largest values ------------------------------------------------------------------------------


class BestOf:
    """Keeps the elements of the largest value; of equal ones those that came first."""

    def __init__(self, size: int) -> None:
        self.size, self.held = size, {}

    def put(self, serial: int, value: float) -> bool:
        if len(self.held) < self.size:
            self.held[serial] = value
            return True
        least = min(self.held.values())
        if value <= least:
            return False
        del self.held[next(serial for serial, other in self.held.items() if other == least)]
        self.held[serial] = value
        return True


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(-3, 9), min_size=1, max_size=9)), max_size=6),
)
def test_the_largest_values_stay(storage, size, calls):
    buffer = ReplayBuffer(storage=storage(size), writer=TensorDictMaxValueWriter("value"), batch_size=3)
    model, written = BestOf(size), 0
    for one_by_one, values in calls:
        data = ranked(values, start=written)
        index = [buffer.add(element) for element in data] if one_by_one else buffer.extend(data).tolist()
        taken = [model.put(written + n, value) for n, value in enumerate(values)]
        assert [place >= 0 for place in index] == taken
        written += len(values)
        held = buffer[:]
        assert sorted(held["value"].tolist()) == sorted(model.held.values())
        assert len(buffer) == len(model.held)
        last = {place: written - len(values) + n for n, place in enumerate(index) if place >= 0}
        assert all(int(buffer[place]["serial"]) == serial for place, serial in last.items())
        for value, serial in zip(held["value"].tolist(), held["serial"].tolist(), strict=True):
            assert sum(other == value for other in model.held.values()) >= 1
            assert serial < written
        least = min(model.held.values())
        strictly = {serial for serial, value in model.held.items() if value > least}
        assert strictly <= set(held["serial"].tolist())  # which of the least ones stay is open


@pytest.mark.parametrize(
    ("reduction", "expected"), [("sum", [1, 2]), ("max", [0, 2]), ("min", [1, 3]), ("mean", [1, 2]), ("median", [1, 3])]
)
def test_several_numbers_become_one(reduction, expected):
    rows = torch.tensor([[-9.0, 0.0, 9.5], [3.0, 3.0, 3.0], [-5.0, 1.0, 14.0], [1.0, 1.5, 2.0]])
    data = TensorDict({"next": {"reward": rows}, "serial": torch.arange(4)}, [4])
    buffer = ReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter(reduction=reduction))
    buffer.extend(data)
    assert sorted(buffer[:]["serial"].tolist()) == expected


def test_the_largest_stay_over_changes_in_place_and_a_new_beginning():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter("value"))
    buffer.extend(ranked([5.0, 6.0, 7.0]))
    buffer[1] = ranked([0.0], start=50)[0]
    assert buffer.extend(ranked([1.0, 0.5])).tolist() == [1, -1]
    assert sorted(buffer[:]["value"].tolist()) == [1.0, 5.0, 7.0]
    buffer.empty()
    buffer.extend(ranked([0.1, 0.2, 0.3, 0.15]))
    assert sorted(round(value, 3) for value in buffer[:]["value"].tolist()) == [0.15, 0.2, 0.3]


def test_the_largest_of_another_storage_stay():
    storage = LazyTensorStorage(2)
    ReplayBuffer(storage=storage).extend(ranked([9.0, 5.0]))
    buffer = ReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter("value"))
    buffer.extend(ranked([1.0, 2.0]))
    buffer.set_storage(storage)
    assert buffer.extend(ranked([6.0, 3.0])).tolist() == [1, -1]
    assert buffer[:]["value"].tolist() == [9.0, 6.0]


def test_a_restored_buffer_goes_on_with_the_largest():
    buffer, other = (
        ReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter("value")) for _ in range(2)
    )
    buffer.extend(ranked([5.0, 1.0, 7.0, 3.0]))
    other.load_state_dict(buffer.state_dict())
    for one in (buffer, other):
        one.extend(ranked([4.0, 2.0]))
        assert sorted(one[:]["value"].tolist()) == [4.0, 5.0, 7.0]


def test_bad_input_to_the_writer_of_the_largest():
    with pytest.raises(ValueError, match=r"reduction: expected one of sum.*'prod'"):
        TensorDictMaxValueWriter("value", reduction="prod")
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter("other"))
    with pytest.raises(KeyError, match=r"rank_key.*'other'.*'value'"):
        buffer.extend(ranked([1.0]))
    for storage, data in (
        (LazyTensorStorage(6, ndim=2), ranked([1.0] * 4).reshape(2, 2)),
        (LazyTensorStorage(3), torch.ones(2)),
    ):
        buffer = ReplayBuffer(storage=storage, writer=TensorDictMaxValueWriter("value"))
        with pytest.raises(ValueError, match="RoundRobinWriter"):
            buffer.extend(data)


def test_voids_are_no_elements_of_the_largest():
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictMaxValueWriter("value"))
    buffer.extend(ranked([1.0, 2.0]))
    buffer.storage.abandon(buffer.storage.reserve(1))
    buffer.extend(ranked([5.0, 6.0, 7.0, 8.0]))
    assert sorted(buffer[:]["value"].tolist()) == [6.0, 7.0, 8.0]  # one row is lost
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter("value"))
    buffer.storage.abandon(buffer.storage.reserve(2))  # the oldest make place
    buffer.extend(ranked([5.0, 6.0, 7.0, 4.0]))
    assert sorted(buffer[:]["value"].tolist()) == [5.0, 6.0, 7.0]


def test_the_entries_that_there_are_instead_of_the_rank():
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter("td_error"))
    nested = TensorDict({"obs": torch.zeros(2), "next": {"reward": torch.zeros(2)}}, [2])
    with pytest.raises(KeyError, match=r"rank_key.*'td_error'.*'next', 'reward'.*'obs'.*Name one"):
        buffer.extend(nested)


@pytest.mark.parametrize("first", ["add", "extend"])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_added_along_the_dimension_that_grows(first, dim):
    storage, writer = LazyTensorStorage(20, ndim=2), RoundRobinWriter()
    rows = torch.arange(12).reshape(4, 3)
    if first == "add":
        writer.add(storage, rows[0], dim)
    else:
        writer.extend(storage, rows[:1] if dim == 0 else rows[:1].mT, dim)
    writer.add(storage, rows[1], dim)
    writer.add(storage, rows[2])
    writer.extend(storage, rows[3:] if dim == 0 else rows[3:].mT, dim)
    assert storage.dim_extend == dim
    assert storage.period == (3 if dim == 0 else 0)
    assert torch.equal(storage.read(storage.live_index()), rows.reshape(-1))


def test_nan_ranks_last():
    buffer = ReplayBuffer(storage=LazyTensorStorage(2), writer=TensorDictMaxValueWriter("value"))
    buffer.extend(TensorDict({"value": torch.tensor([float("nan"), 1.0])}, [2]))
    buffer.extend(TensorDict({"value": torch.tensor([2.0, float("nan"), 3.0])}, [3]))
    assert sorted(buffer[:]["value"].tolist()) == [2.0, 3.0]


# Counting ------------------------------------------------------------------------------------------

COUNTED = {
    "tensor": lambda: ReplayBuffer(storage=LazyTensorStorage(10)),
    "memmap": lambda: ReplayBuffer(storage=LazyMemmapStorage(10)),
    "shared": lambda: ReplayBuffer(storage=LazyTensorStorage(10), shared=True),
    "list": lambda: ReplayBuffer(storage=ListStorage(10)),
    "largest": lambda: ReplayBuffer(storage=LazyTensorStorage(10), writer=TensorDictMaxValueWriter("value")),
    "prioritized": lambda: TensorDictPrioritizedReplayBuffer(alpha=0.5, beta=0.5, storage=LazyTensorStorage(10)),
}


def valued(n: int) -> TensorDict:
    return TensorDict({"value": torch.arange(n).float()}, [n])


@pytest.mark.parametrize("kind", COUNTED)
def test_every_element_that_was_given_is_counted(kind, tmp_path):
    """Those that found no room, and those that a writer did not prefer, too; in copies and after saving as well."""
    buffer = COUNTED[kind]()
    counts = []
    for n in (15, 3, 10, 31):
        buffer.extend(valued(n))
        counts.append(buffer.write_count)
    buffer.add(valued(1)[0])
    assert counts == [15, 18, 28, 59]
    assert (buffer.write_count, len(buffer), buffer.storage.ledger.num_lost) == (60, 10, 0)
    other = COUNTED[kind]()
    other.load_state_dict(buffer.state_dict())
    assert other.write_count == 60
    buffer.dumps(tmp_path / "saved")
    other = COUNTED[kind]()
    other.loads(tmp_path / "saved")
    other.extend(valued(12))
    assert (other.write_count, len(other)) == (72, 10)
    assert pickle.loads(pickle.dumps(buffer)).write_count == 60
    buffer.empty()
    assert buffer.write_count == 60


def test_rows_of_several_elements_and_members_are_counted():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2))
    buffer.extend(valued(30).reshape(2, 15))
    assert (buffer.write_count, len(buffer)) == (30, 10)
    ensemble = ReplayBufferEnsemble(COUNTED["tensor"](), COUNTED["list"](), routing_dim=0)
    ensemble.extend(valued(30).reshape(2, 15))
    assert ensemble.write_count == 30


def test_a_collector_counts_what_it_gave():
    buffer = COUNTED["tensor"]()
    with pytest.warns(UserWarning, match="larger than the storage"):
        collector = Collector(CountingEnv(), frames_per_batch=15, total_frames=30, replay_buffer=buffer)
    with collector:
        for _ in collector:
            pass
        assert collector.stats()["write_count"] == buffer.write_count == 30


def test_what_was_never_stored_counts_for_a_limiter():
    limiter = SampleToInsertRatio(2.0, min_size=1, margin=10)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=5, limiter=limiter)
    buffer.extend(valued(15))
    for _ in range(2 * 15 // 5):
        buffer.sample()
    assert limiter.sampled == 30
