"""Options in the pairs that interact: each keeps its promise beside the other."""

from __future__ import annotations

import json

import pytest
import torch
from tensordict import TensorDict

from rollwright.collectors import Interruptor
from rollwright.collectors.utils import restore_next, split_trajectories
from rollwright.envs import GymEnv, SerialEnv
from rollwright.testing.mocking_classes import (
    CountingBatchedEnv,
    CountingEnv,
    CountingEnvWithString,
    EnvWithDynamicSpec,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*split_trajs=True pads")


class StopsAfter(Interruptor):
    """Interrupts every rollout after the same number of steps."""

    def __init__(self, steps):
        super().__init__()
        self.steps = self.left = steps

    def collection_stopped(self):
        self.left -= 1
        if self.left:
            return False
        self.left = self.steps
        return True


@pytest.fixture
def lengths(make, count):
    """Batches of two environments whose episodes have two and three steps."""

    def build(**options):
        env = CountingBatchedEnv(max_steps=torch.tensor([1, 2]), batch_size=[2])
        return make(env, count(env), **{"frames_per_batch": 14, "total_frames": 42, **options})

    return build


def column(batch, *key):
    return batch[key].squeeze(-1).tolist()


def test_compact_and_split(lengths):
    """Restored after the split, real frames have their next observations."""
    for compact, whole in zip(lengths(compact_obs=True, split_trajs=True), lengths(split_trajs=True), strict=True):
        mask = whole["collector", "mask"]
        assert torch.equal(compact["collector", "mask"], mask)
        restored = restore_next(compact)
        assert torch.equal(restored["next", "observation"][mask], whole["next", "observation"][mask])


def test_compact_and_set_truncated(lengths):
    for compact, whole in zip(lengths(compact_obs=True, set_truncated=True), lengths(set_truncated=True), strict=True):
        assert torch.equal(restore_next(compact)["next", "observation"], whole["next", "observation"])
        assert torch.equal(compact["next", "truncated"], whole["next", "truncated"])


def test_compact_and_interruption(lengths):
    collector = lengths(compact_obs=True, interruptor=StopsAfter(3))
    restored = restore_next(collector.next())
    assert [row[:3] for row in column(restored, "next", "observation")] == [[1, 2, 1], [1, 2, 3]]
    restored = restore_next(collector.next())
    assert [row[:3] for row in column(restored, "next", "observation")] == [[2, 1, 2], [1, 2, 3]]


def test_compact_and_one_object(lengths):
    compact, whole = lengths(compact_obs=True, return_same_td=True), lengths()
    objects = []
    for left, right in zip(compact, whole, strict=True):
        objects.append(left)
        assert torch.equal(restore_next(left)["next", "observation"], right["next", "observation"])
    assert objects[0] is objects[1] is objects[2]


def test_compact_and_a_reset_in_between(lengths):
    collector = lengths(compact_obs=True)
    collector.next()
    collector.reset(0)
    assert column(restore_next(collector.next()), "next", "observation") == [
        [1, 2, 1, 2, 1, 2, 1],
        [2, 3, 1, 2, 3, 1, 2],
    ]


@pytest.mark.parametrize("use_buffers", [True, False])
def test_compact_and_limits(make, count, use_buffers):
    """A step counter's entry is an observation too: stored once, and true at the limit."""

    def collector(**options):
        env = CountingEnv(max_steps=100)
        return make(
            env,
            count(env),
            frames_per_batch=7,
            total_frames=14,
            max_frames_per_traj=3,
            use_buffers=use_buffers,
            **options,
        )

    for compact, whole in zip(collector(compact_obs=True), collector(), strict=True):
        assert ("next", "step_count") not in compact.keys(True)
        restored = restore_next(compact)
        for key in ("observation", "step_count"):
            assert torch.equal(restored["next", key], whole["next", key])


def test_compact_and_postproc(lengths):
    """It sees what is delivered, and may restore it."""
    for restored, whole in zip(lengths(compact_obs=True, postproc=restore_next), lengths(), strict=True):
        assert torch.equal(restored["next", "observation"], whole["next", "observation"])


def test_compact_and_no_ids(lengths):
    batch = lengths(compact_obs=True, track_traj_ids=False).next()
    assert torch.equal(restore_next(batch)["next", "observation"], lengths().next()["next", "observation"])
    assert ("collector", "traj_ids") not in batch.keys(True)


def test_split_and_interruption(lengths):
    """Frames that were not taken are in no trajectory."""
    batch = lengths(split_trajs=True, interruptor=StopsAfter(3)).next()
    mask = batch["collector", "mask"]
    assert mask.sum(-1).tolist() == [2, 1, 3]
    assert int(batch["collector", "traj_ids"][mask].min()) >= 0
    assert [row[:3] for row in column(batch, "observation")] == [[0, 1, 0], [0, 0, 0], [0, 1, 2]]


def test_split_and_set_truncated(lengths):
    """Every trajectory of a batch ends in a flag, and only those cut here are truncated."""
    for batch in lengths(split_trajs=True, set_truncated=True):
        mask = batch["collector", "mask"]
        last = mask.sum(-1) - 1
        rows = torch.arange(len(last))
        assert bool(batch["next", "done"][rows, last].all())
        truncated, terminated = batch["next", "truncated"][rows, last], batch["next", "terminated"][rows, last]
        assert torch.equal(truncated, ~terminated)


def test_split_and_limits(make, count):
    env = CountingEnv(max_steps=100)
    batch = make(env, count(env), frames_per_batch=10, split_trajs=True, max_frames_per_traj=4).next()
    assert batch["collector", "mask"].sum(-1).tolist() == [4, 4, 2]
    assert column(batch, "step_count") == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 0, 0]]


