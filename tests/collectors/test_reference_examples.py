"""The code examples of references 000, 002 and 003 that concern one process, under our package's name."""

from __future__ import annotations

import json

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:.*split_trajs=True pads")


def test_003_pendulum():
    from rollwright.collectors.collectors import SyncDataCollector
    from rollwright.envs.libs.gym import GymEnv

    env_maker = lambda: GymEnv("Pendulum-v1", device="cpu")  # noqa: E731
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
    for i, data in enumerate(collector):
        if i == 2:
            printed = str(data)
            break
    for name in ("action", "collector", "step_count", "traj_ids", "done", "mask", "next", "observation", "reward"):
        assert f"{name}:" in printed
    assert data.batch_size == torch.Size([4, 50])
    del collector
    # The collector delivers batches of data that are marked with a "time" dimension.
    assert data.names[-1] == "time"


def test_003_set_seed():
    from rollwright.collectors import SyncDataCollector
    from rollwright.envs import SerialEnv  # the example's ParallelEnv, in one process
    from rollwright.envs.libs.gym import GymEnv

    env_fn = lambda: GymEnv("Pendulum-v1")  # noqa: E731
    env_fn_parallel = SerialEnv(6, env_fn)
    with pytest.warns(UserWarning, match="204"):  # 200 frames, the default, by 6 environments
        collector = SyncDataCollector(env_fn_parallel)
    out_seed = collector.set_seed(1)
    assert out_seed == 6
    collector.shutdown()


@pytest.fixture
def collector():
    from rollwright.collectors import Collector
    from rollwright.envs import GymEnv

    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    with Collector(
        create_env_fn=lambda: GymEnv("Pendulum-v1"), policy=policy, frames_per_batch=50, total_frames=400
    ) as collector:
        yield collector


@pytest.fixture
def trained_policy():
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


def acts_as(collector, policy):
    batch = collector.next()
    with torch.no_grad():
        expected = policy(batch.select("observation").clone())["action"]
    torch.testing.assert_close(batch["action"], expected)
    return True


def test_002_cascade_execute(collector):
    class Scheme:
        def _set_dist_connection_info(self, info, worker_idx):
            self.told = info, worker_idx

    collector._receiver_schemes = {"policy": Scheme()}
    connection_info_ref = object()
    collector.cascade_execute(
        "_receiver_schemes['policy']._set_dist_connection_info", connection_info_ref, worker_idx=0
    )
    assert collector._receiver_schemes["policy"].told == (connection_info_ref, 0)


def test_002_enable_profile(collector, tmp_path):
    collector.enable_profile(
        workers=[0],
        num_rollouts=5,
        warmup_rollouts=2,
        save_path=str(tmp_path / "traces" / "worker_{worker_idx}.json"),
    )
    # Worker 0 will be profiled for rollouts 2, 3, 4
    for data in collector:
        assert data.numel() == 50
    collector.shutdown()
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
    collector.update_policy_weights_(weights_td)
    assert acts_as(collector, trained_policy)
    collector.update_policy_weights_(trained_policy, worker_ids=[0], model_id="policy")
    # Per-worker weight updates (this collector is worker 0)
    collector.update_policy_weights_({0: weights_td})
    assert acts_as(collector, trained_policy)


def test_002_update_policy_weights_of_models_by_name():
    from rollwright.collectors import Collector
    from rollwright.envs import GymEnv

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, observation):
            return self.actor(observation), self.critic(observation)

    acting, trained = ActorCritic(), ActorCritic()
    actor_module = trained.actor
    weights_td = actor_weights = TensorDict.from_module(trained.actor).data
    critic_weights = TensorDict.from_module(trained.critic).data
    with Collector(lambda: GymEnv("Pendulum-v1"), acting, frames_per_batch=10) as collector:
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


def test_000_what_the_page_says_of_one_step(collector):
    """The names under which contributors find the machinery."""
    for name in (
        "_sync_policy",
        "_sync_env",
        "_sync_storage",
        "_get_sync_fn",
        "_setup_devices",
        "_make_carrier",
        "_update_traj_ids",
        "rollout",
    ):
        assert callable(getattr(collector, name)), name
    for flag in ("_cast_to_policy_device", "_cast_to_env_device", "_carrier_has_no_device"):
        assert isinstance(getattr(collector, flag), bool), flag
    collector._make_carrier()
    carrier = collector._carrier
    assert "observation" in carrier
    assert ("collector", "traj_ids") in carrier.keys(True)
    batch = collector.next()
    assert torch.equal(collector._carrier["observation"], batch["next", "observation"][-1])


def test_000_split_trajs_needs_track_traj_ids():
    from rollwright.collectors import Collector
    from rollwright.envs import GymEnv

    with pytest.raises(ValueError, match="track_traj_ids"):
        Collector(lambda: GymEnv("Pendulum-v1"), None, frames_per_batch=10, split_trajs=True, track_traj_ids=False)
