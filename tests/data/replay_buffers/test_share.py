"""share(): a buffer that is in use moves to memory that processes share; whoever holds it goes on with it."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import threading
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tensordict import TensorDict

from rollwright._processes.child import Child
from rollwright.collectors import Collector
from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RaggedStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
    TensorStorage,
)
from rollwright.testing.mocking_classes import CountingEnv

LIMIT = 60.0
IDS = ("collector", "traj_ids")


def frames(trajectory: int, n: int, start: int = 0) -> TensorDict:
    step = torch.arange(start, start + n)
    return TensorDict({"step": step, "collector": {"traj_ids": torch.full((n,), trajectory)}}, [n])


def extend_in_turns(channel, buffer, trajectory: int, turns: int, **options) -> None:
    """Extend once a message, and say what the buffer holds then."""
    for turn in range(turns):
        channel.recv(LIMIT)
        buffer.extend(frames(trajectory, 5, 5 * turn), **options)
        channel.send((buffer.write_count, buffer.storage.ledger.take_ids(1) if hasattr(buffer, "storage") else None))


def turn(child: Child) -> tuple[int, int]:
    child.channel.send("go")
    return child.channel.recv(LIMIT)


def finish(child: Child) -> None:
    assert child.end(LIMIT) == "ended"
    assert child.how_it_ended() == "exited with status 0"


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
@pytest.mark.parametrize("length", [0, 7, 20, 33])
def test_what_is_stored_stays_and_others_write_behind_it(storage, length):
    buffer = TensorDictReplayBuffer(storage=storage(20), batch_size=4)
    for start in range(0, length, 11):
        buffer.extend(frames(0, min(11, length - start), start))
    before, count = buffer[:] if length else None, buffer.write_count
    ledger = buffer.storage.ledger
    ledger.take_ids(3)
    assert buffer.share() is buffer
    buffer.share()
    assert buffer.storage.shared
    assert buffer.storage.ledger is ledger
    assert (len(buffer), buffer.write_count) == (min(length, 20), count)
    if before is not None:
        assert bool((buffer[:] == before).all())
    child = Child(extend_in_turns, buffer, 7, 2, name="writer")
    assert turn(child) == (count + 5, 3)
    assert turn(child) == (count + 10, 4)
    finish(child)
    assert ledger.take_ids(1) == 5
    assert buffer.write_count == count + 10
    newest = [(count + n) % 20 for n in range(10)]
    assert buffer.storage.read(torch.tensor(newest).numpy())["step"].tolist() == list(range(10))
    assert buffer.sample().shape == (4,)


def test_from_then_on_this_process_and_others_hold_one_another_off():
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), batch_size=4)
    buffer.extend(frames(0, 5))
    buffer.share()
    child = Child(extend_in_turns, buffer, 1, 1, name="writer")
    with buffer.storage.ledger.reading():
        child.channel.send("go")
        assert not child.channel.poll(0.5)
        assert buffer.write_count == 5
    assert child.channel.recv(LIMIT)[0] == 10
    finish(child)


def test_given_data_can_be_shared():
    buffer = ReplayBuffer(storage=TensorStorage(frames(1, 12), max_size=30), batch_size=4).share()
    child = Child(extend_in_turns, buffer, 2, 1, name="writer")
    assert turn(child)[0] == 17
    finish(child)
    assert buffer[:]["step"].tolist() == [*range(12), *range(5)]


def test_what_lies_in_two_dimensions_can_be_shared():
    buffer = ReplayBuffer(storage=LazyTensorStorage(40, ndim=2), batch_size=4)
    data = TensorDict({"step": torch.arange(24).reshape(2, 12)}, [2, 12])
    buffer.extend(data)
    buffer.extend(data)
    before = buffer[:]
    twin = pickle.loads(pickle.dumps(buffer))  # of before: its rows are its own
    buffer.share()
    buffer.extend(data)
    assert bool((twin[:] == before).all())
    assert buffer[:]["step"].shape == (2, 20)
    assert torch.equal(buffer[:]["step"][:, 4:16], data["step"])  # time 24 to 36, in a ring of 20


def test_samplers_go_on():
    torch.manual_seed(0)
    prioritized = ReplayBuffer(
        storage=LazyTensorStorage(20), sampler=PrioritizedSampler(20, alpha=1.0, beta=1.0), batch_size=6
    )
    index = prioritized.extend(frames(0, 20))
    prioritized.update_priority(index, (torch.arange(20) == 13).double())
    prioritized.share()
    assert prioritized.sample()["step"].tolist() == [13] * 6
    passing = ReplayBuffer(storage=LazyTensorStorage(20), sampler=SamplerWithoutReplacement(), batch_size=10)
    passing.extend(frames(0, 20))
    first = passing.sample()["step"]
    passing.share()
    assert sorted([*first.tolist(), *passing.sample()["step"].tolist()]) == list(range(20))


def test_slices_see_what_another_process_writes():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(60), sampler=SliceSampler(slice_len=5, strict_length=True), batch_size=20
    )
    buffer.extend(frames(0, 9))
    buffer.sample()
    buffer.share()
    child = Child(extend_in_turns, buffer, 1, 8, name="writer")
    seen = set()
    for _ in range(8):
        turn(child)
        batch = buffer.sample().reshape(4, 5)
        assert bool((batch[IDS] == batch[IDS][:, :1]).all())
        assert bool((batch["step"].diff() == 1).all())
        seen |= set(batch[IDS].flatten().tolist())
    finish(child)
    assert seen == {0, 1}


def test_all_members_of_an_ensemble():
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(50)) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=8)
    ensemble.extend(frames(9, 5), member=1)
    assert ensemble.share() is ensemble
    child = Child(extend_member_in_turns, ensemble, name="writer")
    assert turn(child) == (10, None)
    finish(child)
    assert ensemble.write_count == 10
    assert ensemble.sample()[IDS].tolist() == [[3] * 4, [9] * 4]


def extend_member_in_turns(channel, ensemble) -> None:
    extend_in_turns(channel, ensemble, 3, 1, member=0)


def extend_with_an_id(channel, buffer) -> None:
    channel.recv(LIMIT)
    taken = buffer.storage.ledger.take_ids(1)
    buffer.extend(buffer[:5].set(IDS, torch.full((5,), taken)))
    channel.send((buffer.write_count, taken))


def test_a_collector_of_before_goes_on_and_ids_are_in_common():
    buffer = ReplayBuffer(storage=LazyTensorStorage(400), batch_size=4)
    collector = Collector(CountingEnv(max_steps=4), None, frames_per_batch=20, replay_buffer=buffer)
    collector.next()
    buffer.share()
    child = Child(extend_with_an_id, buffer, name="writer")
    count, taken = turn(child)
    finish(child)
    collector.next()
    collector.shutdown()
    assert (count, buffer.write_count) == (25, 45)
    ids = buffer[:][IDS]
    assert int(ids[:20].max()) < taken < int(ids[25:].max())
    assert (ids == taken).nonzero().flatten().tolist() == list(range(20, 25))
    assert "shared" in collector.stats()["paths"]["buffer"]


def test_threads_that_write_and_sample_meanwhile_lose_nothing():
    buffer = ReplayBuffer(storage=LazyTensorStorage(5000), batch_size=16)
    buffer.extend(frames(0, 1))
    over, halfway = threading.Event(), threading.Barrier(4)
    failures: list[BaseException] = []

    def write(trajectory: int) -> None:
        for n in range(300):
            if n == 100:
                halfway.wait(LIMIT)
            buffer.extend(frames(trajectory, 5, 5 * n))

    def sample() -> None:
        halfway.wait(LIMIT)
        while not over.is_set():
            batch = buffer.sample()
            if not bool((batch["step"] < 1500).all() and (batch[IDS] <= 2).all()):
                failures.append(ValueError(f"torn: {batch}"))

    threads = [threading.Thread(target=write, args=(n,)) for n in (1, 2)]
    reader = threading.Thread(target=sample)
    for thread in [*threads, reader]:
        thread.start()
    halfway.wait(LIMIT)
    buffer.share()
    for thread in threads:
        thread.join(LIMIT)
    over.set()
    reader.join(LIMIT)
    assert not failures
    assert buffer.write_count == 3001
    data = buffer[:]
    for n in (1, 2):
        assert data["step"][data[IDS] == n].tolist() == list(range(1500))


def test_rows_that_are_being_written_are_waited_for():
    buffer = ReplayBuffer(storage=LazyTensorStorage(50), batch_size=16)
    buffer.extend(frames(0, 5))
    storage = buffer.storage
    rows = storage.reserve(5)
    storage.ledger.timeout_s = 0.05
    with pytest.raises(TimeoutError, match=r"reservation of 5 rows .* not published yet"):
        buffer.share()
    assert not storage.shared
    storage.ledger.timeout_s = LIMIT
    threading.Timer(0.05, storage.abandon, [rows]).start()
    buffer.share()
    assert storage.shared
    assert len(buffer) == 5


def test_what_cannot_be_shared():
    with pytest.raises(TypeError, match=r"ListStorage holds objects of this process.*LazyTensorStorage"):
        ReplayBuffer(storage=ListStorage(5)).share()
    assert not ReplayBuffer(storage=LazyTensorStorage(5)).share(False).storage.shared


def sent(value):
    """What a process that multiprocessing starts would get."""
    return pickle.loads(ForkingPickler.dumps(value))


@pytest.mark.parametrize("length", [0, 7])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, RaggedStorage])
def test_rows_are_shared_when_they_are_sent(storage, length):
    buffer = TensorDictReplayBuffer(storage=storage(20))
    if length:
        buffer.extend(frames(0, length))
    twin = sent(ReplayBufferEnsemble(buffer)).members[0]
    twin.extend(frames(1, 5))
    assert (len(buffer), buffer.storage.shared) == (length + 5, True)
    assert buffer[length:]["step"].tolist() == list(range(5))
    sent(buffer.storage)
    buffer.extend(frames(2, 5))
    assert twin[:][IDS].tolist() == [0] * length + [1] * 5 + [2] * 5


def test_a_writer_of_this_process_alone_is_neither_shared_nor_sent():
    with pytest.raises(ValueError, match="writer: TensorDictMaxValueWriter ranks what this process writes"):
        ReplayBuffer(storage=LazyTensorStorage(9), writer=TensorDictMaxValueWriter("step"), shared=True)
    buffer = ReplayBuffer(storage=LazyTensorStorage(9), writer=TensorDictMaxValueWriter("step"))
    for one in (buffer, ReplayBufferEnsemble(buffer)):
        for way in (sent, type(one).share):
            with pytest.raises(ValueError, match="make the buffer in the process that uses it"):
                way(one)
    buffer.extend(frames(0, 5))  # this process goes on
    assert len(buffer) == 5


def test_nothing_is_left_of_it():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        buffer = ReplayBuffer(storage=LazyTensorStorage(50))
        buffer.extend(frames(0, 5))
        buffer.share()
        del buffer
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


# Storages of objects -------------------------------------------------------------------------------


class OfMine(ListStorage):
    """Somebody's own."""


