"""Folders of mapped rows that are copied while others write: what is opened is whole, or refused."""

from __future__ import annotations

import shutil
import threading
import warnings

import pytest
import torch
from tensordict import TensorDict

from rollwright.cli import main
from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from rollwright.data.replay_buffers.storages.memory import _HEAD, ROWS_FILE, STATE_FILE
from rollwright.errors import DamagedFileError

SIZE = 10


def rows(start: int, stop: int) -> TensorDict:
    serial = torch.arange(start, stop)
    return TensorDict({"serial": serial, "obs": serial[:, None].expand(-1, 3).float()}, [stop - start])


class Live:
    """A buffer in a folder, which is copied in two halves: numbers, and rows.

    What a program that copies files reads in between, page by page, is some of either.
    """

    def __init__(self, tmp_path, num_written: int = SIZE) -> None:
        self.folder, self.copied = tmp_path / "rows", tmp_path / "copy"
        self.buffer = ReplayBuffer(storage=LazyMemmapStorage(SIZE, scratch_dir=self.folder))
        self.buffer.extend(rows(0, num_written))
        self._numbers = (self.folder / ROWS_FILE).read_bytes()[:_HEAD]

    def copy(self):
        whole = (self.folder / ROWS_FILE).read_bytes()
        self.copied.mkdir()
        (self.copied / ROWS_FILE).write_bytes(self._numbers + whole[_HEAD:])
        return self.copied


def serials(folder) -> list[int]:
    elements = ReplayBuffer(storage=LazyMemmapStorage(scratch_dir=folder, existsok=True))[:]
    assert (elements["obs"] == elements["serial"][:, None]).all()
    return sorted(elements["serial"].tolist())


def test_rows_that_were_overwritten_meanwhile_are_dropped(tmp_path):
    live = Live(tmp_path)
    live.buffer.extend(rows(10, 14))
    folder = live.copy()
    with pytest.warns(UserWarning, match=r"is a copy that was made while .*4 rows .*dropped, 6 elements are whole"):
        assert serials(folder) == [4, 5, 6, 7, 8, 9]
    assert serials(folder) == [4, 5, 6, 7, 8, 9]
    again = ReplayBuffer(storage=LazyMemmapStorage(scratch_dir=folder, existsok=True))
    again.extend(rows(20, 25))
    del again
    assert serials(folder) == [5, 6, 7, 8, 9, 20, 21, 22, 23, 24]
    assert serials(live.folder) == list(range(4, 14))


def test_rows_that_are_being_overwritten_are_dropped_too(tmp_path):
    live = Live(tmp_path)
    taken = live.buffer.storage.reserve(3)
    live.buffer.storage._tensors["obs"][:2] = -1.0
    folder = live.copy()
    with pytest.warns(UserWarning, match=r"3 rows were overwritten meanwhile"):
        assert serials(folder) == list(range(3, 10))
    live.buffer.storage.abandon(taken)


def test_nothing_is_left_of_a_copy_during_which_all_was_overwritten(tmp_path):
    live = Live(tmp_path)
    for start in range(10, 50, 5):
        live.buffer.extend(rows(start, start + 5))
    folder = live.copy()
    with pytest.warns(UserWarning, match=r"10 rows .*dropped, 0 elements"):
        storage = LazyMemmapStorage(scratch_dir=folder, existsok=True)
    assert not len(storage)


def test_rows_that_came_meanwhile_do_not_matter_where_there_was_room(tmp_path):
    live = Live(tmp_path, num_written=3)
    live.buffer.extend(rows(3, 9))
    assert serials(live.copy()) == [0, 1, 2]


@pytest.mark.parametrize("change", ["set_at_", "clear", "load_state_dict"])
def test_a_copy_during_which_rows_were_replaced_is_refused(tmp_path, change):
    live = Live(tmp_path)
    if change == "set_at_":
        live.buffer.set_at_("obs", 0.0, [3])
    elif change == "clear":
        live.buffer.empty()
        live.buffer.extend(rows(10, 12))
    else:
        other = ReplayBuffer(storage=LazyTensorStorage(SIZE))
        other.extend(rows(100, 110))
        live.buffer.load_state_dict(other.state_dict())
    folder = live.copy()
    with pytest.raises(DamagedFileError, match=r"was copied while rows were replaced in it.*use dumps\(\)"):
        serials(folder)
    live.buffer.dumps(live.folder)
    shutil.copy(live.folder / STATE_FILE, folder)
    with pytest.raises(DamagedFileError, match=r"was copied while rows were replaced in it"):
        ReplayBuffer(storage=LazyTensorStorage(SIZE)).loads(folder)
    assert main(["inspect", str(folder)]) != 0


def test_folders_that_nobody_writes_to_can_be_copied(tmp_path):
    live = Live(tmp_path)
    live.buffer.set_at_("obs", torch.full((3,), 3.0), [3])
    live.buffer.extend(rows(10, 14))
    live.buffer.dumps(tmp_path / "dump")
    for folder in ("rows", "dump"):
        shutil.copytree(tmp_path / folder, tmp_path / f"{folder} again")
        assert serials(tmp_path / f"{folder} again") == list(range(4, 14))


def test_copies_of_a_buffer_that_a_thread_fills_hold_whole_rows(tmp_path):
    folder, size = tmp_path / "rows", 2000
    buffer = ReplayBuffer(storage=LazyMemmapStorage(size, scratch_dir=folder), shared=True)
    ended, at = threading.Event(), 0

    def extend() -> None:
        buffer.extend(TensorDict({"serial": torch.full((50,), at), "wide": torch.full((50, 64), at)}, [50]))

    def fill() -> None:
        nonlocal at
        while not ended.is_set():
            at += 1
            extend()

    for _ in range(size // 50):
        extend()
    thread = threading.Thread(target=fill)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for n in range(10):
                shutil.copytree(folder, tmp_path / str(n))
                elements = ReplayBuffer(storage=LazyMemmapStorage(scratch_dir=tmp_path / str(n), existsok=True))[:]
                assert (elements["wide"] == elements["serial"][:, None]).all()
    finally:
        ended.set()
        thread.join()
