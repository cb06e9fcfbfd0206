"""A storage is saved by itself."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, RaggedStorage, ReplayBuffer
from rollwright.errors import DamagedFileError

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage, RaggedStorage]


def frames(n: int, start: int = 0) -> TensorDict:
    return TensorDict({"serial": torch.arange(start, start + n), "next": {"obs": torch.ones(n, 2)}}, [n])


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_storage_holds_what_another_has_written_to_a_folder(storage, is_used, tmp_path):
    buffer, twin = (ReplayBuffer(storage=storage(5)) for _ in range(2))
    if is_used:
        twin.extend(frames(3, 50))
    buffer.extend(frames(4))
    buffer.storage.dumps(tmp_path / "saved")
    buffer.extend(frames(3, 4))
    buffer.storage.dumps(tmp_path / "saved")
    twin.storage.loads(tmp_path / "saved")
    assert twin[:]["serial"].tolist() == buffer[:]["serial"].tolist() == [5, 6, 2, 3, 4]
    assert twin.write_count == 7


def test_the_folder_of_the_rows_may_be_that_of_what_is_saved(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=tmp_path))
    buffer.extend(frames(4))
    buffer.storage.dumps(tmp_path)
    twin = LazyTensorStorage(5)
    twin.loads(tmp_path)
    assert twin[:]["serial"].tolist() == [0, 1, 2, 3]


def test_structures_come_back(tmp_path):
    storage, twin = LazyTensorStorage(5), LazyTensorStorage(5)
    storage.set(range(3), {"a": torch.arange(3), "b": (torch.zeros(3), [torch.ones(3, 2)])})
    storage.dumps(tmp_path)
    twin.loads(tmp_path)
    assert twin[:]["a"].tolist() == [0, 1, 2]
    assert twin[1]["b"][1][0].tolist() == [1, 1]


def test_objects_are_loaded_where_they_are_trusted(tmp_path):
    storage, twin = ListStorage(5), ListStorage(5)
    storage.set(range(2), [frozenset("ab"), frozenset("c")])
    storage.dumps(tmp_path)
    with pytest.raises(ValueError, match="allow_pickle=True"):
        twin.loads(tmp_path)
    twin.loads(tmp_path, allow_pickle=True)
    assert list(twin) == [{"a", "b"}, {"c"}]


def test_what_is_no_storage_is_not_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no storage.pt"):
        LazyTensorStorage(5).loads(tmp_path)
    (tmp_path / "storage.pt").write_bytes(b"nothing")
    with pytest.raises(DamagedFileError):
        LazyTensorStorage(5).loads(tmp_path)
    larger = LazyTensorStorage(9)
    larger.set(range(9), torch.arange(9))
    larger.dumps(tmp_path)
    with pytest.raises(ValueError, match="at most 5 elements"):
        LazyTensorStorage(5).loads(tmp_path)


def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch):
    storage, twin = LazyTensorStorage(5), LazyTensorStorage(5)
    storage.set(range(2), torch.arange(2))
    storage.dumps(tmp_path)
    storage.set(range(2, 4), torch.arange(2))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="could not write"):
        storage.dumps(tmp_path)
    monkeypatch.undo()
    twin.loads(tmp_path)
    assert len(twin) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["storage.pt"]