@pytest.mark.parametrize("storage", [ListStorage, OfMine])
def test_a_storage_of_objects_is_not_sent_as_a_silent_copy(storage):
    buffer = ReplayBuffer(storage=storage(10))
    buffer.extend(["a", "b"])
    message = rf"{storage.__name__} holds objects of this process.*shared=True"
    for way in (buffer, ReplayBufferEnsemble(buffer), {"buffer": buffer.storage}):
        with pytest.raises(TypeError, match=message):
            multiprocessing.get_context("spawn").Process(target=print, args=(way,)).start()
    one, other = multiprocessing.Pipe()
    with one, other, pytest.raises(TypeError, match=message):
        one.send(buffer)
    for twin in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):  # these were asked for
        twin.extend(["c"])
        assert (len(twin), len(buffer)) == (3, 2)


def extend_and_tell(channel, write) -> None:
    channel.send(write.buffer.sample(1))  # a copy can be read
    try:
        write("c")
    except TypeError as error:
        channel.send(str(error))


class Write:
    """A function that a worker is sent, with a buffer that it knows."""

    def __init__(self, buffer) -> None:
        self.buffer = buffer

    def __call__(self, item) -> None:
        self.buffer.extend([item])


def test_a_copy_that_came_along_with_a_function_is_not_written():
    buffer = ReplayBuffer(storage=ListStorage(10), collate_fn=list)
    buffer.extend(["a"])
    child = Child(extend_and_tell, Write(buffer), name="writer")
    assert child.channel.recv(LIMIT) == ["a"]
    assert "copy of a ListStorage of another process" in child.channel.recv(LIMIT)
    finish(child)
    buffer.extend(["b"])  # the original goes on
    assert len(buffer) == 2
