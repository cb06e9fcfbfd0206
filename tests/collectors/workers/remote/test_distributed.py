"""Backend "distributed": batches and weights that move between groups and the collector are those of local workers."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

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
    pixels,
    tallies,
    tally,
)
from tests.collectors.workers.processes import gone, num_fds
from tests.patience import patient
from tests.variants import in_turn

from rollwright import Collector
from rollwright._processes.network.handshake import SECRET
from rollwright.collectors.workers.remote import connection
from rollwright.collectors.workers.remote.launching import SubmititLauncher
from rollwright.errors import WorkerError

KINDS = ["sync", "async"]


@pytest.fixture
def remote(make):
    """``remote(kind, envs, policy, **options)``: a collector of groups."""

    def build(kind, *args, per=1, options=None, **others):
        given = {"num_workers_per_collector": per, **(options or {})}
        return make(kind, *args, backend="distributed", backend_options=given, **others)

    return build


def collect(collector, count=10_000):
    for _ in range(count):
        collector.next()


def homing(ident=0):
    env = tally(ident)
    env.parent = multiprocessing.parent_process().pid
    return env


def hosts(collector):
    """Processes of groups, by worker."""
    return [int(number) for number in collector.get_distant_attr("env.parent")]


# The same as local workers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("per", "options"), in_turn([1, 2], [{}, {"cat_results": 0}]))
def test_synchronous_batches_are_those_of_local_workers(make, remote, per, options):
    env = makers(make=tallies if options else tally)
    found = []
    for build in (make, partial(remote, per=per)):
        torch.manual_seed(3)
        collector = build("sync", env, gain(), frames_per_batch=60, total_frames=240, **options)
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


def test_large_frames_arrive_untorn(remote):
    collector = remote("async", [pixels] * 2, None, frames_per_batch=100, total_frames=1000)
    for batch in collector:
        images = batch["observation"]
        assert bool((images.flatten(1) == images.flatten(1)[:, :1]).all())


@pytest.mark.parametrize("per", [1, 2])
def test_each_synchronous_batch_acts_with_what_was_published_before(remote, per):
    collector = remote("sync", makers(2), gain(0.0), per=per, frames_per_batch=20, track_policy_version=True)
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
    for build in (make, remote):
        other = build("sync", makers(2), gain(), frames_per_batch=40)
        other.load_state_dict(state)
        for left, right in zip(batches(other, 2), expected, strict=True):
            assert torch.equal(left["observation"][..., STEP], right["observation"][..., STEP])
            assert torch.equal(left["action"], right["action"])


# Faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["worker", "group"])
def test_a_kill_is_an_error_soon(remote, whose):
    collector = remote("async", [partial(homing, i) for i in range(2)], gain(), frames_per_batch=20)
    collector.next()
    pid = hosts(collector)[1] if whose == "group" else collector.stats()["workers"][1]["pid"]
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker 1 .*(hung up|SIGKILL)"):
        collect(collector)
    assert time.monotonic() - killed < patient(2.0)


def test_a_group_that_dies_is_replaced_and_the_others_do_not_notice(remote):
    env = [partial(homing, i) for i in range(2)]
    collector = remote("async", env, gain(), frames_per_batch=20, on_worker_failure="restart", restart_delay=0.0)
    collector.next()
    first, second = hosts(collector)

    def go_on():
        os.kill(first, signal.SIGKILL)
        seen = set()
        while collector.stats()["restarts"] < 1 or collector.stats()["workers_alive"] < 2 or len(seen) < 2:
            batch = collector.next()
            if collector.stats()["restarts"]:
                seen.add(int(batch["observation"][0, IDENT]))

    with pytest.warns(RuntimeWarning, match="was lost"):
        go_on()
    found = hosts(collector)
    assert found[1] == second
    assert found[0] != first


def test_a_silent_group_is_given_up(remote):
    env = [partial(homing, i) for i in range(2)]
    collector = remote("async", env, gain(), frames_per_batch=20, options={"host_timeout": 2.0}, env_step_timeout=30)
    collector.next()
    frozen = hosts(collector)[0]
    os.kill(frozen, signal.SIGSTOP)
    try:
        with pytest.raises(WorkerError, match=r"worker 0 on .* was lost: "):
            collect(collector)
    finally:
        os.kill(frozen, signal.SIGCONT)
    collector.shutdown(raise_on_error=False)
    assert gone([frozen], patient(20.0))


def test_a_learner_that_is_busy_for_longer_than_the_limit_loses_nothing(remote):
    collector = remote(
        "async", [pixels] * 2, None, frames_per_batch=100, total_frames=800, options={"host_timeout": 1.0}
    )
    count = 0
    for batch in collector:
        images = batch["observation"]
        assert bool((images.flatten(1) == images.flatten(1)[:, :1]).all())
        count += len(batch)
        if count == 200:
            time.sleep(3.0)
    assert count == 800


def test_a_group_that_is_lost_before_the_worker_is_sent_is_an_error_as_well(remote, monkeypatch):
    """The group joins, and is lost again, while what the worker is made of is being pickled."""
    links, begin = [], connection.GroupConnection.__init__

    def init(self, *args, **options):
        begin(self, *args, **options)
        links.append(self)

    def pickle_slowly(pickled):
        links[0].lose("has hung up")
        return pickled

    monkeypatch.setattr(connection.GroupConnection, "__init__", init)
    monkeypatch.setattr(connection, "with_sources", pickle_slowly)
    with pytest.raises(WorkerError, match=r"was lost: .* has hung up"):
        remote("sync", makers(1), gain(), frames_per_batch=20)


# The end, and wrong input ------------------------------------------------------------------------------------------


def test_nothing_is_left_behind():
    def run():
        env = [partial(homing, i) for i in range(2)]
        options = {"num_workers_per_collector": 1}
        collector = Collector(
            env, gain(), frames_per_batch=20, backend="distributed", backend_options=options, sync=True
        )
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
    "unknown option": ({"process_group": "gloo"}, TypeError, "Did you mean 'process_group_backend'"),
    "unknown kind": ({"process_group_backend": "ucc"}, ValueError, "expected 'gloo' or 'nccl' or 'mpi', got 'ucc'"),
    "launcher": ({"launcher": "slurm"}, ValueError, "launcher: expected 'mp' or 'submitit' or 'torchrun' or 'join'"),
    "slurm": ({"slurm_kwargs": {}}, ValueError, "slurm_kwargs: is for launcher='submitit', got launcher='mp'"),
    "no dictionary": (
        {"launcher": "submitit", "slurm_kwargs": ["gpu"]},
        TypeError,
        "slurm_kwargs: expected a dictionary",
    ),
    "no secret": ({"launcher": "join"}, ValueError, "secret: launcher='join' needs one.*ROLLWRIGHT_SECRET"),
    "no torchrun": (
        {"launcher": "torchrun", "secret": "x" * 16},
        ValueError,
        "a program that torchrun has started, and RANK, .* are not set",
    ),
    "address": ({"address": "here"}, ValueError, "address: expected 'HOST:PORT'"),
    "cluster": (
        {"launcher": "submitit", "submitit_kwargs": {"cluster": "moon"}},
        ValueError,
        "submitit_kwargs: .*moon",
    ),
    "job": (
        {"launcher": "submitit", "submitit_kwargs": {"cluster": "local"}, "slurm_kwargs": {"gpus": 1}},
        ValueError,
        "slurm_kwargs: .*gpus",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_options_are_refused_at_construction(make, monkeypatch, wrong):
    for name in (SECRET, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    options, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        make("sync", makers(2), gain(), frames_per_batch=20, backend="distributed", backend_options=options)


def test_more_groups_than_ranks_are_an_error(make, monkeypatch):
    rank = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", SECRET: "x" * 16}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"num_collectors: expected 2, one for each of the 3 ranks .*got 4"):
        make(
            "sync",
            makers(4),
            gain(),
            frames_per_batch=20,
            backend="distributed",
            backend_options={"launcher": "torchrun"},
        )


def test_nobody_else_reads_what_lies_in_the_folder_of_jobs(tmp_path):
    pytest.importorskip("submitit")
    tmp_path.chmod(0o755)
    launcher = SubmititLauncher({"cluster": "local", "folder": str(tmp_path)}, None)
    (own,) = tmp_path.iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    assert launcher._executor.folder == own
    pickled = own / "1_submitted.pkl"
    pickled.touch(0o644)
    job = SimpleNamespace(paths=SimpleNamespace(submitted_pickle=pickled))
    launcher._executor = SimpleNamespace(submit=lambda *args: job)
    assert launcher._submit(("127.0.0.1", 1), b"secret of a test", 0) is job
    assert pickled.stat().st_mode & 0o777 == 0o600
    launcher.close()
