"""The examples of references 000 to 003 that speak of many workers, under our package's name."""

from __future__ import annotations

import json
import os

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tests.collectors.workers.envs import IDS, gain, tally
from tests.collectors.workers.frames import check
from tests.collectors.workers.processes import wait_until
from torch import nn

from rollwright.envs import GymEnv


def make_env():
    return GymEnv("Pendulum-v1")


def actor():
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


@pytest.fixture
def ends():
    """``ends(collector)``: shut down after the test."""
    made = []
    yield lambda collector: made.append(collector) or collector
    for collector in made:
        collector.shutdown(raise_on_error=False)


def acts_as(collector, policy, worker=None):
    batch = collector.next()
    batch = batch if worker is None else batch[worker]
    with torch.no_grad():
        expected = policy(batch.select("observation").clone())["action"]
    torch.testing.assert_close(batch["action"], expected)
    return True


# 000 and 001 -------------------------------------------------------------------------------------------------------


def test_000_hooks_run_inside_each_worker(ends, tmp_path):
    from rollwright.collectors import MultiSyncCollector

    def pre():
        (tmp_path / f"pre-{os.getpid()}").touch()

    def post(batch):
        assert batch.shape == (10,)
        (tmp_path / f"post-{os.getpid()}").touch()

    collector = ends(
        MultiSyncCollector([make_env] * 2, frames_per_batch=20, pre_collect_hook=pre, post_collect_hook=post)
    )
    collector.next()
    names = {path.name for path in tmp_path.iterdir()}
    pids = [worker["pid"] for worker in collector.stats()["workers"]]
    assert names == {f"{name}-{pid}" for name in ("pre", "post") for pid in pids}


def test_001_an_ensemble_with_a_member_a_worker(ends):
    from rollwright.collectors import MultiCollector
    from rollwright.data import LazyTensorStorage, ReplayBufferEnsemble, TensorDictReplayBuffer
    from rollwright.data.replay_buffers import SliceSampler

    N, policy = 1000, actor()
    num_workers = 4
    buffers = [
        TensorDictReplayBuffer(
            storage=LazyTensorStorage(N, ndim=2),  # one row = one rollout
            sampler=SliceSampler(num_slices=4),
        )
        for _ in range(num_workers)
    ]
    rb = ReplayBufferEnsemble(*buffers, sample_from_all=True, batch_size=256)
    collector = ends(
        MultiCollector(
            [lambda: GymEnv("Pendulum-v1", num_envs=2)] * num_workers,
            policy,
            replay_buffer=rb,
            frames_per_batch=200,
            total_frames=800,
        )
    )
    for data in collector:
        assert data is None
    assert sum(len(buffer) for buffer in buffers) >= 800
    assert rb.sample() is not None


def test_001_complete_trajectories(ends):
    from rollwright.collectors import MultiCollector
    from rollwright.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

    make_env, policy, train_steps = tally, gain(), 30
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(100_000),  # ndim=1
        sampler=SliceSampler(slice_len=32),  # auto-detects ("collector", "traj_ids")
        batch_size=256,
    )
    collector = ends(
        MultiCollector(
            [make_env] * 4,
            policy,
            replay_buffer=rb,
            frames_per_batch=200,
            total_frames=-1,
            trajs_per_batch=8,  # each worker writes COMPLETE trajectories only
            sync=False,
        )
    )
    collector.start()
    assert wait_until(lambda: len(rb) > 500)
    for _ in range(train_steps):
        batch = rb.sample()  # variable-length contiguous slices, no leaks
        inside = (batch[IDS][1:] == batch[IDS][:-1]) & ~batch["is_init"].reshape(-1)[1:]
        assert torch.equal(batch["observation"][1:, 3][inside], batch["observation"][:-1, 3][inside] + 1)
    collector.async_shutdown()
    check(rb[:], whole=True)


# 002 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [True, False], ids=["start", "iteration"])
def test_002_workers_fill_a_buffer_with_complete_trajectories(ends, started):
    from rollwright.collectors import MultiSyncCollector
    from rollwright.data import LazyTensorStorage, ReplayBuffer, SliceSampler

    env_fn, policy = tally, gain()
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10_000),
        sampler=SliceSampler(slice_len=16, end_key=("next", "done")),
        shared=True,
    )
    collector = ends(
        MultiSyncCollector(
            [env_fn] * 4,
            policy,
            replay_buffer=rb,
            frames_per_batch=200,
            total_frames=-1,
            trajs_per_batch=32,
        )
    )
    if started:
        collector.start()  # workers fill rb with complete trajectories
        assert wait_until(lambda: len(rb) > 1000)
        collector.async_shutdown()
    else:
        for number, data in enumerate(collector):
            assert data is None
            if number > 5:
                break
        collector.shutdown()
    assert len(rb) > 0
    check(rb[:], whole=True)


