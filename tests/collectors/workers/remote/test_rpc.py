"""Backend "rpc": batches and weights that move by calls of torch.distributed.rpc are those of local workers."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import warnings
from functools import partial

import pytest
import torch
import torch.distributed.rpc as rpc
import torch.distributed.rpc.api as api
from tests.collectors.workers.envs import DONE, EPISODE, IDENT, IDS, STEP, VERSION, gain, makers, pixels, tally
from tests.collectors.workers.processes import alive, gone, num_fds
from tests.patience import patient
from tests.variants import one_quick

from rollwright import Collector
from rollwright.collectors.workers import transports
from rollwright.collectors.workers.remote import rpc as backend
from rollwright.errors import WorkerError


@pytest.fixture(autouse=True)
def noticed(monkeypatch):
    """The notice about RPC was shown before."""
    monkeypatch.setattr(backend, "_has_warned", True)


@pytest.fixture
def remote(make):
    """``remote(kind, envs, policy, **options)``: a collector over RPC, which moves even the smallest pieces."""

    def build(kind, *args, per=1, options=None, **others):
        given = {"num_workers_per_collector": per, "min_bytes": 0, **(options or {})}
        return make(kind, *args, backend="rpc", backend_options=given, **others)

    return build


@pytest.fixture
def carriers(monkeypatch):
    """``carriers()``: the collector's ends, once all members are there."""
    made = []
    real = backend.Members.__init__

    def init(self, *args, **options):
        real(self, *args, **options)
        made[:] = self._carriers

    monkeypatch.setattr(backend.Members, "__init__", init)

    def connected():
        until = time.monotonic() + patient(30)
        while not all(carrier.is_connected for carrier in made):
            assert time.monotonic() < until
            time.sleep(0.01)
        return made

    return connected


def collect(collector, count=10_000):
    for _ in range(count):
        collector.next()


def homing(ident=0):
    env = tally(ident)
    env.parent = multiprocessing.parent_process().pid
    return env


def hosts(collector):
    return [int(number) for number in collector.get_distant_attr("env.parent")]


@pytest.mark.parametrize("per", one_quick([1, 2], 1))
def test_synchronous_batches_are_those_of_local_workers(make, remote, carriers, per):
    found = []
    for build in (make, partial(remote, per=per)):
        torch.manual_seed(3)
        collector = build("sync", makers(), gain(), frames_per_batch=60, total_frames=240)
        if build is not make:
            carriers()
        collector.set_seed(5)
        found.append([batch.clone() for batch in collector])
        collector.shutdown()
    assert len(found[0]) == len(found[1]) == 4
    for local, other in zip(*found, strict=True):
        assert local.batch_size == other.batch_size
        for key in local.keys(True, True):
            left, right = local[key], other[key]
            if key in ("observation", ("next", "observation")):  # whose instance is a number of a process
                left, right = ([each[..., i] for i in (IDENT, EPISODE, STEP)] for each in (left, right))
                left, right = torch.stack(left), torch.stack(right)
            assert torch.equal(left, right), key
    assert all(carrier.num_bytes_done > 1000 for carrier in carriers())


def test_large_frames_arrive_untorn_and_by_calls(remote, carriers):
    collector = remote(
        "async",
        [partial(pixels, 128)] * 2,
        None,
        frames_per_batch=200,
        total_frames=1600,
        options={"min_bytes": 1 << 15},
    )
    carriers()
    num_bytes = 0
    for batch in collector:
        images = batch["observation"]
        assert bool((images.flatten(1) == images.flatten(1)[:, :1]).all())
        num_bytes += images.nbytes
    assert sum(carrier.num_bytes_done for carrier in carriers()) >= 0.7 * 2 * num_bytes  # without what came before


def test_whole_trajectories_arrive(remote):
    options = {"trajs_per_batch": 3, "traj_format": "cat"}
    collector = remote("async", makers(2), gain(), frames_per_batch=20, total_frames=400, **options)
    for batch in collector:
        for number in batch[IDS].unique():
            row = batch[batch[IDS] == number]
            assert row["observation"][:, STEP].tolist() == list(range(len(row)))
            assert bool(row[DONE][-1])


def test_each_synchronous_batch_acts_with_what_was_published_before(remote, carriers):
    collector = remote("sync", makers(2), gain(0.0), per=2, frames_per_batch=20, track_policy_version=True)
    carriers()
    for version in range(6):
        batch = collector.next()
        assert batch[VERSION].unique().tolist() == [version]
        assert batch["action"].unique().numel() == 1
        collector.update_policy_weights_(gain(version + 1.0))


def test_a_saved_state_goes_on_where_it_was(make, remote):
    def batches(collector, count):
        return [collector.next().clone() for _ in range(count)]

    whole = remote("sync", makers(2), gain(), frames_per_batch=40)
    whole.set_seed(1)
    batches(whole, 2)
    state = whole.state_dict()
    expected = batches(whole, 2)
    other = make("sync", makers(2), gain(), frames_per_batch=40)
    other.load_state_dict(state)
    for left, right in zip(batches(other, 2), expected, strict=True):
        assert torch.equal(left["observation"][..., STEP], right["observation"][..., STEP])
        assert torch.equal(left["action"], right["action"])


