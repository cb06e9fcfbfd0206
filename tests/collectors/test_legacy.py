"""SyncDataCollector: reference 003's example, keys and shapes, and what differs from Collector."""

from __future__ import annotations

import itertools

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright.collectors.collectors import SyncDataCollector
from rollwright.envs import ExplorationType
from rollwright.envs.libs.gym import GymEnv
from rollwright.testing.mocking_classes import CountingEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*split_trajs=True pads")


# Key, shape and dtype as reference 003 prints them.
PRINTED = [
    ("action", (4, 50, 1), torch.float32),
    (("collector", "step_count"), (4, 50), torch.int64),
    (("collector", "traj_ids"), (4, 50), torch.int64),
    ("done", (4, 50, 1), torch.bool),
    ("mask", (4, 50), torch.bool),
    (("next", "observation"), (4, 50, 3), torch.float32),
    ("observation", (4, 50, 3), torch.float32),
    ("reward", (4, 50, 1), torch.float32),
]


@pytest.fixture
def data():
    def env_maker():
        return GymEnv("Pendulum-v1", device="cpu")

    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    collector = SyncDataCollector(
        create_env_fn=env_maker,
        policy=policy,
        total_frames=2000,
        max_frames_per_traj=50,
        frames_per_batch=200,
        init_random_frames=-1,
        reset_at_each_iter=False,
        device="cpu",
        storing_device="cpu",
    )
    yield list(itertools.islice(collector, 3))[2]
    collector.shutdown()


@pytest.mark.parametrize(("key", "shape", "dtype"), PRINTED)
def test_every_printed_entry(data, key, shape, dtype):
    assert data[key].shape == shape
    assert data[key].dtype == dtype
    assert data[key].device == torch.device("cpu")


def test_the_printed_batch(data):
    assert data.batch_size == (4, 50)
    assert data["collector"].batch_size == (4, 50)
    assert data["next"].batch_size == (4, 50)
    assert data.device == torch.device("cpu")
    assert data.names[-1] == "time"


def test_the_printed_entries_hold_what_their_names_say(data):
    assert torch.equal(data["collector", "step_count"], torch.arange(50).expand(4, 50))
    ids = data["collector", "traj_ids"]
    assert torch.equal(ids, ids[:, :1].expand(4, 50))
    assert ids[:, 0].tolist() == [8, 9, 10, 11]  # the third batch of four trajectories
    assert bool(data["mask"].all())
    assert torch.equal(data["reward"], data["next", "reward"])
    assert data["next", "truncated"].squeeze(-1).nonzero().tolist() == [[row, 49] for row in range(4)]


def test_whole_batches_unless_trajectories_are_limited():
    collector = SyncDataCollector(CountingEnv(), None, frames_per_batch=10, total_frames=10)
    batch = collector.next()
    collector.shutdown()
    assert batch.shape == (10,)
    assert "mask" not in batch


@pytest.mark.parametrize("split", [True, False])
def test_split_trajs_can_be_said(split):
    collector = SyncDataCollector(
        CountingEnv(max_steps=100), None, frames_per_batch=10, total_frames=10, max_frames_per_traj=5, split_trajs=split
    )
    batch = collector.next()
    collector.shutdown()
    assert batch.shape == ((2, 5) if split else (10,))


def test_a_total_that_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match=r"total_frames.*frames_per_batch=200"):
        SyncDataCollector(CountingEnv(), None, frames_per_batch=200, total_frames=2001)


def test_endless():
    collector = SyncDataCollector(CountingEnv(), None, frames_per_batch=10, total_frames=-1)
    assert [collector.next().numel() for _ in range(3)] == [10] * 3
    collector.shutdown()


@pytest.mark.parametrize("mode", ["random", "mode", "mean"])
def test_exploration_mode_is_the_older_form(mode):
    from rollwright.envs import exploration_type

    seen = []

    def policy(td):
        seen.append(exploration_type())
        return td.set("action", torch.ones(1, dtype=torch.int8))

    collector = SyncDataCollector(CountingEnv(), policy, frames_per_batch=2, total_frames=2, exploration_mode=mode)
    collector.next()
    collector.shutdown()
    assert set(seen) == {ExplorationType[mode.upper()]}


def test_exploration_mode_errors():
    with pytest.raises(ValueError, match=r"exploration_mode.*'random'.*'greedy'"):
        SyncDataCollector(CountingEnv(), None, frames_per_batch=2, total_frames=2, exploration_mode="greedy")
    with pytest.raises(ValueError, match=r"exploration_mode.*exploration_type"):
        SyncDataCollector(
            CountingEnv(),
            None,
            frames_per_batch=2,
            total_frames=2,
            exploration_mode="mode",
            exploration_type=ExplorationType.MODE,
        )


def test_an_unknown_option_names_the_class():
    with pytest.raises(TypeError, match=r"SyncDataCollector.*'frame_per_batch'.*'frames_per_batch'"):
        SyncDataCollector(CountingEnv(), None, frame_per_batch=2, total_frames=2)


def test_legacy_methods():
    collector = SyncDataCollector(CountingEnv(), None, frames_per_batch=2, total_frames=8)
    assert next(collector.iterator()).shape == (2,)
    collector.reset()
    assert collector.rollout().shape == (2,)
    state = collector.state_dict()
    assert "env_state_dict" in state
    collector.load_state_dict(state)
    collector.update_policy_weights_()
    assert collector.set_seed(3) == 3
    collector.shutdown()
