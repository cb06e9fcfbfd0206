"""A batch of zeros has the form of those that are delivered, and changes nothing."""

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import OneHotCategorical

from rollwright.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.envs import CatFrames, Compose, GymEnv, RewardSum, SerialEnv, StepCounter, TransformedEnv
from rollwright.modules import GRUModule
from rollwright.testing.mocking_classes import EnvWithDynamicSpec

FRAMES = {"frames_per_batch": 12, "total_frames": 240}
BOUNDARIES = [("collector", "boundary"), ("collector", "boundaries")]


def cartpole():
    return GymEnv("CartPole-v1")


def cartpoles():
    return SerialEnv(3, cartpole)


def stacked():
    frames = CatFrames(N=3, dim=-1, in_keys=["observation"], out_keys=["stack"])
    return TransformedEnv(cartpole(), Compose(StepCounter(5), RewardSum(), frames))


def actor(first=None):
    layers = [] if first is None else [first]
    net = TensorDictModule(nn.Linear(4, 2), ["hidden" if layers else "observation"], ["logits"])
    draw = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=OneHotCategorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(*layers, net, draw)


def recurrent():
    return actor(GRUModule(4, 4, in_key="observation", out_key="hidden"))


CASES = {
    "random": (cartpole, None, {}),
    "actor": (cartpole, actor, {}),
    "TensorDicts": (cartpole, actor, {"use_buffers": False}),
    "several": (cartpoles, actor, {}),
    "transforms": (stacked, actor, {}),
    "recurrent": (cartpole, recurrent, {}),
    "compact": (cartpole, actor, {"compact_obs": True}),
    "version": (cartpole, actor, {"track_policy_version": True}),
    "no ids": (cartpole, actor, {"track_traj_ids": False}),
    "cut": (cartpole, actor, {"set_truncated": True}),
    "postproc": (cartpole, actor, {"postproc": lambda batch: batch.exclude("logits")}),
    "split": (cartpole, actor, {"split_trajs": True, "frames_per_batch": 6}),
}


def form(td):
    leaves = {key: (value.shape, value.dtype) for key, value in td.exclude(*BOUNDARIES).items(True, True)}
    return td.batch_size, td.names, td.device, leaves


@pytest.mark.filterwarnings("ignore:.*split_trajs")
@pytest.mark.parametrize("case", CASES)
def test_it_has_the_form_of_batches(case):
    env, policy, options = CASES[case]
    with Collector(env(), None if policy is None else policy(), **{**FRAMES, **options}) as collector:
        before = collector.fake_tensordict()
        batch = collector.next()
        after = collector.fake_tensordict()
    assert form(before) == form(after) == form(batch)
    marked = {"done", "truncated"} if case == "cut" else set()
    for key, value in before.items(True, True):
        if key[-1] in marked and key[0] == "next":
            assert value.flatten().tolist() == [False] * 11 + [True]
        elif key != ("collector", "mask"):
            assert not value.any(), key


@pytest.mark.parametrize("traj_format", ["cat", "padded"])
def test_of_whole_trajectories_each_is_as_long_as_a_rollout(traj_format):
    with Collector(cartpoles(), actor(), trajs_per_batch=2, traj_format=traj_format, **FRAMES) as collector:
        fake, batch = collector.fake_tensordict(), collector.next()
    assert fake.shape == ((3, 4) if traj_format == "padded" else (12,))
    assert fake.names == batch.names
    assert {key: value.dtype for key, value in fake.items(True, True)} == {
        key: value.dtype for key, value in batch.items(True, True)
    }


@pytest.mark.parametrize(
    ("kind", "env", "options"),
    [
        (MultiSyncCollector, cartpole, {}),
        (MultiSyncCollector, cartpole, {"cat_results": 0}),
        (MultiSyncCollector, cartpoles, {"cat_results": -1}),
        (MultiAsyncCollector, cartpole, {}),
    ],
    ids=["stack", "0", "-1", "async"],
)
def test_workers_make_it_together(kind, env, options):
    with kind([env] * 2, actor(), **FRAMES, **options) as collector:
        assert form(collector.fake_tensordict()) == form(collector.next())


def test_workers_with_whole_trajectories():
    with MultiSyncCollector([cartpole] * 2, actor(), trajs_per_batch=1, **FRAMES) as collector:
        fake, batch = collector.fake_tensordict(), collector.next()
    assert fake.shape == (2, 6)  # padded, as without workers
    assert set(fake.keys(True, True)) == set(batch.keys(True, True))


def test_a_buffer_takes_it():
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=4)
    with Collector(cartpole(), actor(), replay_buffer=buffer, **FRAMES) as collector:
        buffer.extend(collector.fake_tensordict())
        collector.next()
    assert len(buffer) == 24
    assert not buffer[:12]["observation"].any()
    assert buffer[12:]["observation"].any()


@pytest.mark.parametrize("asked", [0, 2])
def test_nothing_changes_by_it(asked):
    found = []
    for times in (0, asked):
        torch.manual_seed(0)
        with Collector(cartpole(), recurrent(), **FRAMES) as collector:
            collector.set_seed(3)
            for _ in range(times):
                collector.fake_tensordict()
            batches = [collector.next().clone()]
            for _ in range(times):
                collector.fake_tensordict()
            batches.append(collector.next().clone())
            found.append(torch.cat(batches))
            assert collector.stats()["frames"] == 24
    assert (found[0] == found[1]).all()


def test_frames_that_vary_have_no_form():
    with Collector(EnvWithDynamicSpec(), None, **FRAMES) as collector, pytest.raises(ValueError, match="varies"):
        collector.fake_tensordict()


def test_a_collector_that_was_shut_down_has_none():
    collector = Collector(cartpole(), None, **FRAMES)
    collector.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.fake_tensordict()