def test_split_and_one_object_keep_their_values(lengths):
    """The split batch is new memory: the next batch does not overwrite it."""
    collector = lengths(split_trajs=True, return_same_td=True)
    first = collector.next()
    kept = first.clone()
    collector.next()
    assert torch.equal(first["observation"], kept["observation"])


def test_split_and_strings(make, count):
    env = CountingEnvWithString(max_steps=2)
    batch = make(env, count(env), frames_per_batch=7, split_trajs=True).next()
    assert batch["collector", "mask"].sum(-1).tolist() == [3, 3, 1]
    assert all(isinstance(word, str) for row in batch["string"] for word in row)


def test_nested_split_of_growing_observations(make):
    batch = make(EnvWithDynamicSpec(max_count=3), frames_per_batch=8).next()
    nested = split_trajectories(batch, as_nested=True)
    assert [len(row) for row in nested.unbind(0)] == [3, 3, 2]
    assert nested[1][2]["observation"].shape == (3, 3, 2)


def test_interruption_and_set_truncated(make, count):
    """The last frame taken is cut, not the last of the batch."""
    env = CountingEnv(max_steps=100)
    collector = make(env, count(env), frames_per_batch=5, set_truncated=True, interruptor=StopsAfter(2))
    first, second = collector.next(), collector.next()
    for number, batch in enumerate((first, second)):
        assert column(batch, "next", "truncated")[:2] == [False, True]
        assert batch["collector", "traj_ids"].tolist() == [number, number, -1, -1, -1]
    assert column(second, "observation")[:2] == [2, 3]


def test_interruption_and_totals(make, count):
    """Interrupted batches deliver fewer frames, so more of them come: no frame is missing at the end."""
    env = CountingEnv(max_steps=1000)
    collector = make(env, count(env), frames_per_batch=5, total_frames=20, interruptor=StopsAfter(2))
    batches = list(collector)
    taken = torch.cat([batch["observation"][batch["collector", "traj_ids"] >= 0] for batch in batches])
    assert taken.flatten().tolist() == list(range(20))
    assert collector.stats()["frames"] == 20


def test_interruption_and_one_object(make, count):
    """Rows of an older batch do not shine through."""
    env = CountingEnv(max_steps=1000)
    switch = Interruptor()
    collector = make(env, count(env), frames_per_batch=4, return_same_td=True, interruptor=switch)
    collector.next()
    switch.stop_collection()
    batch = collector.next()
    assert batch["collector", "traj_ids"].tolist() == [0, -1, -1, -1]
    assert column(batch, "observation") == [4, 0, 0, 0]
    switch.start_collection()
    assert collector.next()["collector", "traj_ids"].tolist() == [0] * 4


def test_set_truncated_and_reset_at_each_iter(make, count):
    env = CountingEnv(max_steps=100)
    batches = list(
        make(env, count(env), frames_per_batch=3, total_frames=9, set_truncated=True, reset_at_each_iter=True)
    )
    assert [column(batch, "observation") for batch in batches] == [[0, 1, 2]] * 3
    ids = [set(batch["collector", "traj_ids"].tolist()) for batch in batches]
    assert all(len(one) == 1 for one in ids)
    assert len(set.union(*ids)) == 3


