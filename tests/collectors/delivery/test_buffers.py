"""replay_buffer: what lies in it is what would have been yielded, however it is written."""

from __future__ import annotations

import warnings

import pytest
import torch
from tensordict import TensorDict
from tests.variants import in_turn

from rollwright.collectors import Collector, Interruptor
from rollwright.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
)
from rollwright.envs import GymEnv, SerialEnv
from rollwright.testing.mocking_classes import CountingBatchedEnv, CountingEnv, NestedCountingEnv

ENVS = {
    "single": lambda: GymEnv("CartPole-v1"),
    "serial": lambda: SerialEnv(3, lambda: GymEnv("CartPole-v1")),
    "vector": lambda: GymEnv("CartPole-v1", num_envs=3),
    "mock": lambda: CountingEnv(max_steps=4),
    "mocks": lambda: CountingBatchedEnv(max_steps=torch.tensor([3, 5, 7]), batch_size=[3]),
    "nested": lambda: NestedCountingEnv(max_steps=3),
}
BATCHED = ["serial", "vector", "mocks"]
IDS, DONE = ("collector", "traj_ids"), ("next", "done")
WAYS = {
    "direct": {},
    "extend": {"post_collect_hook": lambda batch: None},
    "by step": {"extend_buffer": False},
}


def a_buffer(size=1000, ndim=1, **options):
    return ReplayBuffer(storage=LazyTensorStorage(size, ndim=ndim), **options)


def oldest_first(buffer):
    """What a full buffer holds, in the order in which it was written."""
    low, high = buffer.storage.ledger.live()
    return buffer[:][..., torch.arange(low, high) % buffer.storage.capacity]


@pytest.fixture
def fill(make):
    """``fill(kind, buffer, **options)``: a collector that has written ten batches into the buffer."""

    def run(kind, buffer, **options):
        env = ENVS[kind]() if isinstance(kind, str) else kind
        options = {"frames_per_batch": 30, "total_frames": 300, **options}
        collector = make(env, None, replay_buffer=buffer, **options)
        collector.set_seed(0)
        for delivered in collector:
            assert delivered is None
        return collector

    return run


@pytest.fixture
def yielded(make):
    """``yielded(kind, **options)``: the batches that are yielded without a buffer."""

    def run(kind, **options):
        collector = make(ENVS[kind](), None, **{"frames_per_batch": 30, "total_frames": 300, **options})
        collector.set_seed(0)
        return list(collector)

    return run


# Content -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "way"), in_turn(ENVS, [*WAYS]))
def test_the_buffer_holds_what_would_have_been_yielded(fill, yielded, same, kind, way):
    batches = yielded(kind)
    if way == "by step":  # time by time, all environments at each
        dims = batches[0].ndim - 1
        expected = torch.cat([torch.cat([t.reshape(-1) for t in batch.unbind(dims)]) for batch in batches])
    else:
        expected = torch.cat([batch.reshape(-1) for batch in batches])
    buffer = a_buffer()
    collector = fill(kind, buffer, **WAYS[way])
    same(buffer[:], expected)
    assert collector.stats()["paths"]["buffer"].startswith({"by step": ""}.get(way, way))
    assert collector.stats()["write_count"] == buffer.write_count == len(buffer) == 300


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", BATCHED)
def test_a_storage_of_two_dimensions_keeps_environments_apart(fill, yielded, stream, same, kind, way):
    expected = stream(yielded(kind))
    buffer = a_buffer(ndim=2)
    fill(kind, buffer, **WAYS[way])
    assert buffer[:].shape == (3, 100)
    same(buffer[:], expected)


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_full_storage_keeps_the_newest(fill, yielded, stream, same, way, ndim):
    """Also where a batch goes around the ring's seam."""
    buffer = a_buffer(72, ndim=ndim)
    fill("vector", buffer, **WAYS[way])
    whole = stream(yielded("vector"))
    found = oldest_first(buffer)
    if ndim == 2:
        same(found, whole[:, -24:])
    elif way == "by step":
        same(found, whole.transpose(0, 1).reshape(-1)[-72:])
    else:
        flat = torch.cat([batch.reshape(-1) for batch in whole.split(10, 1)])
        same(found, flat[-72:])


