"""Trajectory ids, and what the user can ask of boundaries: limits, resets, cuts, splits, interruption."""

from __future__ import annotations

import warnings

import pytest
import torch

from rollwright.collectors import Collector, Interruptor, SyncDataCollector
from rollwright.collectors.utils import split_trajectories
from rollwright.envs import GymEnv, SerialEnv
from rollwright.testing.mocking_classes import CountingBatchedEnv, CountingEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*split_trajs=True pads")

ENVS = {
    "single": lambda: GymEnv("CartPole-v1"),
    "serial": lambda: SerialEnv(3, lambda: GymEnv("CartPole-v1")),
    "vector": lambda: GymEnv("CartPole-v1", num_envs=3),
}


def ids_of(batches):
    return torch.cat([batch["collector", "traj_ids"] for batch in batches], -1)


# Ids.


@pytest.mark.parametrize("kind", ENVS)
def test_ids_are_unique_and_monotone_and_each_environments_own(make, kind):
    collector = make(ENVS[kind], frames_per_batch=150, total_frames=900)
    batches = list(collector)
    ids = ids_of(batches).reshape(-1, 900 // collector.env.numel())
    done = torch.cat([batch["next", "done"] for batch in batches], batches[0].ndim - 1).reshape(ids.shape)
    assert int(ids.min()) == 0
    assert torch.equal(ids[:, 1:] > ids[:, :-1], done[:, :-1])  # a new one exactly after an end
    assert bool((ids[:, 1:] >= ids[:, :-1]).all())
    rows = [set(row.tolist()) for row in ids]
    assert sum(map(len, rows)) == len(set.union(*rows))  # shared by no two environments
    assert sorted(set.union(*rows))[: len(rows)] == list(range(len(rows)))


def test_ids_go_on_over_batches(make, count):
    env = CountingEnv(max_steps=4)
    batches = list(make(env, count(env), frames_per_batch=3, total_frames=12))
    assert ids_of(batches).tolist() == [0] * 5 + [1] * 5 + [2] * 2


def test_without_ids_there_is_no_collector_entry(make):
    batch = make(ENVS["serial"], frames_per_batch=12, total_frames=12, track_traj_ids=False).next()
    assert "collector" not in batch


# max_frames_per_traj.


def test_max_frames_per_traj_truncates_and_begins_anew(make, count):
    env = CountingEnv(max_steps=100)
    collector = make(env, count(env), frames_per_batch=7, total_frames=14, max_frames_per_traj=5)
    batch = torch.cat(list(collector))
    assert batch["observation"].flatten().tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1, 2, 3]
    ends = [4, 9]
    assert batch["next", "truncated"].flatten().nonzero().flatten().tolist() == ends
    assert batch["next", "done"].flatten().nonzero().flatten().tolist() == ends
    assert not bool(batch["next", "terminated"].any())
    assert batch["collector", "traj_ids"].tolist() == [0] * 5 + [1] * 5 + [2] * 4


@pytest.mark.parametrize("limit", [None, -1, 0])
def test_no_limit(make, count, limit):
    env = CountingEnv(max_steps=100)
    batch = make(env, count(env), frames_per_batch=50, max_frames_per_traj=limit).next()
    assert batch["observation"].flatten().tolist() == list(range(50))
    assert "step_count" not in batch


def test_an_end_at_the_limit_keeps_both_flags_apart(make, count):
    """Terminated by itself in the very step of the limit: terminated stays what the environment said."""
    env = CountingEnv(max_steps=4)  # terminates in its fifth step
    batch = make(env, count(env), frames_per_batch=10, max_frames_per_traj=5).next()["next"]
    assert batch["terminated"].flatten().nonzero().flatten().tolist() == [4, 9]
    assert batch["done"].flatten().nonzero().flatten().tolist() == [4, 9]


def test_an_environment_that_counts_already_is_refused(make):
    from rollwright.envs import StepCounter, TransformedEnv

    with pytest.raises(ValueError, match=r"max_frames_per_traj.*step_count"):
        make(TransformedEnv(CountingEnv(), StepCounter()), frames_per_batch=5, max_frames_per_traj=5)


# Resets.


def test_reset_at_each_iter_begins_every_batch_anew(make, count):
    env = CountingEnv(max_steps=100)
    batches = list(make(env, count(env), frames_per_batch=3, total_frames=9, reset_at_each_iter=True))
    assert [batch["observation"].flatten().tolist() for batch in batches] == [[0, 1, 2]] * 3
    assert [batch["collector", "traj_ids"].tolist() for batch in batches] == [[0] * 3, [1] * 3, [2] * 3]
    assert not any(bool(batch["next", "done"].any()) for batch in batches)


