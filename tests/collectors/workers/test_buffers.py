"""Workers that write a shared buffer: what lies in it, when, and whole trajectories or nothing."""

from __future__ import annotations

import time

import pytest
import torch
from tests.collectors.workers.envs import (
    DONE,
    EPISODE,
    IDENT,
    IDS,
    STEP,
    VERSION,
    gain,
    makers,
    sampling,
    tallies,
    tally,
)
from tests.collectors.workers.frames import check, flat
from tests.collectors.workers.processes import wait_until
from tests.patience import patient
from tests.variants import in_turn, one_quick

from rollwright.collectors import Collector
from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
)

KINDS = ["sync", "async"]


def ordered(frames):
    """Frames by environment, episode and step, without what names the object that made them."""
    seen = frames["observation"]
    order = sorted(range(len(frames)), key=lambda row: seen[row, [IDENT, EPISODE, STEP]].tolist())
    return frames[torch.tensor(order)].select("action", ("next", "reward"), DONE)


# By iteration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"extend_buffer": False}], ids=["rollouts", "steps"])
@pytest.mark.parametrize(("maker", "kind"), in_turn([tally, tallies], KINDS))
def test_the_buffer_grows_with_each_iteration(make, buffer, kind, maker, options):
    rb = buffer()
    collector = make(
        kind, makers(make=maker), gain(), frames_per_batch=60, total_frames=600, replay_buffer=rb, **options
    )
    for number, delivered in enumerate(collector):
        assert delivered is None
        if kind == "sync":
            assert rb.write_count == 60 * (number + 1)
        else:  # what a sibling has reserved before, and writes now, comes first
            assert wait_until(lambda number=number: rb.write_count >= 60 * (number + 1), 2.0)
    assert number == 9
    collector.shutdown()
    assert len(rb) == rb.write_count == collector.stats()["frames"]
    assert len(rb) == 600 or (kind == "async" and len(rb) > 600)
    found = check(rb[:])
    assert found.gaps == 0
    assert len(found.instances) == (2 if maker is tally else 6)


def test_it_holds_what_would_have_been_yielded(make, buffer, same):
    options = {"frames_per_batch": 40, "total_frames": 200}
    yielding = make("sync", makers(), sampling(), **options)
    yielding.set_seed(3)
    expected = flat(yielding)
    rb = buffer()
    writing = make("sync", makers(), sampling(), replay_buffer=rb, **options)
    writing.set_seed(3)
    list(writing)
    same(ordered(rb[:]), ordered(expected))


def test_postproc_comes_before_the_write(make, buffer):
    rb = buffer()
    list(
        make(
            "sync",
            makers(),
            gain(),
            frames_per_batch=20,
            total_frames=40,
            replay_buffer=rb,
            postproc=lambda td: td.set("twice", 2 * td["next", "reward"]),
        )
    )
    assert torch.equal(rb[:]["twice"], 2 * rb[:]["next", "reward"])


def test_a_buffer_that_was_not_shared_becomes_so(make):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), batch_size=16)
    list(make("sync", makers(), gain(), frames_per_batch=20, total_frames=100, replay_buffer=rb))
    assert len(rb) == 100
    assert rb.sample().shape == (16,)
    check(rb[:])


def test_a_buffer_of_objects_is_refused(make):
    with pytest.raises((TypeError, ValueError), match="ListStorage"):
        make("sync", makers(), gain(), frames_per_batch=20, replay_buffer=ReplayBuffer(storage=ListStorage(10)))


def test_storage_on_disk(make, tmp_path):
    rb = ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=tmp_path))
    list(make("sync", makers(), gain(), frames_per_batch=20, total_frames=200, replay_buffer=rb))
    assert check(rb[:]).frames == 200


def test_a_ring_keeps_the_newest(make, buffer):
    rb = buffer(150)
    list(make("sync", makers(), gain(), frames_per_batch=20, total_frames=1000, replay_buffer=rb))
    assert (len(rb), rb.write_count) == (150, 1000)
    low, high = rb.storage.ledger.live()
    check(rb[torch.arange(low, high) % 150], ring=True)


def test_collectors_of_one_buffer_share_no_ids(make, buffer):
    rb = buffer()
    for kind in KINDS:
        collector = make(kind, makers(), gain(), frames_per_batch=20, total_frames=100, replay_buffer=rb)
        list(collector)
        collector.shutdown()
    with Collector(tally, gain(), frames_per_batch=20, total_frames=100, replay_buffer=rb) as single:
        list(single)
    check(rb[:])


