"""Ctrl-C at any moment is a KeyboardInterrupt where the program waits, and leaves a collector that goes on."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import pytest
from tests.collectors.workers.envs import VERSION, Trouble, gain, makers, one_bad
from tests.collectors.workers.processes import burn, gone, heard, left_behind, wait_until
from tests.interrupts import Raising
from tests.patience import patient

from rollwright.collectors.workers import messages
from rollwright.collectors.workers.handles import WorkerHandle
from rollwright.weight_update.shared import SharedWeights

BOUND_S = 8.0
KINDS = ["sync", "async"]


def run(collector):
    for _ in range(100):
        collector.next()


@pytest.fixture
def inside():
    found = Raising()
    before = signal.signal(signal.SIGINT, found.handle)
    yield found
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("kind", KINDS)
def test_many_at_random_moments(make, inside, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=16)
    over, pause, main = threading.Event(), random.Random(0), threading.main_thread().ident

    def press():
        while not over.wait(pause.uniform(2e-4, 4e-3)):
            signal.pthread_kill(main, signal.SIGINT)

    def look():
        while not over.wait(1e-3):
            collector.stats()

    threads = [threading.Thread(target=press), threading.Thread(target=look)]
    for thread in threads:
        thread.start()
    heard = 0
    try:
        until = time.monotonic() + patient(10)
        while heard < 100 and time.monotonic() < until:
            try:
                with inside:
                    collector.next()
            except KeyboardInterrupt:
                heard += 1
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert heard == inside.count
    assert heard >= 5
    assert collector.next() is not None
    collector.shutdown()  # raises nothing


@pytest.mark.parametrize("edge", ["acquire", "release"])
def test_at_the_edges_of_a_wait(make, inside, monkeypatch, edge):
    """Where the lock has just been taken, or just been given back."""
    collector = make("sync", makers(), gain(), frames_per_batch=20)
    collector.next()
    condition = collector._group._shared.changed
    real = getattr(condition, edge)

    def pressed(*args):
        found = real(*args)
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(condition, edge, pressed)
    with pytest.raises(KeyboardInterrupt), inside:
        run(collector)
    monkeypatch.undo()
    assert inside.count == 1
    free = []
    thread = threading.Thread(
        target=lambda: free.append(condition.acquire(timeout=patient(5)) and condition.release() is None)
    )
    thread.start()
    thread.join()
    assert free == [True]
    assert collector.next() is not None


def test_in_shutdown_which_goes_on_when_it_is_called_again(make, inside, tmp_path):
    """The first one in a wait for a batch, the second in shutdown."""
    struck = str(tmp_path / "struck")
    envs = one_bad(troubles={"trouble": Trouble("sleep", 25, struck)})
    collector = make("sync", envs, gain(), frames_per_batch=200)
    pids = [worker["pid"] for worker in collector.stats()["workers"]]

    def press():
        if wait_until(lambda: os.path.exists(struck)):
            os.kill(os.getpid(), signal.SIGINT)
        if wait_until(lambda: collector.closed and inside.raises):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt), inside:
        collector.next()
    with pytest.raises(KeyboardInterrupt), inside:
        collector.shutdown(timeout=100.0)
    thread.join()
    begun = time.monotonic()
    collector.shutdown(timeout=0.2)
    assert time.monotonic() - begun < patient(BOUND_S)
    assert gone(pids, 1.0)
    assert left_behind(1.0) == []
    assert "worker 1" in collector.stats()["forced"][0]


def pressed_after(monkeypatch, owner, name, when=lambda *args: True):
    """Have Ctrl-C pressed each time that a method has done its work."""
    real = getattr(owner, name)

    def call(*args, **options):
        found = real(*args, **options)
        if when(*args):
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(owner, name, call)


def test_when_weights_have_just_been_published(make, inside, monkeypatch):
    """Two sets of weights with one version would not be told apart."""
    collector = make("sync", makers(), gain(0.0), frames_per_batch=8, track_policy_version=True)
    collector.next()
    pressed_after(monkeypatch, SharedWeights, "publish")
    with pytest.raises(KeyboardInterrupt), inside:
        collector.update_policy_weights_({0: gain(1.0), 1: gain(1.0)})
    monkeypatch.undo()
    assert collector.policy_version == 1
    for version in (1, 2):
        batch = collector.next()
        assert bool((batch[VERSION] == version).all())
        assert bool((batch["action"] == version).all())
        assert collector.update_policy_weights_(gain(version + 1.0)) == version + 1


def test_at_the_end_of_a_pause_which_ends_for_all_workers(make, inside, monkeypatch):
    collector = make("sync", makers(), gain(), frames_per_batch=8)
    collector.next()
    pressed_after(monkeypatch, WorkerHandle, "send", lambda worker, message: isinstance(message, messages.Resume))
    with pytest.raises(KeyboardInterrupt), inside, collector.pause():
        pass
    monkeypatch.undo()
    assert collector.next() is not None


class Cargo:
    """A hook that is larger than what a line has room for."""

    load = bytes(4_000_000)

    def __init__(self):
        self.own = bytes(self.load)

    def __call__(self, batch):
        """Do nothing."""


def test_while_workers_do_not_read_what_they_are_told(make, inside):
    collector = make("async", makers(), gain(), frames_per_batch=20)
    collector.next()
    pids, main = [worker["pid"] for worker in collector.stats()["workers"]], threading.main_thread().ident
    for pid in pids:
        burn(pid, signal.SIGSTOP)

    def press():
        if wait_until(lambda: all(worker.connection.behind for worker in collector._group.workers)):
            signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), inside:
        collector.post_collect_hook = Cargo()
    assert time.monotonic() - begun < patient(BOUND_S)
    thread.join()
    for pid in pids:
        burn(pid, signal.SIGCONT)

    def arrived():  # it was on its way, and is taken at the end of a rollout
        return heard(lambda: collector.get_distant_attr("post_collect_hook.own"), AttributeError) is None

    assert wait_until(arrived)
    assert collector.get_distant_attr("post_collect_hook.own") == [Cargo.load] * 2
    assert collector.next() is not None
