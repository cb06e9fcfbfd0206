"""Shared buffers: processes write and sample at once; nothing is torn, nothing is lost, a death stops nobody."""

from __future__ import annotations

import copy
import os
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict
from tests.collectors.workers.processes import shm_entries, wait_until
from tests.processes.forked import SERVED

from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
)

WIDTH = 500
DEADLINE_S = 100


def frames(worker: int, n: int, start: int) -> TensorDict:
    """Each entry of a frame holds worker and step, so a torn frame is seen."""
    step = torch.arange(start, start + n)
    code = (step + worker * 1_000_000).unsqueeze(-1)
    return TensorDict(
        {
            "step": step,
            "collector": {"traj_ids": torch.full((n,), worker)},
            "obs": code.expand(n, WIDTH).double(),
            "next": {"obs": code.expand(n, WIDTH) + 1},
        },
        [n],
    )


def check_whole(batch: TensorDict) -> None:
    code = (batch["step"] + batch["collector", "traj_ids"] * 1_000_000).unsqueeze(-1)
    assert torch.equal(batch["obs"], code.expand_as(batch["obs"]).double())
    assert torch.equal(batch["next", "obs"], code.expand_as(batch["next", "obs"]) + 1)


def shared_buffer(size: int = 300, storage=LazyTensorStorage, **options) -> ReplayBuffer:
    return TensorDictReplayBuffer(**{"storage": storage(size), "batch_size": 64, "shared": True, **options})


def start(target, *args):
    process = SERVED.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def finish(*processes) -> None:
    for process in processes:
        process.join(DEADLINE_S)
        assert process.exitcode == 0


def extend_many(buffer: ReplayBuffer, worker: int, calls: int, ready=None) -> None:
    torch.set_num_threads(1)
    done = 0
    for call in range(calls):
        n = 1 + (7 * call + worker) % 40
        buffer.extend(frames(worker, n, done))
        done += n
        if ready is not None and not call:
            ready.set()


def num_written(worker: int, calls: int) -> int:
    return sum(1 + (7 * call + worker) % 40 for call in range(calls))


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_processes_write_while_this_one_samples(storage):
    buffer = shared_buffer(storage=storage)
    writers = [start(extend_many, buffer, worker, 150) for worker in range(2)]
    seen: set[int] = set()
    batches = 0
    while any(writer.is_alive() for writer in writers):
        try:
            batch = buffer.sample()
        except RuntimeError as error:  # one writer pauses, and the other has reserved all rows around what it writes
            if "is empty" not in str(error):
                raise
            writers[0].join(0.01)
            continue
        check_whole(batch)
        seen |= set(batch["collector", "traj_ids"].tolist())
        batches += 1
    finish(*writers)
    assert seen
    assert batches
    assert buffer.write_count == sum(num_written(worker, 150) for worker in range(2))
    assert len(buffer) == 300
    check_whole(buffer[:])


def test_threads_that_sample_without_pause_do_not_keep_writers_out():
    """Writers of other processes wait for a moment without a reader."""
    buffer = shared_buffer(100)
    buffer.extend(frames(9, 100, 0))
    done = threading.Event()
    failures: list[BaseException] = []

    def sample() -> None:
        try:
            while not done.is_set():
                check_whole(buffer.sample())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=sample) for _ in range(2)]
    for thread in threads:
        thread.start()
    writer = start(extend_many, buffer, 1, 50)
    writer.join(DEADLINE_S)
    exitcode = writer.exitcode
    done.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not failures
    assert exitcode == 0
    assert buffer.write_count == 100 + num_written(1, 50)


def test_the_first_write_of_a_child_settles_what_a_frame_holds():
    buffer = shared_buffer()
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    finish(start(extend_many, buffer, 3, 1))
    assert len(buffer) == num_written(3, 1)
    check_whole(buffer.sample())
    assert buffer.extend(frames(4, 2, 0)).tolist() == [4, 5]


def test_what_was_there_before_sharing_stays():
    buffer = shared_buffer(shared=False)
    buffer.extend(frames(0, 160, 0))
    buffer.extend(frames(0, 160, 160))
    assert buffer.share() is buffer
    buffer.share()
    assert len(buffer) == 300
    finish(start(extend_many, buffer, 1, 2))
    assert buffer.write_count == 320 + num_written(1, 2)
    check_whole(buffer[:])


def killed_while_it_writes(buffer: ReplayBuffer) -> None:
    storage = buffer.storage
    rows = storage.reserve(50)
    storage.window(rows, "obs")[:20] = -1.0
    os.kill(os.getpid(), signal.SIGKILL)


def extend_until_killed(buffer: ReplayBuffer, worker: int, ready) -> None:
    extend_many(buffer, worker, 1_000_000, ready)


def test_a_writer_that_is_killed_stops_nobody_and_leaves_nothing_half_written():
    buffer = shared_buffer(1000)
    buffer.extend(frames(9, 30, 0))
    victim = start(killed_while_it_writes, buffer)
    victim.join(DEADLINE_S)
    assert victim.exitcode == -signal.SIGKILL
    assert len(buffer) == 30
    finish(start(extend_many, buffer, 1, 3))
    assert buffer.write_count == len(buffer) == 30 + num_written(1, 3)
    check_whole(buffer[:])
    check_whole(buffer.sample(500))
    state = buffer.state_dict()
    other = shared_buffer(1000)
    other.load_state_dict(state)
    assert bool((other[:] == buffer[:]).all())


