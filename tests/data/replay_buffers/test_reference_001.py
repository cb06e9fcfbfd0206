"""The examples of the page on contiguous trajectories, under this package's name, and what the page says of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential

from rollwright.collectors import Collector
from rollwright.data import (
    LazyTensorStorage,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
    split_trajectories,
)
from rollwright.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv
from rollwright.modules import GRUModule, set_recurrent_mode


def make_env():
    return GymEnv("CartPole-v1")


def make_tracked_env():
    return TransformedEnv(GymEnv("CartPole-v1"), InitTracker())


def check_slices(batch: TensorDict) -> None:
    """A flat batch: consecutive frames of one trajectory between two marks."""
    first = batch["is_init"].reshape(-1)
    goes_on = ~first[1:]
    ids = batch["collector", "traj_ids"].reshape(-1)
    assert first[0]
    assert (ids[1:] == ids[:-1])[goes_on].all()
    assert torch.equal(batch["next", "observation"][:-1][goes_on], batch["observation"][1:][goes_on])
    assert not batch["next", "done"].reshape(-1)[:-1][goes_on].any()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


# The storage's ndim ------------------------------------------------------------------------------


def test_one_dimension_takes_rows():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100))
    buffer.extend(TensorDict({"x": torch.arange(10)}, [10]))
    assert len(buffer) == 10
    assert buffer[:].batch_size == (10,)


def test_two_dimensions_take_the_batches_of_a_batched_environment():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(400, ndim=2), sampler=SliceSampler(num_slices=4), batch_size=32
    )
    with Collector(SerialEnv(2, make_env), None, frames_per_batch=50, total_frames=300) as collector:
        for batch in collector:
            assert batch.batch_size == (2, 25)
            buffer.extend(batch)
            sample = buffer.sample()
            check_slices(sample)
            assert sample.batch_size[0] <= 32
    assert buffer[:].batch_size == (2, 150)


def test_three_dimensions_take_a_dimension_of_workers_and_one_of_environments():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000, ndim=3), sampler=SliceSampler(slice_len=5), batch_size=100
    )
    env = SerialEnv(2, make_env)
    with Collector(env, None, frames_per_batch=40, total_frames=320) as collector:
        batches = list(collector)
    for first, second in zip(batches[::2], batches[1::2], strict=True):  # two workers would deliver such batches
        both = torch.stack([first, second])
        both["collector", "traj_ids"] = both["collector", "traj_ids"] + torch.tensor([0, 10_000])[:, None, None]
        buffer.extend(both)
    assert buffer[:].batch_size == (2, 2, 80)
    batch = buffer.sample()
    ids, first = batch["collector", "traj_ids"], batch["is_init"].reshape(-1)
    assert (ids[1:] == ids[:-1])[~first[1:]].all()
    assert batch["index"].shape[-1] == 3


def test_set_truncated_marks_the_last_frame_of_each_batch():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000), sampler=SliceSampler(slice_len=8, end_key=("next", "done")), batch_size=64
    )
    with Collector(make_env, None, frames_per_batch=20, total_frames=200, set_truncated=True) as collector:
        for batch in collector:
            assert bool(batch["next", "done"][-1])
            assert bool(batch["next", "truncated"][-1]) != bool(batch["next", "terminated"][-1])
            buffer.extend(batch)
    drawn = buffer.sample(800)
    goes_on = ~drawn["is_init"].reshape(-1)[1:]
    batch_of = drawn["index"] // 20
    assert (batch_of[1:] == batch_of[:-1])[goes_on].all()  # a slice stays inside a batch


# One buffer per worker ---------------------------------------------------------------------------


def make_ensemble(num_workers: int, ndim: int) -> ReplayBufferEnsemble:
    buffers = [
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(500, ndim=ndim),
            sampler=SliceSampler(num_slices=4),
        )
        for _ in range(num_workers)
    ]
    return ReplayBufferEnsemble(*buffers, sample_from_all=True, batch_size=256)


def check_ensemble(rb: ReplayBufferEnsemble, workers: int) -> None:
    batch = rb.sample()
    assert len(batch) == workers
    for worker in range(workers):
        row = batch[worker]
        assert row.batch_size[0] <= 256 // workers
        assert (row["index", "buffer_ids"] == worker).all()
        check_slices(row)


@pytest.mark.parametrize("ndim", [1, 2])
def test_each_worker_writes_its_own_member(ndim):
    """What the page leaves to the user: each worker's batches go to the member of its own."""
    num_workers = 4
    rb = make_ensemble(num_workers, ndim)
    env = make_env if ndim == 1 else (lambda: SerialEnv(2, make_env))
    collectors = [Collector(env, None, frames_per_batch=60, total_frames=240) for _ in range(num_workers)]
    for batches in zip(*collectors, strict=True):
        for worker, batch in enumerate(batches):
            rb.extend(batch, member=worker)
    for collector in collectors:
        collector.shutdown()
    check_ensemble(rb, num_workers)
    assert rb.write_count == 4 * 240


