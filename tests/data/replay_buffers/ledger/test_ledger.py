"""The ledger: rows are reserved, written, published; readers see published ones only, whoever dies."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.processes.forked import SERVED, forked

from rollwright._memory.segment import Segment
from rollwright._processes import files
from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.data.replay_buffers.ledger.counters import NUM_GAPS
from rollwright.data.replay_buffers.ledger.ledger import Ledger
from rollwright.data.replay_buffers.ledger.locks import RowLock

LIMIT = 60.0

FORK = multiprocessing.get_context("fork")  # its processes are children of this one


def shared_ledger(capacity: int = 100) -> tuple[Ledger, Segment, Segment]:
    rows, lock = Segment(), Segment()
    rows.grow(Ledger.num_bytes)
    return Ledger(rows.map(0, Ledger.num_bytes), RowLock.over(lock), capacity=capacity), rows, lock


def attach(rows: Segment, lock: Segment) -> Ledger:
    return Ledger(rows.map(0, Ledger.num_bytes), RowLock.over(lock))


@given(st.lists(st.tuples(st.sampled_from(["reserve", "publish", "abandon"]), st.integers(1, 7)), max_size=60))
@settings(deadline=None)
def test_what_is_live_is_what_a_simple_model_says(moves):
    capacity = 12
    ledger = Ledger(capacity=capacity, timeout_s=0.0)
    state: dict[int, str] = {}  # of each position ever reserved
    open_reservations = []
    for move, n in moves:
        if move == "reserve":
            first_open = min((r.start for r in open_reservations), default=len(state))
            if len(state) + n - capacity > first_open:
                with pytest.raises(TimeoutError, match="not published yet"):
                    ledger.reserve(n)
                continue
            reservation = ledger.reserve(n)
            assert reservation.start == len(state)
            state.update(dict.fromkeys(range(reservation.start, reservation.stop), "open"))
            open_reservations.append(reservation)
        elif open_reservations:
            reservation = open_reservations.pop(n % len(open_reservations))
            getattr(ledger, move)(reservation)
            word = "there" if move == "publish" else "void"
            state.update(dict.fromkeys(range(reservation.start, reservation.stop), word))
        high = next((p for p in range(len(state)) if state[p] == "open"), len(state))
        low = max(0, min(len(state) - capacity, high))
        live = {p for p in range(low, high) if state[p] == "there"}
        got_low, got_high = ledger.live()
        got = set(range(got_low, got_high))
        for start, stop in ledger.gaps():
            assert set(range(start, stop)) <= got
            got -= set(range(start, stop))
        assert got == live
        assert ledger.num_live() == len(live)
        settled = [state[p] for p in range(high)]
        assert high - settled.count("void") == settled.count("there")


def test_write_count_leaves_out_what_was_abandoned():
    ledger = Ledger(capacity=10)
    ledger.publish(ledger.reserve(4), gaps=[(1, 3)])
    ledger.abandon(ledger.reserve(5))
    assert (ledger.write_count, ledger.num_lost, ledger.num_live()) == (2, 7, 2)
    assert ledger.gaps().tolist() == [[1, 3], [4, 9]]


def test_gaps_that_are_overwritten_are_forgotten():
    ledger = Ledger(capacity=4)
    for _ in range(3 * NUM_GAPS):  # more than are remembered at a time
        ledger.abandon(ledger.reserve(2))
    ledger.publish(ledger.reserve(4))
    assert len(ledger.gaps()) == 0
    assert ledger.num_live() == 4


def test_more_rows_than_there_are_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="1 to 4 rows, got 5"):
        Ledger(capacity=4).reserve(5)


def test_a_reservation_whose_block_raises_is_abandoned():
    ledger = Ledger(capacity=4)
    with pytest.raises(KeyError), ledger.writes(3):
        raise KeyError("mine")
    assert ledger.num_live() == 0
    ledger.publish(ledger.reserve(1))
    assert ledger.num_live() == 1


def test_clear_drops_rows_and_says_that_what_was_derived_is_void():
    ledger = Ledger(capacity=4)
    ledger.publish(ledger.reserve(3))
    before = ledger.revision
    ledger.clear()
    assert ledger.num_live() == 0
    assert ledger.revision > before
    ledger.publish(ledger.reserve(2))
    assert ledger.live() == (4, 6)  # from the first row on


def test_rows_begin_at_the_first_after_a_clear():
    ledger = Ledger(capacity=4)
    for number, n in enumerate((3, 2, 4, 1)):
        ledger.publish(ledger.reserve(n))
        low, high = ledger.live()
        assert (low % 4, high - low) == (0, n)
        ledger.clear()
        ledger.clear()
        assert ledger.num_live() == 0
        assert ledger.num_lost == 0
        assert ledger.write_count == sum((3, 2, 4, 1)[: number + 1])
        assert not len(ledger.gaps())


def test_a_clear_leaves_rows_alone_that_somebody_writes():
    ledger = Ledger(capacity=4)
    ledger.publish(ledger.reserve(1))
    held = ledger.reserve(2)
    ledger.clear()
    ledger.publish(held)
    assert ledger.live() == (3, 3)  # what was being written is dropped, too
    ledger.publish(ledger.reserve(1))
    assert ledger.live() == (3, 4)
    assert (ledger.num_lost, ledger.num_passed, ledger.write_count) == (0, 0, 4)


def reserve_and_wait(rows: Segment, lock: Segment, ready, n: int) -> None:
    ledger = attach(rows, lock)
    ledger.reserve(n)
    ready.set()
    signal.pause()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_writers_reservation_becomes_a_gap_and_stops_nobody():
    ledger, rows, lock = shared_ledger()
    ready = FORK.Event()
    writer = FORK.Process(target=reserve_and_wait, args=(rows, lock, ready, 10))
    writer.start()
    assert ready.wait(60)
    mine = ledger.reserve(5)
    ledger.publish(mine)
    ledger.settle()
    assert ledger.live() == (0, 0)  # the other one may still publish
    os.kill(writer.pid, signal.SIGKILL)
    os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
    ledger.settle()
    assert ledger.live() == (0, 15)
    assert ledger.gaps().tolist() == [[0, 10]]
    writer.join(60)


def hold(rows: Segment, lock: Segment, ready, how: str) -> None:
    ledger = attach(rows, lock)
    with getattr(ledger, how)():
        ready.set()
        signal.pause()


@pytest.mark.parametrize("how", ["reading", "writing"])
def test_the_lock_dies_with_its_holder(how):
    ledger, rows, lock = shared_ledger()
    ready = SERVED.Event()
    holder = SERVED.Process(target=hold, args=(rows, lock, ready, how))
    holder.start()
    assert ready.wait(60)
    ledger.lock._timeout_s = 0.05
    with pytest.raises(TimeoutError, match="process"):
        ledger.reserve(1)
    os.kill(holder.pid, signal.SIGKILL)
    ledger.lock._timeout_s = 60.0
    ledger.publish(ledger.reserve(1))
    assert ledger.num_live() == 1
    holder.join(60)


def test_closing_another_descriptor_of_the_lock_file_loses_no_reservation():
    ledger, _, lock = shared_ledger()
    mine = ledger.reserve(5)
    os.close(os.dup(lock.fd))
    assert forked(lambda: (ledger.settle(), ledger.live())[1]) == (0, 0)
    ledger.publish(mine)
    assert (ledger.live(), ledger.num_lost) == ((0, 5), 0)


def test_rows_that_were_given_up_meanwhile_are_not_lost_in_silence(monkeypatch):
    monkeypatch.setattr(files, "_are_lasting", lambda: False)  # as on other systems than Linux
    ledger, _, lock = shared_ledger()
    mine, other = ledger.reserve(5), ledger.reserve(5)
    os.close(os.dup(lock.fd))
    assert forked(lambda: (ledger.settle(), ledger.live())[1]) == (0, 10)
    with pytest.raises(RuntimeError, match=r"5 rows from position 0 are lost: another process gave them up.*again"):
        ledger.publish(mine)
    ledger.abandon(other)
    assert (ledger.num_live(), ledger.num_lost) == (0, 10)
    ledger.publish(ledger.reserve(2))
    assert ledger.write_count == 2


def test_a_fork_neither_publishes_nor_gives_up_what_its_parent_reserved():
    ledger, _, _ = shared_ledger()
    mine = ledger.reserve(5)

    def close_there() -> tuple[int, int]:
        ledger.abandon(mine)
        with pytest.raises(RuntimeError, match="another process reserved them, which this one was forked from"):
            ledger.publish(mine)
        ledger.publish(ledger.reserve(2))
        return ledger.live()

    assert forked(close_there) == (0, 0)
    ledger.publish(mine)
    assert ledger.live() == (0, 7)


def test_what_was_published_is_waited_for_behind_what_was_reserved_before():
    ledger, _, _ = shared_ledger()
    held = ledger.reserve(3)
    ledger.await_published(lambda: False)  # nothing was
    ledger.publish(ledger.reserve(4))
    last = ledger.reserve(2)  # keeps nothing back that was published
    ledger.timeout_s = 0.01
    with pytest.raises(TimeoutError, match=r"can be read: a reservation of 3 rows by this process.*keeps what comes"):
        ledger.await_published(lambda: False)
    asked = []
    ledger.await_published(lambda: bool(asked.append(ledger.live())) or len(asked) > 2)
    ledger.timeout_s = 60.0
    threading.Timer(0.05, ledger.abandon, [held]).start()
    ledger.await_published(lambda: False)
    assert ledger.live() == (0, 7)
    ledger.publish(last)


def test_rows_that_are_all_being_overwritten_are_waited_for():
    ledger, _, _ = shared_ledger()
    assert not ledger.await_overwritten()  # nothing was published
    ledger.publish(ledger.reserve(ledger.capacity))
    with ThreadPoolExecutor(1) as another:
        held = another.submit(ledger.reserve, 3).result()
        ledger.publish(ledger.reserve(ledger.capacity - 3))
        assert not ledger.num_live()
        ledger.timeout_s = 0.01
        with pytest.raises(TimeoutError, match=r"can be read: a reservation of 3 rows by this process"):
            ledger.await_overwritten()
        ledger.timeout_s = 60.0
        threading.Timer(0.05, ledger.publish, [held]).start()
        assert ledger.await_overwritten()
        assert ledger.num_live() == ledger.capacity
    ledger.clear()
    assert not ledger.await_overwritten()


def test_nobody_waits_for_the_rows_that_it_is_writing_itself():
    ledger, _, _ = shared_ledger()
    ledger.publish(ledger.reserve(ledger.capacity))
    held = ledger.reserve(ledger.capacity)
    assert not ledger.await_overwritten()
    ledger.publish(held)
    assert ledger.await_overwritten()


def test_readers_share_and_a_writer_waits_for_them():
    ledger, _, _ = shared_ledger()
    done = threading.Event()

    def write() -> None:
        ledger.publish(ledger.reserve(1))
        done.set()

    with ledger.reading(), ledger.reading():
        thread = threading.Thread(target=write)
        thread.start()
        assert not done.wait(0.05)
    assert done.wait(60)
    thread.join(60)


def test_two_objects_over_one_file_exclude_one_another_in_a_process():
    ledger, rows, lock = shared_ledger()
    other = attach(rows, lock)
    assert other.lock is ledger.lock


def publish_many(rows: Segment, lock: Segment, count: int) -> None:
    ledger = attach(rows, lock)
    for _ in range(count):
        ledger.publish(ledger.reserve(3))


def test_reservations_of_processes_do_not_overlap():
    ledger, rows, lock = shared_ledger(capacity=1000)
    workers = [SERVED.Process(target=publish_many, args=(rows, lock, 200)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert ledger.write_count == 1200
    assert ledger.live() == (200, 1200)
    assert len(ledger.gaps()) == 0


def test_a_segment_grows_and_is_shared():
    segment = Segment()
    segment.grow(10_000)
    first, second = segment.map(8192, 100), segment.map(8200, 8)
    np.frombuffer(first, np.uint8)[8:16] = 7
    assert bytes(second) == b"\x07" * 8


def test_a_reservation_that_is_open_keeps_a_state_from_being_loaded():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    buffer.extend(torch.arange(4))
    state = buffer.state_dict()
    reservation = buffer.storage.reserve(2)
    with pytest.raises(RuntimeError, match=r"not published yet.*pause or shut down"):
        buffer.load_state_dict(state)
    buffer.storage.publish(reservation)
    buffer.load_state_dict(state)
    assert buffer[:].tolist() == [0, 1, 2, 3]


def test_a_copy_made_while_rows_are_written_can_be_written():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=2)
    buffer.extend(torch.arange(4))
    reservation = buffer.storage.reserve(2)
    twin = copy.deepcopy(buffer)
    buffer.storage.publish(reservation)
    twin.extend(torch.arange(10, 13))
    assert len(twin) == 7
    assert twin[:].tolist() == [0, 1, 2, 3, 10, 11, 12]


def test_more_gaps_than_are_remembered_give_up_what_lies_between():
    ledger = Ledger(capacity=1 << 20)
    for _ in range(NUM_GAPS + 10):
        ledger.publish(ledger.reserve(2), gaps=[ledger.live()[1] + 1 + np.array([0, 1])])
    ledger.publish(ledger.reserve(5))
    high = ledger.live()[1]
    assert high == 2 * (NUM_GAPS + 10) + 5
    assert ledger.num_live() <= NUM_GAPS + 15
    live = set(ledger.positions().tolist())
    assert not live & set(range(1, 2 * NUM_GAPS, 2))
    assert {high - 1, high - 5} <= live


def test_writers_go_before_readers_that_come_later():
    ledger = Ledger(capacity=10, timeout_s=30.0)
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with ledger.reading():
                pass

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        ledger.publish(ledger.reserve(1))
    stop.set()
    for thread in threads:
        thread.join(30)
    assert ledger.write_count == 200


def test_ids_are_given_out_once():
    ledger, rows, lock = shared_ledger()
    other = attach(rows, lock)
    assert [ledger.take_ids(3), other.take_ids(2), ledger.raise_ids(4), ledger.raise_ids(9), other.take_ids(1)] == [
        0,
        3,
        5,
        9,
        9,
    ]


def test_threads_that_write_for_the_first_time_at_once_are_one_process(monkeypatch):
    def write_in_two_threads() -> int:
        both, random = threading.Barrier(2), os.urandom

        def urandom(n: int) -> bytes:
            both.wait(LIMIT)
            return random(n)

        def write() -> int:
            ledger = Ledger(capacity=4)
            with ledger.writes(1):
                both.wait(LIMIT)
            return ledger.write_count

        monkeypatch.setattr(os, "urandom", urandom)
        with ThreadPoolExecutor(2) as pool:
            return sum(future.result() for future in [pool.submit(write), pool.submit(write)])

    assert forked(write_in_two_threads) == 2


def test_rows_are_given_up_where_those_that_were_left_out_cannot_be_counted(monkeypatch):
    ledger = Ledger(capacity=4)

    def skip(n: int) -> None:
        raise TimeoutError("waited")

    monkeypatch.setattr(ledger, "skip", skip)
    with pytest.raises(TimeoutError), ledger.writes(4, skipped=2):
        pass
    assert ledger.is_settled()
    assert ledger.num_lost == 4