def test_one_environment_in_a_ring(fill, yielded, stream, same):
    buffer = a_buffer(70)  # which 30 does not divide
    collector = fill("single", buffer)
    same(oldest_first(buffer), stream(yielded("single"))[-70:])
    memory = collector._rollout.memory
    assert (memory.num_direct, memory.num_copied) == (7, 3)  # those that cross the seam at 70, 140 and 280


@pytest.mark.parametrize("kind", ["vector", "mocks"])
def test_storage_on_disk(fill, yielded, same, tmp_path, kind):
    buffer = ReplayBuffer(storage=LazyMemmapStorage(1000, scratch_dir=tmp_path))
    collector = fill(kind, buffer)
    assert collector.stats()["paths"]["buffer"].startswith("direct")
    same(buffer[:], torch.cat([batch.reshape(-1) for batch in yielded(kind)]))


def test_storage_of_objects(fill, yielded, same):
    buffer = ReplayBuffer(storage=ListStorage(1000))
    collector = fill("single", buffer)
    assert "ListStorage" in collector.stats()["paths"]["buffer"]
    same(buffer[:], torch.cat(yielded("single")))


def test_slices_of_what_was_written_directly_cross_no_boundary(fill):
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=4, strict_length=False), batch_size=40
    )
    collector = fill("single", buffer)
    assert "direct" in collector.stats()["paths"]["buffer"]
    for _ in range(20):
        batch = buffer.sample()
        inside = batch[IDS][1:] == batch[IDS][:-1]
        inside &= ~batch["is_init"].flatten()[1:]
        assert torch.equal(batch["next", "observation"][:-1][inside], batch["observation"][1:][inside])


def test_a_worker_writes_to_its_own_member_of_an_ensemble(fill, yielded, stream, same):
    members = [a_buffer(ndim=2) for _ in range(2)]
    ensemble = ReplayBufferEnsemble(*members, sample_from_all=True, batch_size=8)
    collector = fill("vector", ensemble, worker_idx=1)
    assert "direct" in collector.stats()["paths"]["buffer"]
    assert [len(member) for member in members] == [0, 300]
    same(members[1][:], stream(yielded("vector")))


@pytest.mark.parametrize(("options", "ndim"), [({"routing_key": IDS}, 1), ({"routing_dim": 0}, 1)], ids=str)
def test_an_ensemble_that_routes_by_itself(fill, options, ndim):
    members = [a_buffer(ndim=ndim) for _ in range(2)]

    class Odd(ReplayBufferEnsemble):
        def extend(self, data, **kwargs):
            parts = data.set(IDS, data[IDS] % 2) if self.routing_key else data
            return super().extend(parts, **kwargs)

    env = CountingBatchedEnv(max_steps=torch.tensor([3, 5]), batch_size=[2])
    fill(env, Odd(*members, **options))
    assert sum(map(len, members)) == 300
    assert min(map(len, members)) > 50


# What the collector yields, and when ---------------------------------------------------------------------------------


def test_it_yields_none_for_each_rollout(make):
    buffer = a_buffer()
    collector = make(CountingEnv(), None, frames_per_batch=5, total_frames=20, replay_buffer=buffer)
    assert len(collector) == 4
    assert collector.next() is None
    assert len(buffer) == 5
    assert next(collector) is None
    assert [*collector] == [None, None]
    assert collector.next() is None
    with pytest.raises(StopIteration):
        next(collector)
    assert len(buffer) == collector.stats()["frames"] == 20


def test_every_step_is_in_the_buffer_when_it_was_taken(make):
    buffer, seen = a_buffer(), []

    class Noting(Interruptor):
        def collection_stopped(self):
            seen.append(len(buffer))
            return False

    env = CountingBatchedEnv(max_steps=torch.tensor([3, 5]), batch_size=[2])
    make(env, None, frames_per_batch=8, replay_buffer=buffer, extend_buffer=False, interruptor=Noting()).next()
    assert seen == [2, 4, 6, 8]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["single", "vector", "mocks"])
