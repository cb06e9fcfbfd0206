"""Synchronous workers are as many single collectors, to the bit; ids are unique, and nothing is missing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tests.collectors.workers.envs import IDENT, IDS, gain, makers, sampling, tallies, tally
from tests.collectors.workers.frames import check, flat, per_worker
from tests.variants import in_turn

from rollwright.collectors import Collector
from rollwright.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv

SOURCE = ("observation", ("next", "observation"))
SEEDED = (0, 3, 4)  # of an observation: episodes are counted since the environment was made, and end by turns
HOW_IT_ENDS = ["terminated", "truncated", ("next", "terminated"), ("next", "truncated")]


def cartpole():
    return GymEnv("CartPole-v1")


def pendulums():
    return SerialEnv(2, lambda: GymEnv("Pendulum-v1"))


def vector():
    return GymEnv("CartPole-v1", num_envs=2)


def counted():
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=9))


CASES = {
    "sampling": ([tally] * 2, sampling, {}),
    "three workers": ([tally] * 3, sampling, {}),
    "batched": ([partial(tallies, num_envs=4)] * 2, sampling, {}),
    "random": ([cartpole] * 2, lambda: None, {}),
    "serial": ([pendulums] * 2, lambda: None, {}),
    "vector": ([vector] * 2, lambda: None, {}),
    "transforms": ([counted] * 2, lambda: None, {}),
    "different": ([partial(tally, 1), partial(tally, 2, length=7)], sampling, {}),
    "limits": ([tally] * 2, sampling, {"max_frames_per_traj": 4, "track_policy_version": True}),
    "cut": ([tally] * 2, sampling, {"set_truncated": True}),
    "anew": ([tally] * 2, sampling, {"reset_at_each_iter": True}),
    "going on": ([tally] * 2, sampling, {"reset_when_done": False}),
    "going on, several": ([partial(tallies, num_envs=4)] * 2, sampling, {"reset_when_done": False}),
    "compact": ([tally] * 2, sampling, {"compact_obs": True}),
    "lists": ([tally] * 2, sampling, {"use_buffers": False}),
    "postproc": ([tally] * 2, sampling, {"postproc": lambda td: td.set("twice", 2 * td["next", "reward"])}),
}


def alone(envs, policy, frames, seed, **options):
    """What single collectors deliver, one for each environment, with the seeds that workers have."""
    streams, last = [], seed - 1
    for make_env in envs:
        with Collector(make_env, policy(), frames_per_batch=frames, total_frames=4 * frames, **options) as collector:
            last = collector.set_seed(last + 1)
            streams.append(list(collector))
    return streams, last


def but_for_source(batch, kept=(0, 2, 3, 4)):
    """Without what tells one object from another: its instance, ids, and places of ids."""
    batch = batch.exclude(IDS, ("collector", "boundary"))
    for key in SOURCE:
        value = batch.get(key, None)
        if value is not None and value.shape[-1] == 5 and value.dtype == torch.float64:
            batch.set(key, value[..., list(kept)].clone())
    return batch


@pytest.mark.parametrize("case", CASES)
def test_workers_equal_single_collectors_with_their_seeds(make, same, case):
    envs, policy, options = CASES[case]
    singles, last = alone(envs, policy, 20, 5, **options)
    collector = make("sync", envs, policy(), frames_per_batch=20 * len(envs), total_frames=80 * len(envs), **options)
    assert collector.set_seed(5) == last
    batches = list(collector)
    assert len(batches) == 4
    for number, batch in enumerate(batches):
        for worker, row in enumerate(batch.unbind(0)):
            same(but_for_source(row), but_for_source(singles[worker][number]))
    for worker, single in enumerate(singles):  # ids differ, and change at the same frames
        ours = torch.cat([batch[worker][IDS].reshape(-1) for batch in batches])
        theirs = torch.cat([batch[IDS].reshape(-1) for batch in single])
        pairs = set(zip(ours.tolist(), theirs.tolist(), strict=True))
        assert len(pairs) == len(ours.unique()) == len(theirs.unique())


@pytest.mark.parametrize("how", [0, -1])
def test_ways_of_joining_hold_the_same(make, same, how):
    def run(cat):
        collector = make("sync", [tallies] * 2, sampling(), frames_per_batch=24, total_frames=72, cat_results=cat)
        collector.set_seed(3)
        return [but_for_source(batch) for batch in collector]

    for stacked, joined in zip(run("stack"), run(how), strict=True):
        same(torch.cat(list(stacked.unbind(0)), how), joined)


def test_two_runs_are_equal(make, same):
    runs = []
    for _ in range(2):
        collector = make("sync", makers(), sampling(), frames_per_batch=30, total_frames=150)
        collector.set_seed(11)
        runs.append(list(collector))
    for left, right in zip(*runs, strict=True):
        same(but_for_source(left), but_for_source(right))
    assert not torch.equal(runs[0][0]["action"][0], runs[0][0]["action"][1])  # workers have seeds of their own


def test_the_size_of_batches_does_not_change_the_streams(make, same):
    streams = []
    for frames in (10, 30):
        collector = make("sync", makers(), sampling(), frames_per_batch=frames, total_frames=120)
        collector.set_seed(2)
        streams.append([but_for_source(stream) for stream in per_worker(collector)])
    for left, right in zip(*streams, strict=True):
        same(left, right)


def test_set_seed_in_the_middle_begins_anew(make, same):
    collector = make("sync", [tally] * 2, sampling(), frames_per_batch=30)
    collector.set_seed(4)
    first, _ = collector.next(), collector.next()
    collector.set_seed(4)
    again = collector.next()
    keys = ["action", ("next", "reward"), ("next", "done")]
    same(first.select(*keys), again.select(*keys))
    assert int(again[IDS].min()) > int(first[IDS].max())


def test_static_seeds_are_equal(make):
    collector = make("sync", [tally] * 2, sampling(), frames_per_batch=30)
    assert collector.set_seed(9, static_seed=True) == 9
    batch = collector.next()
    assert torch.equal(batch["action"][0], batch["action"][1])


def test_seeds_go_on_from_worker_to_worker(make):
    collector = make("sync", [tallies] * 2, sampling(), frames_per_batch=30)
    assert collector.set_seed(1) == 6


def test_asynchronous_workers_have_the_streams_of_single_collectors(make, same):
    """The order in which batches come is that of the clock; each worker's stream is not."""
    envs = makers(length=6)
    singles, last = alone(envs, sampling, 20, 5)
    collector = make("async", envs, sampling(), frames_per_batch=20, total_frames=400)
    assert collector.set_seed(5) == last
    found = {0: [], 1: []}
    for batch in collector:
        found[int(batch["observation"][0, IDENT])].append(batch)
    for worker, batches in found.items():
        for ours, theirs in zip(batches, singles[worker], strict=False):
            same(but_for_source(ours), but_for_source(theirs))


