"""Memory: flat after warm-up, however long the run."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import distributions, nn

from rollwright.envs import GymEnv, SerialEnv
from rollwright.testing.mocking_classes import CountingEnv

STATM = Path("/proc/self/statm")
LIBC = ctypes.CDLL(None)
pytestmark = [
    pytest.mark.skipif(not STATM.exists(), reason="reads /proc"),
    pytest.mark.filterwarnings("ignore:.*split_trajs=True pads"),
]
MIB = 1 << 20


def resident():
    """Resident bytes that belong to this process, without those that it could give back."""
    gc.collect()
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # freed memory that is kept for later belongs to nobody
    return int(STATM.read_text().split()[1]) * 4096


def growth(collector, warmup, batches):
    """Bytes by which the process has grown over ``batches`` batches after ``warmup`` more."""
    for _ in range(warmup):
        collector.next()
    before = resident()
    for _ in range(batches):
        collector.next()
    return resident() - before


OPTIONS = {
    "plain": {},
    "compact": {"compact_obs": True},
    "lists": {"use_buffers": False},
    "split": {"split_trajs": True},
    "limits": {"max_frames_per_traj": 10, "set_truncated": True, "track_policy_version": True},
}


def growth_over_24_batches(make, **options):
    env = CountingEnv(batch_size=[5000], max_steps=7)  # a batch of 20,000 frames holds half a megabyte
    return growth(make(env, frames_per_batch=20_000, **options), 8, 24)


@pytest.mark.parametrize("options", OPTIONS)
def test_flat_over_many_batches(make, options):
    assert growth_over_24_batches(make, **OPTIONS[options]) < 8 * MIB


def test_keeping_batches_would_show(make):
    """The test above can fail: this is what it is there to see."""
    kept = []
    env = CountingEnv(batch_size=[50_000], max_steps=7)  # of a size that no freed memory is left over for
    assert growth(make(env, frames_per_batch=200_000, post_collect_hook=kept.append), 2, 5) > 8 * MIB


def test_flat_with_a_real_environment(make, cartpole_actor):
    collector = make(lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")), cartpole_actor(), frames_per_batch=200)
    assert growth(collector, 5, 20) < 4 * MIB


def test_nothing_of_old_batches_is_kept_alive(make):
    """Every tensor that a batch held is freed with it."""

    def alive():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    collector = make(lambda: GymEnv("CartPole-v1"), frames_per_batch=20)
    for _ in range(3):
        collector.next()
    before = alive()
    for _ in range(30):
        collector.next()
    assert alive() <= before + 5


def test_dropping_a_collector_frees_it():
    import weakref

    from rollwright.collectors import Collector

    collector = Collector(CountingEnv(), frames_per_batch=50)
    collector.next()
    gone = weakref.ref(collector)
    del collector
    gc.collect()
    assert gone() is None


@pytest.mark.timeout(3600)
@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [1, 64])
def test_a_million_frames_are_flat(make, cartpole_actor, num_envs):
    env = GymEnv("CartPole-v1") if num_envs == 1 else GymEnv("CartPole-v1", num_envs=num_envs)
    collector = make(env, cartpole_actor(), frames_per_batch=6400)
    assert growth(collector, 8, 157) < 16 * MIB
    assert collector.stats()["frames"] >= 1_000_000


def categorical():
    """The policy of the benchmarks, small: logits, an action drawn from them, its log-prob."""
    return TensorDictSequential(
        TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"], out_keys=["action"], distribution_class=distributions.Categorical, return_log_prob=True
        ),
    )


POOLS = [
    pytest.param(256, 20, {}, id="quick"),
    pytest.param(256, 20, {"compact_obs": True}, id="quick, compact"),
    pytest.param(1024, 200, {}, id="ten million", marks=pytest.mark.slow),
    pytest.param(1024, 200, {"compact_obs": True}, id="ten million, compact", marks=pytest.mark.slow),
    pytest.param(1024, 200, {"compile_policy": True}, id="ten million, compiled", marks=pytest.mark.slow),
]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_envs", "batches", "options"), POOLS)
def test_flat_on_arrays(make, num_envs, batches, options):
    pytest.importorskip("envpool")
    from rollwright.envs import EnvPoolEnv

    env = EnvPoolEnv("CartPole-v1", num_envs, categorical_action_encoding=True)
    collector = make(env, categorical(), frames_per_batch=50 * num_envs, **options)
    assert "NumPy" in collector.stats()["paths"]["env"]
    size = None
    for _ in range(5):
        size = collector.stats()["bytes_held"] or size
        collector.next()
    assert growth(collector, 5, batches - 10) < 4 * MIB  # a batch of 256 has 0.9 MiB
    assert collector.stats()["bytes_held"] == size  # each batch was dropped: one memory, over and over
    assert collector.stats()["frames"] == 50 * num_envs * batches


@pytest.mark.parametrize("options", [{}, {"compact_obs": True}, {"split_trajs": True}], ids=str)
def test_counts_of_python_objects_are_flat(make, cartpole_actor, options):
    collector = make(GymEnv("CartPole-v1", num_envs=4), cartpole_actor(), frames_per_batch=80, **options)

    def alive():
        gc.collect()
        return len(gc.get_objects())

    for _ in range(6):
        collector.next()
    before = alive()
    for _ in range(12):
        collector.next()
    assert alive() <= before + 60  # one object a batch of each of five kinds
