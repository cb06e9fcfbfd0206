"""compact_obs: observations are stored once, and nothing is lost at the boundaries."""

from __future__ import annotations

import pytest
import torch
from tests.variants import in_turn

from rollwright.collectors import MultiSyncCollector
from rollwright.collectors.utils import restore_next
from rollwright.data import Composite, Unbounded
from rollwright.envs import GymEnv, SerialEnv
from rollwright.testing.mocking_classes import CountingBatchedEnv, FastImageEnv, MultiKeyCountingEnv, NestedCountingEnv

ENVS = {
    "single": lambda: GymEnv("CartPole-v1"),
    "serial": lambda: SerialEnv(3, lambda: GymEnv("CartPole-v1")),
    "vector": lambda: GymEnv("CartPole-v1", num_envs=3),
    "lengths": lambda: CountingBatchedEnv(max_steps=torch.tensor([1, 2, 100]), batch_size=[3]),
    "nested": lambda: NestedCountingEnv(max_steps=2, batch_size=[2]),
    "several keys": lambda: MultiKeyCountingEnv(max_steps=3, batch_size=[3]),
}
EXTRA = [("collector", "boundary"), ("collector", "boundaries")]


def pair(make, kind, **options):
    """The same frames, compact and whole."""

    def batches(compact):
        collector = make(ENVS[kind], frames_per_batch=60, total_frames=180, compact_obs=compact, **options)
        collector.set_seed(0)
        return list(collector)

    return zip(batches(True), batches(False), strict=True)


@pytest.mark.parametrize("kind", ENVS)
def test_restored_batches_equal_whole_ones(make, same, kind):
    for compact, whole in pair(make, kind):
        same(restore_next(compact), whole, but=["collector"])


@pytest.mark.parametrize("kind", ENVS)
def test_next_observations_are_left_out_and_the_rest_stays(make, kind):
    env = ENVS[kind]()
    observations = [key if isinstance(key, tuple) else (key,) for key in env.observation_keys]
    for compact, whole in pair(make, kind):
        kept, all_keys = set(compact.keys(True, True)), set(whole.keys(True, True))
        left_out = all_keys - kept
        assert left_out == {("next", *key) for key in observations}
        assert kept - all_keys <= set(EXTRA)


@pytest.mark.parametrize("use_buffers", [None, False])
def test_no_empty_nest_stays(make, use_buffers):
    """What held left-out observations alone is left out, too, however frames are collected."""

    class Nested(CountingBatchedEnv):
        def __init__(self):
            super().__init__(max_steps=torch.tensor([2, 3]), batch_size=[2])
            seen = Composite(a=Composite(b=Unbounded((2, 3)), shape=(2,)), shape=(2,))
            self.observation_spec = Composite(deep=seen, shape=(2,))

        def _observe(self, td):
            return td.exclude("observation").set("deep", self.observation_spec["deep"].zero())

        def _reset(self, tensordict=None, **kwargs):
            return self._observe(super()._reset(tensordict, **kwargs))

        def _step(self, tensordict):
            return self._observe(super()._step(tensordict))

    batch = make(Nested, frames_per_batch=8, compact_obs=True, use_buffers=use_buffers).next()
    assert set(batch["next"].keys(True)) <= {"reward", "done", "terminated", "truncated"}
    assert restore_next(batch)["next", "deep", "a", "b"].shape == (2, 4, 3)


@pytest.mark.parametrize("kind", ["single", "serial", "vector"])
def test_the_root_at_the_next_step_is_the_next_of_this_one(make, kind):
    for compact, whole in pair(make, kind):
        ids = compact["collector", "traj_ids"]
        inside = ids[..., 1:] == ids[..., :-1]
        assert torch.equal(
            compact["observation"][..., 1:, :][inside], whole["next", "observation"][..., :-1, :][inside]
        )


def test_true_last_observations_are_kept(make, count):
    env = CountingBatchedEnv(max_steps=torch.tensor([1, 2]), batch_size=[2])
    batch = make(env, count(env), frames_per_batch=14, compact_obs=True).next()
    restored = restore_next(batch)["next", "observation"].squeeze(-1)
    assert restored.tolist() == [[1, 2, 1, 2, 1, 2, 1], [1, 2, 3, 1, 2, 3, 1]]


