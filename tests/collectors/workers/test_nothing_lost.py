"""Every frame that was stepped is delivered, once, from the memory that it was written to."""

from __future__ import annotations

import time

import pytest
import torch
from tests.collectors.workers.envs import gain, makers, pixels, tallies
from tests.collectors.workers.frames import check
from tests.collectors.workers.processes import in_shared_memory, wait_until

KINDS = ["sync", "async"]


def everyone_waits(collector):
    return all(worker["waiting_for"] for worker in collector.stats()["workers"])


@pytest.mark.parametrize("maker", [None, tallies], ids=["one", "three"])
def test_a_consumer_that_sleeps_gets_every_frame(make, maker):
    options = {} if maker is None else {"make": maker}
    collector = make("async", makers(3, **options), gain(), frames_per_batch=12, total_frames=1200)
    batches = []
    for number, batch in enumerate(collector):
        batches.append(batch)
        if number % 25 == 0:
            assert wait_until(lambda: everyone_waits(collector) or collector.stats()["completed"], 5.0)
    found = check(batches)
    assert found.frames == 1200
    assert found.gaps == 0


def test_a_consumer_that_sleeps_while_synchronous(make):
    collector = make("sync", makers(), gain(), frames_per_batch=20, total_frames=200)
    batches = []
    for batch in collector:
        batches.append(batch)
        time.sleep(0.01)
    assert check(batches).frames == 200 == collector.stats()["frames"]


def test_what_was_stepped_was_delivered(make):
    """Of an asynchronous collector that ends, nothing is left over."""
    collector = make("async", makers(), gain(), frames_per_batch=20, total_frames=400)
    delivered = sum(batch.numel() for batch in collector)
    assert delivered == 400
    assert collector.stats()["frames"] == 400


def test_workers_do_not_run_ahead_without_bound(make):
    """Back-pressure: a consumer that takes nothing stops its workers, and they say why."""
    collector = make("async", makers(), gain(), frames_per_batch=20)
    collector.next()
    assert wait_until(lambda: everyone_waits(collector), 10.0)
    frames = sum(worker["frames"] for worker in collector.stats()["workers"])
    assert frames <= 400
    assert not wait_until(lambda: sum(w["frames"] for w in collector.stats()["workers"]) > frames, 0.3)
    waiting = collector.stats()["workers"][0]["waiting_for"]
    assert isinstance(waiting, str)
    assert collector.stats()["workers_alive"] == 2


# Memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_held_is_never_overwritten(make, kind):
    collector = make(kind, makers(make=tallies), gain(), frames_per_batch=24, total_frames=24 * 60)
    kept, tensors = [], []
    for number, batch in enumerate(collector):
        if number % 3 == 0:
            kept.append((batch, batch.clone()))
        elif number % 3 == 1:
            tensors.append((batch["next", "observation"], batch["next", "observation"].clone()))
        else:
            tensors.append((batch["observation"][..., 1:, :2], batch["observation"][..., 1:, :2].clone()))
        del batch
    for held, copy in kept:
        assert bool((held == copy).all())
    for held, copy in tensors:
        assert torch.equal(held, copy)
    collector.shutdown()
    for held, copy in kept:
        assert bool((held == copy).all())  # and not unmapped


@pytest.mark.parametrize("kind", KINDS)
def test_keeping_everything_is_allowed(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20, total_frames=20 * 100)
    batches = list(collector)
    assert len(batches) == 100
    assert check(batches).frames == 2000
    pointers = {batch["observation"].data_ptr() for batch in batches}
    assert len(pointers) == 100


@pytest.mark.parametrize("kind", KINDS)
def test_memory_comes_back_when_the_last_tensor_dies(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=20)
    pointers = []
    for _ in range(40):
        batch = collector.next()
        pointers.append(batch["observation"].data_ptr())
        assert in_shared_memory(pointers[-1])
        assert in_shared_memory(batch["next", "reward"].data_ptr())
        del batch
    assert len(set(pointers)) <= (4 if kind == "sync" else 8)
    leases = collector.stats()["leases"]
    assert leases


def test_a_stack_is_one_piece_of_memory(make):
    batch = make("sync", makers(3), gain(), frames_per_batch=30).next()
    seen = batch["observation"]
    rows = [row["observation"] for row in batch.unbind(0)]
    for worker, row in enumerate(rows):
        assert row.data_ptr() == seen[worker].data_ptr()
        assert in_shared_memory(row.data_ptr())


@pytest.mark.parametrize("cat_results", ["stack", 0])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_stacked_or_copied_in_this_process(make, monkeypatch, kind, cat_results):
    options = {"cat_results": cat_results} if kind == "sync" else {}
    collector = make(kind, [pixels] * 2, frames_per_batch=20, **options)
    collector.next()

    def refuse(*args, **kwargs):
        raise AssertionError("the batch is copied")

    for owner, names in ((torch, ("stack", "cat")), (torch.Tensor, ("clone", "copy_", "contiguous"))):
        for name in names:
            monkeypatch.setattr(owner, name, refuse)
    batches = [collector.next() for _ in range(3)]
    monkeypatch.undo()
    assert all(batch["observation"].dtype == torch.uint8 for batch in batches)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_batch_when_that_was_asked_for(make, kind):
    collector = make(kind, makers(1), gain(), frames_per_batch=20, return_same_td=True)
    first = collector.next()
    assert collector.next() is first
