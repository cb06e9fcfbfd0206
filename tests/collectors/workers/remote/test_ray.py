"""Backend "ray", on a real cluster of this machine that runs apart from the tests."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tests.collectors.workers.envs import (
    DONE,
    EPISODE,
    IDENT,
    IDS,
    INSTANCE,
    STEP,
    VERSION,
    gain,
    makers,
    tally,
)
from tests.collectors.workers.processes import alive, gone, wait_until
from tests.patience import patient
from tests.ray_cluster import NUM_CPUS, attached

from rollwright.collectors import Collector, RayCollector
from rollwright.errors import MissingExtraError, WorkerError

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster, to which this process is connected."""
    with attached() as address:
        yield address


@pytest.fixture
def remote(make, cluster):
    """``remote(kind, envs, policy, **options)``: two workers in each actor, unless ``per`` says otherwise."""

    def build(kind, *args, per=2, options=None, **others):
        given = {"num_workers_per_collector": per, **(options or {})}
        return make(kind, *args, backend="ray", backend_options=given, **others)

    return build


@pytest.fixture
def made():
    """Collectors that end with the test."""
    found = []
    yield found
    for collector in found:
        collector.shutdown(raise_on_error=False)


def collect(collector, count=10_000):
    for _ in range(count):
        collector.next()


def pids(collector):
    return [worker["pid"] for worker in collector.stats()["workers"]]


def actors():
    """Processes of the actors of this program that live."""
    own = ray.get_runtime_context().get_job_id()
    states = ray._private.state.actors().values()
    return [state["Pid"] for state in states if state["State"] != "DEAD" and state["JobID"] == own]


def equal(left, right):
    assert left.batch_size == right.batch_size
    for key in left.keys(True, True):
        one, other = left[key], right[key]
        if key in ("observation", ("next", "observation")):  # whose instance is a number of a process
            one, other = (torch.stack([each[..., i] for i in (IDENT, EPISODE, STEP)]) for each in (one, other))
        assert torch.equal(one, other), key


# The same as local workers -----------------------------------------------------------------------------------------


def test_a_synchronous_run_is_that_of_local_workers_and_goes_on_from_a_saved_state(make, remote):
    """Batches, weights by version and by worker, calls, pauses, and a state in the middle."""
    found, states = [], []
    for build in (make, remote):
        torch.manual_seed(3)
        options = {"frames_per_batch": 80, "track_policy_version": True}
        collector = build("sync", makers(4), gain(1.0), **options)
        collector.set_seed(5)
        batches = []
        for version in range(3):
            batches.append(collector.next().clone())
            assert batches[-1][VERSION].unique().tolist() == [version]
            collector.update_policy_weights_(gain(version + 2.0))
        collector.update_policy_weights_(gain(9.0), worker_ids=[1])
        batches.append(collector.next().clone())
        assert batches[-1]["action"].flatten(1).unique(dim=1).shape == (4, 1)
        assert batches[-1]["action"][:, 0].flatten().tolist().count(float(batches[-1]["action"][1, 0])) == 1
        assert collector.get_distant_attr("frames_per_batch") == [20] * 4
        with collector.pause():
            assert collector.get_distant_attr("env.batch_size") == [torch.Size([])] * 4
        states.append(collector.state_dict())
        batches += [collector.next().clone() for _ in range(2)]
        found.append(batches)
        if build is remote:
            with pytest.raises(WorkerError, match=r"worker 0 on .*\(group 0, a Ray actor\).*no_such"):
                collector.map_fn("no_such")
            processes = [*pids(collector), *actors()]
            assert len(actors()) == 2
            assert not any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in actors())
        collector.shutdown()
    assert gone(processes, patient(10.0))
    assert wait_until(lambda: actors() == [], 10.0)
    assert ray.is_initialized()
    for local, remote_one in zip(*found, strict=True):
        equal(local, remote_one)
    goes_on = make("sync", makers(4), gain(1.0), frames_per_batch=80, track_policy_version=True)
    goes_on.load_state_dict(states[1])
    assert torch.equal(goes_on.next()[VERSION], found[1][4][VERSION])


def test_asynchronous_batches_and_whole_trajectories(cluster, made):
    options = {"trajs_per_batch": 3, "traj_format": "cat", "frames_per_batch": 20, "total_frames": 400}
    options["num_workers_per_collector"] = 2
    made.append(RayCollector(makers(1), gain(), **options))
    seen = set()
    for batch in made[0]:
        for number in batch[IDS].unique():
            row = batch[batch[IDS] == number]
            assert row["observation"][:, STEP].tolist() == list(range(len(row)))
            assert bool(row[DONE][-1])
            assert int(number) not in seen
            seen.add(int(number))
    assert len(seen) > 20


# Faults ------------------------------------------------------------------------------------------------------------


