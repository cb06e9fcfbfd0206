"""stats(): a snapshot that JSON takes, whose numbers are those of a hand computation."""

from __future__ import annotations

import json
import re
from typing import get_type_hints

import numpy as np
import pytest
import torch

from rollwright.collectors import MultiSyncCollector
from rollwright.collectors.reports.statistics import CollectorStats, Leases, StatsOfWorker
from rollwright.collectors.rollout.stats import EpisodeStats
from rollwright.data import LazyTensorStorage, SampleToInsertRatio, TensorDictReplayBuffer
from rollwright.envs import GymEnv, SerialEnv
from rollwright.testing.mocking_classes import CountingEnv, MultiKeyCountingEnv, NestedCountingEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*split_trajs=True pads")

ENVS = {
    "cartpole": lambda: GymEnv("CartPole-v1"),
    "serial": lambda: SerialEnv(3, lambda: GymEnv("CartPole-v1")),
    "vector": lambda: GymEnv("CartPole-v1", num_envs=3),
}


def by_hand(batches):
    """Returns and lengths of episodes in order of their end; ties in order of environments."""
    whole = torch.cat(batches, batches[0].ndim - 1)
    reward = whole["next", "reward"].reshape(-1, whole.shape[-1]).double()
    done = whole["next", "done"].reshape(-1, whole.shape[-1])
    ended = []
    for env in range(len(reward)):
        start = 0
        for t in done[env].nonzero().flatten().tolist():
            ended.append((float(reward[env, start : t + 1].sum()), t + 1 - start))
            start = t + 1
    return ended


@pytest.mark.parametrize("kind", ENVS)
def test_episodes_equal_a_computation_by_hand(make, kind):
    collector = make(ENVS[kind], frames_per_batch=60, total_frames=960)
    batches = list(collector)
    stats = collector.stats()
    ended = by_hand(batches)
    assert stats["episodes"] == len(ended)
    assert 10 < len(ended) <= 100
    assert stats["mean_return"] == pytest.approx(np.mean([r for r, _ in ended]))
    assert stats["mean_length"] == pytest.approx(np.mean([n for _, n in ended]))


def test_the_last_return(make, pendulum_actor):
    collector = make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(), frames_per_batch=150, total_frames=600)
    batches = list(collector)
    ended = by_hand(batches)
    assert len(ended) == 3
    assert collector.stats()["last_return"] == pytest.approx(ended[-1][0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compact_obs": True},
        {"split_trajs": True},
        {"set_truncated": True},
        {"return_same_td": True},
        {"use_buffers": False},
        {"track_traj_ids": False},
        {"postproc": lambda td: td.select("action")},
    ],
)
def test_options_of_delivery_do_not_change_the_episodes(make, options):
    def episodes(**extra):
        collector = make(ENVS["serial"], frames_per_batch=60, total_frames=600, **extra)
        collector.set_seed(0)
        for _ in collector:
            pass
        return {
            key: value
            for key, value in collector.stats().items()
            if key in ("episodes", "mean_return", "mean_length", "last_return")
        }

    assert episodes(**options) == episodes()


def test_counts_while_running(make):
    collector = make(CountingEnv(batch_size=[2]), frames_per_batch=6, total_frames=18)
    seen = []
    for _ in collector:
        stats = collector.stats()
        seen.append((stats["frames"], stats["batches"], stats["completed"]))
        assert stats["total_frames"] == 18
    assert seen == [(6, 1, False), (12, 2, False), (18, 3, True)]


def test_before_anything_was_collected(make):
    stats = make(CountingEnv(), frames_per_batch=6, total_frames=18).stats()
    assert (stats["frames"], stats["batches"], stats["episodes"], stats["completed"]) == (0, 0, 0, False)
    assert stats["mean_return"] is None
    json.dumps(stats, allow_nan=False)


STATES = {
    "plain": (lambda: CountingEnv(), {}),
    "endless": (lambda: CountingEnv(), {"total_frames": -1}),
    "devices": (lambda: CountingEnv(), {"device": "cpu"}),
    "nested": (lambda: NestedCountingEnv(batch_size=[2]), {}),
    "several rewards": (lambda: MultiKeyCountingEnv(), {}),
    "gym": (lambda: GymEnv("CartPole-v1"), {"track_policy_version": True, "return_same_td": True}),
}


@pytest.mark.parametrize("state", STATES)
def test_json_takes_it_in_every_state(make, state):
    env, options = STATES[state]
    collector = make(env, **{"frames_per_batch": 20, "total_frames": 40, **options})
    json.dumps(collector.stats(), allow_nan=False)
    collector.next()
    collector.update_policy_weights_()
    stats = json.loads(json.dumps(collector.stats(), allow_nan=False))
    assert stats["frames"] == 20
    assert stats["policy_version"] == 1
    collector.shutdown()
    assert json.loads(json.dumps(collector.stats()))["frames"] == 20


def test_an_abandoned_episode_is_not_counted(make, count):
    """A reset in the middle of an episode begins a new one; the half one has no return."""
    env = CountingEnv(max_steps=5)
    collector = make(env, count(env), frames_per_batch=4)
    collector.next()
    collector.reset()
    collector.next()  # frames 0..3 of the second episode
    assert collector.stats()["episodes"] == 0
    collector.next()  # ends after two more
    stats = collector.stats()
    assert stats["episodes"] == 1
    assert stats["mean_length"] == 6


def test_times_by_stage(make):
    collector = make(ENVS["cartpole"], frames_per_batch=100, total_frames=300)
    list(collector)
    stats = collector.stats()
    seconds = stats["seconds"]
    assert seconds["policy"] > 0
    assert seconds["env"] > 0
    assert seconds["policy"] + seconds["env"] <= seconds["total"]
    assert stats["frames_per_second"] == pytest.approx(300 / seconds["total"])


