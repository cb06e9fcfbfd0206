"""What an interrupt leaves: frames that nobody gets are never in the middle of a trajectory."""

from __future__ import annotations

import pytest
import torch
from tests.variants import in_turn

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
