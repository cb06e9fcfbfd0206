"""What objects do in forked children."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref

from tests.processes.forked import forked

from rollwright._processes import forks
from rollwright._processes.forks import on_fork

LIMIT = 60.0


class Owner:
    def __init__(self) -> None:
        self.pid, self.whole = os.getpid(), True
        self.lock = threading.RLock()

    def reset_after_fork(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()


def test_each_object_is_renewed_in_each_child():
    owners = [Owner() for _ in range(3)]
    for owner in owners:
        on_fork(owner)
    assert forked(lambda: [owner.pid == os.getpid() for owner in owners]) == [True] * 3
    assert [owner.pid == os.getpid() for owner in owners] == [True] * 3


def test_nothing_is_left_of_objects_that_are_gone():
    gc.collect()
    before = len(forks._owners)
    for _ in range(10):
        on_fork(Owner())
    gc.collect()
    assert len(forks._owners) <= before


def test_one_that_raises_keeps_no_other_from_its_turn():
    class Failing(Owner):
        def reset_after_fork(self) -> None:
            raise KeyError("mine")

    first, second = Failing(), Owner()
    on_fork(first)
    on_fork(second)
    assert forked(lambda: second.pid == os.getpid())


def test_a_fork_waits_until_a_state_is_whole():
    owner = Owner()
    on_fork(owner, lambda owner: owner.lock)
    halfway, go_on = threading.Event(), threading.Event()

    def change() -> None:
        with owner.lock:
            owner.whole = False
            halfway.set()
            go_on.wait(LIMIT)
            owner.whole = True

    thread = threading.Thread(target=change)
    thread.start()
    halfway.wait(LIMIT)
    threading.Timer(0.05, go_on.set).start()
    assert forked(lambda: owner.whole)
    thread.join(LIMIT)
    with owner.lock:  # as the parent may again, and the child
        assert forked(lambda: owner.lock.acquire(blocking=False))
    assert owner.lock.acquire(blocking=False)
    owner.lock.release()


def test_a_fork_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(forks, "_WAIT_S", 0.01)
    owner = Owner()
    on_fork(owner, lambda owner: owner.lock)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with owner.lock:
            held.set()
            over.wait(LIMIT)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(LIMIT)
    assert forked(lambda: owner.lock.acquire(blocking=False))
    over.set()
    thread.join(LIMIT)


def test_a_fork_takes_all_locks_while_other_threads_make_objects(monkeypatch):
    monkeypatch.setattr(forks, "_owners", weakref.WeakKeyDictionary())
    owners, over = [Owner() for _ in range(50)], threading.Event()
    for owner in owners:
        on_fork(owner, lambda owner: owner.lock)

    def make() -> None:
        while not over.is_set():
            others = [Owner() for _ in range(200)]
            for other in others:
                on_fork(other)

    thread, interval = threading.Thread(target=make), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(1000):
            forks._before()  # what the system calls, and whose errors it only prints
            held = len(forks._held.locks)
            forks._in_parent()
            assert held == len(owners)
    finally:
        over.set()
        sys.setswitchinterval(interval)
        thread.join(LIMIT)