def test_random_frames(make, buffer):
    rb = buffer()
    list(
        make(
            "sync", makers(), gain(7.0), frames_per_batch=20, total_frames=100, replay_buffer=rb, init_random_frames=40
        )
    )
    assert int((rb[:]["action"] == 7.0).sum()) == 60


# Whole trajectories ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("maker", "kind"), in_turn([tallies, tally], KINDS))
def test_whole_trajectories_or_nothing(make, buffer, kind, maker):
    rb = buffer()
    collector = make(
        kind, makers(make=maker), gain(), frames_per_batch=24, total_frames=960, replay_buffer=rb, trajs_per_batch=2
    )
    for delivered in collector:
        assert delivered is None
        if len(rb):
            held = rb[:]
            ids, done = held[IDS], held[DONE].reshape(-1)
            assert bool(done[-1])
            assert torch.equal(done[:-1], ids[1:] != ids[:-1])  # one after the other, each with its end
    collector.shutdown()
    found = check(rb[:], whole=True)
    assert found.gaps == 0
    assert found.trajectories > 20


def test_nothing_is_written_until_a_trajectory_is_complete(make, buffer):
    rb = buffer()
    collector = make(
        "sync", makers(length=35), gain(), frames_per_batch=20, total_frames=200, replay_buffer=rb, trajs_per_batch=1
    )
    counts = [len(rb) for _ in collector]
    assert counts[:3] == [0, 0, 0]
    assert counts[-1] == 2 * 70
    check(rb[:], whole=True)


@pytest.mark.parametrize("kind", KINDS)
def test_slices_cross_no_boundary_while_workers_write(make, kind):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(2000), sampler=SliceSampler(slice_len=6), batch_size=96, shared=True
    )
    collector = make(kind, makers(3), gain(), frames_per_batch=60, replay_buffer=rb)
    collector.start()
    assert wait_until(lambda: len(rb) > 200)
    transitions = 0
    while rb.write_count < 6000:
        batch = rb.sample()
        inside = ~batch["is_init"].reshape(-1)[1:]
        assert torch.equal(batch["observation"][1:][inside], batch["next", "observation"][:-1][inside])
        assert torch.equal(batch[IDS][1:][inside], batch[IDS][:-1][inside])
        transitions += int(inside.sum())
    assert transitions > 1000
    collector.async_shutdown()


# In the background -------------------------------------------------------------------------------------------------


@pytest.fixture
def started(make, buffer):
    def build(kind="async", envs=None, policy=None, size=200_000, **options):
        rb = buffer(size)
        options = {"frames_per_batch": 20, "replay_buffer": rb, **options}
        collector = make(kind, makers() if envs is None else envs, gain() if policy is None else policy, **options)
        collector.start()
        return collector, rb

    return build


@pytest.mark.parametrize(("options", "kind"), in_turn([{}, {"extend_buffer": False}, {"trajs_per_batch": 1}], KINDS))
def test_from_start_to_shutdown(started, kind, options):
    begun = time.monotonic()
    collector, rb = started(kind, **options)
    assert wait_until(lambda: len(rb) > 0, 5.0)
    assert time.monotonic() - begun < patient(5.0)
    assert wait_until(lambda: len(rb) > 400)
    assert collector.is_running()
    collector.async_shutdown()
    assert not collector.is_running()
    count = rb.write_count
    found = check(rb[:], whole="trajs_per_batch" in options)
    assert found.gaps == 0
    assert found.frames == count == rb.write_count
    if "trajs_per_batch" not in options:
        assert collector.stats()["frames"] == count  # what was stepped was written
    with pytest.raises(RuntimeError, match="shut down"):
        collector.next()


@pytest.mark.parametrize("kind", KINDS)
def test_it_ends_with_its_total(started, kind):
    collector, rb = started(kind, total_frames=200)
    assert wait_until(lambda: collector.stats()["completed"])
    assert rb.write_count == 200 or (kind == "async" and rb.write_count > 200)
    assert wait_until(lambda: collector.stats()["frames"] == rb.write_count)
    collector.async_shutdown()
    check(rb[:])


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_pause_freezes_the_count_and_always_resumes(started, kind):
    collector, rb = started(kind, extend_buffer=False)
    assert wait_until(lambda: rb.write_count > 10)
    for fails in (False, True, False):
        try:
            with collector.pause():
                count = rb.write_count
                assert not wait_until(lambda count=count: rb.write_count != count, 0.15)
                if fails:
                    raise KeyError("in the body")
        except KeyError:
            assert fails
        assert wait_until(lambda count=count: rb.write_count > count + 20)
    with collector.pause(), collector.pause():
        count = rb.write_count
    assert wait_until(lambda: rb.write_count > count + 20)
    collector.async_shutdown()
    found = check(rb[:])
    assert found.gaps == 0
    assert found.frames == collector.stats()["frames"]