def test_a_collector_writes_into_the_member_of_its_worker():
    rb = make_ensemble(2, 1)
    for worker in range(2):
        with Collector(
            make_env, None, replay_buffer=rb, frames_per_batch=200, total_frames=400, worker_idx=worker
        ) as collector:
            assert list(collector) == [None, None]
    assert [member.write_count for member in rb.members] == [400, 400]
    check_ensemble(rb, 2)


def test_the_environments_of_a_batch_are_routed_to_members():
    rb = ReplayBufferEnsemble(
        *[TensorDictReplayBuffer(storage=LazyTensorStorage(500), sampler=SliceSampler(num_slices=4)) for _ in range(2)],
        sample_from_all=True,
        batch_size=64,
        routing_dim=0,
    )
    with Collector(SerialEnv(2, make_env), None, replay_buffer=rb, frames_per_batch=80, total_frames=400) as collector:
        for _ in collector:
            pass
    assert [len(member) for member in rb.members] == [200, 200]
    check_ensemble(rb, 2)


# Complete trajectories ---------------------------------------------------------------------------


def test_the_buffer_holds_complete_trajectories():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100_000),
        sampler=SliceSampler(slice_len=32),
        batch_size=256,
    )
    collector = Collector(
        make_env,
        None,
        replay_buffer=rb,
        frames_per_batch=200,
        total_frames=-1,
        trajs_per_batch=8,
    )
    batches = iter(collector)
    for _ in range(4):
        next(batches)
        held = rb[:]
        ends = held["next", "done"].reshape(-1)
        assert ends[-1]
        ids = held["collector", "traj_ids"]
        assert (ends.nonzero()[:-1, 0] == (ids.diff() != 0).nonzero()[:, 0]).all()
        batch = rb.sample()
        check_slices(batch)
        assert batch.batch_size[0] <= 256
    collector.shutdown()


def test_the_buffer_is_filled_in_the_background():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), sampler=SliceSampler(slice_len=32), batch_size=256)
    collector = Collector(make_env, None, replay_buffer=rb, frames_per_batch=200, total_frames=2000, trajs_per_batch=8)
    collector.start()
    train_steps = 0
    while train_steps < 20:
        if len(rb):
            check_slices(rb.sample())
            train_steps += 1
    collector.async_shutdown()
    assert rb[:]["next", "done"].reshape(-1)[-1]


# SliceSampler ------------------------------------------------------------------------------------


def test_a_slice_sample_goes_straight_into_a_recurrent_policy():
    """The flat batch gives what the hand-made [num_slices, slice_len] call gives."""
    gru = GRUModule(
        input_size=4,
        hidden_size=8,
        num_layers=1,
        in_keys=["observation", "recurrent_state", "is_init"],
        out_keys=["features", ("next", "recurrent_state")],
    )
    recurrent_policy = TensorDictSequential(
        gru,
        TensorDictModule(torch.nn.Linear(8, 2), in_keys=["features"], out_keys=["logits"]),
        TensorDictModule(
            lambda logits: torch.nn.functional.one_hot(logits.argmax(-1), 2), in_keys=["logits"], out_keys=["action"]
        ),
    )
    sampler = SliceSampler(num_slices=4, slice_len=32, strict_length=False)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100_000), sampler=sampler, batch_size=128)
    env = GymEnv("CartPole-v1", policy=gru)
    with Collector(env, recurrent_policy, frames_per_batch=100, total_frames=400) as collector:
        for batch in collector:
            rb.extend(batch)
    sample = rb.sample()
    assert sample.batch_size[0] <= 128
    check_slices(sample)
    with torch.no_grad(), set_recurrent_mode("recurrent"):
        out = recurrent_policy(sample.clone())
    starts = [*sample["is_init"].reshape(-1).nonzero()[:, 0].tolist(), len(sample)]
    for start, stop in itertools.pairwise(starts):
        alone = sample[start:stop].clone()
        with torch.no_grad(), set_recurrent_mode("recurrent"):
            features = recurrent_policy(alone.unsqueeze(0))["features"].squeeze(0)
        assert torch.allclose(out["features"][start:stop], features, atol=1e-6)