def test_what_an_interrupted_rollout_did_not_take_is_not_written(make, kind, way):
    class Stop(Interruptor):
        left = 3

        def collection_stopped(self):
            self.left -= 1
            return self.left == 0

    buffer = a_buffer()
    collector = make(ENVS[kind], None, frames_per_batch=30, replay_buffer=buffer, interruptor=Stop(), **WAYS[way])
    collector.next()
    assert len(buffer) == collector.stats()["frames"] == 3 * collector.env.numel()
    assert int(buffer[:][IDS].min()) == 0


def test_set_truncated_and_compiled_policies_and_versions(fill, yielded, same):
    options = {"set_truncated": True, "track_policy_version": True, "init_random_frames": 60}
    buffer = a_buffer()
    fill("vector", buffer, **options)
    same(buffer[:], torch.cat([batch.reshape(-1) for batch in yielded("vector", **options)]))


def test_postproc_comes_before_the_write(fill):
    def postproc(batch):
        return batch.select(IDS, "action").set("twice", batch["next", "reward"] * 2)

    buffer = a_buffer()
    collector = fill("vector", buffer, postproc=postproc)
    assert set(buffer[:].keys()) == {"collector", "action", "twice"}
    assert (buffer[:]["twice"] == 2).all()
    assert "postproc" in collector.stats()["paths"]["buffer"]


@pytest.mark.parametrize("options", [{}, {"trajs_per_batch": 1}], ids=["batches", "trajectories"])
def test_postproc_may_keep_nothing(make, options):
    buffer = a_buffer()

    def some(batch):
        return batch[batch["next", "done"].squeeze(-1)]

    options = {"frames_per_batch": 5, "total_frames": 200, "postproc": some, "replay_buffer": buffer, **options}
    collector = make(lambda: GymEnv("CartPole-v1"), None, **options)
    for _ in collector:
        pass
    assert len(buffer) > 3
    assert buffer[:]["next", "done"].all()


def test_postproc_is_not_called_for_single_steps_and_that_is_said(make):
    with pytest.warns(UserWarning, match=r"postproc.*extend_buffer=False"):
        collector = make(
            CountingEnv(),
            None,
            frames_per_batch=4,
            replay_buffer=a_buffer(),
            extend_buffer=False,
            postproc=lambda b: 1 / 0,
        )
    collector.next()


def test_a_hook_gets_a_batch_that_nobody_overwrites(make):
    kept = []
    buffer = a_buffer(4)
    collector = make(CountingEnv(), None, frames_per_batch=4, replay_buffer=buffer, post_collect_hook=kept.append)
    collector.next()
    expected = kept[0].clone()
    collector.next()
    assert (kept[0] == expected).all()
    collector.post_collect_hook = None
    collector.next()
    assert "direct" in collector.stats()["paths"]["buffer"]


