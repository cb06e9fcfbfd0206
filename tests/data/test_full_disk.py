"""A disk without space: an error with path and bytes, which changes nothing, and never a signal."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import re
import resource
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tests.collectors.workers.processes import wait_until

from rollwright._memory import segment
from rollwright._memory.segment import Segment
from rollwright.collectors import Collector
from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, ReplayBufferEnsemble
from rollwright.data.datasets import DatasetWriter, load_dataset
from rollwright.data.replay_buffers.storages.memory import ROWS_FILE
from rollwright.testing.mocking_classes import CountingEnv

FORK = multiprocessing.get_context("fork")
ROW_BYTES = 40


def rows(n: int, start: int = 0) -> TensorDict:
    serial = torch.arange(start, start + n)
    return TensorDict({"serial": serial, "obs": torch.ones(n, 8) * serial[:, None]}, [n])


def check(buffer: ReplayBuffer, n: int) -> None:
    assert len(buffer) == buffer.write_count == n
    assert buffer[:]["serial"].tolist() == list(range(n))
    assert bool((buffer[:]["obs"] == buffer[:]["serial"][:, None]).all())


def fill(buffer: ReplayBuffer) -> int:
    """Write until there is no space; the number of elements."""
    with contextlib.suppress(OSError):
        while True:
            buffer.extend(rows(100, buffer.write_count))
    return buffer.write_count


@pytest.fixture
def disk(monkeypatch):
    """A disk with space for so many bytes more; None: for all."""

    class Disk:
        free: int | None = None

        def fallocate(self, fd: int, start: int, num_bytes: int) -> None:
            if self.free is not None:
                if num_bytes > self.free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self.free -= num_bytes
            fallocate(fd, start, num_bytes)

    found, fallocate = Disk(), os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", found.fallocate)
    return found


@pytest.fixture
def small(tmp_path):
    """A file system of 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounting.returncode:
        pytest.skip("a file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_in_memory", [False, True])
def test_a_write_without_space_is_an_error_and_nothing_is_counted(disk, tmp_path, shared_in_memory):
    storage = LazyTensorStorage(10**6) if shared_in_memory else LazyMemmapStorage(10**6, scratch_dir=tmp_path)
    buffer = ReplayBuffer(storage=storage, shared=True)
    buffer.extend(rows(10))
    disk.free = 4000
    written = fill(buffer)  # a piece of space was taken ahead
    with pytest.raises(OSError, match=rf"rows {written} to {written + 100} .* need 4000 bytes") as caught:
        buffer.extend(rows(100, written))
    assert caught.value.errno == errno.ENOSPC
    assert ("memfd:rollwright" if shared_in_memory else f"{tmp_path / ROWS_FILE}") in caught.value.filename
    check(buffer, written)
    disk.free = None
    buffer.extend(rows(100, written))
    check(buffer, written + 100)


def test_the_last_of_the_space_is_used(disk, tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10**6, scratch_dir=tmp_path))
    buffer.extend(rows(1))
    disk.free = 64 * ROW_BYTES
    written = fill(buffer)
    assert disk.free < 64 * ROW_BYTES  # in smaller pieces than it would have been
    disk.free = ROW_BYTES
    buffer.extend(rows(1, written))
    with pytest.raises(OSError, match=f"rows {written + 1} to {written + 2}"):
        buffer.extend(rows(1, written + 1))
    check(buffer, written + 1)


def test_a_writer_that_finds_no_space_holds_nobody_up(disk, tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10**6, scratch_dir=tmp_path))
    buffer.extend(rows(10))

    many = rows(100_000, 10)

    def write_in_vain() -> None:
        disk.free = 0
        with pytest.raises(OSError, match="No space left"):
            buffer.extend(many)
        os._exit(7)

    child = FORK.Process(target=write_in_vain, daemon=True)
    child.start()
    buffer.extend(rows(50_000, 10))
    child.join(60)
    assert child.exitcode == 7
    buffer.extend(rows(10, 50_010))
    check(buffer, 50_020)


def test_space_is_taken_in_pieces_and_shared_by_all_who_write(disk, tmp_path):
    one = ReplayBuffer(storage=LazyMemmapStorage(10**6, scratch_dir=tmp_path))
    other = ReplayBuffer(storage=LazyMemmapStorage(scratch_dir=tmp_path, existsok=True, max_size=10**6))
    calls = 0
    fallocate = disk.fallocate

    def counted(*args: int) -> None:
        nonlocal calls
        calls += 1
        fallocate(*args)

    os.posix_fallocate = counted  # the fixture puts it back
    for n in range(200):
        (one, other)[n % 2].extend(rows(100, 100 * n))
    assert calls <= 2 * 8  # 800 kB in pieces that double from 64 kB; two entries
    check(one, 20_000)
    assert os.stat(tmp_path / ROWS_FILE).st_blocks * 512 < 4 * 20_000 * ROW_BYTES


