"""What an interrupt leaves: frames that nobody gets are never in the middle of a trajectory."""

from __future__ import annotations

import signal
import sys

import pytest
import torch
from tests.variants import in_turn

from rollwright.collectors.collector import Collector
from rollwright.collectors.delivery import base, stored
from rollwright.collectors.delivery.assembler import TrajectoryAssembler
from rollwright.collectors.rollout.rollout import Rollout
from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.testing.mocking_classes import CountingBatchedEnv, CountingEnv

IDS = ("collector", "traj_ids")


class Strikes:
    """Calls ``function``, and raises KeyboardInterrupt before or after the ``at``-th call."""

    def __init__(self, function, at, *, after):
        self.function, self.left, self.after = function, at, after

    def __call__(self, *args, **options):
        self.left -= 1
        if self.left == 0 and not self.after:
            raise KeyboardInterrupt
        found = self.function(*args, **options)
        if self.left == 0:
            raise KeyboardInterrupt
        return found


def strike(monkeypatch, owner, name, at=2, *, after=False):
    struck = Strikes(getattr(owner, name), at, after=after)
    monkeypatch.setattr(owner, name, lambda *args, **options: struck(*args, **options))
    return struck


def unbroken(data):
    """Whether each trajectory counts up by one."""
    inside = data[IDS][1:] == data[IDS][:-1]
    steps = data["observation"].flatten().diff()
    return bool((steps[inside] == 1).all())


PLACES = [
    (TrajectoryAssembler, "take", False),
    (TrajectoryAssembler, "take", True),
    (TrajectoryAssembler, "_open", False),
    (TrajectoryAssembler, "_open", True),
    (TrajectoryAssembler, "_close", False),
    (TrajectoryAssembler, "_let_go", False),
    (Rollout, "ends_in", False),
]


@pytest.mark.parametrize(("owner", "name", "after"), PLACES)
@pytest.mark.parametrize(("at", "buffered"), in_turn(range(1, 5), (False, True)))
def test_an_interrupt_while_frames_are_taken_in(make, count, monkeypatch, owner, name, after, at, buffered):
    env = CountingBatchedEnv(max_steps=torch.tensor([9, 14, 25]), batch_size=[3])
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000)) if buffered else None
    options = {"replay_buffer": buffer} if buffered else {"traj_format": "cat"}
    collector = make(env, count(env), frames_per_batch=12, trajs_per_batch=1, **options)
    struck = strike(monkeypatch, owner, name, at, after=after)
    batches, interrupts = [], 0
    for _ in range(20):
        try:
            batches.append(collector.next())
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    assert struck.left < 0
    data = buffer[:] if buffered else torch.cat([batch for batch in batches if batch is not None])
    assert len(data)
    assert unbroken(data)
    assert (data["observation"].flatten()[data[IDS].diff(prepend=torch.tensor([-1])) != 0] == 0).all()
    stats = collector.stats()
    assert stats["frames"] == len(data) + stats["frames_held"] + stats["frames_dropped"]


@pytest.mark.parametrize("way", ["yielded", "stored", "by step"])
def test_an_interrupt_after_a_rollout(make, monkeypatch, count, way):
    buffer = None if way == "yielded" else ReplayBuffer(storage=LazyTensorStorage(1000))
    options = {} if way == "yielded" else {"replay_buffer": buffer, "extend_buffer": way == "stored"}
    env = CountingEnv(max_steps=100)
    collector = make(env, count(env), frames_per_batch=10, **options)
    strike(monkeypatch, collector._rollout, "collect", 2, after=True)
    batches = [collector.next()]
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    batches.append(collector.next())
    data = torch.cat(batches) if buffer is None else buffer[:]
    assert unbroken(data)
    assert data[IDS].unique().tolist() == [0, 1]


@pytest.mark.parametrize("option", ["postproc", "post_collect_hook"])
def test_trajectories_that_a_hook_loses_count_as_dropped(make, count, option):
    calls = iter(range(100))

    def fails_once(batch):
        if next(calls) == 1:
            raise ValueError("not this one")
        return batch

    env = CountingEnv(max_steps=4)
    collector = make(env, count(env), frames_per_batch=10, trajs_per_batch=2, traj_format="cat", **{option: fails_once})
    delivered = len(collector.next())
    with pytest.raises(ValueError, match="not this one"):
        collector.next()
    delivered += len(collector.next())
    stats = collector.stats()
    assert stats["frames_dropped"] > 0
    assert stats["frames"] == delivered + stats["frames_held"] + stats["frames_dropped"]