@pytest.mark.parametrize("plain", [False, True])
def test_what_only_the_policy_writes_is_stored_after_random_frames(make, plain):
    """As with an actor that writes loc and scale beside its actions, and these in another dtype than their spec."""

    def policy(td):
        return td.update({"action": torch.tensor([1.0, 0.0]), "loc": torch.ones(3)})

    for options in ({}, {"extend_buffer": False}, {"trajs_per_batch": 1, "max_frames_per_traj": 4}):
        buffer = a_buffer()
        options = {"frames_per_batch": 4, "init_random_frames": 4, "replay_buffer": buffer, **options}
        collector = make(ENVS["single"], policy, use_buffers=False if plain else None, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                collector.next()
        assert len(buffer) == 12
        assert buffer[:]["loc"].sum(-1).tolist() == [0] * 4 + [3] * 8
        assert buffer[:]["action"].dtype == torch.float32
        assert bool((buffer[:]["action"].sum(-1) == 1).all())


# Whole trajectories --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "joined"), in_turn(ENVS, [False, True]))
def test_whole_trajectories_are_written_flat_in_the_order_of_their_ends(fill, yielded, same, kind, joined):
    options = {"post_collect_hook": lambda batch: None} if joined else {}
    cat = yielded(kind, trajs_per_batch=1, traj_format="cat")
    buffer = a_buffer()
    collector = fill(kind, buffer, trajs_per_batch=5, **options)
    same(buffer[:], torch.cat(cat))
    stats = collector.stats()
    assert stats["frames"] == 300
    assert stats["frames_held"] + len(buffer) == 300
    assert stats["trajectories_held"] == 0


@pytest.mark.parametrize(("at_once", "writes"), [(None, [1, 1, 1, 1, 1]), (2, [2, 2, 1]), (10, [5])])
def test_several_trajectories_are_written_at_a_time(make, count, at_once, writes):
    class Counted(ReplayBuffer):
        def extend_pieces(self, pieces):
            found.append(sum(bool(piece["next", "done"][-1]) for piece in pieces))
            return super().extend_pieces(pieces)

    found, env = [], CountingEnv(max_steps=3)
    buffer = Counted(storage=LazyTensorStorage(100), batch_size=4)
    collector = make(
        env,
        count(env),
        frames_per_batch=20,
        total_frames=20,
        replay_buffer=buffer,
        trajs_per_batch=5,
        trajs_per_write=at_once,
    )
    assert list(collector) == [None]
    assert found == writes
    assert buffer.write_count == 20


def test_until_one_is_complete_the_buffer_stays_empty(make, count):
    env, buffer = CountingEnv(max_steps=9), a_buffer()
    collector = make(env, count(env), frames_per_batch=4, replay_buffer=buffer, trajs_per_batch=2)
    lengths = []
    for _ in range(6):
        assert collector.next() is None
        lengths.append(len(buffer))
    assert lengths == [0, 0, 10, 10, 20, 20]
    assert collector.stats()["batches"] == 6


def test_postproc_gets_each_trajectory(fill):
    seen = []

    def postproc(batch):
        seen.append(batch)
        return batch.set("length", torch.full(batch.shape, len(batch)))

    buffer = a_buffer()
    fill("vector", buffer, trajs_per_batch=1, postproc=postproc)
    assert all(len(batch[IDS].unique()) == 1 for batch in seen)
    assert torch.cat([batch["length"] for batch in seen]).tolist() == buffer[:]["length"].tolist()


def test_a_trajectory_longer_than_the_storage(make, count):
    env, buffer = CountingEnv(max_steps=9), a_buffer(8)
    collector = make(env, count(env), frames_per_batch=10, replay_buffer=buffer, trajs_per_batch=1)
    with pytest.raises(ValueError, match=r"10 frames.*room for 8.*max_frames_per_traj"):
        collector.next()
    assert len(buffer) == 0
    assert collector.stats()["frames_dropped"] == 10


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"replay_buffer": 5}, TypeError, ["replay_buffer", "extend(), add(), sample()", "ReplayBuffer"]),
        ({"replay_buffer": ReplayBuffer}, TypeError, ["replay_buffer", "is a class"]),
        ({"replay_buffer": ReplayBufferEnsemble(a_buffer())}, ValueError, ["worker_idx=None", "0 to 0"]),
        ({"replay_buffer": ReplayBufferEnsemble(a_buffer()), "worker_idx": 1}, ValueError, ["worker_idx=1"]),
        ({"compact_obs": True}, ValueError, ["compact_obs", "table"]),
        ({"split_trajs": True}, ValueError, ["split_trajs", "padding"]),
        ({"return_same_td": True}, ValueError, ["return_same_td"]),
        ({"trajs_per_batch": 2, "extend_buffer": False}, ValueError, ["trajs_per_batch", "extend_buffer"]),
        ({"trajs_per_batch": 2, "traj_format": "cat"}, ValueError, ["traj_format"]),
        ({"trajs_per_write": 2}, ValueError, ["trajs_per_write=2", "trajs_per_batch="]),
        ({"trajs_per_write": 0, "trajs_per_batch": 2}, ValueError, ["trajs_per_write", "at least 1"]),
        ({"extend_buffer": False, "set_truncated": True}, ValueError, ["set_truncated", "extend_buffer"]),
        ({"replay_buffer": None, "extend_buffer": False}, ValueError, ["extend_buffer", "replay_buffer is None"]),
        ({"extend_buffer": None}, TypeError, ["extend_buffer", "True or False"]),
        (
            {"trajs_per_batch": 2, "replay_buffer": ReplayBuffer(storage=LazyTensorStorage(10, ndim=2))},
            ValueError,
            ["trajs_per_batch", "ndim=2", "ndim=1"],
        ),
    ],
    ids=str,
)
def test_bad_input_at_construction(options, error, words):
    with pytest.raises(error) as caught:
        Collector(CountingEnv(), frames_per_batch=4, **{"replay_buffer": a_buffer(), **options})
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("way", WAYS)
def test_frames_that_do_not_fit_the_buffer_say_which_entries(make, way):
    buffer = a_buffer()
    buffer.extend(TensorDict({"other": torch.zeros(3)}, [3]))
    collector = make(CountingEnv(), None, frames_per_batch=4, replay_buffer=buffer, **WAYS[way])
    with pytest.raises(KeyError, match=r"Missing: 'other'; unknown:.*'action'"):
        collector.next()
    assert len(buffer) == 3


