"""What a batch holds: shapes, names, keys, values against a loop written by hand, and memory of its own."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright.envs import GymEnv, SerialEnv
from rollwright.testing.mocking_classes import (
    CountingBatchedEnv,
    CountingEnv,
    CountingEnvWithString,
    EnvWithDynamicSpec,
    EnvWithMetadata,
    HeterogeneousCountingEnv,
    HeterogeneousCountingEnvPolicy,
    MultiKeyCountingEnv,
    MultiKeyCountingEnvPolicy,
    NestedCountingEnv,
)

CARTPOLE = {
    "single": (lambda: GymEnv("CartPole-v1"), ()),
    "serial": (lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")), (2,)),
    "vector": (lambda: GymEnv("CartPole-v1", num_envs=3), (3,)),
    "serial of vectors": (lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1", num_envs=3)), (2, 3)),
}
FLAGS = ("done", "terminated", "truncated")


@pytest.mark.parametrize("kind", CARTPOLE)
def test_layout_of_a_real_batch(make, kind):
    env, shape = CARTPOLE[kind]
    collector = make(env, frames_per_batch=60, total_frames=120)
    for batch in collector:
        length = 60 // max(torch.Size(shape).numel(), 1)
        assert batch.shape == (*shape, length)
        assert batch.names[-1] == "time"
        expected = {
            "observation": ((4,), torch.float32),
            "action": ((2,), None),
            ("next", "observation"): ((4,), torch.float32),
            ("next", "reward"): ((1,), torch.float32),
            ("collector", "traj_ids"): ((), torch.int64),
        }
        for flag in FLAGS:
            expected[flag] = expected["next", flag] = ((1,), torch.bool)
        assert set(batch.keys(True, True)) == set(expected)
        for key, (tail, dtype) in expected.items():
            assert batch[key].shape == (*batch.shape, *tail), key
            assert dtype is None or batch[key].dtype == dtype, key


def test_reward_is_what_came_of_the_step_and_not_at_the_root(make):
    batch = make(lambda: GymEnv("CartPole-v1"), frames_per_batch=5, total_frames=5).next()
    assert "reward" not in batch
    assert "action" not in batch["next"]


def test_equal_to_a_loop_by_hand_over_many_episodes(make, cartpole_actor):
    """2,000 frames of CartPole with auto-resets: observations, rewards, flags, true last observations."""
    collector = make(lambda: GymEnv("CartPole-v1"), cartpole_actor(), frames_per_batch=500, total_frames=2000)
    collector.set_seed(3)
    batch = torch.cat(list(collector))
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=3)
    ends = 0
    for t in range(2000):
        frame = batch[t]
        np.testing.assert_array_equal(frame["observation"].numpy(), observation)
        action = int(frame["action"].argmax())
        observation, reward, terminated, truncated, _ = env.step(action)
        np.testing.assert_array_equal(frame["next", "observation"].numpy(), observation)
        assert frame["next", "reward"].item() == reward
        assert frame["next", "terminated"].item() == terminated
        assert frame["next", "truncated"].item() == truncated
        assert frame["next", "done"].item() == (terminated or truncated)
        if terminated or truncated:
            ends += 1
            observation, _ = env.reset()
    env.close()
    assert ends > 5


def test_time_limits_truncate_and_never_terminate(make, pendulum_actor):
    collector = make(lambda: GymEnv("Pendulum-v1"), pendulum_actor(), frames_per_batch=150, total_frames=600)
    batch = torch.cat(list(collector))["next"]
    ends = batch["truncated"].flatten().nonzero().flatten().tolist()
    assert ends == [199, 399, 599]
    assert not bool(batch["terminated"].any())
    assert torch.equal(batch["done"], batch["truncated"])


@pytest.mark.parametrize("kind", CARTPOLE)
def test_the_root_is_the_next_of_the_step_before_inside_a_trajectory(make, kind):
    collector = make(CARTPOLE[kind][0], frames_per_batch=120, total_frames=480)
    batches = list(collector)
    batch = torch.cat(batches, batches[0].ndim - 1)  # over the edges of batches too
    ids = batch["collector", "traj_ids"]
    inside = ids[..., 1:] == ids[..., :-1]
    assert bool(inside.any())
    assert not bool(inside.all())
    for key in ("observation", *FLAGS):
        following, before = batch[key][..., 1:, :], batch["next", key][..., :-1, :]
        assert torch.equal(following[inside], before[inside]), key
    root = batch["done"].squeeze(-1)
    assert not bool(root.any())  # what is done has begun anew
    ended = batch["next", "done"][..., :-1, 0]
    assert torch.equal(~inside, ended)


@pytest.mark.parametrize("use_buffers", [None, True, False])
def test_private_entries_are_dropped_at_every_level(make, use_buffers):
    env = CountingEnv()

    def policy(td):
        td.set("_secret", torch.ones(3))
        td.set(("nest", "_secret"), torch.ones(3))
        td.set(("_nest", "open"), torch.ones(3))
        td.set(("nest", "open"), torch.ones(3))
        return td.set("action", torch.ones_like(env.action_spec.zero()))

    batch = make(env, policy, frames_per_batch=12, total_frames=12, use_buffers=use_buffers).next()
    paths = [(key,) if isinstance(key, str) else key for key in batch.keys(True)]
    assert ("nest", "open") in paths
    assert not [path for path in paths if any(part.startswith("_") for part in path)]


def test_private_entries_of_postproc_are_dropped(make):
    collector = make(
        CountingEnv(),
        frames_per_batch=3,
        total_frames=3,
        postproc=lambda td: td.set(("_own", "x"), torch.ones(3)).set("kept", torch.ones(3)),
    )
    batch = collector.next()
    assert "kept" in batch
    assert "_own" not in batch


def test_what_the_policy_writes_is_in_the_batch(make):
    env = CountingEnv()

    def policy(td):
        td.set("value", td["observation"].float() * 2)
        td.set(("critic", "features"), torch.ones(2, 3, dtype=torch.float64))
        return td.set("action", torch.ones_like(env.action_spec.zero()))

    batch = make(env, policy, frames_per_batch=4, total_frames=4).next()
    assert batch["value"].flatten().tolist() == [0, 2, 4, 6]
    assert batch["critic", "features"].shape == (4, 2, 3)
    assert batch["critic", "features"].dtype == torch.float64


def test_a_state_that_the_policy_writes_below_next_comes_back_to_it(make):
    """Recurrent policies: ("next", "hidden") at t is "hidden" at t + 1, and starts anew with a trajectory."""
    from rollwright.data import Unbounded
    from rollwright.envs import TensorDictPrimer, TransformedEnv

    env = TransformedEnv(CountingEnv(max_steps=2), TensorDictPrimer({"hidden": Unbounded((1,))}))

    def policy(td):
        td.set(("next", "hidden"), td["hidden"] + 1)
        return td.set("action", torch.ones_like(env.action_spec.zero()))

    batch = make(env, policy, frames_per_batch=7, total_frames=7).next()
    assert batch["hidden"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert batch["next", "hidden"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("compact_obs", [False, True])
@pytest.mark.parametrize("use_buffers", [None, True, False])
def test_batches_have_memory_of_their_own(make, use_buffers, compact_obs):
    collector = make(
        lambda: GymEnv("CartPole-v1"),
        frames_per_batch=10,
        total_frames=50,
        use_buffers=use_buffers,
        compact_obs=compact_obs,
    )
    batches, copies = [], []
    for batch in collector:
        batches.append(batch)
        copies.append(
            {key: batch[key].clone() for key in batch.keys(True, True) if isinstance(batch.get(key), torch.Tensor)}
        )
    for batch, copy in zip(batches, copies, strict=True):
        for key, value in copy.items():
            assert torch.equal(batch[key], value), key


def test_entries_of_one_batch_do_not_share_memory(make, count):
    """Writing into the batch (a learner's in-place normalisation) changes that entry alone."""
    env = CountingEnv(max_steps=100)
    collector = make(env, count(env), frames_per_batch=4, total_frames=8)
    batch = collector.next()
    batch["observation"].fill_(77)
    batch["next", "observation"].fill_(99)
    assert collector.next()["observation"].flatten().tolist() == [4, 5, 6, 7]


def test_return_same_td_overwrites_one_object(make, count):
    env = CountingEnv(max_steps=100)
    collector = make(env, count(env), frames_per_batch=3, total_frames=9, return_same_td=True)
    batches, values = [], []
    for batch in collector:
        batches.append(batch)
        values.append(batch["observation"].flatten().tolist())
    assert batches[0] is batches[1] is batches[2]
    assert values == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert batches[0]["observation"].flatten().tolist() == [6, 7, 8]


def test_use_buffers_does_not_change_the_data(make, same, cartpole_actor):
    batches = {}
    for use_buffers in (None, True, False):
        collector = make(
            lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")),
            frames_per_batch=200,
            total_frames=200,
            use_buffers=use_buffers,
        )
        collector.set_seed(1)
        batches[use_buffers] = collector.next()
    for use_buffers in (True, False):
        same(batches[None], batches[use_buffers], but=["collector"])


def test_growing_observations_come_as_a_lazy_stack(make):
    batch = make(EnvWithDynamicSpec(max_count=4), frames_per_batch=9, total_frames=9).next()
    assert isinstance(batch, LazyStackedTensorDict)
    assert batch.names[-1] == "time"
    assert [frame["observation"].shape[1] for frame in batch.unbind(0)] == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert [frame["next", "observation"].shape[1] for frame in batch.unbind(0)] == [2, 3, 4, 5, 2, 3, 4, 5, 2]
    assert batch["next", "done"].flatten().tolist() == [False, False, False, True] * 2 + [False]


def test_strings_pass_through(make):
    env = CountingEnvWithString(max_steps=3)
    collector = make(env, frames_per_batch=6, total_frames=12)
    for batch in collector:
        words, following = batch["string"], batch["next", "string"]
        assert len(words) == len(following) == 6
        assert all(isinstance(word, str) for word in words)
        ended = batch["next", "done"].flatten().tolist()
        for t in range(5):
            assert ended[t] or words[t + 1] == following[t]


def test_objects_in_the_state_reach_the_environment_again(make):
    batch = make(EnvWithMetadata(), frames_per_batch=4, total_frames=4).next()
    assert list(batch["non_tensor"]) == [0, 1, 2, 3]
    assert list(batch["next", "non_tensor"]) == [1, 2, 3, 4]


@pytest.mark.parametrize("batch_size", [[], [2]])
@pytest.mark.parametrize("nest_done", [False, True])
@pytest.mark.parametrize("nest_reward", [False, True])
def test_nested_entries(make, nest_done, nest_reward, batch_size):
    env = NestedCountingEnv(max_steps=2, nest_done=nest_done, nest_reward=nest_reward, batch_size=batch_size)

    def policy(td):
        return td.set(("data", "action"), torch.ones_like(env.full_action_spec["data", "action"].zero()))

    steps = 8
    batch = make(env, policy, frames_per_batch=steps * env.numel(), total_frames=-1).next()
    states = batch["data", "states"]
    assert states.shape == (*batch_size, steps, 3, 1)
    assert batch["next", "data", "states"].shape == states.shape
    reward = ("next", "data", "reward") if nest_reward else ("next", "reward")
    assert batch[reward].shape == ((*batch_size, steps, 3, 1) if nest_reward else (*batch_size, steps, 1))
    done = ("next", "data", "done") if nest_done else ("next", "done")
    per_env = batch[done].reshape(*batch.shape, -1).any(-1)
    assert per_env.reshape(-1, steps)[0].tolist() == [False, False, True] * 2 + [False, False]
    assert states.reshape(-1, steps, 3)[0, :, 0].tolist() == [0, 1, 2] * 2 + [0, 1]
    ids = batch["collector", "traj_ids"].reshape(-1, steps)[0]
    assert (ids[1:] != ids[:-1]).tolist() == per_env.reshape(-1, steps)[0, :-1].tolist()


@pytest.mark.parametrize("batch_size", [[], [2]])
def test_several_actions_rewards_and_flags(make, batch_size):
    env = MultiKeyCountingEnv(max_steps=3, batch_size=batch_size)
    policy = MultiKeyCountingEnvPolicy(env.full_action_spec, deterministic=True)
    batch = make(env, policy, frames_per_batch=10 * env.numel(), total_frames=-1).next()
    for key in ("action", ("nested_1", "action"), ("nested_2", "azione")):
        assert batch[key].shape[: batch.ndim] == batch.shape
    for key in ("reward", ("nested_1", "gift"), ("nested_2", "reward")):
        assert batch["next"][key].shape[: batch.ndim] == batch.shape
    assert batch["next", "nested_1", "gift"].shape == (*batch_size, 10, 3, 1)
    root = batch["next", "done"].reshape(-1, 10)[0]
    assert root.tolist() == [False, False, False, True] * 2 + [False] * 2


def test_agents_of_different_shapes(make):
    env = HeterogeneousCountingEnv(max_steps=3)
    policy = HeterogeneousCountingEnvPolicy(env.full_action_spec)
    batch = make(env, policy, frames_per_batch=6, total_frames=6).next()
    assert batch.shape == (6,)
    assert batch["state"].shape == (6, 64, 64, 3)
    assert batch["state"][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 0, 1]
    first, second = batch[..., 2]["lazy"][0], batch[..., 2]["lazy"][1]
    assert first["vector"].shape == (3,)
    assert second["vector"].shape == (2,)
    assert first["vector"].tolist() == [2, 2, 2]


def test_episodes_of_different_lengths_are_reset_one_by_one(make, count):
    env = CountingBatchedEnv(max_steps=torch.tensor([1, 3, 100]), batch_size=[3])
    batch = make(env, count(env), frames_per_batch=24, total_frames=24).next()
    assert batch["observation"].squeeze(-1).tolist() == [
        [0, 1, 0, 1, 0, 1, 0, 1],
        [0, 1, 2, 3, 0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]
    assert batch["next", "observation"].squeeze(-1).tolist() == [
        [1, 2, 1, 2, 1, 2, 1, 2],
        [1, 2, 3, 4, 1, 2, 3, 4],
        [1, 2, 3, 4, 5, 6, 7, 8],
    ]


def test_a_step_count_restarts_for_the_environment_that_was_reset_alone(make, count):
    env = CountingBatchedEnv(max_steps=torch.tensor([1, 100]), batch_size=[2])
    collector = make(env, count(env), frames_per_batch=12, total_frames=12, max_frames_per_traj=5)
    batch = collector.next()
    assert batch["step_count"].squeeze(-1).tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 0]]
    assert batch["next", "truncated"].squeeze(-1).tolist() == [[False] * 6, [False] * 4 + [True, False]]
    assert batch["next", "terminated"].squeeze(-1).tolist() == [[False, True] * 3, [False] * 6]


