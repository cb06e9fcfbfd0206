"""Every kind of data (objects, growing and unlike shapes, nests) beside the options that rearrange batches."""

from __future__ import annotations

import json

import pytest
import torch
from tensordict import LazyStackedTensorDict, is_non_tensor

from rollwright.collectors import Collector, Interruptor
from rollwright.collectors.utils import restore_next, split_trajectories
from rollwright.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer
from rollwright.testing.mocking_classes import (
    CountingEnv,
    CountingEnvWithString,
    EnvWithDynamicSpec,
    EnvWithMetadata,
    HeterogeneousCountingEnv,
    HeterogeneousCountingEnvPolicy,
    MultiKeyCountingEnv,
    NestedCountingEnv,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*split_trajs=True pads")


class Stopped(Interruptor):
    """Lets every rollout take one step."""

    def collection_stopped(self):
        return True


def test_split_and_agents_of_different_shapes(make):
    env = HeterogeneousCountingEnv(max_steps=2)
    policy = HeterogeneousCountingEnvPolicy(env.full_action_spec)
    batch = make(env, policy, frames_per_batch=7, split_trajs=True).next()
    assert batch["collector", "mask"].sum(-1).tolist() == [3, 3, 1]
    assert batch[..., 0]["state"].shape == (3, 64, 64, 3)
    assert batch["state"][:, :, 0, 0, 0].tolist() == [[0, 1, 2], [0, 1, 2], [0, 0, 0]]
    assert batch["lazy"][..., 0]["vector"][0, :, 0].tolist() == [0, 1, 2]
    assert batch["lazy"][..., 1]["vector"].shape == (3, 3, 2)


def test_split_and_growing_observations(make):
    """Rows are stacked lazily; what grows is empty in padding."""
    batch = make(EnvWithDynamicSpec(max_count=3), frames_per_batch=8, split_trajs=True).next()
    assert batch["collector", "mask"].sum(-1).tolist() == [3, 3, 2]
    sizes = [[frame["observation"].shape[1] for frame in row.unbind(0)] for row in batch.unbind(0)]
    assert sizes == [[1, 2, 3], [1, 2, 3], [1, 2, 0]]


def test_compact_and_strings(make, count):
    """Objects are not put together from rows: they stay where they are, and nothing is lost."""

    def collect(compact_obs):
        env = CountingEnvWithString(max_steps=2)
        collector = make(env, count(env), frames_per_batch=7, compact_obs=compact_obs)
        collector.set_seed(0)
        return collector.next()

    compact, whole = collect(True), collect(False)
    assert list(compact["next", "string"]) == list(whole["next", "string"])
    restored = restore_next(compact)
    assert list(restored["next", "string"]) == list(whole["next", "string"])
    assert torch.equal(restored["next", "observation"], whole["next", "observation"])


def test_compact_and_growing_observations(make):
    batch = make(EnvWithDynamicSpec(max_count=3), frames_per_batch=4, compact_obs=True).next()
    shapes = [frame["next", "observation"].shape[1] for frame in restore_next(batch).unbind(0)]
    assert shapes == [2, 3, 4, 2]


def test_compact_and_agents_of_different_shapes(make):
    env = HeterogeneousCountingEnv(max_steps=2)
    policy = HeterogeneousCountingEnvPolicy(env.full_action_spec)
    batch = make(env, policy, frames_per_batch=5, compact_obs=True).next()
    assert ("next", "state") not in batch.keys(True)
    restored = restore_next(batch)
    assert restored["next", "state"][:, 0, 0, 0].tolist() == [1, 2, 3, 1, 2]
    assert restored["next", "lazy"][..., 0]["vector"][:, 0].tolist() == [1, 2, 3, 1, 2]


KINDS = {
    "growing": lambda: EnvWithDynamicSpec(max_count=3),
    "strings": lambda: CountingEnvWithString(max_steps=2),
    "agents": lambda: HeterogeneousCountingEnv(max_steps=2),
    "agents, batched": lambda: HeterogeneousCountingEnv(max_steps=2, batch_size=[2]),
    "nested flags": lambda: NestedCountingEnv(max_steps=2, batch_size=[2]),
    "several keys": lambda: MultiKeyCountingEnv(max_steps=2),
    "objects": EnvWithMetadata,
}
EACH = {
    "interruption": lambda: {"interruptor": Stopped()},
    "set_truncated": lambda: {"set_truncated": True},
    "limit": lambda: {"max_frames_per_traj": 2},
    "version": lambda: {"track_policy_version": True},
    "lists": lambda: {"use_buffers": False},
    "no resets": lambda: {"reset_when_done": False},
    "resets": lambda: {"reset_at_each_iter": True},
    "device": lambda: {"device": "cpu"},
    "no ids": lambda: {"track_traj_ids": False},
}


@pytest.mark.parametrize("option", EACH)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_beside_every_option(make, kind, option):
    """Whatever frames hold, options keep the batch's shape, the name of time and the count of frames."""
    options = EACH[option]()
    collector = make(KINDS[kind], frames_per_batch=8, total_frames=16, **options)
    batches = list(collector)
    for batch in batches:
        assert batch.numel() == 8
        assert batch.names[-1] == "time"
        assert ("traj_ids" in batch["collector"]) if option != "no ids" else ("collector" not in batch)
    stats = collector.stats()
    assert stats["frames"] >= 16
    json.dumps(stats)


def tensors(td):
    """All tensors, those of unlike rows one by one, in order of their keys."""
    if isinstance(td, LazyStackedTensorDict):
        return [value for row in td.unbind(td.stack_dim) for value in tensors(row)]
    found = []
    for key in sorted(td.keys()):
        value = td.get(key)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif not is_non_tensor(value):
            found += tensors(value)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_is_split_without_loss(make, kind):
    """Real frames of the padded batch are those of the nested one; padding is zero."""
    env = KINDS[kind]()
    collector = make(env, frames_per_batch=8 * env.numel())
    batch = collector.next()
    nested = split_trajectories(batch, as_nested=True)
    padded = split_trajectories(batch)
    lengths = padded["collector", "mask"].sum(-1).tolist()
    assert [len(row) for row in nested.unbind(0)] == lengths
    assert sum(lengths) == batch.numel()
    for row, (frames, length) in enumerate(zip(nested.unbind(0), lengths, strict=True)):
        for t in range(padded.shape[1]):
            frame = padded[row, t].exclude(("collector", "mask"))
            if t < length:
                expected = tensors(frames[t])
                assert all(torch.equal(*pair) for pair in zip(tensors(frame), expected, strict=True))
            else:
                assert not any(bool(value.any()) for value in tensors(frame))


@pytest.mark.parametrize("kind", KINDS)
def test_random_actions_of_any_kind_reach_the_environment_from_another_device(make, kind):
    """What a policy writes into a stack, in place, is an output too."""
    env = KINDS[kind]()
    batch = make(env, frames_per_batch=3 * env.numel(), policy_device="cpu").next()
    assert batch.shape[-1] == 3


# Replay buffers ------------------------------------------------------------------------------------

TEXT = r"tensors only.*ListStorage.*data.exclude\('string', \('next', 'string'\)\); in a collector postproc="
WAYS = {"rollouts": {}, "frames": {"extend_buffer": False}, "trajectories": {"trajs_per_batch": 1}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_text_for_a_buffer_of_tensors_is_an_error_at_construction(way, storage):
    buffer, env = ReplayBuffer(storage=storage(100)), CountingEnvWithString(max_steps=2)
    with pytest.raises(TypeError, match=TEXT):
        Collector(env, frames_per_batch=6, total_frames=12, replay_buffer=buffer, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_text_that_shows_late_is_an_error_at_the_first_write(way, make, count):
    """A policy may write text, which no spec announces."""
    env, buffer = CountingEnv(max_steps=2), ReplayBuffer(storage=LazyTensorStorage(100))
    act = count(env)
    collector = make(
        env,
        lambda td: act(td).set_non_tensor("plan", "go on"),
        frames_per_batch=6,
        total_frames=12,
        replay_buffer=buffer,
        **WAYS[way],
    )
    with pytest.raises(TypeError, match=r"tensors only.*'plan'"):
        for _ in collector:
            pass
    assert len(buffer) == 0


@pytest.mark.parametrize("way", ["rollouts", "trajectories"])
def test_the_remedies_for_text_work(way, make, count):
    def left_out(data):
        return data.exclude("string", ("next", "string"))

    def collect(buffer, **options):
        env = CountingEnvWithString(max_steps=2)
        for _ in make(
            env, count(env), frames_per_batch=6, total_frames=12, replay_buffer=buffer, **WAYS[way], **options
        ):
            pass
        return buffer

    tensors = collect(ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4), postproc=left_out)
    assert "string" not in tensors.sample().keys()  # noqa: SIM118 - a TensorDict iterates over rows
    objects = collect(ReplayBuffer(storage=ListStorage(100), batch_size=4))
    assert len(objects) == len(tensors) == 12
    assert all(isinstance(text, str) for text in objects.sample()["string"])