def test_killed_workers_and_actors_are_replaced(remote):
    collector = remote("sync", makers(2), gain(), frames_per_batch=20, on_worker_failure="restart", restart_delay=0.0)
    collector.next()
    [host] = actors()
    old = pids(collector)[0]

    def kill_worker():
        killed = time.monotonic()
        os.kill(old, signal.SIGKILL)
        while collector.stats()["restarts"] < 1 or pids(collector)[0] in (old, None) or not alive(pids(collector)[0]):
            collector.next()
        assert time.monotonic() - killed < patient(2.0)

    def kill_actor():
        os.kill(host, signal.SIGKILL)
        while collector.stats()["restarts"] < 3 or collector.stats()["workers_alive"] < 2:
            batch = collector.next()
        return batch

    with pytest.warns(RuntimeWarning, match="It is replaced"):
        kill_worker()
    assert actors() == [host]
    with pytest.warns(RuntimeWarning, match="was lost"):
        batch = kill_actor()
    assert batch.shape == (2, 10)
    assert actors() != [host]
    seen = batch["observation"][..., INSTANCE].unique()
    assert len(seen) == 2


def test_a_killed_actor_is_an_error_soon(remote):
    collector = remote("async", makers(2), gain(), frames_per_batch=20)
    collector.next()
    [victim] = actors()
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker [01] on .*was lost: .*Ray actor\) (has ended with|has hung up)"):
        collect(collector)
    assert time.monotonic() - killed < patient(2.0)


# What is wrong at construction -------------------------------------------------------------------------------------

