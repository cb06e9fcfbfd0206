"""Backend "ray" over hosts of their own: a head, which has the learner, and nodes; collect, publish, cut, kill."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.hosts.conftest import why_not_once
from tests.hosts.namespaces import ROOT, Network
from tests.patience import patient

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(300)]

PORT = 6379
LEARNER = """
import json, sys, time, warnings
from pathlib import Path
from tests.hosts.namespaces import enter

if __name__ == "__main__":
    path, over, kind, given = sys.argv[1:]
    enter(path)
    from rollwright.collectors import MultiAsyncCollector, MultiSyncCollector
    from rollwright.testing.transports import frames as of

    given = json.loads(given)
    import ray

    num_hosts = given.pop("num_hosts")
    ray.init("10.77.0.1:6379", log_to_driver=False)
    while ray.cluster_resources().get("CPU", 0) < num_hosts:  # they have joined; it is known a little later
        time.sleep(0.05)
    backend_options = {"num_workers_per_collector": 2, "remote_configs": {"num_cpus": 1}}
    backend_options |= given.pop("backend_options")
    warnings.filterwarnings("ignore", ".*It is replaced", RuntimeWarning)
    made, each = (MultiSyncCollector, 4) if kind == "sync" else (MultiAsyncCollector, 1)
    envs = of.factories(4, step_s=2e-3)
    collector = made(
        envs, of.constant(0.0), frames_per_batch=20 * each, backend="ray", backend_options=backend_options,
        track_policy_version=True, **given,
    )
    batches, longest_s = [], 0.0
    while not Path(over).exists():
        begun = time.monotonic()
        batches.append(collector.next().clone())
        longest_s = max(longest_s, time.monotonic() - begun)
        if len(batches) % 5 == 0:
            collector.update_policy_weights_(of.constant(float(len(batches))))
        stats = collector.stats()
        pids = [worker["pid"] for worker in stats["workers"] if worker["alive"] and worker["pid"] is not None]
        version = int(batches[-1]["policy_version"].max())
        print(json.dumps({"restarts": stats["restarts"], "pids": pids, "version": version}), flush=True)
    collector.shutdown()
    found = of.whole_trajectories(batches)
    print(json.dumps({"longest_s": longest_s, "trajectories": len(found)}), flush=True)
"""


class Cluster:
    """A Ray cluster over hosts, and a learner on its head.

    Args:
        network: of the hosts.
        programs: start the learner.
        folder: of files.
    """

    def __init__(self, network, programs, folder):
        self.network, self._programs, self._over = network, programs, folder / "over"
        self.head, *self.hosts = network.hosts
        self._env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_grpc_enable_http_proxy": "0",
        }
        shared = ("--disable-usage-stats", "--include-log-monitor=false", f"--object-store-memory={80 * 2**20}")
        self._run(self.head, "--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false", *shared)
        for host in self.hosts:  # not at once: nodes that share a disk count themselves by the files that they find
            self._run(host, f"--address={self.address}", "--num-cpus=1", *shared)

    @property
    def address(self):
        return f"{self.head.address}:{PORT}"

    def _run(self, host, *options):
        command = [str(Path(sys.executable).with_name("ray")), "start", f"--node-ip-address={host.address}", *options]
        env = {**os.environ, **self._env}
        done = subprocess.run(
            host.command(*command), env=env, cwd=ROOT, capture_output=True, text=True, timeout=patient(60.0)
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def learn(self, kind, host_timeout=30.0, **options):
        """Start the learner."""
        given = json.dumps({"backend_options": {"host_timeout": host_timeout}, "num_hosts": len(self.hosts), **options})
        self.learner = self._programs.start(
            "-c", LEARNER, self.head.path, str(self._over), kind, given, cwd=ROOT, env=self._env
        )
        self.take(5)

    def next(self):
        """What the learner says of a batch."""
        line = self.learner.stdout.readline()
        assert line, self.learner.communicate(10.0)[1]
        return json.loads(line)

    def take(self, count=1, until=lambda found: True):
        """Take so many batches, and then until a condition holds."""
        for _ in range(count):
            found = self.next()
        while not until(found):
            found = self.next()
        return found

    def finish(self):
        """Have it end; what it found in all batches."""
        self._over.touch()
        return self.take(until=lambda found: "trajectories" in found)

    def host_of_actor(self):
        """One where an actor of the collector is."""
        pid = self.next()["pids"][0]
        return next(host for host in self.hosts if pid in host.processes())


@pytest.fixture
def cluster(programs, tmp_path):
    """``cluster(num_hosts)``: a head and so many nodes."""
    if (why := why_not_once()) is not None:
        pytest.skip(why)
    made = []

    def build(num_hosts):
        network = Network(1 + num_hosts)
        made.append(network.__enter__())
        return Cluster(network, programs, tmp_path)

    yield build
    for network in made:
        network.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_cut_of_ten_seconds_costs_time_only(cluster, kind):
    cluster = cluster(2)
    cluster.learn(kind, on_worker_failure="restart")
    host = cluster.host_of_actor()
    before = cluster.take(20)["version"]
    host.cut()
    healing = threading.Timer(10.0, host.heal)
    healing.start()
    cluster.take(10, until=lambda found: not healing.is_alive())
    last = cluster.take(40)
    healing.join()
    assert last["restarts"] == 0
    assert last["version"] > before
    found = cluster.finish()
    assert found["longest_s"] < 20.0
    assert (found["longest_s"] > 8.0) == (kind == "sync")
    assert found["trajectories"] > 10


@pytest.mark.parametrize("how", ["cut", "power"])
def test_another_node_takes_the_place_of_one_that_is_lost(cluster, how):
    cluster = cluster(3)
    cluster.learn("sync", host_timeout=4.0, on_worker_failure="restart", restart_delay=0.0)
    host = cluster.host_of_actor()
    host.cut()
    if how == "power":
        host.kill_all()
    last = cluster.take(until=lambda found: found["restarts"] >= 2 and len(found["pids"]) == 4)
    if how == "cut":
        host.heal()  # nothing of it may be delivered now
    cluster.take(20)
    assert last["restarts"] == 2
    found = cluster.finish()
    print(f"\nRay, a node is lost ({how}): the longest wait took {found['longest_s']:.1f} s")
    assert found["trajectories"] > 10


def test_a_node_that_is_lost_is_an_error(cluster):
    cluster = cluster(2)
    cluster.learn("sync", host_timeout=4.0)
    host = cluster.host_of_actor()
    begun = time.monotonic()
    host.cut()
    host.kill_all()
    said = cluster.learner.communicate(patient(30.0))[1]
    assert cluster.learner.returncode == 1
    assert time.monotonic() - begun < 9.0 + patient(2.0)
    assert "WorkerError" in said
    assert "a Ray actor) has given no sign for host_timeout=4 s" in said