def test_a_storage_of_two_dimensions_and_one_environment(make):
    collector = make(CountingEnv(), None, frames_per_batch=4, replay_buffer=a_buffer(ndim=2))
    with pytest.raises(ValueError, match="2 batch dimensions"):
        collector.next()


def test_a_rollout_that_fails_leaves_no_row(make, count):
    env, buffer = CountingEnv(max_steps=9), a_buffer()
    act, fails = count(env), iter([False] * 6 + [True])

    def policy(td):
        if next(fails, False):
            raise OSError("once")
        return act(td)

    collector = make(env, policy, frames_per_batch=4, replay_buffer=buffer)
    collector.next()
    with pytest.raises(OSError, match="once"):
        collector.next()
    assert len(buffer) == 4
    collector.next()
    assert buffer[:]["observation"].flatten().tolist()[-4:] == [0, 1, 2, 3]
    assert int(buffer[:][IDS][-1]) != int(buffer[:][IDS][0])  # no trajectory goes on across the hole


def test_a_write_that_fails_begins_new_trajectories(make, count):
    env = CountingEnv(max_steps=9)

    class Full(ReplayBuffer):
        full = True

        def direct_writes(self):
            return "a test"

        def extend(self, data):
            if self.full:
                raise OSError("no space left")
            return super().extend(data)

    buffer = Full(storage=LazyTensorStorage(100))
    collector = make(env, count(env), frames_per_batch=4, replay_buffer=buffer)
    with pytest.raises(OSError, match="no space"):
        collector.next()
    buffer.full = False
    collector.next()
    assert buffer[:]["observation"].flatten().tolist() == [0, 1, 2, 3]


def test_a_rollout_of_ones_own_is_not_written(make):
    buffer = a_buffer()
    for options in ({}, {"extend_buffer": False}):
        collector = make(CountingEnv(), None, frames_per_batch=4, replay_buffer=buffer, **options)
        assert collector.rollout().shape == (4,)
    assert len(buffer) == 0


# State ---------------------------------------------------------------------------------------------------------------


def test_a_restored_collector_writes_what_it_would_have(make, same):
    def build(buffer):
        collector = make(ENVS["vector"], None, frames_per_batch=30, replay_buffer=buffer, trajs_per_batch=1)
        collector.set_seed(0)
        return collector

    buffer, later = a_buffer(), a_buffer()
    first = build(buffer)
    first.next()
    state, count = first.state_dict(), len(buffer)
    for _ in range(4):
        first.next()
    second = build(later)
    second.load_state_dict(state)
    for _ in range(4):
        second.next()
    same(later[:], buffer[count:])


def test_slices_without_ids_of_several_environments_are_refused(make):
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=4), batch_size=8)
    env = GymEnv("CartPole-v1", num_envs=2)
    with pytest.raises(ValueError, match=r"track_traj_ids=False.*2 environments.*ndim=2"):
        make(env, replay_buffer=buffer, track_traj_ids=False)
