"""Hooks that change the elements that a buffer or a storage writes to a folder, and change them back."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict

from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, RaggedStorage, ReplayBuffer

STORAGES = [LazyTensorStorage, LazyMemmapStorage, ListStorage, RaggedStorage]


def rows(n: int = 6) -> TensorDict:
    obs = torch.arange(float(n))
    return TensorDict({"obs": obs, "next": {"obs": obs + 1}}, [n])


class Halved:
    """Leaves next observations out, which follow from the others."""

    def __init__(self) -> None:
        self.paths: list[object] = []

    def save(self, elements, path):
        self.paths.append(path)
        return TensorDict({"obs": stacked(elements)["obs"] * 2}, [len(elements)])

    def load(self, data, path):
        self.paths.append(path)
        obs = data["obs"] / 2
        return TensorDict({"obs": obs, "next": {"obs": obs + 1}}, [len(obs)])


def stacked(elements):
    return torch.stack(elements) if isinstance(elements, list) else elements


def hooked(part, hooks: Halved):
    part.register_save_hook(hooks.save)
    part.register_load_hook(hooks.load)
    return part


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_a_buffer_is_saved_and_loaded_through_hooks(storage, tmp_path):
    hooks, folder = Halved(), tmp_path / "dump"
    buffer = hooked(ReplayBuffer(storage=storage(10), batch_size=4), hooks)
    buffer.dumps(folder)  # nothing is there
    assert not hooks.paths
    buffer.extend(rows())
    buffer.dumps(folder)
    again = hooked(ReplayBuffer(storage=storage(10)), hooks)
    again.loads(folder)
    assert bool((again[:] == rows()).all())
    assert hooks.paths == [folder, folder]
    bare = ReplayBuffer(storage=LazyTensorStorage(10))
    bare.loads(folder)
    assert torch.equal(bare[:]["obs"], rows()["obs"] * 2)
    assert set(bare[:].keys()) == {"obs"}
    assert bool((buffer[:] == rows()).all())


@pytest.mark.parametrize("storage", STORAGES)
def test_hooks_are_called_in_order_and_change_nothing_else(storage, tmp_path):
    called: list[str] = []

    def hook(name: str):
        def call(data, *, path):
            called.append(name)
            return data

        return call

    buffer = ReplayBuffer(storage=storage(10), batch_size=4)
    for n in "ab":
        buffer.register_save_hook(hook(f"save {n}"))
        buffer.storage.register_load_hook(hook(f"load {n}"))
    buffer.extend(rows(14))
    before = buffer[:]
    buffer.dumps(tmp_path / "dump")
    buffer.empty()
    buffer.loads(tmp_path / "dump")
    assert called == ["save a", "save b", "load a", "load b"]
    assert bool((stacked(buffer[:]) == stacked(before)).all())
    buffer.extend(rows(3))
    assert buffer.write_count == 17


def test_a_storage_alone_is_saved_through_hooks(tmp_path):
    hooks = Halved()
    storage = hooked(LazyTensorStorage(10), hooks)
    storage.append(rows())
    storage.dumps(tmp_path)
    again = hooked(LazyTensorStorage(10), hooks)
    again.loads(tmp_path)
    assert bool((again.get(range(6)) == rows()).all())
    assert hooks.paths == [tmp_path, tmp_path]


def test_rows_that_lie_in_the_folder_are_not_changed(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "rows"))
    buffer.extend(rows())
    buffer.register_save_hook(lambda data, path: data)
    with pytest.raises(ValueError, match=r"path: the rows of the buffer lie in .*Name another folder"):
        buffer.dumps(tmp_path / "rows")
    buffer.dumps(tmp_path / "dump")


def test_hooks_stay_in_their_process():
    storage = LazyTensorStorage(10)
    storage.register_save_hook(lambda data, path: data)
    for copied in (copy.deepcopy(storage), pickle.loads(pickle.dumps(storage))):
        assert not copied.hooks.save
    assert storage.hooks.save
    with pytest.raises(TypeError, match="hook: expected a callable that takes elements and path=, got str"):
        storage.register_load_hook("no")