def test_set_truncated_and_limits_in_the_last_frame(make, count):
    """Cut by the limit in the very last frame: truncated once, and begun anew."""
    env = CountingEnv(max_steps=100)
    batches = list(make(env, count(env), frames_per_batch=4, total_frames=8, set_truncated=True, max_frames_per_traj=4))
    for number, batch in enumerate(batches):
        assert column(batch, "observation") == [0, 1, 2, 3]
        assert column(batch, "next", "truncated") == [False] * 3 + [True]
        assert not bool(batch["next", "terminated"].any())
        assert batch["collector", "traj_ids"].tolist() == [number] * 4


def test_set_truncated_without_ids(make, count):
    env = CountingEnv(max_steps=100)
    batch = make(env, count(env), frames_per_batch=3, set_truncated=True, track_traj_ids=False).next()
    assert column(batch, "next", "done") == [False, False, True]
    assert "collector" not in batch


def test_reset_at_each_iter_and_limits(make, count):
    env = CountingEnv(max_steps=100)
    batches = list(
        make(env, count(env), frames_per_batch=5, total_frames=10, reset_at_each_iter=True, max_frames_per_traj=3)
    )
    assert [column(batch, "step_count") for batch in batches] == [[0, 1, 2, 0, 1]] * 2


def test_reset_at_each_iter_and_set_seed(make, same):
    collector = make(lambda: GymEnv("CartPole-v1"), frames_per_batch=10, reset_at_each_iter=True)
    collector.set_seed(0)
    first = collector.next()
    collector.next()
    collector.set_seed(0)
    same(collector.next(), first, but=["collector"])


def test_reset_at_each_iter_does_not_waste_the_first_reset(make, same):
    """The seeded first batch is the same with and without it."""
    batches = []
    for option in (False, True):
        collector = make(lambda: GymEnv("CartPole-v1"), frames_per_batch=10, reset_at_each_iter=option)
        collector.set_seed(0)
        batches.append(collector.next())
    same(*batches)


def test_reset_when_done_false_and_reset_at_each_iter(make, count):
    env = CountingEnv(max_steps=1)
    batches = list(
        make(env, count(env), frames_per_batch=4, total_frames=8, reset_when_done=False, reset_at_each_iter=True)
    )
    assert [column(batch, "observation") for batch in batches] == [[0, 1, 2, 3]] * 2


def test_random_frames_and_versions(make, pendulum_actor):
    """Versions are counted from the start, also while the policy waits."""
    collector = make(
        lambda: GymEnv("Pendulum-v1"),
        pendulum_actor(),
        frames_per_batch=4,
        total_frames=12,
        init_random_frames=4,
        track_policy_version=True,
    )
    versions = []
    for batch in collector:
        versions.append(batch["policy_version"].tolist())
        collector.update_policy_weights_()
    assert versions == [[0] * 4, [1] * 4, [2] * 4]


def test_random_frames_have_zeros_where_the_policy_computes_nothing(make):
    def policy(td):
        return td.set("value", torch.ones(1)).set("action", torch.zeros(1))

    collector = make(lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=4, init_random_frames=4)
    random, acted = collector.next(), collector.next()
    assert not random["value"].any()
    assert random["action"].all()
    assert bool((acted["value"] == 1).all())


def test_random_frames_and_one_object(make):
    """The memory that is written again has room for what the policy writes."""

    def policy(td):
        return td.set("value", torch.ones(1)).set("action", torch.zeros(1))

    collector = make(
        lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=4, init_random_frames=4, return_same_td=True
    )
    collector.next()
    batch = collector.next()
    assert bool((batch["value"] == 1).all())
    assert bool((batch["action"] == 0).all())


def test_random_frames_and_compiled_policies(make, pendulum_actor):
    collector = make(
        lambda: GymEnv("Pendulum-v1"),
        pendulum_actor(1.0),
        frames_per_batch=4,
        init_random_frames=4,
        compile_policy={"backend": "eager"},
    )
    random, acted = collector.next(), collector.next()
    assert not torch.allclose(random["action"], random["observation"][:, :1])
    torch.testing.assert_close(acted["action"], acted["observation"][:, :1])
    torch.compiler.reset()


