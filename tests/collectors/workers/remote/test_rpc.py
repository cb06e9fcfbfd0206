"""Backend "rpc": batches and weights of its groups are those of local workers."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from functools import partial

import pytest
import torch
from tests.collectors.workers.envs import DONE, EPISODE, IDENT, IDS, STEP, VERSION, gain, makers, tally
from tests.collectors.workers.processes import alive, gone, num_fds
from tests.patience import patient
from tests.variants import one_quick

from rollwright import Collector
from rollwright.collectors.workers import transports
from rollwright.errors import WorkerError


@pytest.fixture
def remote(make):
    """``remote(kind, envs, policy, **options)``: a collector of groups."""

    def build(kind, *args, per=1, options=None, **others):
        given = {"num_workers_per_collector": per, **(options or {})}
        return make(kind, *args, backend="rpc", backend_options=given, **others)

    return build


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
def test_synchronous_batches_are_those_of_local_workers(make, remote, per):
    found = []
    for build in (make, partial(remote, per=per)):
        torch.manual_seed(3)
        collector = build("sync", makers(), gain(), frames_per_batch=60, total_frames=240)
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


def test_whole_trajectories_arrive(remote):
    options = {"trajs_per_batch": 3, "traj_format": "cat"}
    collector = remote("async", makers(2), gain(), frames_per_batch=20, total_frames=400, **options)
    for batch in collector:
        for number in batch[IDS].unique():
            row = batch[batch[IDS] == number]
            assert row["observation"][:, STEP].tolist() == list(range(len(row)))
            assert bool(row[DONE][-1])


def test_each_synchronous_batch_acts_with_what_was_published_before(remote):
    collector = remote("sync", makers(2), gain(0.0), per=2, frames_per_batch=20, track_policy_version=True)
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


def test_a_killed_member_is_an_error_soon(remote):
    collector = remote("async", [partial(homing, i) for i in range(2)], gain(), frames_per_batch=20)
    collector.next()
    pid = hosts(collector)[1]
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker 1 .*(hung up|SIGKILL)"):
        collect(collector)
    assert time.monotonic() - killed < patient(2.0)


def test_a_group_that_dies_is_replaced(remote):
    env = [partial(homing, i) for i in range(2)]
    collector = remote("async", env, gain(), frames_per_batch=20, on_worker_failure="restart", restart_delay=0.0)
    collector.next()
    first, second = hosts(collector)

    def go_on():
        os.kill(first, signal.SIGKILL)
        while collector.stats()["restarts"] < 1 or collector.stats()["workers_alive"] < 2:
            collector.next()
        collector.next()  # stats() may have found it out, and leaves the warning to the next call

    with pytest.warns(RuntimeWarning, match="was lost"):
        go_on()
    found = hosts(collector)
    assert found[1] == second
    assert found[0] != first


# The end, and wrong input ------------------------------------------------------------------------------------------


def test_nothing_is_left_behind():
    def run():
        env = [partial(homing, i) for i in range(2)]
        collector = Collector(env, gain(), frames_per_batch=20, backend="rpc", num_collectors=2, sync=True)
        collector.next()
        processes = [*(worker["pid"] for worker in collector.stats()["workers"]), *hosts(collector)]
        collector.shutdown()
        assert gone(processes)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollwright-")]

    run()  # servers, which stay
    gc.collect()
    before, threads = num_fds(), len(os.listdir("/proc/self/task"))
    run()
    gc.collect()
    assert num_fds() <= before
    assert len(os.listdir("/proc/self/task")) <= threads


WRONG = {
    "unknown option": ({"tensorpipe_option": {}}, TypeError, "Did you mean 'tensorpipe_options'"),
    "no dictionary": ({"tensorpipe_options": 3}, TypeError, "tensorpipe_options: expected a dictionary"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_options_are_refused_at_construction(make, wrong):
    options, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        make("sync", makers(2), gain(), frames_per_batch=20, backend="rpc", backend_options=options)


def test_it_is_a_backend():
    assert not transports.shares_memory("rpc")