WRONG = {
    "unknown option": ({"remote_config": {}}, TypeError, "Did you mean 'remote_configs'"),
    "unknown resource": ({"remote_configs": {"num_cpu": 1}}, TypeError, "Did you mean 'num_cpus'"),
    "reserved": ({"remote_configs": {"max_restarts": 3}}, ValueError, "'max_restarts', but the collector replaces"),
    "no dictionary": ({"remote_configs": "2"}, TypeError, "remote_configs: expected a dictionary.*got str"),
    "too few": ({"remote_configs": [{}] * 3}, ValueError, "one dictionary for each of the 2 groups, got 3"),
    "value": ({"remote_configs": {"num_cpus": -1}}, ValueError, "remote_configs: .*num_cpus cannot be negative"),
    "no node": (
        {"remote_configs": {"num_cpus": 100}},
        ValueError,
        "group 0 asks for CPU 100, which no node .* has: there is CPU 8.*autoscales=True",
    ),
    "no such resource": (
        {"remote_configs": {"resources": {"anvil": 1}}},
        ValueError,
        "group 0 asks for CPU 1, anvil 1",
    ),
    "too much in all": (
        {"remote_configs": {"num_cpus": 5}},
        ValueError,
        "2 groups ask for CPU 10 in all, and the Ray cluster has CPU 8",
    ),
    "init key": (
        {"ray_init_config": {"adress": "auto"}},
        TypeError,
        "ray_init_config has no option 'adress'.*'address'",
    ),
    "init": ({"ray_init_config": 3}, TypeError, "ray_init_config: expected a dictionary.*got int"),
    "other cluster": (
        {"ray_init_config": {"address": "127.0.0.1:1"}},
        ValueError,
        r"ray_init_config\['address'\]: this program is connected .* already",
    ),
    "address": ({"address": "203.0.113.1:0"}, OSError, "cannot listen at 203.0.113.1:0.*'0.0.0.0:0'"),
    "niceness": ({"niceness": 20}, ValueError, "niceness: expected an integer from -20 to 19, got 20"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_options_are_refused_at_construction(remote, wrong):
    options, error, message = WRONG[wrong]
    began = time.monotonic()
    with pytest.raises(error, match=message):
        remote("sync", makers(2), gain(), per=1, frames_per_batch=20, options=options)
    assert time.monotonic() - began < patient(10.0)


def test_an_actor_that_waits_for_what_others_use_says_so(remote):
    holder = ray.remote(threading.Event).options(num_cpus=1).remote()  # a class whose module imports no torch
    assert ray.get(holder.is_set.remote()) is False
    options = {"remote_configs": {"num_cpus": NUM_CPUS}}
    with pytest.raises(TimeoutError, match=rf"worker 0 on the Ray actor of group 0, which asks for CPU {NUM_CPUS} and"):
        remote("sync", makers(1), gain(), per=1, frames_per_batch=20, options=options, start_timeout=1.0)
    ray.kill(holder)
    assert wait_until(lambda: actors() == [], 10.0)


COLLECTORS = {
    "class": ({"collector_class": "multi"}, ValueError, "collector_class: expected one of 'single'"),
    "no class": ({"collector_class": dict}, TypeError, "collector_class: expected Collector"),
    "count": ({"num_collectors": 3}, ValueError, "one function for each of the 3 collectors, got 2"),
    "twice": (
        {"collector_kwargs": {"frames_per_batch": 3}},
        ValueError,
        "frames_per_batch: got .*, and something else in collector_kwargs",
    ),
    "kwargs": ({"collector_kwargs": [{}]}, ValueError, "collector_kwargs: expected one dictionary for each of the 2"),
    "unknown": ({"collector_kwargs": {"postprok": 3}}, TypeError, "Did you mean 'postproc'"),
    "differ": (
        {"collector_kwargs": [{"max_frames_per_traj": 3}, {"max_frames_per_traj": 4}]},
        ValueError,
        "collector_kwargs: max_frames_per_traj has to be the same for all collectors",
    ),
    "backend": ({"backend": "tcp"}, TypeError, "RayCollector has no option 'backend'"),
    "options": ({"backend_options": {"remote_configs": {}}}, ValueError, "'remote_configs', which is said by an arg"),
    "start method": ({"start_method": "fork"}, ValueError, "start_method='fork' is for processes of this machine"),
}


@pytest.mark.parametrize("wrong", COLLECTORS)
def test_wrong_arguments_of_the_class_are_refused(monkeypatch, wrong):
    given, error, message = COLLECTORS[wrong]
    monkeypatch.setattr("rollwright.collectors.workers.transports.transport_of", None)  # nothing is started
    options = {"policy": gain(), "frames_per_batch": 20, **given}
    with pytest.raises(error, match=message):
        RayCollector(makers(2), **options)


def test_ray_that_is_not_installed_is_an_error_with_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"backend='ray' needs .*pip install 'rollwright\[ray\]'"):
        Collector(tally, gain(), num_collectors=2, frames_per_batch=20, backend="ray")


def test_an_address_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    options = {"ray_init_config": {"address": "127.0.0.1:1"}}
    with pytest.raises(ConnectionError, match=r"ray_init_config\['address'\]: nothing answers at 127.0.0.1:1"):
        Collector(tally, gain(), num_collectors=1, frames_per_batch=20, backend="ray", backend_options=options)


# The reference, and the documentation ------------------------------------------------------------------------------


def test_the_examples_of_002_run(cluster, made, tmp_path):
    """All but those with a replay buffer."""
    policy, other = gain(1.0), gain(3.0)
    options = {"frames_per_batch": 60, "total_frames": 120_000, "update_after_each_batch": True}
    collector = RayCollector([partial(tally, 1)] * 2, policy, num_workers_per_collector=1, sync=True, **options)
    made.append(collector)
    collector.enable_profile(workers=[0], num_rollouts=2, save_path=str(tmp_path / "worker_{worker_idx}.json"))
    weights = TensorDict.from_module(other).data
    with torch.no_grad():
        next(policy.parameters()).fill_(2.0)
    first = collector.next()
    acted = first["action"]
    assert collector.policy_version == 1
    for given, named in (
        ((other,), {}),
        ((weights,), {}),
        ((), {"weights": weights}),
        ((), {"policy": other}),
        ((), {"weights": weights, "model_id": "policy"}),
        ((), {"weights_dict": {"policy": weights}}),
        (({0: weights, 1: weights},), {}),
    ):
        collector.update_policy_weights_(*given, **named)
    assert collector.policy_version == 8
    collector.next()  # the weights of the policy itself, again
    assert (tmp_path / "worker_0.json").exists()
    assert torch.equal(collector.next()["action"].unique(), acted.unique())
    assert collector.cascade_execute("policy.training.__class__") is not None
    with pytest.raises(RuntimeError, match="replay"):
        collector.start()
    collector.async_shutdown(timeout=5.0)
    assert wait_until(lambda: actors() == [], 10.0)


DOC = Path(__file__).parents[4] / "docs" / "ray.md"


def documented():
    """The program of the documentation, and what it prints."""
    program, shown = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", DOC.read_text(), re.S).groups()
    return program, shown.splitlines()


def run_documented(programs, tmp_path, **environ):
    program, shown = documented()
    script = tmp_path / "train.py"
    script.write_text(program)
    path = os.pathsep.join(sys.path)  # of actors
    done = programs.run(script, env={"PYTHONPATH": path, **environ}, timeout=patient(100.0))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("torch")] == shown


def test_the_documented_program_attaches_to_a_cluster_and_leaves_it_alone(cluster, programs, tmp_path):
    run_documented(programs, tmp_path, RAY_ADDRESS=cluster)
    assert wait_until(lambda: actors() == [], 10.0)
    assert ray.cluster_resources()["CPU"] == NUM_CPUS


@pytest.mark.slow
def test_the_documented_program_starts_a_cluster_and_ends_it(programs, tmp_path):
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # names of sockets lie below it
        run_documented(programs, tmp_path, RAY_TMPDIR=short, RAY_ADDRESS="")
        assert os.listdir(f"{short}/ray")
        assert wait_until(lambda: not daemons_of(short), 20.0)


def daemons_of(folder):
    """Processes of Ray that write below a folder."""
    commands = [path.read_bytes().decode(errors="replace") for path in Path("/proc").glob("[0-9]*/cmdline")]
    return [command for command in commands if str(folder) in command and "ray" in command]
