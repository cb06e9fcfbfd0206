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
from tests.data.replay_buffers.storages.ragged_records import check_whole, records

from rollwright._memory import Segment
from rollwright.data import RaggedStorage, ReplayBuffer

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