def test_writers_killed_at_any_moment():
    buffer = shared_buffer(200)
    survivor = start(extend_many, buffer, 0, 200)
    for round_ in range(5):
        ready = SERVED.Event()
        victim = start(extend_until_killed, buffer, 1 + round_, ready)
        assert ready.wait(DEADLINE_S)
        assert len(buffer)
        for _ in range(3 * round_):
            check_whole(buffer.sample())
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(DEADLINE_S)
    finish(survivor)
    buffer.extend(frames(7, 200, 0))
    everything = buffer[:]
    check_whole(everything)
    assert sorted(everything["step"].tolist()) == list(range(200))


def hold_a_reading_lock(buffer: ReplayBuffer, ready) -> None:
    with buffer.storage.ledger.reading():
        ready.set()
        signal.pause()


def test_a_sampler_that_is_killed_stops_nobody():
    buffer = shared_buffer()
    buffer.extend(frames(0, 10, 0))
    ready = SERVED.Event()
    victim = start(hold_a_reading_lock, buffer, ready)
    assert ready.wait(DEADLINE_S)
    os.kill(victim.pid, signal.SIGKILL)
    victim.join(DEADLINE_S)
    buffer.extend(frames(0, 10, 10))
    assert len(buffer) == 20


def sample_many(buffer: ReplayBuffer, batches: int, results) -> None:
    torch.set_num_threads(1)
    for _ in range(batches):
        batch = buffer.sample()
        check_whole(batch)
        step = batch["step"]
        inside = ~batch["is_init"].reshape(-1)
        assert (step[inside] == step.roll(1)[inside] + 1).all()
        same = batch["collector", "traj_ids"]
        assert (same[inside] == same.roll(1)[inside]).all()
    results.put(batches)


def test_slices_of_interleaved_writers_in_other_processes():
    buffer = shared_buffer(400, sampler=SliceSampler(slice_len=8))
    buffer.extend(frames(8, 20, 0))
    results = SERVED.SimpleQueue()
    writers = [start(extend_many, buffer, worker, 60) for worker in range(2)]
    reader = start(sample_many, buffer, 100, results)
    for _ in range(50):
        batch = buffer.sample()
        check_whole(batch)
        inside = ~batch["is_init"].reshape(-1)
        step, ids = batch["step"], batch["collector", "traj_ids"]
        assert (step[inside] == step.roll(1)[inside] + 1).all()
        assert (ids[inside] == ids.roll(1)[inside]).all()
    finish(*writers, reader)
    assert results.get() == 100


def test_a_sample_waits_while_a_slow_writer_holds_back_all_that_was_written():
    buffer = shared_buffer(30)
    buffer.extend(frames(0, 30, 0))
    ledger = buffer.storage.ledger
    with ThreadPoolExecutor(1) as another:
        held = another.submit(ledger.reserve, 10).result()
        buffer.extend(frames(1, 20, 0))
        assert not len(buffer)
        threading.Timer(0.05, ledger.abandon, [held]).start()
        batch = buffer.sample(8)
    check_whole(batch)
    assert len(buffer) == 20


def extend_member(ensemble: ReplayBufferEnsemble, member: int) -> None:
    for n in range(20):
        ensemble.extend(frames(member, 10, 10 * n), member=member)


def test_an_ensemble_with_a_process_for_each_member():
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(150)) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=64, shared=True)
    finish(*[start(extend_member, ensemble, member) for member in range(2)])
    assert ensemble.write_count == 400
    batch = ensemble.sample()
    assert batch["collector", "traj_ids"].tolist() == [[0] * 32, [1] * 32]
    check_whole(batch.reshape(-1))


def test_a_list_is_not_shared():
    with pytest.raises(TypeError, match=r"shared.*LazyTensorStorage"):
        ReplayBuffer(storage=ListStorage(5), shared=True)


def test_nothing_is_left_of_it():
    names, num_fds = shm_entries(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        buffer = shared_buffer()
        buffer.extend(frames(0, 10, 0))
        del buffer
    assert wait_until(lambda: shm_entries() <= names)  # other programs come and go there, too
    assert len(os.listdir("/proc/self/fd")) <= num_fds


def test_a_deep_copy_of_a_shared_buffer_shares_its_rows():
    buffer = shared_buffer()
    buffer.extend(frames(0, 10, 0))
    before = threading.active_count()
    twin = copy.deepcopy(buffer)
    twin.extend(frames(0, 10, 10))
    assert len(buffer) == 20
    assert threading.active_count() == before


def test_a_fork_samples_though_its_parent_prefetches():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), batch_size=4, prefetch=2)
    buffer.extend(frames(0, 50, 0))
    buffer.sample()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        pid = os.fork()
    if not pid:
        signal.alarm(30)
        os._exit(0 if len(buffer.sample()) == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    buffer.shutdown()
