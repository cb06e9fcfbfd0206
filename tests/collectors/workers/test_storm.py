"""A storm of SIGKILLs at random moments: no hang, no splice, nothing half, nothing left.

``ROLLWRIGHT_STORM_S`` says how many seconds each of the storms lasts; it goes on until a worker was killed. The tallies
are printed (``pytest -s``).
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from functools import partial

import pytest
import torch
from tests.collectors.workers.envs import IDS, gain, makers, tallies, tally
from tests.collectors.workers.frames import check
from tests.collectors.workers.processes import burn, heard, left_behind, strangers
from tests.patience import patient

from rollwright.collectors.workers.counters import WorkerState
from rollwright.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from rollwright.errors import WorkerError

STORM_S = float(os.environ.get("ROLLWRIGHT_STORM_S", "0.8"))
SEED = int(os.environ.get("ROLLWRIGHT_STORM_SEED", "0"))
WAIT_S = 20.0  # no call may take longer
pytestmark = [
    pytest.mark.timeout(STORM_S * 2 + 60),
    pytest.mark.filterwarnings("ignore:.*It is replaced:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def start_s(make):
    """The server that starts workers is there; seconds that it takes to start three."""
    make("sync", [tally], gain(), frames_per_batch=1).shutdown()
    begun = time.monotonic()
    make("sync", makers(3), gain(), frames_per_batch=3).shutdown()
    return time.monotonic() - begun


class Beside:
    """Does something now and then, in a thread, inside a ``with`` block."""

    def __init__(self, seed: int, mean_s: float):
        self.random, self.mean_s = random.Random(seed), mean_s
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.over.wait(self.random.expovariate(1 / self.mean_s)):
            self.act()

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *exc):
        self.over.set()
        self.thread.join()


class Killer(Beside):
    """Kills a random worker, whichever there is, and notes what it was doing."""

    def __init__(self, seed: int, mean_s: float):
        super().__init__(seed, mean_s)
        self.places: Counter = Counter()
        self.collector, self.in_shutdown = None, False

    def act(self):
        victims = [p.pid for p in strangers()]
        if victims:
            victim = self.random.choice(victims)
            burn(victim, signal.SIGSTOP)  # it does the same until it dies
            try:
                self.places[self.place(victim)] += 1
            finally:
                burn(victim)

    def place(self, pid):
        if self.in_shutdown:
            return "shutdown"
        # Not from stats(), which waits for a lock of the buffer: the stopped one may hold it.
        workers = [] if self.collector is None else self.collector._group.workers
        states = {worker.pid: worker.counters.state for worker in workers if worker.pid is not None}
        return states.get(pid, WorkerState.STARTING).name.lower()


class Updates(Beside):
    """Publishes weights while another thread collects."""

    def __init__(self, collector):
        super().__init__(SEED, 0.02)
        self.collector, self.count = collector, 0

    def act(self):
        if heard(partial(self.collector.update_policy_weights_, gain(2.0)), WorkerError) is None:
            self.count += 1


class Clock:
    """The longest that any call took."""

    def __init__(self):
        self.longest = 0.0

    def __call__(self, function, *args, **kwargs):
        begun = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            self.longest = max(self.longest, time.monotonic() - begun)
            assert self.longest < patient(WAIT_S)


def buffer(kind):
    if kind == "buffer of whole trajectories":
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(500_000), sampler=SliceSampler(slice_len=8), batch_size=64, shared=True
        )
    return TensorDictReplayBuffer(storage=LazyTensorStorage(500_000), batch_size=64, shared=True)


MODES = {
    "sync": {},
    "async": {},
    "buffer": {},
    "buffer by iteration": {},
    "buffer of whole trajectories": {"trajs_per_batch": 1},
}


def collect(make, mode, number, **options):
    rb = buffer(mode) if mode.startswith("buffer") else None
    if rb is not None:
        options["replay_buffer"] = rb
    kind = "sync" if mode in ("sync", "buffer by iteration") or (rb is not None and number % 3 == 0) else "async"
    maker = tallies if number % 2 else tally
    collector = make(kind, makers(3, make=maker), gain(), frames_per_batch=36, **MODES[mode], **options)
    return collector, rb


def collect_into(made, clock, *arguments):
    made.extend(clock(collect, *arguments))


def drive(collector, rb, mode, clock, over, frames, tally_of):
    """Use the collector as a learner does, until ``over()``."""
    with Updates(collector) as updates:
        try:
            learn(collector, rb, mode, clock, over, frames, tally_of)
        finally:
            tally_of["updates beside"] += updates.count


def learn(collector, rb, mode, clock, over, frames, tally_of):
    if mode in ("buffer", "buffer of whole trajectories"):
        clock(collector.start)
    while not over():
        tally_of["calls"] += 1
        if mode in ("sync", "async"):
            frames.append(clock(collector.next).clone())
        elif mode == "buffer by iteration":
            clock(collector.next)
        else:
            time.sleep(0.002)
            if tally_of["calls"] % 7 == 0:
                with collector.pause():
                    pass
        if tally_of["calls"] % 5 == 0:
            clock(collector.update_policy_weights_, gain(2.0))
            tally_of["updates"] += 1
        if tally_of["calls"] % 11 == 0:
            clock(collector.stats)
        if rb is not None and len(rb):
            sampled(rb.sample())
            tally_of["samples"] += 1


def sampled(batch):
    """No row that was never published: each is a frame of an environment, and its next follows it."""
    seen, after = batch["observation"], batch["next", "observation"]
    assert bool((seen[:, 1] > 0).all())
    assert torch.equal(seen[:, :3], after[:, :3])
    assert torch.equal(seen[:, 3] + 1, after[:, 3])
    assert bool((batch[IDS] >= 0).all())


def report(mode, policy, counts, clock, killer):
    kills, places = sum(killer.places.values()), dict(killer.places)
    print(f"\nstorm: {mode}, {policy}: {kills} kills {places}, longest call {clock.longest:.2f} s, {dict(counts)}")


@pytest.mark.parametrize("mode", MODES)
def test_storm_with_restarts(make, mode, start_s):
    clock, counts, frames = Clock(), Counter(), []
    collector, rb = collect(make, mode, SEED + 1, on_worker_failure="restart", max_restarts=10**6, restart_delay=0.0)
    until = time.monotonic() + STORM_S

    def over():
        return time.monotonic() > until and collector.stats()["restarts"] > 0 and len(frames if rb is None else rb) > 0

    # Workers start again between two kills, more often than not, however slow the machine is.
    with Killer(SEED, min(1.0, max(0.1, start_s))) as killer:
        killer.collector = collector
        drive(collector, rb, mode, clock, over, frames, counts)
    calm = time.monotonic() + patient(20.0)  # after the storm all of them work again
    while collector.stats()["workers_alive"] < 3:
        assert time.monotonic() < calm
        if mode in ("sync", "async", "buffer by iteration"):
            clock(collector.next)
    restarts = collector.stats()["restarts"]
    clock(collector.shutdown)
    found = check(frames if rb is None else rb[:], gaps=True, whole="whole" in mode, ring=rb is not None)
    counts.update(frames=found.frames, trajectories=found.trajectories, gaps=found.gaps, restarts=restarts)
    report(mode, "restart", counts, clock, killer)
    assert restarts > 0
    assert found.frames > 0


KILLED = ("killed at start", "killed", "killed at the end")


@pytest.mark.parametrize("mode", MODES)
def test_storm_with_errors(make, mode, start_s):
    """Each round: construct, use, hear of it, shut down, all under fire."""
    clock, counts = Clock(), Counter()
    until, rounds = time.monotonic() + STORM_S, 0
    killer = Killer(SEED + 1, max(0.15, start_s / 2))
    with killer:
        while time.monotonic() < until or not any(counts[when] for when in KILLED):
            rounds += 1
            frames: list = []
            made: list = []
            killer.collector, killer.in_shutdown = None, False
            killed = heard(partial(collect_into, made, clock, make, mode, rounds), WorkerError)
            if killed is not None:
                assert "SIGKILL" in str(killed)
                counts["killed at start"] += 1
                continue
            collector, rb = made
            killer.collector = collector
            end = time.monotonic() + min(max(until - time.monotonic(), 0.5), 2.0)
            use = partial(drive, collector, rb, mode, clock, lambda end=end: time.monotonic() > end, frames, counts)
            killed = heard(use, WorkerError)
            assert killed is None or "worker" in str(killed)
            counts["survived" if killed is None else "killed"] += 1
            killer.in_shutdown = True
            counts["killed at the end"] += heard(partial(clock, collector.shutdown), WorkerError) is not None
            if frames or (rb is not None and len(rb)):
                found = check(frames if rb is None else rb[:], gaps=True, whole="whole" in mode)
                counts["frames"] += found.frames
    assert left_behind() == []
    report(mode, "raise", {**counts, "rounds": rounds}, clock, killer)
    assert any(counts[when] for when in KILLED)