def test_bytes_held(make):
    for options in ({}, {"return_same_td": True}):
        collector = make(ENVS["cartpole"], frames_per_batch=100, **options)
        batch = collector.next()
        size = sum(value.numel() * value.element_size() for value in batch.values(True, True))
        assert collector.stats()["bytes_held"] == size
        del batch
        for _ in range(3):
            collector.next()
        assert collector.stats()["bytes_held"] == size  # the same memory, lent again


def test_a_snapshot_does_not_change_later(make):
    collector = make(ENVS["cartpole"], frames_per_batch=50)
    collector.next()
    before = collector.stats()
    kept = json.dumps(before)
    collector.next()
    assert json.dumps(before) == kept


def test_the_rate_is_that_of_this_run_after_a_restore(make):
    first = make(CountingEnv, frames_per_batch=500)
    first.next()
    second = make(CountingEnv, frames_per_batch=10)
    second.load_state_dict({**first.state_dict(), "frames": 10**9})
    second.next()
    assert second.stats()["frames"] == 10**9 + 10
    assert second.stats()["frames_per_second"] < 10**6


def test_the_entry_of_workers_may_be_left_out(make):
    collector = make(ENVS["cartpole"], frames_per_batch=20, total_frames=40)
    next(iter(collector))
    assert collector.stats(workers=False).keys() == collector.stats(workers=True).keys() == collector.stats().keys()
    many = make([ENVS["cartpole"]] * 2, frames_per_batch=20, total_frames=20, cls=MultiSyncCollector)
    assert {"workers"} == many.stats(workers=True).keys() - many.stats(workers=False).keys()
    assert len(many.stats()["workers"]) == 2
    assert many.stats(workers=False)["workers_alive"] == 2


def test_workers_by_the_words_of_other_packages(make):
    with pytest.warns(UserWarning, match="frames_per_batch=21 becomes 22"):
        many = make([ENVS["cartpole"]] * 2, frames_per_batch=21, total_frames=44, cls=MultiSyncCollector)
    many.next()
    aggregate, each, both = (many.stats(workers=how) for how in ("aggregate", "per_worker", "both"))
    assert aggregate["workers"] == each["workers"] == both["workers"] == 2
    assert {"worker_0/frames", "worker_1/policy_version"} <= each.keys()
    assert "frames" not in each
    assert not any("/" in name for name in aggregate)
    assert both.keys() == aggregate.keys() | each.keys()
    assert each["worker_0/frames"] + each["worker_1/frames"] >= aggregate["frames"] == 22
    assert aggregate["requested_frames_per_batch"] == 21
    single = make(ENVS["cartpole"], frames_per_batch=20, total_frames=40)
    assert single.stats(workers="both")["requested_frames_per_batch"] == 20
    for collector in (single, many):
        with pytest.raises(ValueError, match=r"workers=True, False, 'aggregate', 'per_worker' or 'both', got 'all'"):
            collector.stats(workers="all")


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_the_return_of_an_episode_is_the_sum_of_its_own_rewards(kind):
    rewards = np.array([[1.0, 1e20, 2.0, 3.0, 4.0], [-np.inf, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    ended = np.array([[0, 1, 0, 1, 0], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]], bool)
    stats = EpisodeStats()
    stats.update(kind(rewards), kind(ended), np.zeros(3, bool))
    stats.update(kind(np.ones((3, 1))), kind(np.ones((3, 1), bool)), np.zeros(3, bool))
    returns, lengths = stats.rows()[:, :2].T.tolist()
    assert returns == [-np.inf, 1e20, 2.0, 5.0, 2.0, 5.0, 1.0, 6.0]
    assert lengths == [1, 2, 2, 2, 2, 2, 1, 6]


# Types --------------------------------------------------------------------------------------------


def buffer(**options):
    limiter = SampleToInsertRatio(4.0, margin=1_000, min_size=1)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=4, limiter=limiter, **options)


KINDS = {
    "one process": {},
    "trajectories": {"trajs_per_batch": 2},
    "in step": {"num_collectors": 2, "sync": True},
    "first come": {"num_collectors": 2, "sync": False},
    "trajectories of workers": {"num_collectors": 2, "sync": True, "trajs_per_batch": 2},
}


def undeclared(kind, found):
    return found.keys() - get_type_hints(kind).keys()


def missing(kind, found):
    return kind.__required_keys__ - found.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", ["batches", "buffer", "thread"])
def test_every_key_is_declared_and_every_declared_one_delivered(make, kind, stored):
    options = dict(KINDS[kind])
    if stored != "batches":
        options["replay_buffer"] = buffer(shared="num_collectors" in options)
    collector = make(lambda: CountingEnv(max_steps=5), frames_per_batch=20, total_frames=60, **options)
    if stored == "thread":
        collector.start()
    else:
        collector.next()
    stats = collector.stats()
    assert undeclared(CollectorStats, stats) == missing(CollectorStats, stats) == set()
    for worker in stats.get("workers", []):
        assert worker.keys() == get_type_hints(StatsOfWorker).keys()
    if "leases" in stats:
        assert stats["leases"].keys() == get_type_hints(Leases).keys()
    assert ("buffer" in stats, "background" in stats) == (stored != "batches", stored == "thread")
    if stored == "buffer":
        assert stats["buffer"]["size"] == len(options["replay_buffer"]) > 0


@pytest.mark.parametrize("kind", [CollectorStats, StatsOfWorker, Leases])
def test_every_declared_key_is_documented_in_order(kind):
    documented = re.findall(r"^        (\w+): ", kind.__doc__, re.MULTILINE)
    assert documented == list(get_type_hints(kind))