def test_an_observation_is_stored_once(make):
    """Bytes held by tensors: only ends of trajectories and of the batch come on top of the roots."""

    def held(batch):
        return sum(
            value.numel() * value.element_size()
            for value in batch.values(True, True)
            if isinstance(value, torch.Tensor)
        )

    frames = 50
    env = FastImageEnv(img_shape=(1, 16, 16))
    whole = make(env, frames_per_batch=frames).next()
    compact = make(FastImageEnv(img_shape=(1, 16, 16)), frames_per_batch=frames, compact_obs=True).next()
    image = 16 * 16 * 4
    assert held(whole) - held(compact) > (frames - 2) * image


def test_restore_next_leaves_the_compact_batch_as_it_is(make):
    batch = make(ENVS["single"], frames_per_batch=40, compact_obs=True).next()
    before = batch.clone()
    restored = restore_next(batch)
    restored["next", "observation"].fill_(7)
    assert ("next", "observation") not in batch.keys(True, True)
    assert torch.equal(batch["observation"], before["observation"])


def test_restore_next_survives_indexing_of_environments(make, same):
    for compact, whole in pair(make, "serial"):
        same(restore_next(compact[1:]), whole[1:], but=["collector"])


def test_restore_next_of_joined_batches(make, same, stream):
    compact, whole = zip(*pair(make, "single"), strict=True)
    restored = stream(restore_next(batch) for batch in compact)
    same(restored, stream(whole), but=["collector"])


def test_a_whole_batch_is_refused(make):
    batch = make(ENVS["single"], frames_per_batch=4).next()
    with pytest.raises(KeyError, match="compact_obs=True"):
        restore_next(batch)


def test_a_compact_batch_can_be_cloned_moved_and_saved(make, tmp_path, same):
    batch = make(ENVS["single"], frames_per_batch=40, compact_obs=True).next()
    expected = restore_next(batch)
    same(restore_next(batch.clone()), expected)
    same(restore_next(batch.to("cpu")), expected)
    torch.save(batch, tmp_path / "batch.pt")
    same(restore_next(torch.load(tmp_path / "batch.pt", weights_only=False)), expected)


@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_joined_batches_are_refused_before_they_give_wrong_data(make, join):
    collector = make(ENVS["single"], frames_per_batch=20, compact_obs=True)
    with pytest.raises(ValueError, match="restore_next on each"):
        restore_next(join([collector.next(), collector.next()]))


def test_a_batch_that_was_cut_short_is_refused(make):
    env = CountingBatchedEnv(max_steps=torch.tensor([100]), batch_size=[1])
    batch = make(env, frames_per_batch=10, compact_obs=True).next()
    with pytest.raises(ValueError, match="last step"):
        restore_next(batch[:, :-1])
    assert torch.equal(
        restore_next(batch[:, 4:])["next", "observation"], restore_next(batch)["next", "observation"][:, 4:]
    )


def test_a_failed_rollout_leaves_nothing_behind(make, count):
    """Boundaries of a rollout that raised are not those of the next batch."""

    class Flaky(CountingBatchedEnv):
        steps = 0

        def _step(self, tensordict):
            self.steps += 1
            if self.steps == 5:
                raise OSError("connection lost")
            return super()._step(tensordict)

    env = Flaky(max_steps=torch.tensor([1, 2]), batch_size=[2])
    collector = make(env, count(env), frames_per_batch=14, compact_obs=True)
    with pytest.raises(RuntimeError, match="connection lost"):
        collector.next()
    restored = restore_next(collector.next())["next", "observation"].squeeze(-1)
    assert restored.tolist() == [[1, 2, 1, 2, 1, 2, 1], [1, 2, 3, 1, 2, 3, 1]]


@pytest.mark.parametrize(("cat_results", "use_buffers"), in_turn(["stack", 0, -1], [None, False]))
def test_batches_of_several_workers_can_be_restored(same, cat_results, use_buffers):
    def batches(compact):
        options = {"use_buffers": use_buffers, "compact_obs": compact, "cat_results": cat_results}
        with MultiSyncCollector([ENVS["single"]] * 2, frames_per_batch=120, total_frames=240, **options) as collector:
            collector.set_seed(0)
            return [batch.clone() for batch in collector]

    for compact, whole in zip(batches(True), batches(False), strict=True):
        same(restore_next(compact), whole, but=["collector"])