def test_a_ring_takes_space_once(disk, tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path))
    buffer.extend(rows(100))
    disk.free = 0
    buffer.extend(rows(50, 100))
    assert buffer.write_count == 150


def test_opening_a_file_that_has_its_space_takes_none(disk, tmp_path):
    """Others may be writing its counters, which some systems allocate by writing them."""
    one = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path))
    one.extend(rows(100))
    disk.free = 0
    other = ReplayBuffer(storage=LazyMemmapStorage(scratch_dir=tmp_path, existsok=True))
    other.extend(rows(1, 100))
    assert one.write_count == 101


def test_a_sparse_copy_of_a_folder_takes_its_space_again(disk, tmp_path):
    one = ReplayBuffer(storage=LazyMemmapStorage(10**6, scratch_dir=tmp_path / "one"))
    one.extend(rows(10))
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / ROWS_FILE).write_bytes((tmp_path / "one" / ROWS_FILE).read_bytes())
    two = ReplayBuffer(storage=LazyMemmapStorage(scratch_dir=tmp_path / "two", existsok=True))
    check(two, 10)
    disk.free = 0
    with pytest.raises(OSError, match="rows 0 to 11"):
        two.extend(rows(1, 10))
    disk.free = None
    two.extend(rows(1, 10))
    check(two, 11)


def test_header_and_counters_have_space_from_the_start(tmp_path):
    LazyMemmapStorage(10**9, scratch_dir=tmp_path)
    file = os.stat(tmp_path / ROWS_FILE)
    assert 4096 + 278_528 <= file.st_blocks * 512 < 10**6


def test_a_folder_without_space_is_left_as_it_was(disk, tmp_path):
    disk.free = 0
    with pytest.raises(OSError, match=r"No space left .*buffer.rows"):
        LazyMemmapStorage(10, scratch_dir=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    disk.free = None
    ReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "new")).extend(rows(3))


def test_a_buffer_in_use_is_not_shared_where_there_is_no_space(disk):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    buffer.extend(rows(10))
    buffer.extend(rows(900, 10))
    disk.free = 278_536 + 8192  # header and counters, and some rows
    with pytest.raises(OSError, match="No space left"):
        buffer.share()
    assert not buffer.storage.shared
    check(buffer, 910)


def test_a_collector_reports_that_there_is_no_space(disk, tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10**6, scratch_dir=tmp_path))
    with Collector(CountingEnv(max_steps=7), frames_per_batch=1000, total_frames=10**6, replay_buffer=buffer) as made:
        made.next()
        disk.free = 0
        with pytest.raises(OSError, match=r"No space left .*buffer.rows"):
            for _ in made:
                pass
        assert len(buffer) == buffer.write_count > 0
        assert bool((buffer[:]["next", "observation"] > buffer[:]["observation"]).any())


def test_no_member_of_an_ensemble_is_loaded_where_there_is_no_space_for_another_one(disk, tmp_path):
    other = ReplayBufferEnsemble(*(ReplayBuffer(storage=LazyTensorStorage(10**5)) for _ in range(2)))
    for member in other.members:
        member.extend(rows(10_000, 500))
    members = [ReplayBuffer(storage=LazyMemmapStorage(10**5, scratch_dir=tmp_path / str(n))) for n in range(2)]
    ensemble = ReplayBufferEnsemble(*members)
    for member in members:
        member.extend(rows(10))
    disk.free = 10_000 * ROW_BYTES + 4096
    with pytest.raises(OSError, match="No space left"):
        ensemble.load_state_dict(other.state_dict())
    for member in members:
        check(member, 10)
    disk.free = None
    ensemble.load_state_dict(other.state_dict())
    assert [len(member) for member in members] == [10_000] * 2


def test_a_limit_on_files_is_an_error(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10**6, scratch_dir=tmp_path))
    with files_of_at_most(10**6), pytest.raises(OSError, match=r"a file of \d+ bytes cannot be made") as caught:
        buffer.extend(rows(10))
    assert caught.value.errno == errno.EFBIG
    buffer.extend(rows(10))
    check(buffer, 10)


# Copies and datasets -------------------------------------------------------------------------------


