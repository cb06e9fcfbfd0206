"""Samplers by themselves, and samplers of classes of the user's own."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rollwright.collectors import Collector
from rollwright.data import (
    ConsumingSampler,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    Sampler,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)
from rollwright.errors import DamagedFileError
from rollwright.testing.mocking_classes import CountingEnv

SAMPLERS = {
    "random": RandomSampler,
    "without": SamplerWithoutReplacement,
    "prioritized": lambda: PrioritizedSampler(10, alpha=0.7, beta=0.9),
    "consuming": ConsumingSampler,
    "slices": lambda: SliceSampler(slice_len=2, traj_key="episode"),
}


def frames(n: int, start: int = 0) -> TensorDict:
    serial = torch.arange(start, start + n)
    return TensorDict({"serial": serial, "episode": serial // 4}, [n])


def stored(n: int = 8, size: int = 10) -> LazyTensorStorage:
    storage = LazyTensorStorage(size)
    storage.set(range(n), frames(n))
    return storage


# Without a buffer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_chooses_from_a_storage(make):
    index, info = make().sample(stored(), 4)
    assert (index.shape, index.dtype) == ((4,), torch.int64)
    assert set(index.tolist()) <= set(range(8))
    assert all(len(value) == 4 for value in info.values())


def test_the_index_of_a_sampler_is_that_of_a_buffer():
    storage = LazyTensorStorage(8, ndim=2)
    buffer = ReplayBuffer(storage=storage)
    written = buffer.extend(torch.arange(6).reshape(2, 3))
    index, _ = RandomSampler().sample(storage, 5)
    assert index.shape == (5, 2)
    assert {tuple(place) for place in index.tolist()} <= {tuple(place) for place in written.tolist()}


def test_passes_go_on_from_draw_to_draw():
    sampler, storage = SamplerWithoutReplacement(), stored()
    first, second = (sampler.sample(storage, 4)[0] for _ in range(2))
    assert sorted(torch.cat([first, second]).tolist()) == list(range(8))
    assert sampler.ran_out


def test_nothing_can_be_chosen_from_an_empty_storage():
    with pytest.raises(RuntimeError, match="storage: expected some elements"):
        RandomSampler().sample(LazyTensorStorage(10), 4)
    with pytest.raises(ValueError, match="batch_size"):
        RandomSampler().sample(stored(), 0)


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_a_sampler_is_saved_by_itself(make, tmp_path):
    storage, sampler, twin = stored(), make(), make()
    sampler.sample(storage, 4)
    sampler.dumps(tmp_path)
    sampler.dumps(tmp_path)  # over the other
    twin.loads(tmp_path)
    draws = []
    for each in (sampler, twin):
        torch.manual_seed(0)
        draws.append(each.sample(storage, 4)[0].tolist())
    assert draws[0] == draws[1]


def test_what_is_no_sampler_is_not_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"sampler\.pt"):
        RandomSampler().loads(tmp_path)
    torch.save([1, 2], tmp_path / "sampler.pt")
    with pytest.raises(DamagedFileError, match="holds a list, expected the state of a sampler"):
        RandomSampler().loads(tmp_path)


# Priorities before there is a storage -------------------------------------------------------------


def test_priorities_wait_for_a_storage():
    sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0)
    sampler.update_priority(torch.arange(6), torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0, 0.0]))
    sampler.update_priority(torch.tensor([6, 7, 9]), 0.0)  # of which one will never be there
    assert sampler.default_priority == 5.0
    assert set(sampler.sample(stored(), 100)[0].tolist()) == {2}


def test_priorities_that_wait_are_checked_at_once():
    sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0)
    with pytest.raises(ValueError, match="priority: expected one for each of the 3 elements"):
        sampler.update_priority(torch.arange(3), torch.ones(2))
    with pytest.raises(ValueError, match="of at least 0"):
        sampler.update_priority(torch.arange(2), torch.tensor([1.0, -1.0]))


def test_priorities_that_wait_are_of_several_dimensions():
    sampler, storage = PrioritizedSampler(8, alpha=1.0, beta=1.0), LazyTensorStorage(8, ndim=2)
    sampler.update_priority(torch.tensor([[row, lane] for row in range(3) for lane in range(2)]), 0.0)
    sampler.update_priority(torch.tensor([[1, 1]]), 1.0)
    ReplayBuffer(storage=storage).extend(torch.arange(6).reshape(2, 3))
    index, _ = sampler.sample(storage, 50)
    assert index.unique(dim=0).tolist() == [[1, 1]]


def test_priorities_that_wait_are_in_the_state():
    sampler, twin = (PrioritizedSampler(10, alpha=1.0, beta=1.0) for _ in range(2))
    sampler.update_priority(torch.arange(8), 0.0)
    sampler.update_priority(torch.tensor([4]), 1.0)
    twin.load_state_dict(sampler.state_dict())
    sampler.update_priority(torch.tensor([4]), 0.0)
    assert set(twin.sample(stored(), 50)[0].tolist()) == {4}


@pytest.mark.parametrize("shared", [False, True])
def test_priorities_are_set_before_the_first_draw(shared):
    sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, shared=shared, batch_size=50)
    index = buffer.extend(frames(8))
    sampler.update_priority(index, torch.arange(8) == 3)
    assert set(buffer.sample()["serial"].tolist()) == {3}


def test_elements_count_as_new_again():
    sampler = PrioritizedSampler(10, alpha=1.0, beta=1.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=sampler, batch_size=200)
    index = buffer.extend(frames(3))
    buffer.update_priority(index, torch.tensor([0.0, 0.0, 2.0]))
    buffer.mark_update(index[:1])
    assert set(buffer.sample()["serial"].tolist()) == {0, 2}
    sampler.mark_update(1)
    assert set(buffer.sample()["serial"].tolist()) == {0, 1, 2}
    ReplayBuffer(storage=stored()).mark_update(0)  # where elements have no priorities nothing happens


# Of the user's own --------------------------------------------------------------------------------


class Newest(Sampler):
    """The elements that were written last."""

    def __init__(self):
        self.written = []

    def extend(self, index):
        self.written += index.tolist()

    def add(self, index):
        self.written.append(index)

    def sample(self, storage, batch_size):
        self.ran_out = batch_size >= len(self.written)
        return torch.tensor(self.written[-batch_size:]), {"order": torch.arange(batch_size)}


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage])
def test_a_sampler_of_the_users_own_draws_batches(storage):
    buffer = TensorDictReplayBuffer(storage=storage(10), sampler=Newest(), batch_size=2)
    buffer.extend(frames(8))
    assert buffer.sample()["serial"].tolist() == [6, 7]
    buffer.add(frames(1, start=8)[0])
    buffer.extend(frames(3, start=9))
    batch = buffer.sample()
    assert batch["serial"].tolist() == [10, 11]
    assert batch["index"].tolist() == [0, 1]
    assert batch["order"].tolist() == [0, 1]
    assert buffer.sampler.written == [*range(10), 0, 1]


def test_a_sampler_of_the_users_own_ends_an_iteration():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=Newest(), batch_size=4)
    buffer.extend(frames(4))
    assert len(list(buffer)) == 1


def test_a_sampler_of_the_users_own_learns_of_what_a_collector_writes():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(30), sampler=Newest(), batch_size=4)
    with Collector(lambda: CountingEnv(max_steps=50), frames_per_batch=10, total_frames=20, replay_buffer=buffer) as it:
        list(it)
    assert buffer.sampler.written == list(range(20))
    assert buffer.sample()["index"].tolist() == [16, 17, 18, 19]


class OfRows(Sampler):
    def sample(self, storage, batch_size):
        return (torch.tensor([2, 0]), torch.tensor([1, 1])), {}


def test_an_index_may_be_one_tensor_for_each_dimension():
    buffer = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), sampler=OfRows(), batch_size=2)
    buffer.extend(torch.arange(6).reshape(2, 3))
    batch, info = buffer.sample(return_info=True)
    assert info["index"].tolist() == [[2, 1], [0, 1]]
    assert batch.tolist() == [5, 3]


class First(Sampler):
    def sample(self, storage, batch_size):
        return torch.arange(batch_size), {}


def test_places_are_those_of_what_is_stored():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=First(), batch_size=3)
    buffer.extend(frames(2))
    buffer.empty()
    held = buffer.storage.reserve(6)
    buffer.storage.abandon(held)  # a writer failed
    buffer.extend(frames(3, start=6))
    assert buffer.sample()["serial"].tolist() == [6, 7, 8]


class InBrackets(Sampler):
    def sample(self, storage, batch_size):
        return (torch.tensor([1, -1]),), {}


def test_an_index_of_one_dimension_may_be_in_a_tuple():
    buffer = ReplayBuffer(storage=stored(), sampler=InBrackets(), batch_size=2)
    assert buffer.sample()["serial"].tolist() == [1, 7]


def test_elements_that_are_not_stored_are_not_drawn():
    buffer = ReplayBuffer(storage=stored(), sampler=First(), batch_size=9)
    with pytest.raises(IndexError, match="out of range: the buffer holds 8 elements"):
        buffer.sample()
    lanes = ReplayBuffer(storage=LazyTensorStorage(8, ndim=2), sampler=OfRows(), batch_size=2)
    lanes.extend(torch.arange(4).reshape(2, 2))
    with pytest.raises(IndexError, match=r"OfRows.sample chose elements that are not stored"):
        lanes.sample()


def test_a_sampler_that_cannot_draw_is_refused():
    class Nothing(Sampler):
        pass

    with pytest.raises(TypeError, match=r"Nothing: expected a sampler with draw\(\) or sample\(\)"):
        Nothing()


class Doubling(PrioritizedSampler):
    """Priorities twice as large."""

    def update_priority(self, index, priority, *, storage=None):
        super().update_priority(index, 2 * torch.as_tensor(priority), storage=storage)


def test_a_subclass_may_change_how_priorities_are_set():
    buffer = ReplayBuffer(storage=stored(), sampler=Doubling(10, alpha=1.0, beta=1.0), batch_size=4)
    buffer.update_priority(torch.arange(2), torch.tensor([0.0, 8.0]))
    assert buffer.sampler.default_priority == 16.0
