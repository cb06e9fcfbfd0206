"""How many elements a storage of several dimensions has room for."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictPrioritizedReplayBuffer,
    TensorStorage,
)


def numbered(*shape: int) -> TensorDict:
    """Elements that are told apart by their number."""
    return TensorDict({"serial": torch.arange(torch.Size(shape).numel()).reshape(shape)}, shape)


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize(("shape", "asked", "room"), [((3, 8), 100, 102), ((3, 8), 102, 102), ((5, 2), 3, 5)])
def test_the_room_of_whole_rows(kind, shape, asked, room):
    buffer = ReplayBuffer(storage=kind(asked, ndim=2))
    assert buffer.storage.max_size == asked
    for n in range(1, 60):
        buffer.extend(numbered(*shape))
        assert buffer.storage.max_size == room
        assert len(buffer) == min(n * shape[0] * shape[1], room)
    assert len(buffer.storage) == room
    assert buffer.storage.requested_size == asked


def test_room_of_whole_rows_is_saved_and_loaded(tmp_path):
    buffer, other = (
        TensorDictPrioritizedReplayBuffer(
            alpha=1.0, beta=1.0, storage=LazyMemmapStorage(10, scratch_dir=tmp_path / name, ndim=2), batch_size=64
        )
        for name in "ab"
    )
    buffer.extend(numbered(3, 9))
    assert len(buffer) == buffer.storage.max_size == 12
    other.load_state_dict(buffer.state_dict())
    assert other.storage.max_size == 12
    assert len(set(other.sample()["serial"].tolist())) > 10  # those beyond the number that was asked for are drawn too
    buffer.dumps(tmp_path / "saved")
    third = ReplayBuffer(storage=LazyTensorStorage(10, ndim=2))
    third.loads(tmp_path / "saved")
    assert bool((third[:] == buffer[:]).all())
    again = LazyMemmapStorage(10, scratch_dir=tmp_path / "a", ndim=2, existsok=True)
    assert (again.max_size, again.requested_size, len(again)) == (12, 10, 12)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_tensordict_without_entries_is_room(shape):
    buffer = ReplayBuffer(storage=TensorStorage(TensorDict({}, shape), ndim=len(shape)))
    assert (len(buffer), buffer.storage.max_size) == (0, 4)
    buffer.extend(numbered(*shape))
    assert buffer[:]["serial"].tolist() == numbered(*shape)["serial"].tolist()
    buffer.extend(numbered(*shape))
    assert len(buffer) == 4


@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_more_elements_than_there_is_room_for(kind):
    buffer = ReplayBuffer(storage=kind(10**15))
    with pytest.raises(OSError, match=r"max_size: 1000000000000000 elements take 8,(\d{3},){4}\d{3} bytes.*Lower it"):
        buffer.extend(numbered(3))
