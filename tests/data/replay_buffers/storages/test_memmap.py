"""Memory-mapped storages: they survive their process, however it ends, and hold published rows only."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.patience import patient
from tests.processes.forked import forked

from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler
from rollwright.data.replay_buffers.storages.memory import LOCK_FILE, ROWS_FILE

FORK = multiprocessing.get_context("fork")  # children that use storages of their own, and no other thread


def numbered(n: int, start: int = 0, width: int = 3) -> TensorDict:
    serial = torch.arange(start, start + n)
    wide = serial.unsqueeze(-1)
    return TensorDict(
        {
            "serial": serial,
            "obs": wide.expand(n, width).double(),
            "next": {"obs": wide.expand(n, width).to(torch.int32)},
        },
        [n],
    )


def check_whole(data: TensorDict) -> None:
    serial = data["serial"].unsqueeze(-1)
    assert torch.equal(data["obs"], serial.expand_as(data["obs"]).double())
    assert torch.equal(data["next", "obs"], serial.expand_as(data["next", "obs"]).int())


def opened(folder, max_size: int | None = 100, **options) -> ReplayBuffer:
    return ReplayBuffer(storage=LazyMemmapStorage(max_size, scratch_dir=folder, **options), batch_size=8)


@pytest.mark.parametrize("ndim", [1, 2])
def test_what_was_written_is_there_again(ndim, tmp_path):
    buffer = opened(tmp_path / "rows", 12, ndim=ndim)
    for n in range(5):
        data = numbered(4, 4 * n)
        buffer.extend(data if ndim == 1 else data.reshape(2, 2))
    expected = buffer[:]
    del buffer
    for max_size in (12, None):
        again = opened(tmp_path / "rows", max_size, ndim=ndim, existsok=True)
        assert again.storage.num_reopened == len(again) == 12
        assert again.write_count == 20
        assert bool((again[:] == expected).all())
        check_whole(again.sample())
    again.extend(numbered(2, 100) if ndim == 1 else numbered(2, 100).reshape(2, 1))
    assert again.write_count == 22
    check_whole(again[:])
    assert {100, 101} <= set(again[:]["serial"].reshape(-1).tolist())


def test_a_folder_that_holds_rows_is_not_taken_by_mistake(tmp_path):
    opened(tmp_path).extend(numbered(3))
    with pytest.raises(FileExistsError, match=r"scratch_dir.*existsok=True"):
        opened(tmp_path)
    assert len(opened(tmp_path, existsok=True)) == 3
    for options in ({"max_size": 50}, {"max_size": 100, "ndim": 2}):
        with pytest.raises(ValueError, match=r"max_size, ndim: expected.*\(100, 1\)"):
            opened(tmp_path, existsok=True, **options)


def test_a_new_folder_is_made_with_existsok_or_without(tmp_path):
    for existsok in (False, True):
        folder = tmp_path / "deep" / str(existsok)
        buffer = opened(folder, existsok=existsok)
        assert buffer.storage.num_reopened == 0
        buffer.extend(numbered(2))
        assert sorted(os.listdir(folder)) == sorted([ROWS_FILE, LOCK_FILE])
        assert buffer.storage.scratch_dir == folder


def test_a_size_is_needed_where_there_are_no_rows(tmp_path):
    with pytest.raises(ValueError, match="max_size: expected a number"):
        opened(tmp_path, None)
    with pytest.raises(ValueError, match=r"device.*LazyTensorStorage"):
        LazyMemmapStorage(3, device="meta")


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / ROWS_FILE).write_bytes(b"not rows" * 10_000)
    with pytest.raises(ValueError, match="holds no rows"):
        opened(tmp_path, existsok=True)
    assert (tmp_path / ROWS_FILE).read_bytes()[:8] == b"not rows"


def test_without_a_folder_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=4)
    buffer.extend(numbered(30))
    check_whole(buffer.sample())
    assert os.listdir(tmp_path) == []
    assert buffer.storage.scratch_dir is None


def test_two_objects_over_one_folder_see_the_same_rows(tmp_path):
    one = opened(tmp_path)
    one.extend(numbered(3))
    other = opened(tmp_path, existsok=True)
    other.extend(numbered(2, 3))
    assert one[:]["serial"].tolist() == other[:]["serial"].tolist() == list(range(5))
    del other
    one.extend(numbered(1, 5))
    assert one.write_count == 6


def test_rows_take_no_room_before_they_are_written(tmp_path):
    buffer = opened(tmp_path, 1_000_000)
    buffer.extend(numbered(10))
    blocks = os.stat(tmp_path / ROWS_FILE).st_blocks * 512
    assert blocks < 2_000_000
    assert os.stat(tmp_path / ROWS_FILE).st_size > 40_000_000


def test_slices_of_a_reopened_buffer(tmp_path):
    buffer = opened(tmp_path)
    data = numbered(90)
    data["traj"] = data["serial"] // 10
    buffer.extend(data)
    again = ReplayBuffer(
        storage=LazyMemmapStorage(scratch_dir=tmp_path, existsok=True),
        sampler=SliceSampler(slice_len=5, traj_key="traj"),
        batch_size=50,
    )
    slices = again.sample()["serial"].reshape(10, 5)
    assert (slices.diff() == 1).all()
    assert (slices[:, 0] // 10 == slices[:, -1] // 10).all()


# Killed ------------------------------------------------------------------------------------------


def extend_for_ever(folder, begun, start: int) -> None:
    torch.set_num_threads(1)
    buffer = ReplayBuffer(storage=LazyMemmapStorage(500, scratch_dir=folder, existsok=True))
    rng = np.random.default_rng(start)
    serial = start
    while True:
        n = int(rng.integers(1, 120))
        buffer.extend(numbered(n, serial, width=200))
        serial += n
        begun.release()


def test_a_kill_at_any_moment_of_extend_leaves_published_rows_only(tmp_path):
    rng = np.random.default_rng(0)
    written = 0
    for round_ in range(15):
        begun = FORK.Semaphore(0)
        child = FORK.Process(target=extend_for_ever, args=(tmp_path, begun, 1_000_000 * round_), daemon=True)
        child.start()
        assert begun.acquire(timeout=patient(60))
        time.sleep(rng.random() * 0.03)  # any moment
        os.kill(child.pid, signal.SIGKILL)
        child.join(60)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            storage = LazyMemmapStorage(500, scratch_dir=tmp_path, existsok=True)
        buffer = ReplayBuffer(storage=storage, batch_size=64)
        assert storage.num_reopened == len(buffer) <= 500
        assert all(
            f"{storage.num_reopened} published" in str(w.message) and "dropped" in str(w.message) for w in caught
        )
        everything = buffer[:]
        check_whole(everything)
        serials = everything["serial"]
        assert len(serials.unique()) == len(serials)
        newest = serials.max().item()
        mine = serials[serials >= 1_000_000 * round_]
        assert newest >= 1_000_000 * round_
        assert sorted(mine.tolist()) == list(range(newest - len(mine) + 1, newest + 1))  # the last ones, without a hole
        assert buffer.write_count >= written + newest - 1_000_000 * round_ + 1
        written = buffer.write_count
        check_whole(buffer.sample())
        del buffer, storage


def die_while_writing(folder) -> None:
    storage = LazyMemmapStorage(100, scratch_dir=folder, existsok=True)
    rows = storage.reserve(20)
    storage.window(rows, "obs")[:7] = -1.0
    os.kill(os.getpid(), signal.SIGKILL)


def test_rows_that_were_being_written_are_dropped_with_a_warning_that_counts_them(tmp_path):
    opened(tmp_path).extend(numbered(90))
    child = FORK.Process(target=die_while_writing, args=(tmp_path,))
    child.start()
    child.join(60)
    with pytest.warns(UserWarning, match="80 published elements; 20 rows .* dropped"):
        buffer = opened(tmp_path, existsok=True)
    assert len(buffer) == buffer.storage.num_reopened == 80
    assert sorted(buffer[:]["serial"].tolist()) == list(range(10, 90))
    assert buffer.write_count == 90
    check_whole(buffer.sample(200))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = opened(tmp_path, existsok=True)  # told once
    again.extend(numbered(100, 500))
    assert sorted(again[:]["serial"].tolist()) == list(range(500, 600))


def test_a_storage_of_this_process_may_go_to_files_by_its_state(tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=8)
    buffer.extend(numbered(150))
    mapped = opened(tmp_path)
    mapped.load_state_dict(buffer.state_dict())
    mapped.storage.flush()
    del mapped
    again = opened(tmp_path, existsok=True)
    assert bool((again[:] == buffer[:]).all())


def test_copying_the_folder_loses_no_rows_that_are_being_written(tmp_path):
    folder = tmp_path / "rows"
    buffer = ReplayBuffer(storage=LazyMemmapStorage(20, scratch_dir=folder), shared=True)
    buffer.extend(numbered(5))
    rows = buffer.storage.reserve(4)
    shutil.copytree(folder, tmp_path / "copy")  # closes a descriptor of the lock file

    def write_elsewhere() -> tuple[int, int]:
        buffer.extend(numbered(3))
        return len(buffer), buffer.storage.ledger.num_lost

    assert forked(write_elsewhere) == (5, 0)
    buffer.storage._write(rows.start, 4, {key: numbered(4)[key] for key in ("serial", "obs", ("next", "obs"))}, 0)
    buffer.storage.publish(rows)
    assert (len(buffer), buffer.write_count) == (12, 12)
    check_whole(buffer[:])


# Removing the files -------------------------------------------------------------------------------


def test_files_are_removed_on_request(tmp_path):
    buffer = opened(tmp_path / "rows")
    buffer.extend(numbered(4))
    buffer.dumps(tmp_path / "rows")
    assert buffer.storage.cleanup()
    assert not (tmp_path / "rows").exists()
    assert len(buffer) == 4
    check_whole(buffer.sample())
    assert not buffer.storage.cleanup()
    assert not LazyMemmapStorage(10).cleanup()


def test_other_files_stay(tmp_path):
    buffer = opened(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert buffer.storage.cleanup()
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("auto_cleanup", [None, False, True])
def test_files_may_end_with_the_process(programs, auto_cleanup, tmp_path):
    program = f"""
import torch
from rollwright.data import LazyMemmapStorage
storage = LazyMemmapStorage(10, scratch_dir={str(tmp_path / "rows")!r}, auto_cleanup={auto_cleanup})
storage.append(torch.arange(3))
"""
    done = programs.run("-c", program)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rows").exists() is not (auto_cleanup is True)


def test_a_storage_that_was_emptied_takes_no_more_space(tmp_path):
    buffer = opened(tmp_path, 1_000_000)
    buffer.extend(numbered(1000))
    before = os.stat(tmp_path / ROWS_FILE).st_blocks
    for _ in range(3):
        buffer.empty()
        buffer.extend(numbered(1000))
    assert os.stat(tmp_path / ROWS_FILE).st_blocks == before
    del buffer
    again = opened(tmp_path, None, existsok=True)
    assert (len(again), again.write_count, again.storage.ledger.num_lost) == (1000, 4000, 0)
    again.extend(numbered(10, 1000))
    check_whole(again[:])
    assert again[:]["serial"].tolist() == list(range(1010))
