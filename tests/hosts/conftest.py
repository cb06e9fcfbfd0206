"""Hosts for tests, where they can be made."""

from __future__ import annotations

import threading
import time
import warnings
from functools import cache, partial

import pytest
from tests.collectors.workers.processes import burn
from tests.hosts.namespaces import ROOT, Network, why_not
from tests.patience import patient

from rollwright.collectors import MultiAsyncCollector, MultiSyncCollector
from rollwright.testing.transports import frames as of

SECRET, PORT = "a secret of tests, long enough", 29400
BACKENDS = {"tcp": {}, "distributed": {}}
why_not_once = cache(why_not)


JOIN = """
import sys
from tests.hosts.namespaces import enter
enter(sys.argv[1])
from rollwright.cli import main
sys.exit(main(sys.argv[2:]))
"""


class Site:
    """A learner on the first host of a network, and groups of workers on others."""

    def __init__(self, network, programs, backend):
        self.network, self._programs, self._backend = network, programs, backend
        self.learner, *self.hosts = network.hosts
        self.address = f"{self.learner.address}:{PORT}"
        self.collector = None
        self.joined, self.all_joined = {}, []
        self._starting = threading.Lock()

    def join(self, host):
        """Start a group there; the workers of all are forked from one process, which is on no host."""
        arguments = ("join", self.address, "--name", host.name, "--timeout", "60")
        env = {"ROLLWRIGHT_SECRET": SECRET}
        with self._starting:
            program = self._programs.start("-c", JOIN, host.path, *arguments, cwd=ROOT, env=env)
        self.joined[host.name] = program
        self.all_joined.append(program)
        return program

    def join_when_there_is_room(self, host, over):
        """Start groups there until one is let in, which serves until the event is set."""
        while not over.is_set():
            program = self.join(host)
            while program.poll() is None and not over.is_set():
                time.sleep(0.05)
            over.wait(0.3)

    def power_off(self, host):
        """End all that runs there, without a word to others."""
        host.cut()
        for pid in [*self.pids_on(host), self.joined[host.name].pid]:
            burn(pid)

    def build(self, kind, *, per=2, host_timeout=30.0, envs=None, policy=None, hosts=None, join=True, **options):
        """A collector with a group on each host."""
        hosts = self.hosts if hosts is None else hosts
        given = {"launcher": "join", "address": self.address, "secret": SECRET}
        given |= {"num_workers_per_collector": per, "host_timeout": host_timeout, **BACKENDS[self._backend]}
        envs = of.factories(per * len(hosts), step_s=2e-3) if envs is None else envs
        options["frames_per_batch"] = options.pop("each", 20) * (len(envs) if kind == "sync" else 1)
        for host in hosts if join else ():
            self.join(host)
        made = MultiSyncCollector if kind == "sync" else MultiAsyncCollector
        policy = of.constant() if policy is None and "policy_factory" not in options else policy
        try:
            with self.learner.entered():
                self.collector = made(envs, policy, backend=self._backend, backend_options=given, **options)
        except Exception as error:
            error.add_note(f"groups: {self.states()}")
            raise
        return self.collector

    def states(self):
        """What has become of the groups that were started: how they ended, and what they said."""
        ended = {name: program.poll() for name, program in self.joined.items()}
        return {
            name: ended[name] if ended[name] is None else program.communicate() for name, program in self.joined.items()
        }

    def workers_on(self, host):
        """Indices of the workers that run there."""
        workers = self.collector._group.workers
        return [each.index for each in workers if each.connection is not None and each.connection.host == host.name]

    def pids_on(self, host):
        """Processes of the workers there."""
        pids = [self.collector.stats()["workers"][index]["pid"] for index in self.workers_on(host)]
        return [pid for pid in pids if pid is not None]


@pytest.fixture(params=["tcp", pytest.param("distributed", marks=pytest.mark.slow)])
def site(request, programs):
    """``site(num_hosts)``: so many hosts, and one for the learner."""
    if (why := why_not_once()) is not None:
        pytest.skip(why)
    made = []

    def build(num_hosts=2):
        network = Network(1 + num_hosts)
        network.__enter__()
        made.append(Site(network, programs, request.param))
        return made[-1]

    yield build
    for each in made:
        try:
            if each.collector is not None:
                each.collector.shutdown(raise_on_error=False)
        finally:
            each.network.close()


class Run:
    """Takes batches of a collector, and keeps them, and how long each took.

    Attributes:
        batches: copies.
        longest_s: that one took.
    """

    def __init__(self, collector):
        self.collector, self.batches, self.longest_s = collector, [], 0.0

    def take(self, until):
        """Take batches until a condition holds; the last one came when it did."""
        limit = time.monotonic() + patient(60.0)
        while not until():
            assert time.monotonic() < limit
            begun = time.monotonic()
            batch = self.collector.next()
            self.longest_s = max(self.longest_s, time.monotonic() - begun)
            self.batches.append(batch.clone())

    def take_some(self, count=5):
        """Take so many."""
        wanted = len(self.batches) + count
        self.take(lambda: len(self.batches) >= wanted)


@pytest.fixture
def run():
    """``run(collector)``."""
    return Run


@pytest.fixture
def later():
    """``later(seconds, function, ...)``: call it in a thread; at the end of the test it was called."""
    timers = []

    def start(seconds, function, *arguments):
        timers.append(threading.Timer(seconds, partial(function, *arguments)))
        timers[-1].start()
        return timers[-1]

    yield start
    for timer in timers:
        timer.join()


@pytest.fixture
def replacing():
    """Inside of it, warnings that a worker is replaced are no errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*It is replaced", RuntimeWarning)
        yield
