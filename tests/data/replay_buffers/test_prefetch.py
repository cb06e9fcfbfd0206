"""Prefetcher: what is dropped while threads begin it, and what fails ahead of time."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tests.patience import patient

from rollwright.data.replay_buffers._threads import Prefetcher, Ticket


@pytest.mark.parametrize("ended", ["drop", "shutdown"])
@pytest.mark.timeout(30)
def test_work_that_starts_while_it_is_dropped_does_not_wait_for_what_was_cancelled(monkeypatch, ended):
    """Two threads are at work, two results are pending; the first that is cancelled lets the threads go on."""
    count, begun = iter(range(100)), [threading.Event() for _ in range(100)]
    submitted, gate = threading.Semaphore(0), threading.Event()
    turns: list[Ticket] = []

    def make(turn: Ticket) -> int:
        turns.append(turn)
        number = next(count)
        begun[number].set()
        if number < 2:
            gate.wait()
        with turn:
            return number

    def submit(pool, *args, submit=ThreadPoolExecutor.submit):
        future = submit(pool, *args)
        submitted.release()
        return future

    def cancel(future, cancel=Future.cancel):
        done = cancel(future)
        gate.set()
        begun[2].wait(patient(5.0))  # what is not cancelled yet starts now
        return done

    prefetcher = Prefetcher(2, make)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    monkeypatch.setattr(Future, "cancel", cancel)
    results: set[int] = set()
    callers = [threading.Thread(target=lambda: results.add(prefetcher.next()), daemon=True) for _ in range(2)]
    for caller in callers:
        caller.start()
    for _ in range(4):
        submitted.acquire()
    over = threading.Thread(target=getattr(prefetcher, ended), daemon=True)
    over.start()
    threads = (over, *callers)
    for thread in threads:
        thread.join(patient(5.0))
    waiting = [thread for thread in threads if thread.is_alive()]
    for turn in turns:
        turn._before.set()  # no test waits for what hangs
    assert not waiting
    assert results == {0, 1}
    assert begun[2].is_set()
    assert not begun[3].is_set()
    prefetcher.shutdown()


@pytest.mark.parametrize("error", [TimeoutError, ValueError])
def test_what_waited_in_vain_ahead_of_time_is_made_when_it_is_asked_for(error):
    count = iter(range(100))

    def make(turn: Ticket) -> bool:
        with turn:
            if next(count) == 1:
                raise error("ahead")
            return True

    prefetcher = Prefetcher(1, make)
    assert prefetcher.next()
    if error is TimeoutError:
        assert prefetcher.next()
    else:
        with pytest.raises(ValueError, match="ahead"):
            prefetcher.next()
    prefetcher.shutdown()


def test_what_waits_in_vain_when_it_is_asked_for_is_an_error():
    def make(turn: Ticket) -> int:
        with turn:
            raise TimeoutError("in vain")

    prefetcher = Prefetcher(1, make)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="in vain"):
            prefetcher.next()
    prefetcher.shutdown()
