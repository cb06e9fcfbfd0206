"""Storms over groups of workers: workers, groups, the replay service and the learner are killed at random moments.

No call hangs, every acknowledged frame is there once, trajectories that are promised whole are whole, and nothing is
left. The tallies are printed (``pytest -s -m slow``); ``ROLLWRIGHT_STORM_SEED`` gives other moments.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import threading
import time
from collections import Counter
from functools import partial

import pytest
from tests.collectors.workers.envs import gain, tally
from tests.collectors.workers.frames import check
from tests.collectors.workers.processes import burn, gone, wait_until
from tests.collectors.workers.remote.stored import check_trajectories, frames_by_name
from tests.patience import patient
from tests.ray_cluster import attached

from rollwright.data import LazyTensorStorage, ReplayBuffer

SEED = int(os.environ.get("ROLLWRIGHT_STORM_SEED", "0"))
WAIT_S = 30.0  # no call may take longer
ROUNDS = 50
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:.*It is replaced:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*of the .* are lost:RuntimeWarning"),
]

OPTIONS = {
    "tcp": {},
    "distributed": {},
    "rpc": {},
    "ray": {"remote_configs": {"num_cpus": 1}},
}
BACKENDS = ["tcp", "distributed", "rpc", pytest.param("ray", marks=pytest.mark.ray)]
REPLACED = {"on_worker_failure": "restart", "max_restarts": 10**6, "restart_delay": 0.0}


@pytest.fixture(autouse=True)
def started(backend, monkeypatch):
    """What a backend needs: for Ray, this process is connected to a cluster."""
    if backend != "ray":
        yield
        return
    pytest.importorskip("ray")
    with attached() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        yield


@pytest.fixture
def service(tmp_path):
    """A replay service that comes back from its last dump with all that it had acknowledged."""
    options = {"path": tmp_path / "dumps", "dump_every": 1, "max_restarts": 10**6}
    storage = partial(LazyTensorStorage, 500_000)
    buffer = ReplayBuffer(storage=storage, service_backend="process", service_backend_options=options)
    yield buffer
    buffer.shutdown()


def homing(ident):
    """An environment that knows the process of its group."""
    env = tally(ident)
    env.parent = multiprocessing.parent_process().pid
    return env


def options_of(backend):
    return {"backend": backend, "backend_options": {"num_workers_per_collector": 2, **OPTIONS[backend]}}


class Storm:
    """Kills one thing after another while a collector is used.

    Args:
        collector: of two groups of two workers.
        buffer: the replay service that it writes to, if any.
        seed: of what is killed, and when.
    """

    def __init__(self, collector, buffer, seed):
        self.collector, self.buffer, self.random = collector, buffer, random.Random(seed)
        self.tally, self.longest_s, self.batches, self.pids = Counter(), 0.0, [], set()

    def round(self, what):
        """Collect while it is killed, and until all is there again."""
        self.tally[what] += 1
        groups = self.timed(partial(self.collector.get_distant_attr, "env.parent"))
        self.pids |= {*groups, *self.workers()}
        victims = {"group": groups, "worker": self.workers(), "service": [self.buffer.host.pid] if self.buffer else []}
        delay_s = self.random.uniform(0.0, 0.3)
        striking = threading.Timer(delay_s, burn, [self.random.choice(victims[what])])
        restarts = self.collector.stats()["restarts"]
        striking.start()
        limit = time.monotonic() + patient(60.0)
        while striking.is_alive() or not self.is_whole(what, restarts):
            assert time.monotonic() < limit, f"{what}: {self.collector.stats()}"
            self.learn()
        striking.join()
        self.learn()

    def is_whole(self, what, restarts):
        """Whether what was killed was replaced, and all workers run."""
        if what == "service":
            return self.buffer.num_restarts == self.tally["service"]
        return self.collector.stats()["restarts"] > restarts and None not in self.workers()

    def workers(self):
        """Processes of the workers; None where one is being replaced."""
        return [worker["pid"] if worker["alive"] else None for worker in self.collector.stats()["workers"]]

    def learn(self):
        """Take a batch, and publish weights now and then."""
        batch = self.timed(self.collector.next)
        self.tally["batches"] += 1
        if batch is not None:
            self.batches.append(batch.clone())
        if self.tally["batches"] % 5 == 0:
            self.timed(partial(self.collector.update_policy_weights_, gain(2.0)))

    def timed(self, call):
        """No call takes long."""
        begun = time.monotonic()
        found = call()
        took_s = time.monotonic() - begun
        self.longest_s = max(self.longest_s, took_s)
        assert took_s < patient(WAIT_S)
        return found


@pytest.mark.parametrize("stored", [False, True], ids=["delivered", "stored"])
@pytest.mark.parametrize("trajectories", [False, True], ids=["frames", "trajectories"])
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_storm(make, service, backend, kind, trajectories, stored):
    options = {"trajs_per_batch": 2} if trajectories else {}
    if stored:
        options["replay_buffer"] = service.client()
    elif trajectories:
        options["traj_format"] = "cat"
    envs = [partial(homing, ident) for ident in range(4)]
    collector = make(kind, envs, gain(), frames_per_batch=40, **options, **options_of(backend), **REPLACED)
    storm = Storm(collector, service if stored else None, SEED + 4 * (kind == "sync") + 2 * trajectories + stored)
    whats = ["worker", "group", *(["service"] if stored else [])]
    for number in range(ROUNDS):
        storm.round(whats[number] if number < len(whats) else storm.random.choice(whats))
    stats = collector.stats()
    storm.timed(collector.shutdown)
    if stored:
        names = frames_by_name(service)
        assert len(names) == service.write_count >= stats["frames"] > 0
        assert service.num_lost == 0
        found = check(service[:], gaps=True, whole=trajectories)
        assert not trajectories or check_trajectories(service) == found.trajectories
    else:
        found = check(storm.batches, gaps=True, whole=trajectories)
        waiting = 40 * stats["undelivered"]
        assert found.frames <= stats["frames"] if trajectories else found.frames + waiting == stats["frames"]
    print(
        f"\nstorm, {backend}, {kind}, {'trajectories' if trajectories else 'frames'}, "
        f"{'stored' if stored else 'delivered'}: {dict(storm.tally)}, restarts {stats['restarts']}, {found.frames} "
        f"frames, {found.trajectories} trajectories, longest call {storm.longest_s:.1f} s"
    )
    assert stats["restarts"] > 0
    assert gone([pid for pid in storm.pids if pid is not None], patient(10.0))


LEARNER = """
import pickle, sys, warnings
from functools import partial
from pathlib import Path
from rollwright.collectors import MultiAsyncCollector, MultiSyncCollector
from tests.collectors.workers.envs import gain
from tests.collectors.workers.remote.test_storms import homing, options_of