@pytest.mark.parametrize(("storage", "n", "limit"), [(LazyTensorStorage, 50_000, 600_000), (ListStorage, 500, 60_000)])
def test_a_copy_cut_short_is_removed(storage, n, limit, tmp_path):
    buffer = ReplayBuffer(storage=storage(10**6))
    buffer.extend(rows(10))
    buffer.dumps(tmp_path / "saved")
    buffer.extend(rows(n, 10))
    with files_of_at_most(limit), pytest.raises(OSError, match=rf"bytes.*{re.escape(str(tmp_path))}") as caught:
        buffer.dumps(tmp_path / "saved")
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == ["saved"]
    again = ReplayBuffer(storage=storage(10**6))
    again.loads(tmp_path / "saved")
    check(again, 10)
    ensemble = ReplayBufferEnsemble(buffer)
    with files_of_at_most(limit), pytest.raises(OSError, match="bytes"):
        ensemble.dumps(tmp_path / "both")


def test_a_state_that_does_not_fit_beside_its_rows_leaves_the_old_one(tmp_path):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path / "saved"))
    buffer.extend(rows(10))
    buffer.dumps(tmp_path / "saved")
    before = sorted(os.listdir(tmp_path / "saved"))
    with files_of_at_most(100), pytest.raises(OSError, match=r"could not write .*state.pt"):
        buffer.dumps(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path / "saved")) == before


def test_a_dataset_without_space_keeps_what_was_complete(tmp_path):
    target = DatasetWriter(tmp_path / "out", steps=20)
    target.write(rows(10))
    with files_of_at_most(100), pytest.raises(OSError, match=r"could not write \d+ bytes.*memmap"):
        target.write(rows(10, 10))
    with files_of_at_most(100), pytest.raises(OSError, match=r"could not write \d+ bytes.*dataset.json"):
        target.close()
    assert load_dataset(tmp_path / "out")["serial"].tolist() == list(range(10))


# A real one ----------------------------------------------------------------------------------------


def fill_all(folder: Path) -> None:
    torch.set_num_threads(1)  # a fork does not have the threads that torch began
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10**6, scratch_dir=folder / "rows"))
    check(buffer, fill(buffer))
    kept = ReplayBuffer(storage=LazyTensorStorage(10**5))
    kept.extend(rows(10**5))
    for one in (kept, buffer):
        with pytest.raises(OSError, match="No space left"):
            one.dumps(folder / "copy")
    with pytest.raises(OSError, match="No space left"):
        DatasetWriter(folder / "dataset", steps=10**5).write(rows(10**5))
    assert "copy" not in str(os.listdir(folder))
    os._exit(7)


def test_a_full_file_system_is_an_error_and_no_signal(small):
    child = FORK.Process(target=fill_all, args=(small,), daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 7


def test_a_service_dumps_again_when_there_is_space(small):
    options = {"path": small / "dumps", "dump_every": 5000}
    buffer = ReplayBuffer(
        storage=partial(LazyTensorStorage, 10**5), service_backend="process", service_backend_options=options
    )
    with contextlib.ExitStack() as ends:
        ends.callback(buffer.shutdown)
        buffer.extend(rows(5000))
        (small / "others").write_bytes(bytes(1_300_000))
        with pytest.warns(RuntimeWarning, match=r"could not save its buffer: .*No space left"):
            buffer.extend(rows(5000, 5000))
        buffer.extend(rows(5000, 10_000))
        (small / "others").unlink()
        assert wait_until(lambda: buffer.stats()["dump_failure"] is None)
    again = ReplayBuffer(storage=LazyTensorStorage(10**5))
    [folder] = (small / "dumps").glob("dump-*")
    again.loads(folder)
    check(again, 15_000)


# Bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["missing", "unsupported"])
def test_space_is_taken_where_the_system_has_no_call_for_it(kind, tmp_path, monkeypatch):
    def unsupported(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    if kind == "missing":
        monkeypatch.delattr(segment.os, "posix_fallocate")
    else:
        monkeypatch.setattr(segment.os, "posix_fallocate", unsupported)
    file = Segment(tmp_path / "file")
    file.grow(10**6)
    file.map(0, 10**6)[5000:5003] = b"abc"
    file.allocate(100, 300_000)
    assert file.num_bytes == 10**6
    assert bytes(file.map(0, 10**6)[5000:5003]) == b"abc"
    assert 300_000 <= os.stat(tmp_path / "file").st_blocks * 512 < 400_000
    file.allocate(10**6, 10)
    assert file.num_bytes == 10**6 + 10