@pytest.fixture
def collector(ends):
    from rollwright.collectors import MultiSyncCollector

    return ends(MultiSyncCollector([make_env] * 3, actor(), frames_per_batch=60, total_frames=600))


@pytest.fixture
def trained_policy():
    return actor()


def test_002_cascade_execute(collector):
    seen = collector.cascade_execute("stats")
    assert seen["frames"] == 0


def test_002_enable_profile(ends, tmp_path):
    from rollwright.collectors import MultiSyncCollector

    collector = ends(
        MultiSyncCollector(create_env_fn=[make_env] * 4, policy=actor(), frames_per_batch=100, total_frames=1000)
    )
    collector.enable_profile(
        workers=[0],
        num_rollouts=5,
        warmup_rollouts=2,
        save_path=str(tmp_path / "traces" / "worker_{worker_idx}.json"),
    )
    # Worker 0 will be profiled for rollouts 2, 3, 4
    for data in collector:
        assert data.numel() == 100
    collector.shutdown()
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["worker_0.json"]
    assert json.loads((tmp_path / "traces" / "worker_0.json").read_text())["traceEvents"]


def test_002_receive_weights(collector, trained_policy):
    weights_td = TensorDict.from_module(trained_policy).data
    # Receive from registered schemes, or mirror the original policy
    collector.receive_weights()
    # Apply weights from a policy module (positional)
    collector.receive_weights(trained_policy)
    assert acts_as(collector, trained_policy)
    # Apply weights from a TensorDict (positional)
    collector.receive_weights(weights_td)
    # Use keyword arguments for clarity
    collector.receive_weights(weights=weights_td)
    collector.receive_weights(policy=trained_policy)
    assert acts_as(collector, trained_policy)


def test_002_update_policy_weights_(collector, trained_policy):
    weights_td = TensorDict.from_module(trained_policy).data
    collector.update_policy_weights_(trained_policy)
    assert acts_as(collector, trained_policy)
    other = actor()
    collector.update_policy_weights_(TensorDict.from_module(other).data)
    assert acts_as(collector, other)
    collector.update_policy_weights_(weights=weights_td, model_id="policy")
    assert acts_as(collector, trained_policy)
    # Per-worker weight updates (for distinct policy factories)
    actors = [actor() for _ in range(3)]
    worker_0_weights, worker_1_weights, worker_2_weights = (TensorDict.from_module(a).data for a in actors)
    collector.update_policy_weights_({0: worker_0_weights, 1: worker_1_weights, 2: worker_2_weights})
    batch = collector.next()
    for worker, policy in enumerate(actors):
        with torch.no_grad():
            expected = policy(batch[worker].select("observation").clone())["action"]
        torch.testing.assert_close(batch[worker]["action"], expected)


def test_002_update_several_models(ends):
    from rollwright.collectors import MultiSyncCollector

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, observation):
            return self.actor(observation), self.critic(observation)

    acting, trained = ActorCritic(), ActorCritic()
    collector = ends(MultiSyncCollector([make_env] * 2, acting, frames_per_batch=20))
    actor_module = trained.actor
    weights_td = actor_weights = TensorDict.from_module(trained.actor).data
    critic_weights = TensorDict.from_module(trained.critic).data
    collector.update_policy_weights_(weights=weights_td, model_id="actor")
    collector.update_policy_weights_(policy=actor_module, model_id="actor")
    # Update multiple models atomically
    collector.update_policy_weights_(
        weights_dict={
            "actor": actor_weights,
            "critic": critic_weights,
        }
    )
    batch = collector.next()
    torch.testing.assert_close(batch["action"], trained.actor(batch["observation"]).detach())
    torch.testing.assert_close(batch["output1"], trained.critic(batch["observation"]).detach())


def test_002_async_shutdown_and_pause_and_init_updater(ends):
    from rollwright.collectors import MultiAsyncCollector
    from rollwright.data import LazyTensorStorage, ReplayBuffer

    rb = ReplayBuffer(storage=LazyTensorStorage(5000), shared=True)
    collector = ends(MultiAsyncCollector([make_env] * 2, actor(), frames_per_batch=20, replay_buffer=rb))
    collector.init_updater()  # no updater is set: a no-op
    collector.start()
    with collector.pause():
        pass
    collector.async_shutdown(timeout=10.0, close_env=True)


# 003 ---------------------------------------------------------------------------------------------------------------


def test_003_seeds_of_a_parallel_environment(ends):
    from rollwright import envs
    from rollwright.collectors import SyncDataCollector

    env_fn = lambda: GymEnv("Pendulum-v1")  # noqa: E731
    env_fn_parallel = envs.ParallelEnv(6, env_fn)
    with pytest.warns(UserWarning, match="204"):  # 200 frames, the default, by 6 environments
        collector = ends(SyncDataCollector(env_fn_parallel))
    out_seed = collector.set_seed(1)  # out_seed = 6
    assert out_seed == 6
    collector.shutdown()
