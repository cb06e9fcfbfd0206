"""The schedules of workers run over any connection: here, over one that has no process behind it."""

from __future__ import annotations

import math
import os
import time
from collections import deque

import pytest
import torch
from tensordict import TensorDict

from rollwright._memory import Segment
from rollwright._processes.channel import ByValue, ChannelClosed
from rollwright._processes.connection import NOTHING
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.workers import messages
from rollwright.collectors.workers.group import WorkerGroup
from rollwright.collectors.workers.handles import Restarts, Watchdog
from rollwright.collectors.workers.memory import BlockStore, Packer
from rollwright.collectors.workers.schedule import Schedule
from rollwright.collectors.workers.strategies import FirstCome, Gather, PendingRollouts, Staleness
from rollwright.collectors.workers.worker import WorkerSpec
from rollwright.errors import WorkerError

STEPS = 5


class FakeWorker:
    """Answers each message at once, with rollouts whose frames are counted; it may break off in one of them."""

    name, pid, behind, host = "fake worker", None, False, None

    def __init__(self, spec, breaks_at=None):
        self._spec, self._breaks_at = spec, breaks_at
        self._packer = Packer(spec.packing)
        self._bell, self._ring = os.pipe()
        self._arrived = deque()
        self._gone = False
        self._frames = 0
        self._send(messages.Ready(1, (), {}, STEPS, 0, "cpu", "cpu", 1, "a fake", {}, ByValue([])))

    def _send(self, message):
        self._arrived.append(message)
        os.write(self._ring, b"1")

    def post(self, message):
        match message:
            case messages.Collect(run=run):
                if self._frames == self._breaks_at:
                    self._gone = True
                    os.write(self._ring, b"1")
                    return
                frames = torch.arange(self._frames, self._frames + STEPS)
                self._frames += STEPS
                rest = self._packer.pack(TensorDict({"frame": frames}, batch_size=STEPS))
                self._send(messages.Collected(run, STEPS, STEPS, False, rest, (), {}, (), 0, 0, 0))
            case messages.Call(serial=serial, path=path):
                self._send(messages.Returned(serial, ByValue(f"{path} of {self._spec.index}")))
            case messages.Pause(serial=serial):
                self._send(messages.Paused(serial))
            case messages.Stop():
                self._gone = True
                os.write(self._ring, b"1")

    def take(self):
        if self._arrived:
            os.read(self._bell, 1)
            return self._arrived.popleft()
        if self._gone:
            raise ChannelClosed
        return NOTHING

    def filenos(self):
        return (self._bell,)

    def flush(self):
        """Everything was sent."""

    def close(self):
        self._gone = True

    terminate = kill = close

    def clock(self):
        return time.monotonic()

    def stopped_s(self):
        return 0.0

    def wait(self, timeout_s):
        return self._gone

    def how_it_ended(self):
        return "has left the network"


class FakeTransport:
    """Starts fake workers."""

    def __init__(self, connect):
        self.connect = connect

    def fileno(self):
        return -1

    def read(self):
        """There is nothing to read but what workers have sent."""

    tend = published = close = read


@pytest.fixture
def group_of():
    """``group_of(connect, restart=False)``: two fake workers, and a store of blocks; they end with the test."""
    groups = []

    def build(connect, restart=False):
        words, blocks = Segment(), Segment()
        options = CollectorOptions(frames_per_batch=STEPS, total_frames=-1)
        specs = [
            WorkerSpec(i, 2, None, None, options, None, i, words, blocks, (Segment(), Segment()), (), None)
            for i in range(2)
        ]
        restarts = Restarts(wanted=restart, delay_s=0.0)
        group = WorkerGroup(
            specs,
            transport=FakeTransport(connect),
            restarts=restarts,
            watch=Watchdog(None),
            forget=lambda index: None,
        )
        groups.append(group)
        group.start()
        return group, BlockStore(blocks, 4)

    yield build
    for group in groups:
        assert group.end(1.0) is None
        assert group.forced == []


def schedule_of(kind, group, store, **options):
    staleness = Staleness(None, waits=False, versions=lambda: [0, 0])
    rollouts = PendingRollouts(group, store, math.inf)
    strategy = Gather(rollouts, **options) if kind is Gather else FirstCome(rollouts, staleness, stored=False)
    schedule = Schedule(rollouts, strategy, staleness, trajs_per_batch=None, padded=False, stored=False)
    group.listener = schedule
    return schedule


def following(schedule):
    assert schedule.ready()
    return schedule.next()


def test_batches_of_all_workers(group_of):
    schedule = schedule_of(Gather, *group_of(FakeWorker), join="stack", least=2)
    for number in range(3):
        assert following(schedule)["frame"].tolist() == [[*range(STEPS * number, STEPS * (number + 1))]] * 2


def test_batches_in_the_order_in_which_they_arrive(group_of):
    schedule = schedule_of(FirstCome, *group_of(FakeWorker))
    firsts = [int(following(schedule)["frame"][0]) for _ in range(6)]
    assert sorted(firsts)[:2] == [0, 0]
    assert set(firsts) <= {0, 5, 10, 15, 20, 25}


def test_calls_and_pauses(group_of):
    group, store = group_of(FakeWorker)
    schedule_of(Gather, group, store, join="stack", least=2)
    assert group.call("env.name", [None, None]) == ["env.name of 0", "env.name of 1"]
    with group.pausing():
        assert group.num_pauses == 1


def test_a_worker_that_is_lost_is_an_error_that_names_it(group_of):
    group, store = group_of(lambda spec: FakeWorker(spec, STEPS if spec.index else None))
    schedule = schedule_of(Gather, group, store, join="stack", least=2)
    following(schedule)
    with pytest.raises(WorkerError, match=r"worker 1 has left the network while starting\. .*on_worker_failure"):
        following(schedule)


class Confused(FakeWorker):
    """Answers another order than it was given."""

    def post(self, message):
        super().post(message._replace(run=message.run + 7) if isinstance(message, messages.Collect) else message)


def test_a_worker_that_answers_what_it_was_not_asked_is_an_error(group_of):
    schedule = schedule_of(Gather, *group_of(Confused), join="stack", least=2)
    with pytest.raises(WorkerError, match=r"worker \d has answered order \d+, which it was not given"):
        following(schedule)


def test_a_worker_that_is_lost_is_replaced(group_of):
    made = []

    def connect(spec):
        made.append(spec.index)
        return FakeWorker(spec, STEPS if made.count(1) == 1 and spec.index else None)

    group, store = group_of(connect, restart=True)
    schedule = schedule_of(Gather, group, store, join="stack", least=2)
    following(schedule)
    with pytest.warns(RuntimeWarning, match="worker 1 has left the network while starting"):
        assert following(schedule)["frame"].tolist() == [[5, 6, 7, 8, 9], [0, 1, 2, 3, 4]]
    assert made == [0, 1, 1]
