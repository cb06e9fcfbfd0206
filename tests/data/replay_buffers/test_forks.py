"""A buffer in a forked child: it can be used there, whatever threads of the parent were doing at the fork."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.processes.forked import forked

from rollwright._processes import forks
from rollwright.data import (
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SampleToInsertRatio,
    TensorDictReplayBuffer,
)

LIMIT = 60.0


def frames(n: int, start: int = 0) -> TensorDict:
    return TensorDict({"step": torch.arange(start, start + n)}, [n])


class Gate:
    """A place where threads of this process rest, and those of forks do not."""

    def __init__(self) -> None:
        self.home, self.open = os.getpid(), threading.Event()
        self.there = threading.Event()

    def rest(self) -> None:
        if os.getpid() == self.home:
            self.there.set()
            assert self.open.wait(LIMIT)

    @contextlib.contextmanager
    def held(self, work: Callable[[], Any]) -> Iterator[None]:
        """While a thread does that, and rests here."""
        thread = threading.Thread(target=work)
        thread.start()
        assert self.there.wait(LIMIT)
        try:
            yield
        finally:
            self.open.set()
            thread.join(LIMIT)
            assert not thread.is_alive()


class GatedSampler(RandomSampler):
    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def draw(self, *arguments: Any, **options: Any) -> Any:
        self.gate.rest()
        return super().draw(*arguments, **options)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(forks, "_WAIT_S", 0.01)  # threads rest until the fork is over


def use(buffer: ReplayBuffer) -> tuple[int, int, int, int]:
    """Every call that takes a lock."""
    batch, info = buffer.sample(return_info=True)
    buffer.update_priority(info["index"], 1.0)
    buffer.extend(frames(5, 100))
    buffer.add(frames(1, 200)[0])
    buffer[:5] = frames(5, 300)
    held, state = len(buffer), buffer.state_dict()
    buffer.set_sampler(RandomSampler())
    buffer.append_transform(lambda batch: batch)
    again = len(buffer.sample())
    buffer.empty()
    buffer.load_state_dict(state)
    buffer.share(buffer.storage.shared)
    written = buffer.write_count
    buffer.shutdown()
    return len(batch), held, again, written


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("shared", [False, True], ids=["private", "shared"])
def test_a_fork_while_a_thread_draws(prefetch, shared):
    gate = Gate()
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(50), sampler=GatedSampler(gate), batch_size=8, prefetch=prefetch, shared=shared
    )
    buffer.extend(frames(20))
    with gate.held(buffer.sample):
        if shared:  # the parent, which lives, holds the lock between processes too: whoever writes waits for it
            assert forked(lambda: len(buffer.sample())) == 8
        else:
            assert forked(lambda: use(buffer)) == (8, 26, 8, 26)
    if shared:
        assert forked(lambda: use(buffer)) == (8, 26, 8, 26)
    assert len(buffer.sample()) == 8
    buffer.shutdown()


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_fork_while_a_thread_writes(prefetch):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=8, prefetch=prefetch)
    buffer.extend(frames(20))
    gate, write = Gate(), buffer.storage._write

    def gated(*arguments: Any) -> None:
        write(*arguments)
        gate.rest()

    buffer.storage._write = gated
    with gate.held(lambda: buffer.extend(frames(7, 20))):  # reserved, and not published
        assert len(buffer) == 20
        assert forked(lambda: use(buffer)) == (8, 26, 8, 26)
    assert len(buffer) == 27


@pytest.mark.parametrize("how", ["reading", "writing"])
def test_a_fork_while_a_thread_holds_the_lock_of_rows(how):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=8)
    buffer.extend(frames(20))
    gate = Gate()

    def hold() -> None:
        with getattr(buffer.storage.ledger, how)():
            gate.rest()

    with gate.held(hold):
        assert forked(lambda: use(buffer)) == (8, 26, 8, 26)


def test_a_fork_while_threads_wait_for_the_limiter():
    limiter = SampleToInsertRatio(1.0, margin=8, timeout_s=LIMIT)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=8, limiter=limiter)
    buffer.extend(frames(20))
    gate = Gate()

    def hold() -> None:
        with limiter.progress.changed:
            gate.rest()

    with gate.held(hold):
        assert forked(lambda: use(buffer)) == (8, 26, 8, 26)
    assert limiter.sampled == 0


def test_a_fork_in_the_middle_of_a_pass_goes_on_with_it():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(), batch_size=5)
    buffer.extend(frames(20))
    first = buffer.sample()["step"].tolist()
    rest = forked(lambda: [step for _ in range(3) for step in buffer.sample()["step"].tolist()])
    assert sorted(first + rest) == list(range(20))


def test_a_fork_waits_for_a_draw_under_way(monkeypatch):
    monkeypatch.setattr(forks, "_WAIT_S", LIMIT)
    gate = Gate()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(20), sampler=GatedSampler(gate), batch_size=5)
    buffer.extend(frames(20))
    with gate.held(buffer.sample):
        threading.Timer(0.05, gate.open.set).start()
        assert forked(lambda: gate.open.is_set())


def test_many_forks_while_threads_write_and_sample_without_a_pause():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(200), batch_size=8, prefetch=2, shared=True)
    buffer.extend(frames(200))
    over = threading.Event()

    def work(do: Callable[[], Any]) -> None:
        while not over.is_set():
            do()

    threads = [
        threading.Thread(target=work, args=(do,))
        for do in (buffer.sample, lambda: buffer[:3], lambda: buffer.extend(frames(3)))
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            assert forked(lambda: (len(buffer.sample()), len(buffer.extend(frames(4))))) == (8, 4)
    finally:
        over.set()
        for thread in threads:
            thread.join(LIMIT)
        buffer.shutdown()
