"""Elements are read while others write: what was overwritten meanwhile is in no batch."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rollwright.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
)
from rollwright.data.replay_buffers.ledger.ledger import Ledger


def frames(serial: int, n: int) -> TensorDict:
    return TensorDict(
        {
            "serial": torch.full((n,), serial),
            "twin": torch.full((n, 3), serial),
            "episode": torch.full((n,), serial),
        },
        [n],
    )


def by_priority() -> PrioritizedSliceSampler:
    return PrioritizedSliceSampler(20, 0.7, 0.5, slice_len=4)


class Reads:
    """Runs something in the middle of each read of a storage, as another process might."""

    def __init__(self, buffer: ReplayBuffer, *meanwhile) -> None:
        self._read, self._meanwhile = buffer.storage.read, list(meanwhile)
        self._lock = buffer.storage.ledger.lock
        self.held: list[bool] = []  # whether writers were kept out
        buffer.storage.read = self

    def __call__(self, index: np.ndarray):
        self.held.append(bool(self._lock._readers))
        half = self._read(index)
        if self._meanwhile:
            self._meanwhile.pop(0)()
            half["twin"] = self._read(index)["twin"]  # what is read later is of later
        return half


def check(batch: TensorDict, serials: set[int]) -> None:
    assert (batch["twin"] == batch["serial"][:, None]).all()
    assert set(batch["serial"].tolist()) <= serials


def full_buffer(**options) -> ReplayBuffer:
    buffer = ReplayBuffer(**{"storage": LazyTensorStorage(20), "batch_size": 16, "shared": True, **options})
    buffer.extend(frames(0, 20))
    return buffer


@pytest.mark.parametrize(
    "sampler",
    [None, lambda: SliceSampler(slice_len=4), lambda: PrioritizedSampler(20, 0.7, 0.5)],
    ids=["uniform", "slices", "priorities"],
)
def test_a_batch_that_was_overwritten_is_drawn_again(sampler):
    buffer = full_buffer(sampler=sampler)
    reads = Reads(buffer, lambda: buffer.extend(frames(1, 20)))
    check(buffer.sample(), {1})
    assert reads.held == [False, False]


def test_a_batch_that_is_overwritten_again_and_again_keeps_writers_out_in_the_end():
    buffer = full_buffer()
    reads = Reads(buffer, *[lambda n=n: buffer.extend(frames(n, 20)) for n in (1, 2, 3)])
    check(buffer.sample(), {3})
    assert reads.held == [False, False, False, True]


def test_what_was_written_elsewhere_is_no_reason():
    buffer = full_buffer(storage=LazyTensorStorage(1000))
    reads = Reads(buffer, lambda: buffer.extend(frames(1, 20)))
    check(buffer.sample(), {0})
    assert reads.held == [False]


def test_elements_that_are_replaced_in_place_are_read_again():
    buffer = full_buffer()
    reads = Reads(buffer, lambda: buffer.__setitem__(slice(None), frames(7, 20)))
    check(buffer.sample(), {7})
    assert reads.held == [False, False]


def test_a_buffer_that_is_loaded_or_emptied_meanwhile():
    buffer = full_buffer()
    other = full_buffer()
    other.extend(frames(5, 20))
    state = other.state_dict()
    Reads(buffer, lambda: buffer.load_state_dict(state))
    check(buffer.sample(), {5})
    buffer = full_buffer()
    Reads(buffer, buffer.empty)
    with pytest.raises(RuntimeError, match="is empty"):
        buffer.sample()


def test_a_pass_that_gives_everything_once_keeps_writers_out():
    buffer = full_buffer(sampler=SamplerWithoutReplacement(), batch_size=5)
    reads = Reads(buffer)
    seen = [value for _ in range(4) for value in buffer.sample()["serial"].tolist()]
    assert len(seen) == 20
    assert all(reads.held)


def test_a_buffer_of_one_process_is_read_in_one_go():
    buffer = full_buffer(shared=False)
    reads = Reads(buffer)
    buffer.sample()
    assert reads.held == [True]


@pytest.mark.parametrize(
    "sampler",
    [None, lambda: SliceSampler(slice_len=4), lambda: PrioritizedSampler(20, 0.7, 0.5), lambda: by_priority()],
    ids=["uniform", "slices", "priorities", "slices-priorities"],
)
def test_no_lock_is_held_while_a_shared_buffer_is_sampled(sampler):
    buffer = full_buffer(sampler=sampler)
    with buffer.storage.ledger.writing(), ThreadPoolExecutor(1) as pool:  # as a process does that was stopped there
        check(pool.submit(buffer.sample).result(10.0), {0})


@pytest.mark.parametrize(
    "sampler",
    [lambda: SliceSampler(slice_len=4), lambda: by_priority()],
    ids=["slices", "slices-priorities"],
)
@pytest.mark.parametrize("lengths", [(20,), (7,), (13, 20), (3, 5)], ids=str)
def test_boundaries_that_are_overwritten_while_they_are_read(sampler, lengths):
    buffer = full_buffer(sampler=sampler)
    entry, serials = buffer.storage.entry, iter(range(1, 100))

    def meanwhile(*arguments):
        half = entry(*arguments).copy()
        for length in written.pop() if written else ():
            buffer.extend(frames(next(serials), length))
        whole = entry(*arguments)
        return np.concatenate([half[: len(half) // 2], whole[len(half) // 2 :]])

    written = [lengths, lengths]
    buffer.storage.entry = meanwhile
    for _ in range(4):
        batch = buffer.sample()
        check(batch, set(range(100)))
        starts = batch["is_init"].reshape(-1)
        slices = torch.tensor_split(batch["episode"], starts.nonzero().reshape(-1)[1:])
        assert all(len(set(episode.tolist())) == 1 for episode in slices)
    assert set(batch["serial"].tolist()) <= set(buffer[:]["serial"].tolist())


def test_rows_that_somebody_was_killed_at_changing_are_sampled_under_the_lock():
    buffer = full_buffer()
    ledger = buffer.storage.ledger
    child = os.fork()
    if not child:
        with ledger.changing_in_place():
            os._exit(0)
    os.waitpid(child, 0)
    reads = Reads(buffer)
    check(buffer.sample(), {0})
    assert reads.held == [True]
    buffer[:] = frames(3, 20)
    check(buffer.sample(), {3})
    assert reads.held == [True, False]


def test_what_still_holds_is_what_a_simple_model_says():
    rng = np.random.default_rng(0)
    for _ in range(300):
        ledger = Ledger(capacity=10)
        ledger.publish(ledger.reserve(int(rng.integers(1, 11))))
        for _ in range(int(rng.integers(0, 4))):
            ledger.publish(ledger.reserve(int(rng.integers(1, 11))))
        low, high = ledger.live()
        span, positions = ledger.steady_span(), rng.integers(low, high, 3)
        for _ in range(int(rng.integers(0, 3))):
            ledger.reserve(int(rng.integers(1, 4)))  # and written, it may be
        expected = bool((positions >= ledger.end() - 10).all())
        columns = int(rng.integers(1, 4))
        index = positions % 10 * columns + rng.integers(0, columns, 3)
        assert ledger.still_holds(span, index, columns) == expected


@pytest.mark.parametrize("options", [{}, {"shared": True}, {"prefetch": 2}], ids=["private", "shared", "prefetched"])
def test_a_buffer_all_of_which_a_thread_is_overwriting_is_waited_for(options):
    buffer = full_buffer(**{"shared": False, **options})
    storage = buffer.storage
    with ThreadPoolExecutor(1) as another:
        held = another.submit(storage.reserve, 20).result()
        assert len(buffer) == 0
        threading.Timer(0.05, storage.publish, [held]).start()
        check(buffer.sample(), {0})
    buffer.shutdown()


def test_a_thread_that_overwrites_all_of_a_buffer_itself_is_not_kept_waiting():
    buffer = full_buffer(shared=False)
    held = buffer.storage.reserve(20)
    with pytest.raises(RuntimeError, match="nothing to sample from yet"):
        buffer.sample()
    buffer.storage.publish(held)
    check(buffer.sample(), {0})


@pytest.mark.parametrize("shared", [False, True])
def test_slices_that_are_too_long_for_what_is_not_being_overwritten_are_waited_for(shared):
    buffer = full_buffer(shared=shared, sampler=SliceSampler(slice_len=16, strict_length=True))
    with ThreadPoolExecutor(1) as another:
        held = another.submit(buffer.storage.reserve, 15).result()
        threading.Timer(0.05, buffer.storage.publish, [held]).start()
        assert len(buffer.sample()) == 16
    held = buffer.storage.reserve(15)
    with pytest.raises(ValueError, match="slice_len: expected at most 5"):
        buffer.sample()  # this thread writes itself
    buffer.storage.publish(held)
    buffer.set_sampler(SliceSampler(slice_len=32, strict_length=True))
    with pytest.raises(ValueError, match="slice_len: expected at most 20"):
        buffer.sample(32)
