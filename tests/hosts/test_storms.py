"""Storms over hosts: workers and groups are killed, hosts are cut off for a while or for long, at random moments.

No call hangs, every frame is delivered once, trajectories that are promised whole are whole, and nothing is left. The
tallies are printed (``pytest -s``); ``ROLLWRIGHT_STORM_SEED`` gives other moments.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from functools import partial

import pytest
from tests.collectors.workers.processes import burn, gone, wait_until
from tests.patience import patient

from rollwright.testing.transports import frames as of

SEED = int(os.environ.get("ROLLWRIGHT_STORM_SEED", "0"))
HOST_TIMEOUT_S = 2.0
WAIT_S = 20.0  # no call may take longer
QUICK, LONG = 3, 50  # rounds
pytestmark = pytest.mark.usefixtures("replacing")


class Storm:
    """Does one thing after another to hosts and workers, each at a random moment.

    Args:
        site: where.
        seed: of what happens, and when.
    """

    def __init__(self, site, seed):
        self.site, self.random = site, random.Random(seed)
        self.tally, self.longest_s, self.pids = Counter(), 0.0, set()
        self.over, self.batches = threading.Event(), []

    def __enter__(self):
        join = self.site.join_when_there_is_room
        self.joining = [threading.Thread(target=join, args=(host, self.over)) for host in self.site.hosts]
        for thread in self.joining:
            thread.start()
        return self

    def __exit__(self, *error):
        self.over.set()
        for thread in self.joining:
            thread.join()

    # What happens -------------------------------------------------------------------------------------

    def kill_worker(self, host):
        """Kill one."""
        for pid in self.site.pids_on(host)[:1]:
            burn(pid)

    def kill_group(self, host):
        """Kill the process of a group."""
        burn(self.site.joined[host.name].pid)

    def cut_short(self, host):
        """Cut a host off, for less than the limit."""
        host.cut()
        time.sleep(self.random.uniform(0.1, HOST_TIMEOUT_S / 3))
        host.heal()

    def cut_long(self, host):
        """Cut a host off, until it is given up."""
        host.cut()
        time.sleep(HOST_TIMEOUT_S + self.random.uniform(0.5, 1.5))
        host.heal()

    def strike(self, what):
        """Do one of these at a random moment."""
        time.sleep(self.random.uniform(0.0, 0.3))
        getattr(self, what)(self.random.choice(self.site.hosts))

    # What the learner does ----------------------------------------------------------------------------

    def round(self, collector, what):
        """Learn while it happens, and until all workers are there again."""
        self.tally[what] += 1
        striking = threading.Thread(target=self.strike, args=(what,))
        striking.start()
        limit = time.monotonic() + patient(60.0)
        try:
            while striking.is_alive() or not self.complete(collector):
                assert time.monotonic() < limit, f"{what}: {collector.stats()}"
                self.learn(collector)
        finally:
            striking.join()
        self.learn(collector)

    def complete(self, collector):
        """Whether all workers run; one whose host has not joined yet has no process."""
        return all(worker["alive"] and worker["pid"] is not None for worker in collector.stats()["workers"])

    def learn(self, collector):
        """Take a batch, and publish weights now and then."""
        self.batches.append(self.timed(collector.next).clone())
        if len(self.batches) % 5 == 0:
            self.timed(partial(collector.update_policy_weights_, of.constant(2.0)))
        self.pids |= {worker["pid"] for worker in collector.stats()["workers"] if worker["pid"] is not None}

    def timed(self, call):
        """No call takes long."""
        begun = time.monotonic()
        found = call()
        took_s = time.monotonic() - begun
        self.longest_s = max(self.longest_s, took_s)
        assert took_s < patient(WAIT_S)
        return found


ACTIONS = ("kill_worker", "kill_group", "cut_short", "cut_long")
ROUNDS = [
    pytest.param(QUICK, id=f"{QUICK} rounds", marks=pytest.mark.timeout(120)),
    pytest.param(LONG, id=f"{LONG} rounds", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
]

MIXED = [
    pytest.param("sync", True, id="sync-trajectories"),
    pytest.param("async", False, id="async-frames", marks=pytest.mark.slow),
    pytest.param("sync", False, id="sync-frames", marks=pytest.mark.slow),
    pytest.param("async", True, id="async-trajectories", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("num_rounds", ROUNDS)
@pytest.mark.parametrize(("kind", "trajectories"), MIXED)
def test_storm(site, kind, trajectories, num_rounds):
    site = site(2)
    seed = SEED + 2 * (kind == "sync") + trajectories
    options = {"trajs_per_batch": 3, "traj_format": "cat"} if trajectories else {}
    options |= {"on_worker_failure": "restart", "restart_delay": 0.0, "max_restarts": 10**6}
    with Storm(site, seed) as storm:
        collector = site.build(kind, host_timeout=HOST_TIMEOUT_S, join=False, **options)
        for number in range(num_rounds):
            storm.round(collector, storm.random.choice(ACTIONS) if number >= len(ACTIONS) else ACTIONS[-1 - number])
        stats = collector.stats()
        storm.timed(collector.shutdown)
    found = of.whole_trajectories(storm.batches, ended=trajectories)
    frames = sum(batch.numel() for batch in storm.batches)
    tally = {**storm.tally, "restarts": stats["restarts"], "groups": len(site.all_joined)}
    print(
        f"\nstorm, {kind}, {'trajectories' if trajectories else 'frames'}: {tally}, {frames} frames, {len(found)} "
        f"trajectories, longest call {storm.longest_s:.1f} s"
    )
    assert stats["restarts"] > 0
    assert wait_until(lambda: all(program.poll() is not None for program in site.all_joined), 10.0)
    assert gone(list(storm.pids), patient(10.0))
