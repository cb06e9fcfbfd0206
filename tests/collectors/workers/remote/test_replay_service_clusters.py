"""Groups of workers that write to a replay service, in a process or in an actor, whatever is killed."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
from tests.collectors.workers.envs import gain
from tests.collectors.workers.processes import wait_until
from tests.collectors.workers.remote.stored import check_trajectories, frames_by_name, homing
from tests.ray_cluster import attached

from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.errors import WorkerError

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]

OPTIONS = {
    "tcp": {},
    "distributed": {},
    "rpc": {},
    "ray": {"remote_configs": {"num_cpus": 1}},
}
SERVICES = {"process": {}, "ray": {"remote_config": {"num_cpus": 0.1}}}
RESTART = {"on_worker_failure": "restart", "max_restarts": 20, "restart_delay": 0.0}


def slow(backend, service):
    return pytest.param(backend, service, marks=pytest.mark.slow)


DISTRIBUTED, RPC, RAY = ("distributed", "process"), ("rpc", "process"), ("ray", "ray")
ways = partial(pytest.mark.parametrize, ("backend", "service"))


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """This process is connected to it."""
    with attached() as address:
        yield address


@pytest.fixture
def serve():
    made = []

    def build(service, **options):
        given = {**SERVICES[service], **options}
        storage = partial(LazyTensorStorage, 100_000)
        made.append(ReplayBuffer(storage=storage, service_backend=service, service_backend_options=given))
        return made[-1]

    yield build
    for buffer in made:
        buffer.shutdown()


@pytest.fixture
def write(make):
    """``write(kind, backend, buffer)``: two groups of two workers that write to a buffer."""

    def build(kind, backend, buffer, **options):
        given = {"num_workers_per_collector": 2, **OPTIONS[backend]}
        options = {"frames_per_batch": 40, "replay_buffer": buffer, **options}
        return make(
            kind, [partial(homing, i) for i in range(4)], gain(), backend=backend, backend_options=given, **options
        )

    return build


def kill_one(pids):
    os.kill(next(pid for pid in pids if pid), signal.SIGKILL)


def pids(collector):
    return [worker["pid"] for worker in collector.stats()["workers"] if worker["alive"]]


def groups(collector):
    """Processes that run groups of workers."""
    return collector.get_distant_attr("env.parent")


def more(buffer, count=200):
    """Whether so many further elements are written."""
    before = buffer.write_count
    return wait_until(lambda: buffer.write_count > before + count, 30.0)


@ways([DISTRIBUTED, RPC, RAY, slow("ray", "process"), slow("tcp", "ray")])
def test_batches_go_to_the_service_and_counts_are_exact(write, serve, backend, service):
    buffer = serve(service)
    collector = write("sync", backend, buffer.client(), total_frames=400)
    for number, delivered in enumerate(collector):
        assert delivered is None
        assert buffer.write_count == 40 * (number + 1)
    collector.shutdown()
    assert number == 9
    assert len(buffer) == collector.stats()["frames"] == 400
    assert len(frames_by_name(buffer)) == 400


@ways([DISTRIBUTED, slow(*RPC), slow(*RAY)])
def test_killed_workers_leave_whole_trajectories_and_are_replaced(write, serve, backend, service):
    buffer = serve(service)
    collector = write("async", backend, buffer, trajs_per_batch=1, **RESTART)
    with pytest.warns(RuntimeWarning, match="It is replaced"):  # noqa: PT031
        collector.start()
        for number in range(3):
            assert more(buffer)
            kill_one(pids(collector))
            assert wait_until(lambda number=number: collector.stats()["restarts"] > number, 30.0)
        assert more(buffer)
        collector.async_shutdown()
    assert collector.stats()["restarts"] == 3
    assert check_trajectories(buffer) > 10
    assert len(frames_by_name(buffer)) == buffer.write_count


@ways([DISTRIBUTED, slow(*RAY)])
def test_a_killed_group_is_replaced_and_every_frame_is_there_once(write, serve, backend, service):
    buffer = serve(service)
    collector = write("async", backend, buffer, trajs_per_batch=1, **RESTART)
    with pytest.warns(RuntimeWarning, match="It is replaced"):  # noqa: PT031
        collector.start()
        assert more(buffer)
        kill_one(groups(collector))
        assert wait_until(lambda: collector.stats()["restarts"] >= 2, 30.0)
        assert wait_until(lambda: len([pid for pid in pids(collector) if pid]) == 4, 60.0)
        assert more(buffer)
        collector.async_shutdown()
    assert check_trajectories(buffer) > 10
    assert len(frames_by_name(buffer)) == buffer.write_count


@ways([RPC, slow(*DISTRIBUTED), slow(*RAY)])
def test_workers_go_on_when_the_service_comes_back(write, serve, tmp_path, backend, service):
    buffer = serve(service, path=tmp_path / "dumps", dump_every=1)
    collector = write("async", backend, buffer)
    collector.start()
    assert more(buffer)
    os.kill(buffer.host.pid, signal.SIGKILL)
    assert wait_until(lambda: buffer.num_restarts == 1, 60.0)
    with pytest.warns(RuntimeWarning, match="0 of the"):
        assert more(buffer)
    collector.async_shutdown()
    assert buffer.num_lost == 0
    assert buffer.write_count >= collector.stats()["frames"] > 0
    assert len(frames_by_name(buffer)) == buffer.write_count


@ways([DISTRIBUTED, slow(*RAY)])
def test_a_service_that_dies_is_an_error_of_the_collector(write, serve, backend, service):
    buffer = serve(service)
    collector = write("async", backend, buffer)
    for _ in range(3):
        collector.next()
    os.kill(buffer.host.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="replay service"):
        for _ in collector:
            pass
    with pytest.raises(WorkerError, match=r"elements that it held are lost"):
        len(buffer)
