"""A buffer in a process of its own behaves as one of this process, for the program and for its clients."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import resource
import signal
import threading
from functools import partial

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from tests.collectors.workers.processes import gone, wait_until

from rollwright.collectors import Collector
from rollwright.data import (
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RaggedStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SampleToInsertRatio,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from rollwright.data.replay_buffers.service.buffer import ServiceReplayBuffer
from rollwright.errors import WorkerError
from rollwright.testing.mocking_classes import CountingEnv


def frames(first, count):
    ids = torch.arange(first, first + count)
    return TensorDict({"obs": ids.float().unsqueeze(-1).expand(count, 30), ("next", "id"): ids}, [count])


def ids_of(buffer):
    return sorted(buffer[:]["next", "id"].tolist())


def doubled(batch):
    return batch.set("twice", 2 * batch["next", "id"])


# The same as a buffer of this process ------------------------------------------------------------------------------


def used(buffer, whole=True):
    """What comes of a number of calls; not ``whole``: until what is prefetched is dropped, with its random numbers."""
    found = [buffer.extend(frames(0, 40)), buffer.extend(frames(40, 70)), buffer.add(frames(110, 1)[0])]
    found += [len(buffer), buffer.write_count, buffer[5]["obs"], buffer[-3:]["next", "id"], buffer["next", "id"]]
    buffer[2] = frames(500, 1)[0]
    buffer.update_priority(torch.tensor([1, 2]), torch.tensor([5.0, 7.0]))
    found += [buffer.sample() for _ in range(5)]
    batch, info = buffer.sample(return_info=True)
    if not whole:
        return [*found, batch, *info.values()]
    buffer.append_transform(doubled)
    found += [batch, *info.values(), buffer.sample()]
    state = buffer.state_dict()
    found += [buffer.sample() for _ in range(2)]
    buffer.load_state_dict(state)
    found += [buffer.sample() for _ in range(2)]
    buffer.set_rng(torch.Generator().manual_seed(3))
    found.append(buffer.sample())
    buffer.empty()
    return [*found, len(buffer), buffer.write_count]


@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("sampler", [None, partial(PrioritizedSampler, 100, 0.7, 0.5), SamplerWithoutReplacement])
def test_a_service_gives_what_a_buffer_of_this_process_gives(serve, sampler, prefetch):
    def options():
        generator = torch.Generator().manual_seed(1)
        return {"sampler": sampler, "batch_size": 8, "generator": generator, "prefetch": prefetch}

    local = TensorDictReplayBuffer(storage=LazyTensorStorage(100), **options())
    expected, found = (used(each, prefetch is None) for each in (local, serve(size=100, **options())))
    local.shutdown()
    assert len(expected) == len(found)
    for mine, theirs in zip(expected, found, strict=True):
        if isinstance(mine, TensorDict):
            assert mine.batch_size == theirs.batch_size
            assert bool((mine == theirs).all())
        elif isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs


def test_it_is_a_replay_buffer_whatever_class_was_asked_for(serve):
    for kind in (ReplayBuffer, TensorDictReplayBuffer):
        buffer = serve(kind)
        assert isinstance(buffer, ReplayBuffer)
        assert isinstance(buffer, ServiceReplayBuffer)
        assert buffer.info.kind == kind.__name__
    assert "LazyTensorStorage(max_size=1000)" in repr(buffer)


def test_a_pass_ends_where_the_sampler_says(serve):
    buffer = serve(sampler=SamplerWithoutReplacement, batch_size=10, prefetch=2)
    buffer.extend(frames(0, 50))
    assert sorted(i for batch in buffer for i in batch["next", "id"].tolist()) == list(range(50))


def test_entries_are_changed_in_the_service(serve):
    buffer = serve()
    index = buffer.extend(frames(0, 10))
    buffer.set_at_(("next", "id"), torch.tensor([70, 80]), index[3:5])
    assert buffer["next", "id"].tolist() == [0, 1, 2, 70, 80, 5, 6, 7, 8, 9]
    buffer.set_(("next", "id"), 4)
    assert set(buffer["next", "id"].tolist()) == {4}
    with pytest.raises(KeyError, match="got 'lost'"):
        buffer.set_("lost", 1)


def test_elements_count_as_new_again(serve):
    buffer = serve(TensorDictPrioritizedReplayBuffer, alpha=1.0, beta=1.0, batch_size=200)
    index = buffer.extend(frames(0, 3))
    buffer.update_priority(index, torch.tensor([0.0, 0.0, 1.0]))
    buffer.mark_update(index[:1])
    assert set(buffer.next()["next", "id"].tolist()) == {0, 2}


def test_priorities_are_the_service_s(serve):
    buffer = serve(TensorDictPrioritizedReplayBuffer, alpha=1.0, beta=1.0, batch_size=64, priority_key="td_error")
    buffer.extend(frames(0, 100))
    buffer.update_priority(torch.arange(100), torch.zeros(100))
    batch = buffer.sample()
    batch["td_error"] = torch.zeros(64)
    buffer.update_tensordict_priority(batch)
    buffer.client().update_priority(torch.tensor([7]), torch.tensor([1e6]))
    assert buffer.sample()["next", "id"].eq(7).all()
    with pytest.raises(KeyError, match="td_error"):
        buffer.update_tensordict_priority(buffer.sample())
    uniform = serve(TensorDictReplayBuffer, batch_size=4)
    uniform.extend(frames(0, 4))
    uniform.update_tensordict_priority(uniform.sample())  # nothing to set
    with pytest.raises(TypeError, match=r"hook: .* saves where its storage is"):
        uniform.register_save_hook(print)


def test_text_and_ragged_elements(serve):
    buffer = serve(ReplayBuffer, storage=partial(RaggedStorage, 100), batch_size=4)
    buffer.extend(lazy_stack([TensorDict({"text": "a" * n, "tokens": torch.arange(n)}) for n in range(1, 4)]))
    batch = buffer.sample()
    assert [len(text) for text in batch["text"]] == [len(one["tokens"]) for one in batch.unbind(0)]


def test_objects_of_a_list(serve):
    buffer = serve(ReplayBuffer, storage=partial(ListStorage, 10), batch_size=2, collate_fn=list)
    buffer.extend([{"a": 1}, {"a": 2}])
    assert all(one in ({"a": 1}, {"a": 2}) for one in buffer.sample())


def test_a_list_storage_that_is_made_already_is_copied_into_the_service(serve):
    buffer = serve(ReplayBuffer, storage=ListStorage(10), batch_size=2)
    buffer.extend([1, 2])
    assert set(buffer.sample()) <= {1, 2}
    buffer.set_storage(ListStorage(5))
    buffer.extend([3])
    assert buffer.sample() == [3, 3]


def test_counts_are_named_as_those_of_a_buffer_of_this_process(serve):
    buffer = serve(batch_size=4)
    assert not buffer.can_sample()
    buffer.extend(frames(0, 5))
    assert buffer.can_sample()
    assert buffer.can_sample(100)
    local = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=4)
    local.extend(frames(0, 5))
    assert local.stats().items() <= buffer.stats().items()
    client = buffer.client()
    assert client.stats() == local.stats()
    client.shutdown()


def test_a_buffer_is_alive_until_it_is_shut_down(serve):
    buffer = serve(batch_size=4)
    assert buffer.start() is buffer
    assert buffer.is_alive
    client = buffer.client()
    assert client.is_alive
    client.shutdown()
    assert not client.is_alive
    assert buffer.is_alive
    buffer.shutdown(timeout=3.0)
    assert not buffer.is_alive


def test_a_service_that_was_killed_is_not_alive(serve):
    buffer = serve(batch_size=4)
    buffer.extend(frames(0, 5))
    os.kill(buffer.host.pid, signal.SIGKILL)
    wait_until(lambda: not buffer.is_alive)
    with pytest.raises(WorkerError, match=r"was killed by SIGKILL: the 5 elements"):
        buffer.sample()


def test_dumps_and_loads(serve, tmp_path):
    first, second = serve(), serve()
    first.extend(frames(0, 30))
    first.dumps(tmp_path / "saved")
    second.loads(tmp_path / "saved")
    local = TensorDictReplayBuffer(storage=LazyTensorStorage(1000))
    local.loads(tmp_path / "saved")
    assert ids_of(second) == ids_of(local) == list(range(30))


def test_what_arrives_is_the_consumer_s_own(serve):
    buffer = serve(batch_size=50)
    buffer.extend(frames(0, 50))
    buffer.sample()["obs"].fill_(-1)
    assert buffer[:]["obs"].min() >= 0


# Clients -----------------------------------------------------------------------------------------------------------


def test_a_client_connects_when_it_is_used_and_can_be_pickled(serve):
    buffer = serve(batch_size=5)
    client = pickle.loads(pickle.dumps(buffer.client()))
    assert client.num_connections == 0
    client.extend(frames(0, 10))
    assert client.num_connections == 1
    again = pickle.loads(pickle.dumps(client))
    again.extend(frames(10, 10))
    assert ids_of(buffer) == list(range(20))
    assert again.sample().shape == (5,)
    assert buffer.stats()["write_count"] == 20
    for each in (client, again):
        each.shutdown()
    assert len(buffer) == 20
    with pytest.raises(RuntimeError, match="was shut down"):
        client.sample()


def test_a_fork_has_a_connection_of_its_own(serve):
    buffer = serve(batch_size=5)
    buffer.extend(frames(0, 10))
    pid = os.fork()
    if not pid:
        try:
            buffer.extend(frames(10, 10))
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert ids_of(buffer) == list(range(20))


def test_threads_write_and_sample_at_once(serve):
    buffer = serve(batch_size=16, prefetch=2)
    buffer.extend(frames(0, 10))
    errors = []

    def write(first):
        try:
            for start in range(first, first + 100, 10):
                buffer.extend(frames(start, 10))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(first,)) for first in (10, 110, 210)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        batch = buffer.sample()
        assert torch.equal(batch["obs"][:, 0].long(), batch["next", "id"])
        assert bool((batch["obs"] == batch["obs"][:, :1]).all())
    for thread in threads:
        thread.join()
    assert not errors
    assert ids_of(buffer) == list(range(310))


# Once each ---------------------------------------------------------------------------------------------------------


def test_a_write_whose_acknowledgement_is_lost_is_stored_once(serve):
    """The connection is cut at all moments between a write and its acknowledgement."""
    buffer = serve(size=100_000)
    client = buffer.client()
    stop = threading.Event()

    def cut():
        while not stop.wait(0.003):
            client._connection.cut()

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        for start in range(0, 1000, 10):
            client.extend(frames(start, 10))
    finally:
        stop.set()
        thread.join()
    assert client.num_connections > 10
    assert ids_of(buffer) == list(range(1000))
    assert buffer.write_count == 1000
    client.shutdown()


def test_samples_without_replacement_are_whole_though_the_connection_breaks(serve):
    buffer = serve(sampler=SamplerWithoutReplacement, batch_size=10, prefetch=3)
    buffer.extend(frames(0, 1000))
    found = []
    for number, batch in enumerate(buffer):
        found += batch["next", "id"].tolist()
        if number % 5 == 0:
            buffer._connection.cut()
    assert sorted(found) == list(range(1000))
    assert buffer.num_connections > 5


def test_a_writer_that_was_given_up_is_refused(serve):
    buffer = serve()
    first, second = buffer.as_writer("worker", 0), buffer.as_writer("worker", 1)
    first.extend(frames(0, 10))
    buffer.give_up("worker", 0)
    assert len(buffer) == 10  # and it was given up before
    with pytest.raises(WorkerError, match="writer worker of generation 0 was given up"):
        first.extend(frames(10, 10))
    with pytest.raises(WorkerError, match="given up"):
        pickle.loads(pickle.dumps(first)).extend(frames(10, 10))  # on a new connection
    second.extend(frames(20, 10))
    assert ids_of(buffer) == [*range(10), *range(20, 30)]
    for each in (first, second):
        each.shutdown()


# The limiter -------------------------------------------------------------------------------------------------------


def test_a_sample_waits_for_the_limiter_and_is_served_when_enough_is_there(serve):
    limiter = SampleToInsertRatio(1.0, margin=20, min_size=30, timeout_s=20)
    buffer = serve(batch_size=10, limiter=limiter)
    buffer.extend(frames(0, 10))
    timer = threading.Timer(0.3, lambda: buffer.client().extend(frames(10, 20)))
    timer.start()
    assert buffer.sample().shape == (10,)
    assert buffer.write_count == 30
    assert buffer.limiter.balance == -10
    assert not buffer.limiter.may_insert(31)
    timer.join()


def test_a_sample_that_waits_in_vain_says_what_for(serve):
    buffer = serve(batch_size=10, limiter=SampleToInsertRatio(1.0, margin=20, min_size=30, timeout_s=0.3))
    buffer.extend(frames(0, 10))
    with pytest.raises(TimeoutError, match="until 20 more are inserted"):
        buffer.sample()


def test_who_inserts_waits_for_draws_by_anyone_and_not_for_ever(serve):
    buffer = serve(batch_size=10, limiter=SampleToInsertRatio(1.0, margin=20, timeout_s=0.3))
    buffer.extend(frames(0, 20))
    with pytest.raises(TimeoutError, match="a worker waits to insert 10 items until 9 more are drawn"):
        buffer.limiter.await_insert(10, whom="a worker")
    assert not buffer.limiter.await_insert(10, stop=lambda: True)
    client = buffer.client()
    timer = threading.Timer(0.1, client.sample)
    timer.start()
    assert buffer.limiter.await_insert(10)
    timer.join()
    client.shutdown()
    assert (buffer.limiter.inserted, buffer.limiter.sampled) == (20, 10)


# What fails --------------------------------------------------------------------------------------------------------


def test_what_raises_in_the_service_raises_here_as_what_it_is(serve):
    buffer = serve(batch_size=4)
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    buffer.extend(frames(0, 10))
    with pytest.raises(KeyError, match="unknown: 'other'"):
        buffer.extend(TensorDict({"other": torch.zeros(3)}, [3]))
    with pytest.raises(IndexError):
        buffer[100]
    with pytest.raises(AttributeError, match="nothing_known"):
        buffer._connection.ask("nothing_known")
    assert len(buffer) == 10


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def test_what_the_service_cannot_read_is_an_error_of_who_sent_it(serve):
    buffer = serve(ReplayBuffer, storage=partial(ListStorage, 10))
    with pytest.raises(ValueError, match="no number"):
        buffer.extend([Unreadable()])
    buffer.extend([1])
    assert len(buffer) == 1


@contextlib.contextmanager
def full_disk(buffer):
    """No file of the service can be longer than 8 bytes."""
    pid = buffer.host.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was killed
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_a_warning_and_writing_goes_on(serve, tmp_path):
    buffer = serve(service={"path": tmp_path / "dumps", "dump_every": 10})
    client = buffer.client()
    client.extend(frames(0, 10))
    with full_disk(buffer):
        for start in range(10, 60, 10):
            client.extend(frames(start, 10))
        with pytest.warns(RuntimeWarning, match=r"could not save its buffer: .*File too large") as warned:
            assert len(buffer) == 60
        assert len(warned) == 1
        assert "File too large" in buffer.stats()["dump_failure"]
        assert client.storage.ledger.take_ids(5) == 0  # the promise cannot be written down, either
        assert client.storage.ledger.take_ids(5) == 5
    assert wait_until(lambda: buffer.stats()["dump_failure"] is None)  # though nothing is written
    os.kill(buffer.host.pid, signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match=" 0 of the 60 elements"):
        assert ids_of(buffer) == list(range(60))
    assert client.storage.ledger.take_ids(100) >= 10
    client.shutdown()


def test_the_dump_of_before_is_read_where_a_later_one_failed(serve, tmp_path):
    buffer = serve(service={"path": tmp_path / "dumps", "dump_every": 10})
    buffer.extend(frames(0, 10))
    with full_disk(buffer):
        with pytest.warns(RuntimeWarning, match="could not save"):
            buffer.extend(frames(10, 10))
        buffer.empty()
        restarted(buffer)
    with pytest.warns(RuntimeWarning, match="was started again"):
        assert len(buffer) == 10
    assert ids_of(buffer) == list(range(10))


def test_an_explicit_dump_and_the_end_raise_where_the_disk_is_full(serve, tmp_path):
    buffer = serve(service={"path": tmp_path / "dumps", "dump_every": 100})
    buffer.extend(frames(0, 10))
    with full_disk(buffer), pytest.raises(OSError, match="File too large"):
        buffer.dumps(tmp_path / "mine")
    buffer.extend(frames(10, 90))
    assert buffer.stats()["dump_failure"] is None
    pid = buffer.host.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (8, resource.RLIM_INFINITY))
    buffer.extend(frames(100, 5))
    with pytest.raises(OSError, match=r"could not be saved, and its last dump is older: .*File too large"):
        buffer.shutdown()
    assert gone([pid])
    buffer.shutdown()
    again = serve(service={"path": tmp_path / "dumps", "resume": True})
    assert ids_of(again) == list(range(100))


class Unsaved:
    """Can be sent once, and not be saved again."""

    def __init__(self, sent=False):
        self.sent = sent

    def __reduce__(self):
        if self.sent:
            raise ZeroDivisionError("not this")
        return Unsaved, (True,)


def test_an_element_that_cannot_be_saved_is_a_warning_and_writing_goes_on(serve, tmp_path):
    buffer = serve(ReplayBuffer, storage=partial(ListStorage, 10), service={"path": tmp_path / "d", "dump_every": 1})
    with pytest.warns(RuntimeWarning, match="could not save its buffer: .*not this"):
        buffer.extend([Unsaved()])
    buffer.extend([1])
    assert buffer.write_count == 2
    with pytest.raises(OSError, match="could not be saved"):
        buffer.shutdown()


def test_workers_go_on_where_the_disk_is_full(serve, tmp_path):
    buffer = serve(size=10_000, service={"path": tmp_path / "dumps", "dump_every": 20}, batch_size=8)
    options = {"num_collectors": 2, "sync": False, "frames_per_batch": 20, "total_frames": 400}
    collector = Collector(lambda: CountingEnv(max_steps=7), replay_buffer=buffer, **options)
    with full_disk(buffer), collector:
        assert len(list(collector)) == 20
        with pytest.warns(RuntimeWarning, match="could not save"):
            assert len(buffer) == 400
        assert collector.stats()["restarts"] == 0
    assert wait_until(lambda: buffer.stats()["dump_failure"] is None)


def test_a_service_that_dies_is_an_error_with_what_is_lost(serve):
    buffer = serve(batch_size=4, size=50)
    client = buffer.client()
    for start in range(0, 120, 10):
        client.extend(frames(start, 10))
    os.kill(buffer.host.pid, signal.SIGKILL)
    lost = r"was killed by SIGKILL: the 50 elements that it held are lost \(120 were written\)"
    with pytest.raises(WorkerError, match=lost):
        buffer.sample()
    with pytest.raises(WorkerError, match=lost):
        len(buffer)
    with pytest.raises(WorkerError, match="is gone"):
        client.extend(frames(0, 10))
    client.shutdown()


def test_it_comes_back_from_its_last_dump(serve, tmp_path):
    buffer = serve(size=10_000, service={"path": tmp_path / "dumps", "dump_every": 100})
    client = buffer.as_writer("one", 0)
    for start in range(0, 250, 10):
        client.extend(frames(start, 10))
    os.kill(buffer.host.pid, signal.SIGKILL)
    for start in range(250, 300, 10):
        client.extend(frames(start, 10))
    with pytest.warns(RuntimeWarning, match="50 of the 250 elements that were written are lost"):
        assert len(buffer) == 250
    assert ids_of(buffer) == [*range(200), *range(250, 300)]
    assert (buffer.num_lost, buffer.num_restarts, buffer.write_count) == (50, 1, 250)
    client.shutdown()


def test_with_a_dump_for_each_write_nothing_is_lost_and_nothing_doubled(serve, tmp_path):
    buffer = serve(size=10_000, service={"path": tmp_path / "dumps", "dump_every": 1, "max_restarts": 10})
    client = buffer.client()
    done = threading.Event()

    def kill():
        for _ in range(3):
            before = buffer.write_count
            wait_until(lambda before=before: done.is_set() or buffer.stats()["write_count"] > before)
            os.kill(buffer.host.pid, signal.SIGKILL)
            restarts = buffer.num_restarts
            wait_until(lambda restarts=restarts: buffer.num_restarts > restarts)

    thread, start = threading.Thread(target=kill), 0
    with pytest.warns(RuntimeWarning) as warned:  # noqa: PT031
        thread.start()
        while thread.is_alive():
            client.extend(frames(start, 10))
            start += 10
        done.set()
        thread.join()
        len(buffer)
    assert all(" 0 of the" in str(one.message) for one in warned)
    assert ids_of(buffer) == list(range(start))
    client.shutdown()


@pytest.mark.parametrize("dumped", [False, True])
@pytest.mark.parametrize("count", [1, 100_000])
def test_no_trajectory_id_is_given_out_twice_when_it_comes_back(serve, tmp_path, dumped, count):
    buffer = serve(service={"path": tmp_path / "dumps", "dump_every": 1})
    writers = [buffer.as_writer(name, 0) for name in "ab"]
    if dumped:
        buffer.extend(frames(0, 10))
    taken = [(writers[0].storage.ledger.take_ids(count), count)]
    for restarts in (1, 2):
        os.kill(buffer.host.pid, signal.SIGKILL)
        assert wait_until(lambda restarts=restarts: buffer.num_restarts == restarts)
        for writer in reversed(writers):
            taken += [(writer.storage.ledger.take_ids(count), count) for _ in range(3)]
    with pytest.warns(RuntimeWarning, match="are lost"):
        assert len(buffer) == 10 * dumped
    taken.sort()
    assert all(first + n <= following for (first, n), (following, _) in itertools.pairwise(taken))
    for writer in writers:
        writer.shutdown()


def restarted(buffer):
    """Kill the service, and wait until it is there again."""
    before = buffer.num_restarts
    os.kill(buffer.host.pid, signal.SIGKILL)
    assert wait_until(lambda: buffer.num_restarts > before)


class Plus:
    """Adds to what is sampled."""

    def __init__(self, number):
        self.number = torch.full((100,), float(number))  # too large for the body of a request

    def __call__(self, batch):
        return batch.set("obs", batch["obs"] + self.number[0])


@pytest.mark.filterwarnings("ignore:.*are lost:RuntimeWarning")
def test_parts_that_were_changed_are_so_when_it_comes_back(serve, tmp_path):
    buffer = serve(service={"path": tmp_path / "dumps", "dump_every": 1, "max_restarts": 4}, batch_size=10)
    buffer.append_transform(Plus(1000))
    client = buffer.client()
    client.insert_transform(0, Plus(2000))
    client.set_sampler(SamplerWithoutReplacement())
    buffer.extend(frames(0, 10))
    for _ in range(2):
        restarted(buffer)
        batch = buffer.sample()
        assert sorted(batch["next", "id"].tolist()) == list(range(10))
        assert torch.equal(batch["obs"][:, 0], batch["next", "id"] + 3000.0)
    client.set_storage(LazyTensorStorage(20))
    restarted(buffer)
    assert len(buffer) == 0
    buffer.extend(frames(5, 30))
    restarted(buffer)
    assert sorted(buffer[:]["next", "id"].tolist()) == list(range(15, 35))
    client.shutdown()


@pytest.mark.filterwarnings("ignore:.*are lost:RuntimeWarning")
def test_a_dump_is_loaded_into_the_parts_that_it_was_saved_with(serve, tmp_path):
    buffer = serve(service={"path": tmp_path / "dumps", "dump_every": 10, "max_restarts": 4}, batch_size=10)
    buffer.extend(frames(0, 10))
    buffer.set_sampler(PrioritizedSampler(1000, 0.7, 0.5))  # whose state is in no dump
    restarted(buffer)
    assert buffer.sample().get("priority_weight", None) is not None
    buffer.extend(frames(10, 10))
    buffer.set_sampler(SamplerWithoutReplacement())
    restarted(buffer)
    assert len(buffer) == 20
    assert buffer.sample().get("priority_weight", None) is None
    buffer.set_storage(LazyTensorStorage(8))
    buffer.extend(frames(0, 5))  # in no dump
    restarted(buffer)
    assert len(buffer) == 0
    buffer.extend(frames(0, 10))
    restarted(buffer)
    assert sorted(buffer[:]["next", "id"].tolist()) == list(range(2, 10))


@pytest.mark.filterwarnings("ignore:.*are lost:RuntimeWarning")
def test_a_program_that_goes_on_has_the_parts_that_it_asks_for(serve, tmp_path):
    first = serve(service={"path": tmp_path / "dumps"})
    first.append_transform(Plus(1000))
    first.extend(frames(0, 10))
    first.shutdown()
    second = serve(service={"path": tmp_path / "dumps", "resume": True}, transform=Plus(2000), batch_size=10)
    batch = second.sample()
    assert torch.equal(batch["obs"][:, 0], batch["next", "id"] + 2000.0)
    second.set_sampler(PrioritizedSampler(1000, 0.7, 0.5))  # the dump is the first program's
    restarted(second)
    assert len(second) == 10
    assert second.sample().get("priority_weight", None) is not None


@pytest.mark.filterwarnings("ignore:.*are lost:RuntimeWarning")
def test_a_writer_that_was_given_up_is_refused_when_it_comes_back(serve, tmp_path):
    buffer = serve(service={"path": tmp_path / "dumps", "dump_every": 1})
    lost = buffer.as_writer("one", 0)
    lost.extend(frames(0, 10))
    buffer.give_up("one", 0)
    len(buffer)  # after that
    restarted(buffer)
    with pytest.raises((PermissionError, WorkerError), match="was given up"):
        lost.extend(frames(10, 10))
    heir = buffer.as_writer("one", 1)
    heir.extend(frames(10, 10))
    assert ids_of(buffer) == list(range(20))
    for writer in (lost, heir):
        writer.shutdown()


@pytest.mark.filterwarnings("ignore:.*are lost:RuntimeWarning")
def test_what_was_dropped_or_replaced_is_so_when_it_comes_back(serve, tmp_path):
    buffer = serve(service={"path": tmp_path / "dumps", "dump_every": 100})
    buffer.extend(frames(0, 100))
    saved = buffer.state_dict()
    buffer.empty()
    restarted(buffer)
    assert len(buffer) == 0
    buffer.load_state_dict(saved)
    restarted(buffer)
    assert ids_of(buffer) == list(range(100))


def test_a_program_can_go_on_with_what_an_earlier_service_has_left(serve, tmp_path):
    first = serve(service={"path": tmp_path / "dumps"})
    first.extend(frames(0, 10))
    first.shutdown()
    with pytest.raises(FileExistsError, match="resume=True"):
        serve(service={"path": tmp_path / "dumps"})
    second = serve(service={"path": tmp_path / "dumps", "resume": True})
    assert ids_of(second) == list(range(10))


def test_shutdown_ends_the_process_and_who_waits(serve):
    buffer = serve(batch_size=10, limiter=SampleToInsertRatio(1.0, margin=20, min_size=30))
    pid = buffer.host.pid
    timer = threading.Timer(0.3, buffer.shutdown)
    timer.start()
    with pytest.raises(RuntimeError, match="was shut down"):
        buffer.sample()
    timer.join()
    assert gone([pid])
    buffer.shutdown()


# Bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"service_backend": "threads"}, ValueError, "service_backend: expected 'process' or 'ray', got 'threads'"),
        ({"service_backend_options": {"adress": "a:1"}}, TypeError, "Did you mean 'address'"),
        ({"service_backend_options": 3}, TypeError, "service_backend_options: expected a dictionary"),
        ({"service_backend_options": {"address": "nowhere"}}, ValueError, "address: expected 'HOST:PORT'"),
        ({"service_backend_options": {"dump_every": 5}}, ValueError, "dump_every: there is no folder"),
        ({"service_backend_options": {"dump_every": 0, "path": "x"}}, ValueError, "dump_every: expected an integer"),
        ({"service_backend_options": {"secret": "short"}}, ValueError, "secret: expected a text of at least 16"),
        ({"prefetch": 2}, ValueError, "prefetch: .*batch_size is None"),
        ({"limiter": 3}, TypeError, "limiter: expected a SampleToInsertRatio"),
        ({"sampler": threading.Lock()}, TypeError, "sampler: cannot be sent"),
        ({"sampler": 3}, TypeError, "sampler"),
        ({"storag": 3}, TypeError, "storag"),
    ],
)
def test_bad_options_are_errors_at_construction(options, error, message):
    with pytest.raises(error, match=message):
        ReplayBuffer(**{"service_backend": "process", **options})


def test_options_of_a_service_need_one():
    with pytest.raises(ValueError, match="service_backend is None"):
        ReplayBuffer(service_backend_options={"address": "127.0.0.1:0"})


def test_a_buffer_of_this_process_is_its_own_client():
    buffer = ReplayBuffer(service_backend="direct")
    assert buffer.client() is buffer
    with pytest.raises(TypeError, match=r"address: .*service_backend='process'"):
        buffer.client(address=("127.0.0.1", 7))


def test_a_service_is_no_member_of_an_ensemble(serve):
    with pytest.raises(TypeError, match="in a service"):
        ReplayBufferEnsemble(serve())


def test_whoever_does_not_know_the_secret_is_refused(serve):
    buffer = serve()
    client = buffer.client()
    client._connection.target = client._connection.target._replace(secret=b"another secret, long enough")
    with pytest.raises(
        WorkerError, match=r"cannot be used: the replay service at .* has another secret\. Pass the secret"
    ):
        len(client)
    assert len(buffer) == 0
    client.shutdown()


def test_slices_know_trajectories(serve):
    buffer = serve(sampler=partial(SliceSampler, slice_len=5, traj_key="traj"), batch_size=20)
    ids = torch.arange(60)
    buffer.extend(TensorDict({"traj": ids // 10, "step": ids % 10}, [60]))
    batch = buffer.sample()
    assert bool((batch["step"].reshape(4, 5).diff(dim=1) == 1).all())
    assert buffer.draws_slices
