"""trajs_per_batch: whole trajectories, exactly so many, in the order in which they ended."""

from __future__ import annotations

import io
import itertools
import warnings

import pytest
import torch
from tensordict import TensorDict
from tests.variants import in_turn

from rollwright.collectors import Collector, Interruptor
from rollwright.collectors.delivery.assembler import TrajectoryAssembler
from rollwright.collectors.delivery.rows import HeldBatch, RowRange, concatenate, pad
from rollwright.collectors.utils import split_trajectories
from rollwright.envs import GymEnv, SerialEnv
from rollwright.testing.mocking_classes import CountingBatchedEnv, CountingEnv, EnvWithDynamicSpec, NestedCountingEnv

ENVS = {
    "single": lambda: GymEnv("CartPole-v1"),
    "serial": lambda: SerialEnv(3, lambda: GymEnv("CartPole-v1")),
    "vector": lambda: GymEnv("CartPole-v1", num_envs=3),
    "mock": lambda: CountingEnv(max_steps=4),
    "mocks": lambda: CountingBatchedEnv(max_steps=torch.tensor([3, 5, 7]), batch_size=[3]),
    "grid": lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1", num_envs=2)),
}
IDS, DONE = ("collector", "traj_ids"), ("next", "done")


@pytest.fixture
def seeded(make):
    """``seeded(kind, **options)``: a collector with a seed."""

    def build(kind, **options):
        collector = make(ENVS[kind], **{"frames_per_batch": 60, "total_frames": 600, **options})
        collector.set_seed(0)
        return collector

    return build


def by_hand(stream):
    """The complete trajectories of a stream ``[*env, T]``, in the order in which they ended."""
    rows = stream.reshape(-1, stream.shape[-1])
    ends = rows[DONE].squeeze(-1).nonzero().tolist()
    found = []
    for env, t in sorted(ends, key=lambda end: (end[1], end[0])):
        found.append(rows[env][rows[env][IDS] == rows[env, t][IDS]])
    return found


# What is delivered --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENVS)
def test_cat_is_the_complete_trajectories_one_after_another(seeded, stream, same, kind):
    expected = by_hand(stream(seeded(kind)))
    batches = list(seeded(kind, trajs_per_batch=3, traj_format="cat"))
    assert len(batches) == len(expected) // 3
    for i, batch in enumerate(batches):
        assert batch.names == ["time"]
        same(batch, torch.cat(expected[3 * i : 3 * i + 3]))


@pytest.mark.parametrize("kind", ENVS)
def test_padded_is_the_same_frames_with_a_mask(seeded, same, kind):
    flat = list(seeded(kind, trajs_per_batch=3, traj_format="cat"))
    padded = list(seeded(kind, trajs_per_batch=3))
    assert len(flat) == len(padded) > 0
    for one, batch in zip(flat, padded, strict=True):
        assert batch.names == [None, "time"]
        mask = batch["collector", "mask"]
        assert batch.shape == (3, int(mask.sum(-1).max()))
        same(batch[mask].exclude(("collector", "mask")), one)
        same(batch, split_trajectories(one, prefix="collector"))
        assert not any(bool(value.any()) for value in batch[~mask].values(True, True))


@pytest.mark.parametrize(("kind", "steps"), in_turn(ENVS, [1, 7, 100]))
def test_frames_per_batch_does_not_change_what_is_delivered(seeded, same, kind, steps):
    """A batch of other size, or of one step, gives the same trajectories in the same order."""
    frames = steps * {"single": 1, "mock": 1, "grid": 4}.get(kind, 3)
    left = list(itertools.islice(seeded(kind, trajs_per_batch=2, total_frames=-1), 4))
    right = list(itertools.islice(seeded(kind, trajs_per_batch=2, total_frames=-1, frames_per_batch=frames), 4))
    for one, other in zip(left, right, strict=True):
        same(one, other)


def test_every_trajectory_is_whole(seeded):
    for batch in seeded("vector", trajs_per_batch=4):
        for row in batch:
            frames = row[row["collector", "mask"]]
            assert len(frames[IDS].unique()) == 1
            assert frames[DONE].squeeze(-1).nonzero().tolist() == [[len(frames) - 1]]
            assert torch.equal(frames["next", "observation"][:-1], frames["observation"][1:])


def test_frames_are_copied_once_into_memory_of_their_own(seeded):
    batches = list(seeded("serial", trajs_per_batch=2, traj_format="cat"))
    pointers = [batch["observation"].untyped_storage().data_ptr() for batch in batches]
    assert len(set(pointers)) == len(pointers)
    copies = [batch.clone() for batch in batches]
    assert all((one == other).all() for one, other in zip(batches, copies, strict=True))


