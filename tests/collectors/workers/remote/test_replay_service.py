"""Workers that write to a replay service, on every backend: exact counts and whole trajectories, whatever is killed."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import threading
import time
from functools import partial

import pytest
import torch
from tests.collectors.workers.envs import IDS, STEP, gain, makers, tally
from tests.collectors.workers.processes import wait_until
from tests.collectors.workers.remote.stored import check_trajectories, frames_by_name
from tests.patience import patient
from tests.variants import in_turn, one_quick

from rollwright.collectors import Collector
from rollwright.data import LazyTensorStorage, SampleToInsertRatio, SliceSampler, TensorDictReplayBuffer
from rollwright.errors import ServiceLostError

BACKENDS = {"process": {}, "tcp": {"backend": "tcp", "backend_options": {"num_workers_per_collector": 1}}}


@pytest.fixture
def serve():
    made = []

    def build(size=100_000, *, service=None, **options):
        storage = partial(LazyTensorStorage, size)
        options = {"service_backend": "process", "service_backend_options": service, **options}
        made.append(TensorDictReplayBuffer(storage=storage, **options))
        return made[-1]

    yield build
    for buffer in made:
        buffer.shutdown()


@pytest.mark.parametrize(("kind", "backend"), in_turn(["sync", "async"], list(BACKENDS)))
def test_batches_go_to_the_service_and_counts_are_exact(make, serve, kind, backend):
    buffer = serve()
    collector = make(
        kind, makers(), gain(), frames_per_batch=40, total_frames=400, replay_buffer=buffer, **BACKENDS[backend]
    )
    for number, delivered in enumerate(collector):
        assert delivered is None
        if kind == "sync":
            assert buffer.write_count == 40 * (number + 1)
    collector.shutdown()
    assert number == 9
    assert len(buffer) == buffer.write_count == collector.stats()["frames"] == collector.stats()["write_count"]
    assert len(frames_by_name(buffer)) == len(buffer)


@pytest.mark.parametrize("backend", one_quick(BACKENDS, "process"))
def test_trajectories_are_whole_while_the_learner_samples_with_prefetch(make, serve, backend):
    buffer = serve(sampler=partial(SliceSampler, slice_len=4), batch_size=16, prefetch=2)
    collector = make(
        "async", makers(), gain(), frames_per_batch=40, replay_buffer=buffer, trajs_per_batch=2, **BACKENDS[backend]
    )
    collector.start()
    assert wait_until(lambda: len(buffer) > 0)
    while buffer.write_count < 1000:
        batch = buffer.sample()
        assert bool((batch[IDS].reshape(-1) >= 0).all())
        follows = ~batch["is_init"].squeeze(-1)[1:]
        assert bool((batch["observation"][:, STEP].diff()[follows] == 1).all())
    collector.async_shutdown()
    assert check_trajectories(buffer) > 10
    assert len(frames_by_name(buffer)) == buffer.write_count


def killed(collector) -> bool:
    """Kill a worker that lives; False: there is none, of those that the collector knows."""
    for worker in collector.stats()["workers"]:
        with contextlib.suppress(ProcessLookupError):
            if worker["alive"] and worker["pid"]:
                os.kill(worker["pid"], signal.SIGKILL)
                return True
    return False


@pytest.mark.parametrize("backend", one_quick(BACKENDS, "tcp"))
def test_killed_writers_leave_whole_trajectories_and_are_replaced(make, serve, backend):
    buffer = serve()
    collector = make(
        "async",
        makers(),
        gain(),
        frames_per_batch=40,
        replay_buffer=buffer,
        trajs_per_batch=1,
        on_worker_failure="restart",
        max_restarts=20,
        restart_delay=0.0,
        **BACKENDS[backend],
    )
    with pytest.warns(RuntimeWarning, match="It is replaced"):  # noqa: PT031
        collector.start()
        for _ in range(4):
            before = buffer.write_count
            assert wait_until(lambda before=before: buffer.write_count > before + 100, 20.0)
            assert wait_until(lambda: killed(collector))
        before = buffer.write_count
        assert wait_until(lambda: buffer.write_count > before + 200, 20.0)
        collector.async_shutdown()
    assert check_trajectories(buffer) > 10
    assert len(frames_by_name(buffer)) == buffer.write_count


@pytest.mark.parametrize("backend", BACKENDS)
def test_connections_that_break_lose_nothing_and_double_nothing(make, serve, backend):
    """A proxy between the workers and the service cuts connections at random moments."""
    from tests.collectors.workers.remote.proxy import Proxy

    buffer = serve()
    with Proxy(buffer.address) as proxy:
        collector = make(
            "sync",
            makers(),
            gain(),
            frames_per_batch=40,
            replay_buffer=buffer.client(address=proxy.address),
            **BACKENDS[backend],
        )
        over = threading.Event()

        def cut():
            while not over.wait(random.uniform(0.0, patient(0.1))):  # a connection takes a while
                proxy.cut()

        thread = threading.Thread(target=cut)
        thread.start()
        try:
            for _ in collector:
                if proxy.num_cut >= 5:
                    break
        finally:
            over.set()
            thread.join()
        collector.shutdown()
        assert buffer.write_count == len(frames_by_name(buffer)) == collector.stats()["frames"]
    assert collector.stats()["write_count"] is None


def test_a_worker_that_is_stuck_is_replaced_and_counts_stay_exact(make, serve):
    buffer = serve()
    collector = make(
        "async",
        makers(1),
        gain(),
        frames_per_batch=20,
        replay_buffer=buffer,
        on_worker_failure="restart",
        env_step_timeout=1.0,
        backend="tcp",
    )
    with pytest.warns(RuntimeWarning, match="It is replaced"):  # noqa: PT031
        collector.start()
        assert wait_until(lambda: buffer.write_count > 100, 20.0)
        first = collector.stats()["workers"][0]["pid"]
        os.kill(first, signal.SIGSTOP)
        assert wait_until(lambda: collector.stats()["workers"][0]["pid"] not in (first, None), 60.0)
        before = buffer.write_count
        assert wait_until(lambda: buffer.write_count > before + 100, 20.0)
        collector.async_shutdown()
    names = frames_by_name(buffer)
    assert len(names) == buffer.write_count


def test_workers_go_on_when_the_service_comes_back(make, serve, tmp_path):
    buffer = serve(service={"path": tmp_path / "dumps", "dump_every": 1})
    collector = make("async", makers(), gain(), frames_per_batch=40, replay_buffer=buffer, backend="tcp")
    collector.start()
    assert wait_until(lambda: buffer.write_count > 200, 20.0)
    os.kill(buffer.host.pid, signal.SIGKILL)
    assert wait_until(lambda: buffer.num_restarts == 1, 30.0)
    with pytest.warns(RuntimeWarning, match="0 of the"):
        before = buffer.write_count
    assert wait_until(lambda: buffer.write_count > before + 200, 20.0)
    collector.async_shutdown()
    assert buffer.num_lost == 0
    assert len(frames_by_name(buffer)) == buffer.write_count


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
def test_a_service_that_dies_is_an_error_of_the_collector(make, serve, on_failure):
    buffer = serve()
    options = {"frames_per_batch": 40, "replay_buffer": buffer, "backend": "tcp", "on_worker_failure": on_failure}
    collector = make("async", makers(), gain(), **options)
    for _ in range(3):
        collector.next()
    os.kill(buffer.host.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ServiceLostError, match="replay service"):
        collections.deque(collector, 0)
    assert time.monotonic() - began < 20.0
    assert collector.stats()["restarts"] == 0  # another worker would not find it either


@pytest.mark.parametrize("backend", one_quick(BACKENDS, "tcp"))
def test_collecting_waits_for_samples(make, serve, backend):
    buffer = serve(batch_size=20, limiter=SampleToInsertRatio(1.0, margin=100, min_size=20))
    collector = make("async", makers(), gain(), frames_per_batch=20, replay_buffer=buffer, **BACKENDS[backend])
    collector.start()
    for _ in range(20):
        buffer.sample()
    assert wait_until(lambda: "samples" in str(collector.stats()["waiting_for"]), 20.0)
    assert -100 <= buffer.limiter.balance <= 140
    written = buffer.write_count
    buffer.sample()
    assert wait_until(lambda: buffer.write_count > written, 20.0)
    collector.async_shutdown()


def test_a_collector_of_this_process_writes_to_a_service(serve):
    buffer = serve(batch_size=8)
    with Collector(tally, gain(), frames_per_batch=20, total_frames=200, replay_buffer=buffer) as collector:
        collector.start()
        assert wait_until(lambda: buffer.write_count == 200, 20.0)
        assert collector.stats()["write_count"] == 200
    assert len(frames_by_name(buffer)) == 200


def test_ids_of_two_collectors_are_apart(serve):
    buffer = serve()
    options = {"frames_per_batch": 20, "total_frames": 100, "trajs_per_batch": 1}
    with (
        Collector(tally, gain(), replay_buffer=buffer, **options) as first,
        Collector(tally, gain(), replay_buffer=buffer.client(), **options) as second,
    ):
        threads = [threading.Thread(target=lambda c=c: [None for _ in c]) for c in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert check_trajectories(buffer) > 2
    assert torch.unique(buffer[:][IDS]).numel() == check_trajectories(buffer)
