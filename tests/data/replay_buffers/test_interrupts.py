"""Ctrl-C at any moment leaves a buffer that works."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from tensordict import TensorDict
from tests.processes.forked import forked

from rollwright._interrupts import uninterrupted
from rollwright.data import LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler

FRAMES = TensorDict({"episode": torch.zeros(10)}, [10])


def test_ctrl_c_waits_until_the_block_is_through():
    done = []

    def interrupted() -> None:
        with uninterrupted:
            with uninterrupted:
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_users_own_handler_is_called_once():
    calls = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with uninterrupted:
            signal.raise_signal(signal.SIGINT)
            assert not calls
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_handler_of_python_is_left_alone(before):
    mine = signal.signal(signal.SIGINT, before)
    try:
        with uninterrupted:
            assert signal.getsignal(signal.SIGINT) == before
    finally:
        signal.signal(signal.SIGINT, mine)


def test_other_threads_are_not_concerned():
    seen = []

    def run() -> None:
        with uninterrupted:
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert seen == [signal.default_int_handler]


@pytest.mark.parametrize(
    ("storage", "shared"), [(LazyTensorStorage, False), (LazyTensorStorage, True), (ListStorage, False)]
)
def test_a_buffer_works_after_ctrl_c_at_any_moment(storage, shared):
    buffer = ReplayBuffer(
        storage=storage(1000), batch_size=4, sampler=SliceSampler(slice_len=2, traj_key="episode"), shared=shared
    )
    buffer.storage.ledger.timeout_s = buffer.storage.ledger.lock._timeout_s = 2.0
    buffer.extend(FRAMES)
    signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    interrupts = 0
    while interrupts < 60:
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-4 + 3e-4 * float(torch.rand(())))
            while True:
                buffer.sample()
                buffer.extend(FRAMES)
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        before = buffer.write_count
        buffer.extend(FRAMES)
        assert buffer.write_count == before + 10
        assert len(buffer.sample()) == 4
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def test_ctrl_c_comes_through_in_a_fork_of_another_thread():
    def come_through() -> str:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), uninterrupted:
            signal.raise_signal(signal.SIGINT)
        return "through"

    found = []
    with uninterrupted:  # of the main thread, which is not there
        thread = threading.Thread(target=lambda: found.append(forked(come_through)))
        thread.start()
        thread.join(60)
        assert found == ["through"]
        assert forked(lambda: uninterrupted._depth) == 1  # of this thread, which ends the block there too
