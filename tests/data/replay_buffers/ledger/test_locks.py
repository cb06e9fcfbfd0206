"""The lock of rows: writers and readers of all processes take turns, and nobody waits for one who is dead."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable

import pytest
from tests.collectors.workers.processes import wait_until
from tests.processes.forked import fork

from rollwright._memory.segment import Segment
from rollwright._processes import files
from rollwright.data.replay_buffers.ledger.locks import _READERS, RowLock

LIMIT = 60.0

pytestmark = pytest.mark.skipif(
    not files._are_lasting(), reason="two locks in one process stand for those of two, on Linux"
)


class Group:
    """Locks over one file, each of which stands for a process; threads that use them, and the order of their turns."""

    def __init__(self, count: int) -> None:
        self._file, memory = Segment(), Segment()
        memory.grow(8)
        self.hint = memory.map(0, 8).cast("q")
        self.locks = [RowLock(self._file) for _ in range(count)]
        for lock in self.locks:
            lock.hint_at(self.hint)
        self.turns: list[str] = []
        self._threads: list[threading.Thread] = []

    def start(self, name: str, held: Callable) -> None:
        def take_turn() -> None:
            with held():
                self.turns.append(name)

        thread = threading.Thread(target=take_turn)
        self._threads.append(thread)
        thread.start()

    def finish(self) -> list[str]:
        for thread in self._threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        return self.turns

    def await_writer(self) -> None:
        assert wait_until(lambda: self.hint[0] == 1, LIMIT)


def test_readers_that_come_later_wait_for_the_writer_that_waits():
    group = Group(3)
    first, writer, second = group.locks
    with first.reading():
        group.start("writer", writer.writing)
        group.await_writer()
        group.start("reader", second.reading)
        assert wait_until(lambda: first._locks.is_taken(_READERS), LIMIT)
        assert group.turns == []
    assert group.finish() == ["writer", "reader"]
    assert group.hint[0] == 0


def test_so_do_other_threads_of_a_process_that_reads():
    group = Group(2)
    readers, writer = group.locks
    with readers.reading():
        group.start("writer", writer.writing)
        group.await_writer()
        group.start("reader", readers.reading)
        with readers.reading():  # of this thread, which would wait for itself
            assert group.turns == []
    assert group.finish() == ["writer", "reader"]


def test_the_next_writer_waits_for_readers_that_wait():
    group = Group(4)
    holder, second, reader, third = group.locks
    with holder.writing():
        group.start("second", second.writing)
        group.await_writer()
        group.start("reader", reader.reading)
        assert wait_until(lambda: holder._locks.is_taken(_READERS), LIMIT)
        group.start("third", third.writing)
    assert group.finish() == ["second", "reader", "third"]


def test_many_who_want_it_at_once_all_get_it():
    group = Group(6)
    inside: list[str] = []
    alone: list[bool] = []

    def work(lock: RowLock, writes: bool) -> None:
        for _ in range(100):
            with lock.writing() if writes else lock.reading():
                inside.append("writer" if writes else "reader")
                alone.append(len(inside) == 1 or not (writes or "writer" in inside))
                inside.remove("writer" if writes else "reader")

    threads = [threading.Thread(target=work, args=(lock, n < 3)) for n, lock in enumerate(group.locks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    assert len(alone) == 600
    assert all(alone)


def test_a_writer_that_is_killed_while_it_waits_keeps_nobody_waiting():
    group = Group(3)
    reader, writer, other = group.locks
    with reader.reading():
        pid = fork()
        if not pid:
            with writer.writing():
                os._exit(1)
        group.await_writer()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert group.hint[0] == 1
        with other.reading():
            assert group.hint[0] == 0
    with writer.writing():
        pass


def test_who_gives_up_waiting_keeps_nobody_waiting():
    group = Group(3)
    reader, writer, other = group.locks
    writer._timeout_s = 0.01
    with reader.reading():
        with pytest.raises(TimeoutError, match="a process that holds the replay buffer's lock"), writer.writing():
            pass
        with other.reading():
            assert group.hint[0] == 0


@pytest.mark.parametrize("how", ["reading", "writing"])
def test_two_system_calls_where_nobody_is_in_the_way(how, monkeypatch):
    [lock] = Group(1).locks
    calls = []
    call = fcntl.fcntl

    def counted(*arguments):
        calls.append(arguments)
        return call(*arguments)

    monkeypatch.setattr(fcntl, "fcntl", counted)
    with getattr(lock, how)():
        pass
    assert len(calls) == 2


def test_a_fork_in_the_middle_of_a_turn_ends_it_by_itself():
    [lock] = Group(1).locks
    with lock.reading():
        pid = fork()
    if not pid:
        signal.alarm(int(LIMIT))
        with lock.writing():
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with lock.writing():
        pass