def test_a_batch_of_one_trajectory_that_lies_in_one_rollout_is_a_copy(seeded):
    collector = seeded("mock", trajs_per_batch=1, traj_format="cat")
    batch = collector.next()
    expected = batch.clone()
    for _ in collector:
        pass
    assert (batch == expected).all()


def test_nested_batch_sizes_are_kept(make):
    whole = make(NestedCountingEnv(max_steps=3), None, frames_per_batch=5).next()
    batch = make(NestedCountingEnv(max_steps=3), None, frames_per_batch=5, trajs_per_batch=2).next()
    assert any(value.ndim > 1 for value in whole.values(True) if isinstance(value, TensorDict))
    for key, value in whole.items(True):
        if isinstance(value, TensorDict):
            assert batch[key].batch_size == (*batch.batch_size, *value.batch_size[1:]), key


def test_shapes_that_vary(make):
    collector = make(EnvWithDynamicSpec(max_count=3), frames_per_batch=4, trajs_per_batch=2, traj_format="cat")
    batch = collector.next()
    assert batch[DONE].sum() == 2
    assert batch.shape == (6,)
    collector = make(EnvWithDynamicSpec(max_count=3), frames_per_batch=4, trajs_per_batch=2, traj_format="padded")
    padded = collector.next()
    assert padded.shape == (2, 3)
    assert [frame["observation"].shape[1] for frame in padded[1].unbind(0)] == [1, 2, 3]


# Counts -------------------------------------------------------------------------------------------------------


def test_total_frames_counts_what_was_stepped_and_the_rest_is_said(make, count):
    env = CountingEnv(max_steps=4)  # five steps
    collector = make(env, count(env), frames_per_batch=7, total_frames=28, trajs_per_batch=2)
    assert [batch.shape for batch in collector] == [(2, 5)] * 2
    stats = collector.stats()
    assert (stats["frames"], stats["completed"]) == (28, True)
    assert (stats["trajectories_held"], stats["frames_held"], stats["frames_dropped"]) == (1, 8, 0)
    assert (stats["batches"], stats["total_batches"]) == (2, None)


def test_the_number_of_batches_is_not_known(seeded):
    with pytest.raises(TypeError, match="trajs_per_batch"):
        len(seeded("single", trajs_per_batch=2))
    with pytest.raises(RuntimeError, match="total_frames"):
        list(seeded("single", trajs_per_batch=2, total_frames=-1))  # would never end


def test_next_and_iteration_are_one_stream(seeded, same):
    expected = list(seeded("serial", trajs_per_batch=2))
    right = seeded("serial", trajs_per_batch=2)
    found = [right.next(), next(right)]
    found += list(right)
    assert right.next() is None
    with pytest.raises(StopIteration):
        next(right)
    for one, other in zip(expected, found, strict=True):
        same(one, other)


def test_what_is_held_does_not_keep_all_that_was_collected(make):
    """One trajectory that never ends beside 49 short ones: the memory held is that of the long one."""
    lengths = torch.full((50,), 3)
    lengths[7] = 100_000
    env = CountingBatchedEnv(max_steps=lengths, batch_size=[50])
    collector = make(env, None, frames_per_batch=500, trajs_per_batch=25, traj_format="cat")
    whole = make(ENVS["mocks"](), None, frames_per_batch=30).next()
    frame = sum(value[0, 0].nbytes for value in whole.values(True, True))
    for _ in range(200):
        collector.next()
    held = collector._delivery.assembler
    assert held.frames_held < 3000
    assert held.num_bytes < 6 * held.frames_held * frame


# Trajectories that are cut ------------------------------------------------------------------------------------


def test_a_limit_makes_trajectories_complete(make, pendulum_actor):
    env = GymEnv("Pendulum-v1")
    collector = make(env, pendulum_actor(), frames_per_batch=20, trajs_per_batch=2, max_frames_per_traj=30)
    batch = collector.next()
    assert batch.shape == (2, 30)
    assert batch["next", "truncated"].squeeze(-1).nonzero().tolist() == [[0, 29], [1, 29]]
    assert not batch["next", "terminated"].any()


def test_set_truncated_makes_trajectories_complete(make, count):
    env = CountingEnv(max_steps=100)
    batch = make(env, count(env), frames_per_batch=4, trajs_per_batch=3, set_truncated=True).next()
    assert batch["observation"].squeeze(-1).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert batch["next", "truncated"][..., -1, :].all()


class StopsAfter(Interruptor):
    def __init__(self, steps):
        super().__init__()
        self.steps = self.left = steps

    def collection_stopped(self):
        self.left -= 1
        if self.left:
            return False
        self.left = self.steps
        return True