@pytest.mark.parametrize("stepped", [False, True], ids=["own ids", "renamed"])
def test_a_trajectory_that_began_unseen_is_not_whole_after_loading(make, count, stepped):
    def build():
        env = CountingEnv(max_steps=12)
        return make(env, count(env), frames_per_batch=5, trajs_per_batch=1, traj_format="cat")

    saved, restored = build(), build()
    saved.rollout()
    if stepped:
        restored.next()
    restored.load_state_dict(saved.state_dict())
    found = restored.next()
    assert found["observation"].flatten().tolist() == list(range(len(found)))
    assert len(found) == len(saved.next())
    restored.load_state_dict(restored.state_dict())
    assert restored.next()["observation"].flatten().tolist() == list(range(len(found)))


@pytest.mark.parametrize("buffered", [False, True])
def test_an_end_without_a_whole_trajectory_is_said_once(make, count, buffered):
    env = CountingEnv(max_steps=100)
    options = {"replay_buffer": ReplayBuffer(storage=LazyTensorStorage(1000))} if buffered else {}
    collector = make(env, count(env), frames_per_batch=10, total_frames=30, trajs_per_batch=1, **options)
    with pytest.warns(UserWarning, match="frames_held=30"):
        list(collector)
    assert list(collector) == []


def test_an_end_after_a_whole_trajectory_is_quiet(make, count):
    env = CountingEnv(max_steps=20)
    collector = make(env, count(env), frames_per_batch=10, total_frames=30, trajs_per_batch=1)
    assert len(list(collector)) == 1
    assert list(collector) == []


class LineByLine:
    """Raises KeyboardInterrupt once, at the ``at``-th line that runs in the code that hands batches out."""

    def __init__(self, at):
        self.left = at
        self.code = {Collector.iterator.__code__}
        self.files = {base.__file__, stored.__file__}

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if code not in self.code and code.co_filename not in self.files:
            return None
        frame.f_trace = self._at_line
        return self._at_line

    def _at_line(self, frame, event, arg):
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self._at_line

    def __enter__(self):
        sys.settrace(self)

    def __exit__(self, *error):
        sys.settrace(None)


WAYS = {
    "batches": {},
    "trajectories": {"trajs_per_batch": 2, "traj_format": "cat"},
    "buffer": {"replay_buffer": True},
    "trajectories in a buffer": {"replay_buffer": True, "trajs_per_batch": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_at_any_line_of_a_delivery_loses_and_repeats_nothing(make, count, way):
    """What is counted was delivered, is held, or was dropped and counted; a batch comes after the interrupt instead."""
    for at in range(1 + list(WAYS).index(way), 1_000, 3):  # a third of the lines, which differ from way to way
        env = CountingBatchedEnv(max_steps=torch.tensor([3, 4]), batch_size=[2])
        options = {"frames_per_batch": 8, **WAYS[way]}
        buffer = None
        if options.get("replay_buffer"):
            buffer = options["replay_buffer"] = ReplayBuffer(storage=LazyTensorStorage(1_000))
        collector = make(env, count(env), **options)
        strike, batches, interrupts = LineByLine(at), [], 0
        iterating = iter(collector)
        for _ in range(3):
            try:
                with strike:
                    batches.append(next(iterating))
            except KeyboardInterrupt:
                interrupts += 1
                iterating = iter(collector)
        batches.append(collector.next())  # or what the interrupt has left
        data = torch.cat([batch.reshape(-1) for batch in batches]) if buffer is None else buffer[:].reshape(-1)
        stats = collector.stats()
        assert stats["frames"] == len(data) + stats.get("frames_held", 0) + stats.get("frames_dropped", 0), at
        pairs = torch.stack([data[IDS], data["observation"].reshape(-1).to(torch.int64)], 1)
        assert len(pairs.unique(dim=0)) == len(pairs), at
        collector.shutdown()
        if not interrupts:
            assert at > 20
            return
    raise AssertionError("more lines than were expected")