def test_a_pause_is_between_two_steps_and_loses_no_rollout(started):
    collector, rb = started(frames_per_batch=200)
    for _ in range(20):
        with collector.pause():
            pass
    assert wait_until(lambda: rb.write_count > 2000)
    collector.async_shutdown()
    assert check(rb[:]).gaps == 0


def test_what_may_be_called_while_it_runs(started):
    collector, rb = started()
    assert wait_until(lambda: rb.write_count > 40)
    for call in (collector.next, lambda: next(iter(collector)), collector.start):
        with pytest.raises(RuntimeError, match=r"start|runs"):
            call()
    assert wait_until(lambda: collector.stats()["frames"] > 0)  # reported after it was written
    assert collector.update_policy_weights_(gain(2.0)) == 1
    assert "worker0" in collector.state_dict()
    collector.reset()
    collector.set_seed(3)
    count = rb.write_count
    assert wait_until(lambda: rb.write_count > count + 100)
    assert wait_until(lambda: bool((rb[-20:]["action"] == 2.0).all()))
    collector.async_shutdown()
    check(rb[:], gaps=True)


def test_start_without_a_buffer(make):
    with pytest.raises(RuntimeError, match="replay_buffer"):
        make("async", makers(), gain(), frames_per_batch=20).start()


def test_iteration_then_start(make, buffer):
    rb = buffer()
    collector = make("async", makers(), gain(), frames_per_batch=20, replay_buffer=rb)
    collector.next()
    collector.start()
    assert wait_until(lambda: rb.write_count > 200)
    collector.async_shutdown()
    assert check(rb[:]).gaps == 0


def test_updates_act_between_two_steps_and_the_tag_says_which(started):
    collector, rb = started(track_policy_version=True, frames_per_batch=100, policy=gain(0.0))
    version = 0
    while rb.write_count < 3000:
        version = collector.update_policy_weights_(gain(version + 1))
    collector.async_shutdown()
    data = rb[:]
    assert torch.equal(data["action"].flatten().long(), data[VERSION])
    assert len(data[VERSION].unique()) > 10


# Ensembles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "kind"), in_turn(["iterate", "start"], KINDS))
def test_a_member_for_each_worker(make, kind, run):
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(4000, ndim=2)) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=32, shared=True)
    collector = make(kind, makers(make=tallies), gain(), frames_per_batch=60, total_frames=600, replay_buffer=ensemble)
    if run == "start":
        collector.start()
        assert wait_until(lambda: ensemble.write_count >= 600)
        collector.async_shutdown()
    else:
        list(collector)
        collector.shutdown()
    assert ensemble.write_count == collector.stats()["frames"]
    for worker, member in enumerate(members):
        held = member[:]
        assert held.shape[0] == 3
        assert bool((held["observation"][..., IDENT] // 10 == worker).all())
        check(held)
    assert ensemble.sample().shape[0] == 2


def test_an_ensemble_that_is_too_small_is_refused(make):
    members = [TensorDictReplayBuffer(storage=LazyTensorStorage(100)) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*members, batch_size=30, shared=True)
    with pytest.raises(ValueError, match="ensemble"):
        make("sync", makers(3), gain(), frames_per_batch=30, replay_buffer=ensemble)


# The limiter -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_workers_wait_for_samples(make, kind):
    from rollwright.data import SampleToInsertRatio

    limiter = SampleToInsertRatio(1.0, margin=200.0, min_size=100, timeout_s=20.0)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(50_000), batch_size=50, shared=True, limiter=limiter)
    collector = make(kind, makers(), gain(), frames_per_batch=20, replay_buffer=rb)
    collector.start()
    assert wait_until(lambda: rb.write_count >= 100)
    assert wait_until(lambda: "sample" in str(collector.stats()["waiting_for"]))
    assert wait_until(lambda: all(worker["state"] == "waiting" for worker in collector.stats()["workers"]))
    count = rb.write_count
    assert count <= 500
    assert not wait_until(lambda: rb.write_count != count, 0.3)
    assert collector.stats()["workers_alive"] == 2
    for _ in range(40):
        rb.sample()  # 2000 samples let about as many frames in
    assert wait_until(lambda: rb.write_count > 1500)
    assert rb.write_count < 3000
    collector.async_shutdown()
    assert check(rb[:]).gaps == 0