@pytest.mark.parametrize("kind", ["single", "vector", "mocks"])
def test_frames_that_were_not_taken_are_left_out(seeded, same, kind):
    whole = list(itertools.islice(seeded(kind, trajs_per_batch=2), 3))
    cut = list(itertools.islice(seeded(kind, trajs_per_batch=2, interruptor=StopsAfter(4)), 3))
    for one, other in zip(whole, cut, strict=True):
        same(one, other)
        assert int(other[IDS].min()) >= 0


def test_reset_drops_what_is_held_and_counts_it(make, count):
    env = CountingEnv(max_steps=4)
    collector = make(env, count(env), frames_per_batch=7, trajs_per_batch=3)
    assert collector._delivery.ready()
    collector.next()
    held = collector.stats()["frames_held"]
    collector.reset()
    stats = collector.stats()
    assert (stats["frames_held"], stats["trajectories_held"], stats["frames_dropped"]) == (0, 0, held)
    batch = collector.next()
    assert batch["observation"].squeeze(-1).tolist() == [[0, 1, 2, 3, 4]] * 3
    ids = batch[IDS][:, 0]
    assert int(ids.min()) > 3  # none of before


def test_reset_of_some_environments_drops_theirs(make, count):
    env = CountingBatchedEnv(max_steps=torch.tensor([9, 9]), batch_size=[2])
    collector = make(env, count(env), frames_per_batch=8, trajs_per_batch=3, traj_format="cat")
    collector._delivery.collect_trajectories()
    collector.reset([1])
    batch = collector.next()
    lengths = batch[IDS].unique_consecutive(return_counts=True)[1]
    assert lengths.tolist() == [10, 10, 10]
    assert collector.stats()["frames_dropped"] == 4  # of the second environment


def test_set_seed_in_the_middle_gives_the_first_batch_again(seeded, same):
    collector = seeded("vector", trajs_per_batch=2)
    first = collector.next()
    collector.next()
    collector.set_seed(0)
    same(collector.next(), first, but=[IDS])


def test_a_rollout_that_is_not_delivered_leaves_no_hole(make, count):
    env = CountingEnv(max_steps=9)
    collector = make(env, count(env), frames_per_batch=4, trajs_per_batch=1)
    collector._delivery.collect_trajectories()
    collector.rollout()
    batch = collector.next()
    assert batch["observation"].flatten().tolist() == list(range(10))
    assert collector.stats()["frames_dropped"] == 6  # four before the rollout, two after it


def test_an_error_leaves_no_hole(make, count):
    env = CountingEnv(max_steps=9)
    act = count(env)
    fails = iter([False] * 6 + [True])

    def policy(td):
        if next(fails, False):
            raise OSError("once")
        return act(td)

    collector = make(env, policy, frames_per_batch=4, trajs_per_batch=1)
    with pytest.raises(OSError, match="once"):
        collector.next()
    assert collector.next()["observation"].flatten().tolist() == list(range(10))


# Other options ------------------------------------------------------------------------------------------------


def test_hooks_and_postproc_work_on_what_is_delivered(make, count):
    env, seen, before = CountingEnv(max_steps=4), [], []

    def postproc(batch):
        return batch.set("length", batch["collector", "mask"].sum(-1, keepdim=True).expand(batch.shape))

    collector = make(
        env,
        count(env),
        frames_per_batch=3,
        trajs_per_batch=2,
        postproc=postproc,
        pre_collect_hook=lambda: before.append(1),
        post_collect_hook=seen.append,
    )
    batch = collector.next()
    assert seen == [batch]
    assert (batch["length"] == 5).all()
    assert len(before) == 4  # once a rollout


def test_random_frames_first_have_what_only_the_policy_writes(make):
    def policy(td):
        return td.update({"action": torch.ones(1, dtype=torch.int32), "value": torch.ones(1)})

    collector = make(
        CountingEnv(max_steps=4), policy, frames_per_batch=3, trajs_per_batch=2, init_random_frames=3, total_frames=30
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = collector.next(), collector.next()
    assert first["value"].flatten().tolist()[:4] == [0, 0, 0, 1]
    assert bool((second["value"][second["collector", "mask"]] == 1).all())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split_trajs": True}, ["split_trajs"]),
        ({"compact_obs": True}, ["compact_obs"]),
        ({"return_same_td": True}, ["return_same_td"]),
        ({"track_traj_ids": False}, ["track_traj_ids"]),
        ({"reset_when_done": False}, ["reset_when_done"]),
        ({"traj_format": "flat"}, ["traj_format", "'padded' or 'cat'", "'flat'"]),
        ({"trajs_per_batch": 0}, ["at least 1", "0"]),
        ({"trajs_per_batch": None, "traj_format": "cat"}, ["traj_format", "trajs_per_batch is None"]),
    ],
    ids=str,
)
def test_what_does_not_go_together(options, words):
    with pytest.raises(ValueError, match=r"trajs_per_batch|traj_format") as caught:
        Collector(CountingEnv(), frames_per_batch=4, **{"trajs_per_batch": 2, **options})
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("value", [True, 1.5, "2"])
def test_a_count_that_is_none(value):
    with pytest.raises(TypeError, match="trajs_per_batch"):
        Collector(CountingEnv(), frames_per_batch=4, trajs_per_batch=value)