def test_random_frames_and_loading(make):
    """Random frames that were taken are not taken again; the policy was looked at before them."""
    calls = []

    def policy(td):
        calls.append(1)
        return td.set("action", torch.zeros(1))

    first, second = (
        make(lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=4, total_frames=8, init_random_frames=4)
        for _ in range(2)
    )
    first.next()
    second.load_state_dict(first.state_dict())
    assert len(list(second)) == 1
    assert len(calls) == 1 + 4


def test_versions_and_split(make, pendulum_actor):
    collector = make(
        lambda: GymEnv("Pendulum-v1"),
        pendulum_actor(),
        frames_per_batch=6,
        split_trajs=True,
        max_frames_per_traj=4,
        track_policy_version=True,
    )
    collector.update_policy_weights_()
    batch = collector.next()
    assert batch["policy_version"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


def test_versions_and_compact(make, pendulum_actor):
    batch = make(
        lambda: GymEnv("Pendulum-v1"), pendulum_actor(), frames_per_batch=4, compact_obs=True, track_policy_version=True
    ).next()
    assert batch["next", "policy_version"].tolist() == [0] * 4


def test_storing_device_and_one_object(make):
    collector = make(
        CountingEnv(device="cpu"),
        lambda td: TensorDict({"action": torch.ones(1, dtype=torch.int8)}),
        frames_per_batch=3,
        policy_device="meta",
        storing_device="cpu",
        return_same_td=True,
    )
    first = collector.next()
    assert collector.next() is first
    assert column(first, "observation") == [3, 4, 5]


def test_postproc_and_one_object(make, count):
    """What postproc writes into the batch does not reach the next one."""
    env = CountingEnv(max_steps=100)
    collector = make(
        env,
        count(env),
        frames_per_batch=3,
        return_same_td=True,
        postproc=lambda td: td.set("observation", td["observation"] + 100),
    )
    assert column(collector.next(), "observation") == [100, 101, 102]
    assert column(collector.next(), "observation") == [103, 104, 105]


def test_postproc_in_place_does_not_reach_the_environment(make, count):
    env = CountingEnv(max_steps=100)

    def spoil(td):
        for value in td.values(True, True):
            value.zero_()
        return td

    collector = make(env, count(env), frames_per_batch=3, postproc=spoil)
    collector.next()
    collector.set_post_collect_hook(None)
    carried = collector._carrier
    assert carried["observation"].item() == 3


def test_a_hook_that_updates_weights(make, pendulum_actor):
    """Before each rollout: the whole batch acts with the new version."""
    collector = make(
        lambda: GymEnv("Pendulum-v1"),
        pendulum_actor(1.0),
        frames_per_batch=4,
        total_frames=12,
        track_policy_version=True,
    )
    collector.pre_collect_hook = lambda: collector.update_policy_weights_(pendulum_actor(0.5))
    for number, batch in enumerate(collector):
        torch.testing.assert_close(batch["action"], 0.5 * batch["observation"][:, :1])
        assert batch["policy_version"].tolist() == [number + 1] * 4


def test_profiling_and_interruption(make, tmp_path):
    path = tmp_path / "trace.json"
    collector = make(CountingEnv(), frames_per_batch=4, interruptor=StopsAfter(2))
    collector.enable_profile(num_rollouts=2, save_path=path, activities=["cpu"], with_stack=False)
    collector.next()
    collector.next()
    assert json.loads(path.read_text())["traceEvents"]


def test_static_seeds_and_limits(make):
    """Environments with one seed and one policy stay alike until something tells them apart."""
    collector = make(
        lambda: SerialEnv(2, lambda: GymEnv("Pendulum-v1")),
        lambda td: td.set("action", torch.zeros(2, 1)),
        frames_per_batch=20,
        max_frames_per_traj=10,
    )
    collector.set_seed(0, static_seed=True)
    batch = collector.next()
    assert torch.equal(batch["observation"][0], batch["observation"][1])
    assert not torch.equal(batch["collector", "traj_ids"][0], batch["collector", "traj_ids"][1])


def test_buffers_of_frames_whose_layout_changes(make):
    """A policy that writes another key now and then: the batch is still delivered, nothing is lost."""
    calls = []

    def policy(td):
        calls.append(1)
        if len(calls) % 3 == 0:
            td.set("extra", torch.ones(1))
        return td.set("action", torch.ones(1, dtype=torch.int8))

    batch = make(CountingEnv(max_steps=100), policy, frames_per_batch=6).next()
    assert column(batch, "observation") == [0, 1, 2, 3, 4, 5]
