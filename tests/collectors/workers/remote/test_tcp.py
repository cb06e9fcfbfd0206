"""Backend "tcp": groups of workers that share nothing with the collector behave as local workers do.

What it has in common with all transports is tested in ``tests/testing/transports``.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from tests.collectors.workers.envs import (
    DONE,
    EPISODE,
    IDENT,
    IDS,
    INSTANCE,
    STEP,
    Trouble,
    gain,
    makers,
    many,
    one_bad,
    pixels,
    tally,
)
from tests.collectors.workers.processes import alive, descendants, gone, heard, num_fds, open_files, wait_until
from tests.patience import patient

from rollwright import Collector
from rollwright._processes.network.handshake import SECRET
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.workers.options import WorkerOptions, delivery_device, options_of_workers
from rollwright.collectors.workers.remote.connection import RemoteWorker
from rollwright.collectors.workers.remote.frames import FrameChannel
from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.errors import EnvError, WorkerError

KINDS = ["sync", "async"]
KNOWN = "a secret of tests, long enough"


@pytest.fixture
def remote(make):
    """``remote(kind, envs, policy, **options)``: a collector over sockets, with two workers in each group."""

    def build(kind, *args, per=2, options=None, **others):
        given = {"num_workers_per_collector": per, **(options or {})}
        return make(kind, *args, backend="tcp", backend_options=given, **others)

    return build


def collect(collector, count=10_000):
    for _ in range(count):
        collector.next()


def pids(collector):
    return [worker["pid"] for worker in collector.stats()["workers"]]


# Batches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", [1, 3])
def test_a_group_and_its_collector_exchange_one_message_for_each_batch(remote, monkeypatch, per):
    sent, seen = [], []
    post, read = FrameChannel._post, FrameChannel.read

    def counted_post(line, queued):
        sent.append(line)
        return post(line, queued)

    def counted_read(line, place, received):
        before = line.num_messages
        read(line, place, received)
        seen.extend([line] * (line.num_messages - before))

    collector = remote("sync", makers(3), gain(), per=per, frames_per_batch=30, total_frames=900)
    batches = iter(collector)
    next(batches)
    monkeypatch.setattr(FrameChannel, "_post", counted_post)
    monkeypatch.setattr(FrameChannel, "read", counted_read)
    count = sum(1 for _ in batches)
    groups = -(-3 // per)
    assert count == 29
    assert groups * count <= len(sent) <= groups * count + 2
    # the other way there are signs of life besides, and what a busy machine has let wait for too long
    assert groups * count <= len(seen) <= 1.5 * groups * count


def test_whole_trajectories_arrive(remote):
    options = {"trajs_per_batch": 3, "traj_format": "cat"}
    collector = remote("async", makers(2), gain(), frames_per_batch=20, total_frames=600, **options)
    for batch in collector:
        ids = batch[IDS].unique()
        assert len(ids) <= 3
        for number in ids:
            row = batch[batch[IDS] == number]
            assert row["observation"][:, STEP].tolist() == list(range(len(row)))
            assert bool(row[DONE][-1])


def test_a_consumer_may_take_longer_than_a_host_may_be_silent(remote):
    collector = remote(
        "async", [pixels] * 2, None, frames_per_batch=400, total_frames=4000, options={"host_timeout": 0.8}
    )
    seen = 0
    for batch in collector:  # 9.8 MB, more than the system keeps for a connection
        if seen == 400:
            time.sleep(2.5)  # what the test is about
        seen += len(batch)
    assert seen == 4000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["device", "policy_device", "env_device"])
def test_devices_are_looked_for_where_the_workers_are(remote, name):
    with pytest.raises(WorkerError, match=rf"worker \d on .*{name}: got 'cuda:0', .*no CUDA device") as raised:
        remote("sync", makers(2), gain(), frames_per_batch=20, **{name: "cuda:0"})
    assert isinstance(raised.value, ValueError)
    with pytest.raises(WorkerError, match="cudagraph_policy needs a CUDA device"):
        remote("sync", makers(2), gain(), frames_per_batch=20, cudagraph_policy=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_batches_of_workers_on_a_gpu_come_through_host_memory_to_a_learner_without_one(remote):
    own, others = WorkerOptions.split({"sync": True, "backend": "tcp"}, "x", CollectorOptions)
    given, each = options_of_workers({**others, "device": "cuda:0"}, 2, own)
    assert [(str(one.device), str(one.storing_device)) for one in each] == [("cuda:0", "cpu")] * 2
    assert given.storing_device is None
    assert delivery_device(given) is None
    _, each = options_of_workers({**others, "device": "cpu"}, 2, own)
    assert [one.storing_device for one in each] == [None] * 2
    with pytest.raises(ValueError, match="storing_device: got") as raised:
        remote("sync", makers(2), gain(), frames_per_batch=20, device="cuda:0", storing_device="cuda:0")
    assert not isinstance(raised.value, WorkerError)


def test_a_worker_takes_few_open_files_of_the_collector(remote):
    found = []
    for count in (1, 5):
        before = open_files()
        collector = remote("sync", makers(count), gain(), per=5, frames_per_batch=20)
        collect(collector, 3)
        found.append(len(open_files() - before))  # what tests before leave may close meanwhile
        collector.shutdown()
    assert (found[1] - found[0]) / 4 <= 4.0


def test_what_another_thread_brings_while_nothing_was_found_is_noticed(remote, monkeypatch):
    silence = RemoteWorker._silence

    def bring_and_silence(self):
        until = time.monotonic() + 0.03
        while not self._arrived and time.monotonic() < until:
            self._group.read()
        silence(self)

    monkeypatch.setattr(RemoteWorker, "_silence", bring_and_silence)
    collector = remote("sync", makers(2), gain(), frames_per_batch=20, env_step_timeout=5.0)
    collect(collector, 5)
    collector.shutdown()


# Weights, calls, state ---------------------------------------------------------------------------------------------


def test_weights_of_several_workers_arrive_together_whole(remote):
    env = [partial(homing, i) for i in range(2)]
    size = 1 << 20  # more than a socket holds: what comes later waits, and is sent together
    collector = remote("sync", env, many(size=size), per=2, frames_per_batch=20, options={"host_timeout": 60.0})
    collector.update_policy_weights_(many(value=0.5, size=size))  # asks what the workers have
    collector.next()
    (host,) = hosts(collector)
    os.kill(host, signal.SIGSTOP)
    try:
        collector.update_policy_weights_(many(value=1.0, size=size))
        for worker in range(2):
            collector.update_policy_weights_(many(value=2.0 + worker, size=size), worker_ids=[worker])
    finally:
        os.kill(host, signal.SIGCONT)
    batch = collector.next()
    for worker in range(2):
        for key in ("low", "high"):
            assert batch[key][worker].unique().tolist() == [2.0 + worker]


def test_weights_act_in_the_middle_of_a_long_rollout(remote):
    collector = remote("async", makers(2, step_s=0.002), gain(), frames_per_batch=3000, track_policy_version=True)
    waiting = threading.Thread(target=heard, args=(collector.next, RuntimeError))  # for a rollout of six seconds
    waiting.start()

    def acting(version):
        return [worker["policy_version"] for worker in collector.stats()["workers"]] == [version] * 2

    for value in (2.0, 3.0):
        version = collector.update_policy_weights_(gain(value))
        assert wait_until(lambda version=version: acting(version), 2.0)
    assert collector.stats()["batches"] == 0
    collector.shutdown()
    waiting.join(patient(5.0))
    assert not waiting.is_alive()


def test_calls_reach_the_workers_and_their_errors_come_back(remote):
    collector = remote("sync", makers(2), gain(), frames_per_batch=20)
    assert collector.get_distant_attr("frames_per_batch") == [10, 10]
    with pytest.raises(WorkerError, match=r"worker 0 on .*\(group 0\).*no_such"):
        collector.map_fn("no_such")
    with collector.pause():
        assert collector.get_distant_attr("env.batch_size") == [torch.Size([])] * 2
    assert collector.next().shape == (2, 10)


def test_hooks_are_called_where_workers_are(remote):
    collector = remote("sync", makers(2), gain(), frames_per_batch=20, post_collect_hook=_halve)
    assert collector.next() is not None
    assert all(number != os.getpid() for number in pids(collector))


def _halve(batch):
    assert multiprocessing.parent_process() is not None


# Faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_environment_raises_comes_with_class_host_and_traceback(remote, kind):
    collector = remote(kind, one_bad(2, troubles={"trouble": Trouble("raise", 30)}), gain(), frames_per_batch=20)
    with pytest.raises(EnvError, match=r"worker 1 on .*boom at call 30") as caught:
        collect(collector)
    assert "in strike" in str(caught.value.__cause__)


def test_what_cannot_be_made_over_there_ends_the_construction(remote):
    with pytest.raises(WorkerError, match=r"worker 1 on .*no environment"):
        remote("sync", [tally, _no_env], gain(), frames_per_batch=20)


def _no_env():
    raise RuntimeError("no environment")


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_is_an_error_soon(remote, kind):
    collector = remote(kind, makers(2), gain(), frames_per_batch=20)
    collector.next()
    killed = time.monotonic()
    os.kill(pids(collector)[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker 1 on .* was killed by SIGKILL"):
        collect(collector)
    assert time.monotonic() - killed < patient(2.0)


def test_killed_workers_are_replaced_where_they_were_and_nothing_comes_twice(remote):
    collector = remote("async", makers(2), gain(), frames_per_batch=20, on_worker_failure="restart", restart_delay=0.0)
    host = {process.pid for process in descendants()}
    seen = set()

    def kill_three_times():
        for rounds in range(1, 4):
            os.kill(pids(collector)[0], signal.SIGKILL)
            while collector.stats()["restarts"] < rounds or not pids(collector)[0] or not alive(pids(collector)[0]):
                _count(collector.next(), seen)

    with pytest.warns(RuntimeWarning, match="It is replaced"):
        kill_three_times()
    assert collector.stats()["workers_alive"] == 2
    assert host & {process.pid for process in descendants()}


def _count(batch, seen):
    for row in batch["observation"]:
        key = (int(row[IDENT]), int(row[INSTANCE]), int(row[EPISODE]), int(row[STEP]))
        assert key not in seen
        seen.add(key)


def hosts(collector):
    """Processes of groups: the parents of workers that are no servers."""
    found = [int(number) for number in collector.get_distant_attr("env.parent") if number]
    return sorted(set(found))


def homing(ident=0):
    env = tally(ident)
    env.parent = multiprocessing.parent_process().pid
    return env


@pytest.mark.parametrize("how", ["raise", "restart"])
def test_a_killed_host_is_an_error_or_the_run_goes_on(remote, how):
    env = [partial(homing, i) for i in range(4)]
    collector = remote("sync", env, gain(), frames_per_batch=40, on_worker_failure=how, restart_delay=0.0)
    collector.next()
    first, second = hosts(collector)
    killed = time.monotonic()
    os.kill(first, signal.SIGKILL)
    if how == "raise":
        with pytest.raises(
            WorkerError, match=r"worker [01] was lost: .*\(group 0\) .*(hung up|SIGKILL)|worker [01] on"
        ):
            collect(collector)
        assert time.monotonic() - killed < patient(5.0)
        return

    def go_on():
        while collector.stats()["restarts"] < 2 or collector.stats()["workers_alive"] < 4:
            batch = collector.next()
        return batch

    with pytest.warns(RuntimeWarning, match="was lost"):
        batch = go_on()
    assert batch.shape == (4, 10)
    found = hosts(collector)
    assert len(found) == 2
    assert second in found
    assert first not in found


def test_a_silent_host_is_given_up_and_what_it_says_later_is_not_heard(remote):
    env = [partial(homing, i) for i in range(2)]
    collector = remote(
        "async", env, gain(), per=1, frames_per_batch=20, options={"host_timeout": 2.0}, env_step_timeout=30
    )
    collector.next()
    frozen = hosts(collector)[0]
    silent = collector.get_distant_attr("env.parent").index(frozen)
    workers = pids(collector)
    os.kill(frozen, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerError, match=rf"worker {silent} on .* was lost: .* no sign for host_timeout=2 s"):
            collect(collector)
    finally:
        os.kill(frozen, signal.SIGCONT)
    collector.shutdown(raise_on_error=False)
    assert gone([frozen, *workers], patient(20.0))


def test_a_shorter_silence_costs_time_only(remote):
    env = [partial(homing, i) for i in range(2)]
    collector = remote(
        "sync", env, gain(), per=1, frames_per_batch=20, options={"host_timeout": 60.0}, env_step_timeout=1.0
    )
    collector.next()
    frozen = hosts(collector)[0]
    os.kill(frozen, signal.SIGSTOP)
    waker = subprocess.Popen([sys.executable, "-c", f"import time, os; time.sleep(2); os.kill({frozen}, 18)"])
    for _ in range(5):
        assert collector.next().shape == (2, 10)
    assert collector.stats()["restarts"] == 0
    assert waker.wait(20) == 0


# The end, and how it begins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_behind(kind):
    def run():
        env = [partial(homing, i) for i in range(2)]
        collector = Collector(env, gain(), frames_per_batch=20, backend="tcp", sync=kind == "sync")
        collector.next()
        processes = [*pids(collector), *hosts(collector)]
        collector.shutdown()
        assert gone(processes)

    run()  # servers, which stay
    gc.collect()
    before = num_fds()
    run()
    gc.collect()
    assert num_fds() <= before


def test_who_joins_by_hand_runs_workers(make, monkeypatch, caplog, programs):
    monkeypatch.setenv(SECRET, KNOWN)
    joining = []

    def join(record):
        if "waits for" in record.getMessage():
            address = record.args[1], record.args[2]
            command = ["-m", "rollwright", "join", f"{address[0]}:{address[1]}", "--name", "elsewhere"]
            joining.append(programs.start(*command))
        return True

    import logging

    log = logging.getLogger("rollwright")
    log.addFilter(join)
    try:
        options = {"launcher": "join", "num_workers_per_collector": 2}
        collector = make("sync", makers(2), gain(), frames_per_batch=20, backend="tcp", backend_options=options)
    finally:
        log.removeFilter(join)
    assert collector.next().shape == (2, 10)
    with pytest.raises(WorkerError, match="on elsewhere"):
        collector.map_fn("no_such")
    collector.shutdown()
    _, errors = joining[0].communicate(patient(30))
    assert joining[0].returncode == 0, errors
    assert "the collector has ended" in errors


def test_a_host_that_does_not_come_is_an_error_that_says_how_long(make, monkeypatch):
    monkeypatch.setenv(SECRET, KNOWN)
    waited = r"waited 0\.3 s for .*worker 0 on a host that has not joined is starting"
    lost = r"worker 0 on a host that has not joined.*TimeoutError: nothing joined within start_timeout=0\.3 s"
    with pytest.raises(TimeoutError, match=f"{waited}|{lost}"):  # both limits end at once
        make(
            "sync",
            makers(1),
            gain(),
            frames_per_batch=20,
            backend="tcp",
            backend_options={"launcher": "join"},
            start_timeout=0.3,
        )


WRONG = {
    "unknown option": ({"num_worker_per_collector": 2}, {}, TypeError, "Did you mean 'num_workers_per_collector'"),
    "no dictionary": ([2], {}, TypeError, "backend_options: expected a dictionary, got list"),
    "count": ({"num_workers_per_collector": 0}, {}, ValueError, "num_workers_per_collector: .*at least 1, got 0"),
    "address": ({"address": "here"}, {}, ValueError, "address: expected 'HOST:PORT'.*got 'here'"),
    "secret": ({"secret": "short"}, {}, ValueError, "secret: expected a text of at least 16 characters"),
    "launcher": (
        {"launcher": "slurm"},
        {},
        ValueError,
        "launcher: expected 'mp' or 'submitit' or 'torchrun' or 'join', got 'slurm'",
    ),
    "no secret": ({"launcher": "join"}, {}, ValueError, "secret: launcher='join' needs one.*ROLLWRIGHT_SECRET"),
    "timeout": ({"host_timeout": 0}, {}, ValueError, "host_timeout: expected more than 0 s"),
    "start method": ({}, {"start_method": "fork"}, ValueError, "start_method='fork' is for processes of this machine"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_options_are_refused_at_construction(make, monkeypatch, wrong):
    monkeypatch.delenv(SECRET, raising=False)
    options, others, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        make("sync", makers(2), gain(), frames_per_batch=20, backend="tcp", backend_options=options, **others)


def test_options_of_a_backend_without_any_are_refused(make):
    with pytest.raises(ValueError, match="backend_options: backend='process' has none, got \\['address'\\]"):
        make("sync", makers(2), gain(), frames_per_batch=20, backend_options={"address": "a:1"})


def test_a_buffer_of_this_process_is_refused(make):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), shared=True)
    with pytest.raises(ValueError, match=r"replay_buffer: lies in memory of this machine.*each would fill a copy"):
        make("async", makers(2), gain(), frames_per_batch=20, replay_buffer=buffer, backend="tcp")


def test_what_cannot_be_sent_is_named(make):
    lock = __import__("threading").Lock()
    with pytest.raises(TypeError, match="create_env_fn: cannot be sent"):
        make("sync", [lambda: (lock, tally())[1]] * 2, gain(), frames_per_batch=20, backend="tcp")


def test_collector_counts_groups():
    with Collector(
        tally,
        gain(),
        frames_per_batch=40,
        total_frames=80,
        num_collectors=2,
        backend="tcp",
        backend_options={"num_workers_per_collector": 2},
        sync=True,
    ) as collector:
        assert [batch.shape[0] for batch in collector] == [4, 4]