# State --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["single", "serial", "vector"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_restored_collector_goes_on_with_the_bits_it_would_have(seeded, same, kind, after):
    first = seeded(kind, trajs_per_batch=3)
    for _ in range(after):
        first.next()
    stream = io.BytesIO()
    torch.save(first.state_dict(), stream)
    held = first.stats()["frames_held"]
    expected = [first.next() for _ in range(3)]
    second = seeded(kind, trajs_per_batch=3)
    second.load_state_dict(torch.load(io.BytesIO(stream.getvalue()), weights_only=True))
    assert second.stats()["frames_held"] == held
    for batch in expected:
        same(second.next(), batch)


def test_a_collector_that_has_stepped_renames_what_it_goes_on_with(seeded, same):
    first = seeded("serial", trajs_per_batch=2)
    first.next()
    state = first.state_dict()
    expected = [first.next() for _ in range(3)]
    second = seeded("serial", trajs_per_batch=2)
    used = torch.cat([second.next()[IDS].flatten() for _ in range(6)])
    second.load_state_dict(state)
    found = [second.next() for _ in range(3)]
    for one, other in zip(expected, found, strict=True):
        same(one, other, but=[IDS])
        assert not set(used.tolist()) & set(other[IDS][other["collector", "mask"]].tolist())


def test_what_is_held_of_an_environment_that_begins_anew_is_dropped(seeded):
    first = seeded("single", trajs_per_batch=2)
    first.next()
    state = first.state_dict()
    held = state["held"]
    under_way = sum(td["batch_size"][0] for td in held["open"])
    state["trajectories"] = None  # as where an environment cannot be saved
    second = seeded("single", trajs_per_batch=2)
    second.load_state_dict(state)
    assert second.stats()["frames_dropped"] == held["frames_dropped"] + under_way
    assert second.next()[DONE].sum() == 2


def test_the_state_of_a_collector_of_batches_gives_no_half_trajectory(make, count):
    env, other = CountingEnv(max_steps=9), CountingEnv(max_steps=9)
    plain = make(env, count(env), frames_per_batch=4)
    plain.next()
    collector = make(other, count(other), frames_per_batch=4, trajs_per_batch=1)
    collector.load_state_dict(plain.state_dict())
    assert collector.next()["observation"].flatten().tolist() == list(range(10))


# The assembler ------------------------------------------------------------------------------------------------


def frames(ids):
    return TensorDict({"x": torch.arange(len(ids)), "collector": {"traj_ids": torch.tensor(ids)}}, [len(ids)])


def test_pieces_are_views_of_the_batches():
    assembler = TrajectoryAssembler(1)
    batches = [frames([0, 0, 0]), frames([0, 0, 1])]
    assembler.take(batches[0], 3, torch.tensor([False, False, False]))
    assembler.take(batches[1], 3, torch.tensor([False, True, False]))
    [found] = assembler.pop(1)
    assert found.length == 5
    for piece, batch in zip(found.pieces, batches, strict=True):
        assert piece.of("x").data_ptr() == batch["x"].data_ptr()
    assert concatenate(found.pieces)["x"].tolist() == [0, 1, 2, 0, 1]


def test_ids_that_change_without_an_end_are_dropped():
    assembler = TrajectoryAssembler(1)
    assembler.take(frames([0, 0, 1, 1]), 4, torch.tensor([False, False, False, True]))
    [found] = assembler.pop(1)
    assert concatenate(found.pieces)["x"].tolist() == [2, 3]
    assert assembler.frames_dropped == 2


def test_padding_copies_each_frame_once(monkeypatch):
    """One call of ``cat`` an entry, and nothing else that copies."""
    calls = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors, *rest: calls.append(len(tensors)) or cat(tensors, *rest))
    one, two = (HeldBatch.of(frames(ids), 4) for ids in ([0] * 4, [1] * 4))
    padded = pad([[RowRange(one, 0, 2), RowRange(two, 0, 1)], [RowRange(two, 1, 3)]])
    assert padded["x"].tolist() == [[0, 1, 0], [1, 2, 0]]
    assert len(calls) == 2