def test_reset_when_done_false_steps_on(make, count):
    env = CountingEnv(max_steps=2)
    collector = make(env, count(env), frames_per_batch=6, reset_when_done=False)
    batch = collector.next()
    assert batch["observation"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["next", "done"].flatten().tolist() == [False, False, True, True, True, True]
    assert batch["collector", "traj_ids"].tolist() == [0] * 6
    assert collector.stats()["episodes"] == 1


def test_reset_begins_new_trajectories_everywhere(make, count):
    env = CountingEnv(max_steps=100, batch_size=[2])
    collector = make(env, count(env), frames_per_batch=6)
    collector.next()
    collector.reset()
    batch = collector.next()
    assert batch["observation"].squeeze(-1).tolist() == [[0, 1, 2]] * 2
    assert batch["collector", "traj_ids"].tolist() == [[2] * 3, [3] * 3]


@pytest.mark.parametrize("index", [1, [1], torch.tensor([1]), torch.tensor([False, True, False]), slice(1, 2)])
def test_reset_of_some_environments_leaves_the_others(make, count, index):
    env = CountingEnv(max_steps=100, batch_size=[3])
    collector = make(env, count(env), frames_per_batch=6)
    collector.next()
    collector.reset(index)
    batch = collector.next()
    assert batch["observation"].squeeze(-1).tolist() == [[2, 3], [0, 1], [2, 3]]
    assert batch["collector", "traj_ids"].tolist() == [[0, 0], [3, 3], [2, 2]]
    assert "_reset" not in batch


@pytest.mark.parametrize("kind", ["serial", "vector"])
def test_reset_of_one_real_environment(make, kind):
    collector = make(ENVS[kind], frames_per_batch=6)
    before = collector.next()
    ended = before["next", "done"][:, -1, 0]
    assert not bool(ended.any())
    collector.reset(1)
    after = collector.next()
    for row in (0, 2):
        assert torch.equal(after["observation"][row, 0], before["next", "observation"][row, -1])
        assert after["collector", "traj_ids"][row, 0] == before["collector", "traj_ids"][row, -1]
    assert not torch.equal(after["observation"][1, 0], before["next", "observation"][1, -1])
    assert bool((after["observation"][1, 0].abs() <= 0.05).all())  # where CartPole begins
    assert int(after["collector", "traj_ids"][1, 0]) == 3


def test_reset_of_an_index_needs_a_batch(make):
    collector = make(CountingEnv(), frames_per_batch=2)
    with pytest.raises(RuntimeError, match="index=0"):
        collector.reset(0)


# set_truncated.


@pytest.mark.parametrize("batch_size", [[], [2]])
def test_set_truncated_cuts_the_batch_and_never_touches_terminated(make, count, batch_size):
    env = CountingEnv(max_steps=3, batch_size=batch_size)  # terminates in every fourth step
    steps = 6
    collector = make(
        env, count(env), frames_per_batch=steps * env.numel(), total_frames=4 * steps * env.numel(), set_truncated=True
    )
    for number, batch in enumerate(collector):
        flags = {
            name: batch["next", name].reshape(-1, steps)[0].tolist() for name in ("done", "terminated", "truncated")
        }
        ends = [(number * steps + t) % 4 == 3 for t in range(steps)]
        assert flags["terminated"] == ends
        assert flags["truncated"] == [False] * (steps - 1) + [not ends[-1]]
        assert flags["done"] == [*ends[:-1], True]


def test_set_truncated_leaves_a_terminated_last_frame_alone(make, count):
    env = CountingEnv(max_steps=3)
    for batch in make(env, count(env), frames_per_batch=4, total_frames=12, set_truncated=True):
        assert batch["next", "terminated"].flatten().tolist() == [False, False, False, True]
        assert not bool(batch["next", "truncated"].any())


def test_set_truncated_does_not_reset_the_environment_but_ends_the_trajectory(make, count):
    env = CountingEnv(max_steps=100)
    batches = list(make(env, count(env), frames_per_batch=3, total_frames=9, set_truncated=True))
    assert [batch["observation"].flatten().tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert ids_of(batches).tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert not any(bool(batch["done"].any()) for batch in batches)  # roots tell of the environment


def test_without_set_truncated_a_batchs_end_is_no_boundary(make, count):
    env = CountingEnv(max_steps=100)
    batches = list(make(env, count(env), frames_per_batch=3, total_frames=9))
    assert not any(bool(batch["next", "done"].any()) for batch in batches)
    assert ids_of(batches).tolist() == [0] * 9


# split_trajs.


def lengths_env():
    return CountingBatchedEnv(max_steps=torch.tensor([1, 2, 100]), batch_size=[3])


def test_split_trajs_pads_and_masks(make, count):
    env = lengths_env()
    batch = make(env, count(env), frames_per_batch=15, split_trajs=True).next()
    assert batch.shape == (6, 5)  # rows 2+2+1, 3+2, 5
    assert batch.names[-1] == "time"
    mask = batch["collector", "mask"]
    assert mask.dtype == torch.bool
    assert mask.shape == batch.shape
    assert mask.sum(-1).tolist() == [2, 2, 1, 3, 2, 5]
    ids = batch["collector", "traj_ids"]
    for row in range(6):
        assert len(ids[row][mask[row]].unique()) == 1
    assert len(ids[mask].unique()) == 6
    assert batch["observation"].squeeze(-1).tolist() == [
        [0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 1, 2, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 2, 3, 4],
    ]
    assert batch["next", "observation"][3].flatten().tolist() == [1, 2, 3, 0, 0]
    assert int(mask.sum()) == 15


@pytest.mark.parametrize("kind", ENVS)
def test_split_trajs_loses_and_doubles_nothing(make, kind, same):
    whole = make(ENVS[kind], frames_per_batch=120)
    split = make(ENVS[kind], frames_per_batch=120, split_trajs=True)
    whole.set_seed(0)
    flat = whole.next().reshape(-1)
    split.set_seed(0)
    padded = split.next()
    same(padded[padded["collector", "mask"]], flat, but=["collector"])
    mask = padded["collector", "mask"]
    assert bool((mask[:, :-1] >= mask[:, 1:]).all())
    assert not bool(padded["observation"][~mask].any())


@pytest.mark.parametrize("cls", [Collector, SyncDataCollector])
def test_split_trajs_advises_against_itself_once(make, cls):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        collector = make(CountingEnv(max_steps=4), None, cls=cls, frames_per_batch=5, split_trajs=True)
        collector.next()
        collector.next()
    assert len(caught) == 1
    assert "trajs_per_batch" in str(caught[0].message)


def test_split_trajs_does_not_set_flags(make, count):
    """The environment's truth: a trajectory that goes on in the next batch is not done."""
    env = lengths_env()
    batch = make(env, count(env), frames_per_batch=15, split_trajs=True).next()
    ends = [bool(row["next", "done"][row["collector", "mask"]][-1]) for row in batch.unbind(0)]
    assert ends == [True, True, False, True, False, False]


def test_split_trajectories_as_nested(make, count):
    env = lengths_env()
    batch = make(env, count(env), frames_per_batch=15).next()
    nested = split_trajectories(batch, as_nested=True)
    assert [row.shape[0] for row in nested.unbind(0)] == [2, 2, 1, 3, 2, 5]
    assert ("collector", "mask") not in nested.keys(True)
    assert nested[3]["observation"].flatten().tolist() == [0, 1, 2]


# Interruption.


class StopsAfter(Interruptor):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def collection_stopped(self):
        self.steps -= 1
        return self.steps <= 0


@pytest.mark.parametrize("use_buffers", [None, False])
@pytest.mark.parametrize("batch_size", [[], [2]])
def test_an_interrupted_batch_keeps_its_shape_and_marks_what_was_not_taken(make, count, batch_size, use_buffers):
    env = CountingEnv(max_steps=100, batch_size=batch_size)
    collector = make(
        env, count(env), frames_per_batch=5 * env.numel(), interruptor=StopsAfter(2), use_buffers=use_buffers
    )
    batch = collector.next()
    assert batch.shape == (*batch_size, 5)
    ids = batch["collector", "traj_ids"].reshape(-1, 5)
    assert ids[:, 2:].eq(-1).all()
    assert ids[:, :2].ge(0).all()
    assert batch["observation"].reshape(-1, 5)[0].tolist()[:2] == [0, 1]


def test_an_interrupted_rollout_has_taken_at_least_one_step(make, count):
    env = CountingEnv(max_steps=100)
    switch = Interruptor()
    collector = make(env, count(env), frames_per_batch=4, interruptor=switch)
    switch.stop_collection()
    first, second = collector.next(), collector.next()
    assert first["collector", "traj_ids"].tolist() == [0, -1, -1, -1]
    assert second["collector", "traj_ids"].tolist() == [0, -1, -1, -1]
    assert second["observation"][0].item() == 1  # nothing was skipped between them
    switch.start_collection()
    third = collector.next()
    assert third["collector", "traj_ids"].tolist() == [0] * 4
    assert third["observation"].flatten().tolist() == [2, 3, 4, 5]


def test_frames_that_were_not_taken_do_not_count(make, count):
    env = CountingEnv(max_steps=100)
    collector = make(env, count(env), frames_per_batch=5, total_frames=10, interruptor=StopsAfter(2))
    collector.next()
    assert collector.stats()["frames"] == 2  # what was stepped, not what was asked


def test_interruption_from_inside_the_rollout(make):
    env = CountingEnv(max_steps=100)
    switch = Interruptor()

    def policy(td):
        if int(td["observation"]) == 3:
            switch.stop_collection()
        return td.set("action", torch.ones(1, dtype=torch.int8))

    batch = make(env, policy, frames_per_batch=8, interruptor=switch).next()
    assert batch["collector", "traj_ids"].tolist() == [0, 0, 0, 0, -1, -1, -1, -1]
