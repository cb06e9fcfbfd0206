"""Processes that are killed while they fill a shared RaggedStorage: nothing half written, nothing published lost."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import signal
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tests.data.replay_buffers.storages.ragged_records import check_whole, record, records

from rollwright._memory import Segment
from rollwright.data import LazyTensorStorage, RaggedStorage, ReplayBuffer
from rollwright.data.encoding import Encoded
from rollwright.data.replay_buffers.ledger import Ledger
from rollwright.data.replay_buffers.ledger.counters import Reservations
from rollwright.data.replay_buffers.storages.elements import SharedElements

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(["torch", "tensordict", "rollwright.data"])
DEADLINE_S = 60
MOST = 12  # records of a batch


def write_until_killed(buffer: ReplayBuffer, life: int, counts: Segment) -> None:
    """Write batch after batch; ``counts``: whether to go on; of each life the records that ``extend`` returned for."""
    torch.set_num_threads(1)
    goes, count = counts.map(0, 8).cast("q"), counts.map(8 + 8 * life, 8).cast("q")
    rng, ready = random.Random(life), []
    made = 0
    while True:
        if not ready:  # made ahead, so that most kills find it writing
            for _ in range(15):
                ready.append(records(life, made, rng.randint(1, MOST)))
                made += len(ready[-1])
        while not goes[0] and count[0]:
            time.sleep(1e-3)
        batch = ready.pop(0)
        buffer.extend(batch)
        count[0] += len(batch)


def run(kills: int, size: int, chunk_bytes: int, longest_s: float, seed: int) -> dict[str, int]:
    buffer = ReplayBuffer(storage=RaggedStorage(size, chunk_bytes=chunk_bytes), shared=True, batch_size=16)
    counts = Segment()
    counts.grow(mmap.PAGESIZE * 2)
    goes, totals = counts.map(0, 8).cast("q"), np.frombuffer(counts.map(8, 8 * (kills + 2)), np.int64)
    rng = random.Random(seed)
    lives = 0
    writers = []

    def begin() -> None:
        nonlocal lives
        process = SPAWN.Process(target=write_until_killed, args=(buffer, lives, counts), daemon=True)
        process.start()
        writers.append((process, lives))
        lives += 1

    begin()
    begin()
    sampled = peak_bytes = 0
    for _ in range(kills):
        at = rng.randrange(2)
        victim, life = writers.pop(at)
        until = time.monotonic() + DEADLINE_S
        while not totals[life] and time.monotonic() < until:  # it has begun
            time.sleep(0.001)
        goes[0] = 1
        time.sleep(rng.uniform(0, longest_s))
        os.kill(victim.pid, signal.SIGKILL)
        begin()
        goes[0] = 0
        for _ in range(2):
            sampled += len(check_whole(buffer.sample()))
        victim.join(DEADLINE_S)
        assert victim.exitcode == -signal.SIGKILL
        # What a dead writer published last is there, unless others have written over it since.
        with buffer.storage.ledger.reading():
            found, full = check_whole(buffer[:]), buffer.storage.ledger.end() > size
        serials = [serial for writer, serial in found if writer == life]
        if not full:
            assert serials == list(range(len(serials)))
            assert totals[life] <= len(serials) <= totals[life] + MOST
        elif serials:
            ordered = sorted(serials)
            assert ordered == list(range(ordered[0], ordered[0] + len(ordered)))
            assert totals[life] <= ordered[-1] + 1 <= totals[life] + MOST
        peak_bytes = max(peak_bytes, buffer.storage.num_bytes)
    for process, _ in writers:
        process.kill()
        process.join(DEADLINE_S)
    found = check_whole(buffer[:])
    published = int(totals.sum())
    assert published <= buffer.write_count <= published + MOST * (kills + 2)
    assert len(found) == len(buffer)
    written = buffer.write_count
    more = min(size, 300)
    buffer.extend(records(10**6, 0, more))
    assert check_whole(buffer.storage.in_order()[-more:]) == [(10**6, n) for n in range(more)]
    assert len(buffer) == min(size, written + more)
    return {
        "kills": kills + 2,
        "published": written,
        "acknowledged": published,
        "positions lost": buffer.storage.ledger.num_lost,
        "half written": 0,
        "sampled and checked": sampled,
        "peak bytes": peak_bytes,
    }


@pytest.mark.parametrize(("size", "chunk_bytes"), [(100_000, 1 << 22), (200, 1 << 14)], ids=["grows", "recycles"])
def test_killed_writers_leave_nothing_half_written_and_lose_nothing_published(size, chunk_bytes):
    tally = run(4, size, chunk_bytes, 0.05, seed=size)
    assert tally["published"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "chunk_bytes"), [(100_000, 1 << 22), (200, 1 << 14)], ids=["grows", "recycles"])
def test_fifty_kills(size, chunk_bytes, capsys):
    tally = run(50, size, chunk_bytes, 0.05, seed=50 + size)
    with capsys.disabled():
        print("\n" + ", ".join(f"{name} {value:,}" for name, value in tally.items()))


# At each step of a write ----------------------------------------------------------------------------


def killed_at(buffer: ReplayBuffer, moment: str) -> None:
    torch.set_num_threads(1)

    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "places are found":
        Reservations.add = kill
    elif moment == "rows are reserved":
        SharedElements.note = kill
    elif moment == "places are noted":
        Encoded.write = kill
    elif moment == "an element is half written":
        write = Encoded.write
        Encoded.write = lambda one, memory: (write(one, memory), memory.__setitem__(slice(40, 60), bytes(20)), kill())
    elif moment == "all is written":
        Ledger.publish = kill
    else:  # another element is put in place of one
        SharedElements._write = kill
        buffer[3] = record(2, 0)
    buffer.extend(records(2, 0, 9))


@pytest.mark.parametrize(
    "moment",
    [
        "places are found",
        "rows are reserved",
        "places are noted",
        "an element is half written",
        "all is written",
        "one is replaced",
    ],
)
def test_a_writer_killed_at_each_moment_leaves_the_rest_as_it_was(moment):
    buffer = ReplayBuffer(storage=RaggedStorage(30, chunk_bytes=1 << 13), shared=True, batch_size=8)
    for start in range(0, 100, 10):
        buffer.extend(records(0, start, 10))
    victim = FORK.Process(target=killed_at, args=(buffer, moment))
    victim.start()
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    found = sorted(check_whole(buffer[:]))
    assert found == [(0, n) for n in range(70 if moment in ("places are found", "one is replaced") else 79, 100)]
    assert buffer.write_count == 100
    for start in range(0, 60, 10):
        buffer.extend(records(3, start, 10))
        assert set(check_whole(buffer.sample(20))) <= set(check_whole(buffer[:]))
    assert sorted(check_whole(buffer[:])) == [(3, n) for n in range(30, 60)]


@pytest.mark.parametrize(
    "read", [lambda buffer: len(buffer[:]), lambda buffer: buffer.state_dict()["storage"]["high"] - 2]
)
@pytest.mark.parametrize("storage", [LazyTensorStorage, RaggedStorage])
def test_what_was_published_behind_a_killed_writer_can_be_read_at_once(storage, read):
    buffer = ReplayBuffer(storage=storage(100), shared=True, batch_size=4)
    buffer.extend(TensorDict({"n": torch.arange(3)}, [3]))
    begun, reserved = os.pipe()
    child = os.fork()
    if not child:
        buffer.storage.ledger.reserve(2)
        os.write(reserved, b"!")
        signal.pause()
    os.read(begun, 1)
    buffer.extend(TensorDict({"n": torch.arange(3, 6)}, [3]))
    with buffer.storage.ledger.reading():
        assert len(buffer[:]) == 3
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert read(buffer) == 6
    assert len(buffer) == 6
    os.close(begun)
    os.close(reserved)
