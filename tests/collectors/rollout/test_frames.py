"""How many frames are delivered, and that any rounding is said once, in exact numbers."""

from __future__ import annotations

import warnings

import pytest
import torch

from rollwright.collectors import SyncDataCollector
from rollwright.envs import GymEnv, SerialEnv
from rollwright.testing.mocking_classes import CountingEnv


def caught(build):
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        collector = build()
    return collector, [str(message.message) for message in messages]


@pytest.mark.parametrize(("per_batch", "total", "batches"), [(100, 300, 3), (1, 5, 5), (7, 7, 1), (10, 20, 2)])
def test_counts_that_divide_are_delivered_in_silence(make, per_batch, total, batches):
    collector, messages = caught(lambda: make(CountingEnv(), frames_per_batch=per_batch, total_frames=total))
    assert messages == []
    assert len(collector) == batches
    assert [batch.numel() for batch in collector] == [per_batch] * batches


def test_300_by_173_are_2_batches_announced_in_exact_numbers(make):
    collector, messages = caught(lambda: make(CountingEnv(), frames_per_batch=173, total_frames=300))
    assert len(messages) == 1
    for part in ("total_frames", "300", "346", "2", "173"):
        assert part in messages[0]
    assert len(collector) == 2
    assert sum(batch.numel() for batch in collector) == 346
    assert collector.stats()["frames"] == 346


def test_the_warning_points_at_the_callers_line():
    from rollwright.collectors import Collector

    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        Collector(CountingEnv(), frames_per_batch=173, total_frames=300).shutdown()
    assert [message.filename for message in messages] == [__file__]


@pytest.mark.parametrize("num_envs", [1, 2, 3, 5])
@pytest.mark.parametrize("per_batch", [1, 6, 10])
def test_frames_per_batch_is_rounded_up_to_the_environments(make, num_envs, per_batch):
    expected = -(-per_batch // num_envs) * num_envs

    def build():
        return make(CountingEnv(batch_size=[num_envs]), frames_per_batch=per_batch, total_frames=-1)

    collector, messages = caught(build)
    batch = collector.next()
    assert batch.numel() == expected
    assert batch.shape == (num_envs, expected // num_envs)
    assert len(messages) == int(expected != per_batch)
    if messages:
        for part in ("frames_per_batch", str(per_batch), str(expected)):
            assert part in messages[0]


def test_both_roundings_stand_in_one_warning(make):
    collector, messages = caught(
        lambda: make(CountingEnv(batch_size=[4]), frames_per_batch=10, total_frames=50, init_random_frames=5)
    )
    assert len(messages) == 1
    for part in ("10", "12", "50", "60", "init_random_frames", "5"):
        assert part in messages[0]
    assert len(collector) == 5
    assert sum(batch.numel() for batch in collector) == 60


def test_no_further_warning_comes_while_collecting(make):
    collector, _ = caught(lambda: make(CountingEnv(), frames_per_batch=173, total_frames=300))
    list(collector)  # warnings are errors here


def test_a_total_below_one_batch_is_one_batch(make):
    collector, messages = caught(lambda: make(CountingEnv(), frames_per_batch=20, total_frames=7))
    assert len(messages) == 1
    assert "20" in messages[0]
    assert [batch.numel() for batch in collector] == [20]


def test_the_legacy_class_refuses_a_total_that_does_not_divide():
    with pytest.raises(ValueError, match=r"total_frames.*173.*300.*346"):
        SyncDataCollector(CountingEnv(), None, frames_per_batch=173, total_frames=300)


@pytest.mark.parametrize("total", [-1, None])
def test_a_collector_without_an_end_has_no_length(make, total):
    collector = make(CountingEnv(), frames_per_batch=3, total_frames=total)
    with pytest.raises(RuntimeError, match="total_frames=-1"):
        len(collector)
    for _ in range(4):
        assert collector.next().numel() == 3
    assert collector.stats()["total_frames"] is None


def test_iteration_ends_and_stays_ended(make):
    collector = make(CountingEnv(), frames_per_batch=5, total_frames=10)
    assert len(list(collector)) == 2
    assert list(collector) == []
    assert collector.next() is None
    with pytest.raises(StopIteration):
        next(collector)


def test_iterators_go_on_where_the_last_one_stopped(make, count):
    env = CountingEnv(max_steps=1000)
    collector = make(env, count(env), frames_per_batch=2, total_frames=8)
    first = next(iter(collector))
    second = collector.next()
    third, fourth = list(collector.iterator())
    seen = torch.cat([batch["observation"] for batch in (first, second, third, fourth)])
    assert seen.flatten().tolist() == list(range(8))
    assert collector.next() is None


def test_random_frames_come_first_and_their_rounding_is_announced(make):
    calls = []

    def policy(td):
        calls.append(1)
        return td.set("action", torch.zeros(1, dtype=torch.int8))

    def build():
        return make(CountingEnv(), policy, frames_per_batch=10, total_frames=50, init_random_frames=15)

    collector, messages = caught(build)
    assert len(messages) == 1
    assert "init_random_frames=15" in messages[0]
    assert "20" in messages[0]
    batches = [collector.next(), collector.next()]
    assert len(calls) == 1  # to see what it writes
    assert all(bool(batch["action"].any()) for batch in batches)
    rest = list(collector)
    assert len(rest) == 3
    assert len(calls) == 31
    assert not any(bool(batch["action"].any()) for batch in rest)


@pytest.mark.parametrize("frames", [None, -1, 0])
def test_no_random_frames(make, frames, count):
    env = CountingEnv()
    collector = make(env, count(env), frames_per_batch=10, total_frames=10, init_random_frames=frames)
    assert bool(collector.next()["action"].all())


def test_random_frames_of_a_batched_environment_count_all_environments(make):
    env = SerialEnv(4, lambda: CountingEnv())
    calls = []

    def policy(td):
        calls.append(td.batch_size)
        return td.set("action", torch.zeros(4, 1, dtype=torch.int8))

    collector = make(env, policy, frames_per_batch=8, total_frames=24, init_random_frames=8)
    list(collector)
    assert calls == [torch.Size([4])] * 5  # once to see what it writes


@pytest.mark.parametrize(
    "maker", [lambda: SerialEnv(3, lambda: GymEnv("CartPole-v1")), lambda: GymEnv("CartPole-v1", num_envs=3)]
)
def test_real_batches_count_frames_of_all_environments(make, maker):
    collector, messages = caught(lambda: make(maker, frames_per_batch=100, total_frames=300))
    assert "102" in messages[0]
    assert "306" in messages[0]
    assert [tuple(batch.shape) for batch in collector] == [(3, 34)] * 3