def unequal():
    """A quick worker, which has rollouts in store while the slow one is in the middle of one."""
    return [tally, partial(tally, 1, step_s=0.005)]


def by_worker(batches):
    """Batches by the environment that they are from."""
    found = {0: [], 1: []}
    for batch in batches:
        found[int(batch["observation"][0, IDENT])].append(batch)
    return found


def test_set_seed_in_the_middle_reaches_every_asynchronous_worker(make, same):
    """The first batch of each worker after it is the first under its seed; what it dropped does not count."""
    singles, _ = alone([tally, partial(tally, 1)], sampling, 20, 5)
    collector = make("async", unequal(), sampling(), frames_per_batch=20, total_frames=400)
    before, after = [], []
    for batch in collector:
        (before if len(before) < 5 else after).append(batch)
        if len(before) == 5 and not after:
            assert collector.set_seed(5) == 6
    assert sum(batch.numel() for batch in before + after) == collector.stats()["frames"] == 400
    for worker, batches in by_worker(after).items():
        assert batches
        for ours, theirs in zip(batches, singles[worker], strict=False):
            same(but_for_source(ours, SEEDED), but_for_source(theirs, SEEDED), but=HOW_IT_ENDS)


def test_a_restored_asynchronous_collector_delivers_what_each_worker_would_have(make, same):
    """Rollouts that had arrived and were not delivered are part of the state."""
    first, second = (
        make("async", unequal(), sampling(), frames_per_batch=20, total_frames=total) for total in (400, 300)
    )
    before = [first.next() for _ in range(5)]
    state = first.state_dict()
    expected = by_worker(first)
    for collector in (second, first):
        collector.load_state_dict(state)
        again = list(collector)
        assert sum(map(len, before + again)) == collector.stats()["frames"] == collector.total_frames
        for worker, batches in by_worker(again).items():
            assert batches
            for ours, theirs in zip(batches, expected[worker], strict=False):
                same(but_for_source(ours), but_for_source(theirs))


# Ids -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("maker", "kind"), in_turn([tally, tallies], ["sync", "async"]))
def test_ids_are_unique_and_nothing_is_missing(make, kind, maker):
    collector = make(kind, makers(3, make=maker), gain(), frames_per_batch=45, total_frames=45 * 40)
    found = check(list(collector))
    assert found.frames == 45 * 40
    assert found.whole > 100
    assert found.gaps == 0
    assert len(found.instances) == (3 if maker is tally else 9)
    assert all(len(instances) == 1 for instances in found.instances.values())


def test_every_environment_of_a_batch_is_reset_by_itself(make):
    frames = flat(make("sync", makers(make=tallies), gain(), frames_per_batch=60, total_frames=600))
    check(frames)
    assert len(frames[frames["next", "done"].reshape(-1)]["observation"][:, IDENT].unique()) == 6


def test_ids_go_on_after_reset(make):
    collector = make("sync", makers(), gain(), frames_per_batch=20)
    first = collector.next()
    collector.reset()
    second = collector.next()
    assert set(first[IDS].unique().tolist()).isdisjoint(second[IDS].unique().tolist())
    check([first, second], gaps=True)


def test_batches_are_plain_tensordicts(make):
    batch = make("sync", makers(), gain(), frames_per_batch=20).next()
    assert type(batch) is TensorDict
    assert all(type(value) is torch.Tensor for value in batch.values(True, True))