def test_batches_need_no_grad(make):
    module = nn.Linear(3, 1)
    policy = TensorDictModule(module, in_keys=["observation"], out_keys=["action"])
    batch = make(lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=4, total_frames=4).next()
    assert not any(value.requires_grad for value in batch.values(True, True))
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert torch.is_grad_enabled()


def test_a_policy_that_returns_a_new_tensordict(make):
    from tensordict import TensorDict

    collector = make(
        CountingEnv(max_steps=100),
        lambda td: TensorDict({"action": torch.ones(1, dtype=torch.int8)}),
        frames_per_batch=3,
        total_frames=3,
    )
    batch = collector.next()
    assert batch["observation"].flatten().tolist() == [0, 1, 2]
    assert bool(batch["action"].all())


def test_a_policy_that_writes_in_place_and_returns_nothing(make):
    def policy(td):
        td.set("action", torch.ones(1, dtype=torch.int8))

    batch = make(CountingEnv(max_steps=100), policy, frames_per_batch=3, total_frames=3).next()
    assert batch["observation"].flatten().tolist() == [0, 1, 2]


def test_a_policy_that_reuses_its_output_buffer(make):
    """Values at each step are those of that step, whatever the policy does to its tensors later."""
    buffer = torch.zeros(1)

    def policy(td):
        buffer.add_(0.25)
        return td.set("action", buffer)

    batch = make(lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=4, total_frames=4).next()
    assert batch["action"].flatten().tolist() == [0.25, 0.5, 0.75, 1.0]
