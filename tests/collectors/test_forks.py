"""Collectors and environments in a forked child: they work there, or say whose they are; nothing hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.collectors.workers.processes import wait_until
from tests.processes.forked import forked

from rollwright.collectors import Collector, Evaluator, Interruptor, MultiAsyncCollector, MultiSyncCollector
from rollwright.data import LazyTensorStorage, TensorDictReplayBuffer
from rollwright.envs import AsyncEnvPool, ParallelEnv
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import CountingEnv

LIMIT = 60.0
THERE = "process .*, which this one was forked from"


def make_env() -> CountingEnv:
    return CountingEnv(max_steps=5)


def pause(collector) -> None:
    with collector.pause():
        pass


USES: dict[str, Callable] = {
    "next": lambda collector: collector.next(),
    "iter": lambda collector: next(iter(collector)),
    "pause": pause,
    "set_seed": lambda collector: collector.set_seed(3),
    "reset": lambda collector: collector.reset(),
    "state_dict": lambda collector: collector.state_dict(),
    "map_fn": lambda collector: collector.map_fn("stats"),
    "get_distant_attr": lambda collector: collector.get_distant_attr("env.batch_size"),
    "start": lambda collector: collector.start(),
    "update": lambda collector: collector.update_policy_weights_(),
}


def refused(collector) -> list[str]:
    """The uses that are refused in a word, and not otherwise."""
    names = []
    for name, use in USES.items():
        try:
            use(collector)
        except RuntimeError as error:
            if "which this one was forked from" not in str(error):
                raise
            names.append(name)
    collector.shutdown()
    collector.shutdown()
    return names


@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
def test_a_fork_leaves_the_workers_to_its_parent(kind):
    with kind([make_env], None, frames_per_batch=10) as collector:
        collector.next()
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with collector._group._shared.changed, collector._weights._publishing, collector._taking:
                held.set()
                over.wait(LIMIT)

        thread = threading.Thread(target=hold)
        thread.start()
        assert held.wait(LIMIT)
        try:
            assert forked(lambda: refused(collector)) == list(USES)
            with pytest.raises(AssertionError, match=THERE):
                forked(collector.stats)
        finally:
            over.set()
            thread.join(LIMIT)
        assert collector.next().numel() == 10  # the parent's are as they were
        assert collector.stats()["frames"] >= 20


def test_a_fork_beside_workers_that_fill_a_buffer():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=8)
    with MultiAsyncCollector([make_env], None, frames_per_batch=10, replay_buffer=buffer) as collector:
        collector.start()
        assert wait_until(lambda: len(buffer) >= 10, LIMIT)
        for _ in range(5):
            assert forked(lambda: len(buffer.sample())) == 8
        assert forked(lambda: refused(collector)) == list(USES)
        before = buffer.write_count
        assert wait_until(lambda: buffer.write_count > before, LIMIT)


def test_a_fork_beside_a_thread_that_collects():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=8)
    collector = Collector(make_env(), None, frames_per_batch=10, replay_buffer=buffer)
    collector.start()
    assert wait_until(lambda: len(buffer) >= 10, LIMIT)
    with collector._background.thread.condition:
        found = forked(lambda: (len(buffer.sample()), len(buffer.extend(buffer[:3])), refused(collector)))
    assert found[:2] == (8, 3)
    assert {"next", "iter", "pause", "set_seed", "reset", "state_dict", "start"} <= set(found[2])
    before = buffer.write_count
    assert wait_until(lambda: buffer.write_count > before, LIMIT)
    collector.async_shutdown()


def test_a_collector_of_one_process_works_in_a_fork():
    collector = Collector(make_env(), None, frames_per_batch=10, total_frames=30)
    first = collector.next()
    assert forked(lambda: [len(batch) for batch in collector]) == [10, 10]
    assert len(first) == len(collector.next()) == 10
    collector.shutdown()


def test_an_evaluator_in_a_thread():
    with Evaluator(make_env, None, max_steps=5) as evaluator:
        evaluator.evaluate()
        with pytest.raises(AssertionError, match=THERE):
            forked(evaluator.evaluate)
        assert forked(evaluator.shutdown) is None
        assert evaluator.evaluate()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ParallelEnv(1, make_env),
        lambda: AsyncEnvPool([make_env], backend="multiprocessing"),
        lambda: AsyncEnvPool([make_env], backend="threading"),
    ],
    ids=["ParallelEnv", "processes", "threads"],
)
def test_environments_elsewhere(make):
    env = make()
    env.reset()

    def reset_there() -> None:
        with pytest.raises(EnvError, match="forked from"):
            env.reset()
        env.close()

    assert forked(reset_there) is None
    env.reset()
    env.close()


def test_an_interruptor_keeps_what_it_says():
    switch = Interruptor()
    switch.stop_collection()
    with switch._stopped._cond:
        assert forked(lambda: (switch.collection_stopped(), switch.start_collection())[0])
    assert switch.collection_stopped()
