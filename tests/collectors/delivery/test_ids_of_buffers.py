"""Trajectory ids of collectors that write one buffer: none in common."""

from __future__ import annotations

import pytest

from rollwright.collectors.rollout.state import TrajectoryPool
from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble, SliceSampler
from rollwright.data.replay_buffers.ledger.ledger import Ledger
from rollwright.testing.mocking_classes import CountingEnv

IDS = ("collector", "traj_ids")


def a_buffer(**options):
    return ReplayBuffer(storage=LazyTensorStorage(1000), **options)


@pytest.fixture
def collector(make, count):
    def build(buffer, **options):
        env = CountingEnv(max_steps=100)
        return make(env, count(env), frames_per_batch=10, replay_buffer=buffer, **options)

    return build


def test_collectors_one_after_another_and_in_turns(collector):
    buffer = a_buffer()
    for _ in range(3):
        collector(buffer).next()
    several = [collector(buffer) for _ in range(2)]
    for one in several * 2:
        one.next()
    assert buffer[:][IDS].reshape(-1, 10)[:, 0].tolist() == [0, 1, 2, 3, 4, 3, 4]


def test_slices_cross_no_boundary_between_collectors(collector):
    buffer = a_buffer(sampler=SliceSampler(slice_len=8), batch_size=64)
    several = [collector(buffer) for _ in range(2)]
    for one in several * 5:
        one.next()
    for _ in range(20):
        batch = buffer.sample()
        goes_on = ~batch["is_init"].flatten()[1:]
        assert (batch["observation"].flatten().diff()[goes_on] == 1).all()


def test_members_of_an_ensemble_and_a_file_that_is_opened_again(collector, tmp_path):
    ensemble = ReplayBufferEnsemble(a_buffer(), a_buffer())
    for worker in range(2):
        collector(ensemble, worker_idx=worker).next()
    assert [int(member[:][IDS][0]) for member in ensemble.members] == [0, 1]
    for _ in range(2):
        buffer = ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=tmp_path, existsok=True))
        collector(buffer).next()
    assert buffer[:][IDS].reshape(-1, 10)[:, 0].tolist() == [0, 1]


def test_a_pool_that_goes_back_gives_no_id_twice():
    ledger = Ledger(capacity=4)
    pool, other = TrajectoryPool(ledger), TrajectoryPool(ledger)
    assert [pool.take(2).tolist(), other.take(1).tolist(), pool.take(1).tolist()] == [[0, 1], [2], [3]]
    pool.load_state_dict({"traj_id": 1})
    assert pool.take(1).tolist() == [4]
    pool.load_state_dict({"traj_id": 9})
    assert [other.take(1).tolist(), pool.take(1).tolist()] == [[9], [10]]
    restored = TrajectoryPool(Ledger(capacity=4))
    restored._next = 7
    assert restored.take(2).tolist() == [7, 8]