backend, kind, first, file = sys.argv[1:]
warnings.filterwarnings("ignore", "RPCDataCollector")
if __name__ == "__main__":
    buffer = pickle.loads(Path(file).read_bytes())
    made = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}[kind]
    envs = [partial(homing, int(first) + i) for i in range(4)]
    collector = made(envs, gain(), frames_per_batch=40, trajs_per_batch=1, replay_buffer=buffer, **options_of(backend))
    pids = [worker["pid"] for worker in collector.stats()["workers"]]
    print(*pids, *set(collector.get_distant_attr("env.parent")), flush=True)
    for _ in collector:
        pass
"""


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_learners_that_are_killed(programs, service, tmp_path, backend, kind):
    file, moments = tmp_path / "client", random.Random(SEED)
    file.write_bytes(pickle.dumps(service.client()))
    for number in range(ROUNDS):
        program = programs.start("-c", LEARNER, backend, kind, str(100 * number), str(file))
        line = program.stdout.readline()
        assert line, program.communicate(10.0)
        pids = [int(pid) for pid in line.split()]
        time.sleep(moments.uniform(0.0, 0.3))
        program.kill()
        assert gone([program.pid, *pids], patient(20.0)), number
        program.close()
    written = service.write_count
    assert written == len(frames_by_name(service))
    whole = check_trajectories(service)
    assert whole > 0
    assert wait_until(lambda: service.write_count == written, 1.0)
    print(f"\nlearners, {backend}, {kind}: {ROUNDS} killed, {written} frames, {whole} trajectories")
