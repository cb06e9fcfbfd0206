"""Locks on bytes of a file: they end with their holder, with nothing else, and belong to no fork."""

from __future__ import annotations

import os
import shutil
import signal

import pytest
from tests.processes.forked import fork, forked, resting_fork

from rollwright._memory.segment import Segment
from rollwright._processes import files
from rollwright._processes.files import FileLocks

LASTING = files._are_lasting()
needs_lasting = pytest.mark.skipif(not LASTING, reason="no locks that belong to an open file description")


@pytest.fixture(params=[pytest.param(True, marks=needs_lasting), False], ids=["description", "process"])
def locks_of(request, monkeypatch):
    """Makes locks of either kind."""
    monkeypatch.setattr(files, "_are_lasting", lambda: request.param)
    return FileLocks


def test_many_read_or_one_writes(locks_of):
    locks = locks_of(Segment())
    assert locks.take(0, exclusive=False)
    assert locks.take(7, exclusive=True)
    assert forked(lambda: (locks.take(0, exclusive=False), locks.take(0, exclusive=True))) == (True, False)
    assert forked(lambda: [locks.is_taken(byte) for byte in (0, 6, 7)]) == [True, False, True]
    assert not locks.is_taken(7)  # by somebody else
    locks.release(0)
    locks.release(7)
    assert forked(lambda: locks.take(0, exclusive=True) and not locks.is_taken(7))


def test_a_fork_holds_none_of_its_parents_locks_and_drops_none(locks_of):
    locks = locks_of(Segment())
    locks.take(0, exclusive=True)

    def release() -> bool:
        locks.release(0)
        return locks.is_taken(0)

    assert forked(release)
    assert forked(lambda: locks.is_taken(0))


def test_a_fork_keeps_no_lock_of_a_killed_parent_alive(locks_of):
    locks = locks_of(Segment())
    ready, tell = os.pipe()
    parent = fork()
    if not parent:
        locks.take(0, exclusive=True)
        with resting_fork() as pid:
            os.write(tell, b"%d" % pid)
            signal.pause()
    child = int(os.read(ready, 20))
    try:
        assert locks.is_taken(0)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        os.kill(child, 0)  # it is there, with all descriptors that it inherited
        assert locks.take(0, exclusive=True)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(ready)
        os.close(tell)


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


@needs_lasting
def test_closing_other_descriptors_drops_nothing(tmp_path):
    file = Segment(tmp_path / "lock")
    locks = FileLocks(file)
    locks.take(0, exclusive=True)
    shutil.copyfile(tmp_path / "lock", tmp_path / "copy")
    os.close(os.dup(file.fd))
    del file
    assert forked(lambda: locks.is_taken(0))
    assert FileLocks(Segment(tmp_path / "lock")).is_taken(0)


@needs_lasting
def test_locks_end_with_their_object_and_leave_no_descriptor():
    file = Segment()
    before, in_fork = num_open(), forked(num_open)
    locks = FileLocks(file)
    locks.take(0, exclusive=True)
    assert forked(num_open) == in_fork + 1
    del locks
    assert not FileLocks(file).is_taken(0)
    assert num_open() == before
    assert forked(num_open) == in_fork


@needs_lasting
def test_a_fork_that_cannot_open_the_file_has_no_locks_rather_than_its_parents(monkeypatch):
    locks = FileLocks(Segment())
    locks.take(0, exclusive=True)

    def refuse(fd: int) -> int:
        raise OSError("too many open files")

    def release() -> str:
        with pytest.raises(ValueError, match="file descriptor"):
            locks.release(0)
        return "refused"

    monkeypatch.setattr(files, "_opened_anew", refuse)
    assert forked(release) == "refused"