# Faults ------------------------------------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced_under_its_member(remote):
    env = [partial(homing, i) for i in range(2)]
    collector = remote("async", env, gain(), frames_per_batch=20, on_worker_failure="restart", restart_delay=0.0)
    collector.next()
    before = hosts(collector)
    pids = [worker["pid"] for worker in collector.stats()["workers"]]

    def go_on():
        os.kill(pids[0], signal.SIGKILL)
        while collector.stats()["restarts"] < 1 or not alive(collector.stats()["workers"][0]["pid"] or 0):
            collector.next()

    with pytest.warns(RuntimeWarning, match="It is replaced"):
        go_on()
    assert hosts(collector) == before


def test_a_killed_member_is_an_error_soon(remote, carriers):
    collector = remote("async", [partial(homing, i) for i in range(2)], gain(), frames_per_batch=20)
    carriers()
    collector.next()
    pid = hosts(collector)[1]
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker 1 .*(hung up|SIGKILL).*no other can join.*'distributed'"):
        collect(collector)
    assert time.monotonic() - killed < patient(2.0)


def test_a_member_that_is_gone_is_not_replaced_and_the_error_says_why(remote, carriers):
    env = [partial(homing, i) for i in range(2)]
    collector = remote("async", env, gain(), frames_per_batch=20, on_worker_failure="restart", restart_delay=0.0)
    carriers()
    collector.next()
    first = hosts(collector)[0]

    def kill_and_go_on():
        os.kill(first, signal.SIGKILL)
        collect(collector)

    with (
        pytest.warns(RuntimeWarning, match="It is replaced"),
        pytest.raises(WorkerError, match=r"group-0 of an RPC group.*torch lets no other join.*backend='distributed'"),
    ):
        kill_and_go_on()


# The end, and wrong input ------------------------------------------------------------------------------------------


def test_nothing_is_left_behind_but_what_torch_keeps_of_one_group():
    def run():
        env = [partial(homing, i) for i in range(2)]
        collector = Collector(
            env, gain(), frames_per_batch=20, backend="rpc", backend_options={"min_bytes": 0}, sync=True
        )
        collector.next()
        processes = [*(worker["pid"] for worker in collector.stats()["workers"]), *hosts(collector)]
        collector.shutdown()
        assert gone(processes)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollwright-rpc")]

    run()  # servers, which stay; and threads of torch, until the next group
    gc.collect()
    before, threads = num_fds(), len(os.listdir("/proc/self/task"))
    run()
    gc.collect()
    assert num_fds() <= before + 2
    assert len(os.listdir("/proc/self/task")) <= threads


def test_shutdown_ends_the_wait_for_members_that_are_gone(remote, monkeypatch):
    """What the members wait for at their beginning does not reach the collector."""
    announced = threading.Event()
    monkeypatch.setattr(api, "_broadcast_to_followers", lambda *args: announced.set())
    collector = remote("sync", makers(1), gain(), frames_per_batch=20)
    collector.next()
    assert announced.wait(patient(20.0))
    collector.shutdown()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollwright-rpc")]


def test_the_notice_of_torch_appears_once_and_as_ours(monkeypatch):
    monkeypatch.setattr(backend, "_has_warned", False)
    with pytest.warns(FutureWarning, match=r"backend='rpc': torch keeps its RPC .* in maintenance"):
        backend.check_rpc()
    with warnings.catch_warnings(action="error"):
        backend.check_rpc()


def test_a_second_group_in_one_process_is_an_error(remote, make, carriers):
    remote("sync", makers(1), gain(), frames_per_batch=20)
    carriers()
    with pytest.raises(RuntimeError, match="this process is in an RPC group already"):
        make("sync", makers(1), gain(), frames_per_batch=20, backend="rpc")


def test_members_answer_calls_of_the_program(remote, carriers):
    collector = remote("sync", [homing], gain(), frames_per_batch=20)
    carriers()
    assert rpc.rpc_sync("group-0", os.getpid) == hosts(collector)[0]


WRONG = {
    "unknown option": ({"tensorpipe_option": {}}, TypeError, "Did you mean 'tensorpipe_options'"),
    "no dictionary": ({"tensorpipe_options": 3}, TypeError, "tensorpipe_options: expected a dictionary"),
    "unknown key": ({"tensorpipe_options": {"device_map": {}}}, TypeError, "Did you mean 'device_maps'"),
    "device": (
        {"tensorpipe_options": {"device_maps": {"group-0": {"cuda:0": "cpu:7x"}}}},
        ValueError,
        "tensorpipe_options: ",
    ),
    "interface": ({"interface": "lo7"}, ValueError, "interface: .*got 'lo7'"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_options_are_refused_at_construction(make, wrong):
    options, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        make("sync", makers(2), gain(), frames_per_batch=20, backend="rpc", backend_options=options)


def test_it_is_a_backend():
    assert not transports.shares_memory("rpc")