def test_marks_of_slices_are_joined_with_those_of_resets():
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1000), sampler=SliceSampler(slice_len=10, traj_key="one"), batch_size=100
    )
    with Collector(make_tracked_env, None, frames_per_batch=200, total_frames=200) as collector:
        batch = collector.next()
    batch["one"] = torch.zeros(200, dtype=torch.int64)  # slices over resets
    rb.extend(batch)
    sample = rb.sample()
    stored = batch["is_init"].reshape(-1)[sample["index"]]
    begins = torch.zeros(100, dtype=torch.bool)
    begins[::10] = True
    assert torch.equal(sample["is_init"].reshape(-1), stored | begins)
    assert (stored & ~begins).any()
    assert torch.equal(rb[:]["is_init"], batch["is_init"])  # what is stored stays


def test_short_slices_are_kept_and_padding_has_a_mask():
    ids = torch.tensor([0] * 3 + [1] * 3)
    data = TensorDict({"obs": torch.arange(6), "collector": {"traj_ids": ids}}, [6])
    ragged = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=4), batch_size=8)
    ragged.extend(data)
    batch = ragged.sample()
    assert batch.batch_size == (6,)
    assert ("collector", "mask") not in batch.keys(True)
    padded = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=SliceSampler(slice_len=4, pad_output=True), batch_size=8
    )
    padded.extend(data)
    batch = padded.sample()
    mask = batch["collector", "mask"]
    assert mask.tolist() == [True, True, True, False] * 2
    assert mask.dtype == torch.bool
    assert torch.equal(batch["obs"][3::4], batch["obs"][2::4])  # the last real step again


def test_the_key_of_trajectories_is_found_out():
    """Ids of the collector before "episode" before the flag of the end."""
    ids, episode = torch.tensor([0] * 6 + [1] * 6), torch.arange(12) // 3
    ends = (torch.arange(12) % 2 == 1).unsqueeze(-1)
    every = TensorDict(
        {"collector": {"traj_ids": ids}, "episode": episode, "next": {"done": torch.zeros_like(ends)}}, [12]
    )
    for data, longest in (
        (every, 6),
        (every.exclude(("collector", "traj_ids")), 3),
        (TensorDict({"next": {"done": ends}}, [12]), 2),
    ):
        rb = TensorDictReplayBuffer(
            storage=LazyTensorStorage(20), sampler=SliceSampler(slice_len=longest), batch_size=12
        )
        rb.extend(data)
        assert rb.sample(longest * 4).batch_size == (longest * 4,)
        rb.set_sampler(SliceSampler(slice_len=longest + 1, strict_length=True))
        with pytest.raises(ValueError, match=f"expected at most {longest}"):
            rb.sample(longest + 1)


# Recurrent policies find what they need ----------------------------------------------------------


@pytest.mark.parametrize("way", ["environment", "collector", "both"])
def test_what_a_recurrent_policy_needs_is_registered(way):
    gru = GRUModule(
        input_size=4,
        hidden_size=8,
        num_layers=1,
        in_keys=["observation", "recurrent_state", "is_init"],
        out_keys=["features", ("next", "recurrent_state")],
    )
    policy = TensorDictSequential(
        gru,
        TensorDictModule(
            lambda x: torch.nn.functional.one_hot((x.sum(-1) > 0).long(), 2), in_keys=["features"], out_keys=["action"]
        ),
    )
    env = GymEnv("CartPole-v1") if way == "collector" else GymEnv("CartPole-v1", policy=gru)
    if way != "collector":
        assert {"is_init", "recurrent_state"} <= set(env.reset().keys())
    with Collector(
        env, policy, frames_per_batch=30, total_frames=60, auto_register_policy_transforms=way != "environment"
    ) as collector:
        batch = collector.next()
    assert {"is_init", "recurrent_state"} <= set(batch.keys())
    assert batch["is_init"].reshape(-1)[0]
    assert ("next", "recurrent_state") in batch.keys(True)


# The older layout --------------------------------------------------------------------------------


def test_trajectories_are_split_off_a_flat_batch():
    with Collector(make_env, None, frames_per_batch=100, total_frames=100) as collector:
        batch = collector.next()
    ids = batch["collector", "traj_ids"]
    nested = split_trajectories(batch, as_nested=True)
    padded = split_trajectories(batch)
    assert len(padded) == len(ids.unique())
    assert (
        int(padded["collector", "mask"].sum() if ("collector", "mask") in padded.keys(True) else padded["mask"].sum())
        == 100
    )
    assert len(nested) == len(padded)
    with pytest.warns(UserWarning, match="split_trajs"):
        collector = Collector(make_env, None, frames_per_batch=100, total_frames=100, split_trajs=True)
    collector.shutdown()
