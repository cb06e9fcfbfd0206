"""Elements that have a batch size of their own, such as whole trajectories of one length."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)


def trajectories(n: int) -> TensorDict:
    values = torch.arange(n * 5.0).reshape(n, 5)
    return TensorDict({"obs": values, "next": TensorDict({"obs": values.unsqueeze(-1) + 1}, [n, 5])}, [n, 5])


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_batches_keep_the_batch_size_of_elements(kind, tmp_path):
    buffer = ReplayBuffer(storage=kind(8), batch_size=3)
    data = trajectories(6)
    buffer.extend(data)
    assert buffer.sample().batch_size == (3, 5)
    assert buffer[:].batch_size == (6, 5)
    assert bool((buffer[:] == data).all())
    assert buffer[2].batch_size == (5,)
    assert bool((buffer[2] == data[2]).all())
    assert buffer._storage._storage.batch_size == (8, 5)
    buffer.dumps(tmp_path / "saved")
    twin = ReplayBuffer(storage=kind(8), batch_size=3)
    twin.loads(tmp_path / "saved")
    assert twin[:].batch_size == (6, 5)
    assert bool((twin[:] == data).all())
    twin[1] = data[0]
    twin.add(data[3])
    assert bool((twin[torch.tensor([1, 6])] == data[torch.tensor([0, 3])]).all())


def test_the_index_of_an_element_is_that_of_all_its_steps():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=3)
    buffer.extend(trajectories(6))
    batch = buffer.sample()
    assert batch["index"].shape == (3, 5)
    assert torch.equal(batch["index"] * 5 + torch.arange(5), batch["obs"].long())


def test_priorities_of_steps_become_one_of_the_element():
    torch.manual_seed(0)
    buffer = TensorDictPrioritizedReplayBuffer(alpha=1.0, beta=1.0, storage=LazyTensorStorage(8), batch_size=64)
    buffer.extend(trajectories(6))
    batch = buffer.sample()
    assert batch["priority_weight"].shape == (64, 5)
    buffer.update_tensordict_priority(batch.set("td_error", 1e6 * (batch["index"] == 2).float() * torch.arange(5)))
    assert (buffer.sample()["index"] == 2).float().mean() > 0.95


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_slices_of_elements_with_time_are_refused_before_anything_is_stored(kind):
    buffer = kind(storage=LazyTensorStorage(100), batch_size=4, sampler=SliceSampler(slice_len=2))
    data = TensorDict({"collector": {"traj_ids": torch.zeros(3, 5, dtype=torch.int64)}}, [3, 5])
    with pytest.raises(ValueError, match="reshape"):
        buffer.extend(data)
    buffer.extend(data.reshape(-1))
    assert len(buffer) == 15


def test_the_first_step_that_is_added_settles_the_dimension_that_grows():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=2), batch_size=4, dim_extend=0)
    buffer.add(TensorDict({"obs": torch.arange(5.0)}, [5]))
    buffer.extend(TensorDict({"obs": torch.arange(10.0).reshape(2, 5)}, [2, 5]))
    assert buffer[:].batch_size == (3, 5)
    assert buffer[:]["obs"][1:].tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0, 9.0]]


def test_an_emptied_list_lets_its_objects_go():
    buffer = ReplayBuffer(storage=ListStorage(None), batch_size=1, collate_fn=list)
    element = TensorDict({"obs": torch.zeros(3)})
    buffer.add(element)
    kept = weakref.ref(buffer.storage.read(np.array([0]))[0])
    buffer.empty()
    gc.collect()
    assert kept() is None
    assert not buffer.storage._items
