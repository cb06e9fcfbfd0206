"""Devices: how they are resolved, which casts and synchronisations follow, and what lands where.

Tensors on the ``meta`` device stand in for a second device where there is no accelerator: moving to it is
a real copy between devices, and nothing can be read back by accident.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright.collectors import Collector, SyncDataCollector
from rollwright.envs import GymEnv, SerialEnv
from rollwright.testing.mocking_classes import CountingEnv

CPU, META = torch.device("cpu"), torch.device("meta")


def blind(td):
    """A policy that looks at nothing and answers on the CPU, wherever its data are."""
    return TensorDict({"action": torch.ones(1, dtype=torch.int8)})


# The environment's own device, then options, then the batch's device.
RESOLUTION = [
    (None, {}, None),
    (CPU, {}, None),  # the policy is nowhere in particular
    (None, {"device": "cpu"}, CPU),
    (None, {"storing_device": "cpu"}, CPU),
    (None, {"env_device": "cpu"}, None),
    (CPU, {"policy_device": "cpu"}, CPU),
    (None, {"policy_device": "cpu", "env_device": "cpu"}, CPU),
    (CPU, {"policy_device": "meta"}, None),
    (CPU, {"policy_device": "meta", "storing_device": "cpu"}, CPU),
    (CPU, {"storing_device": "meta"}, META),
    (CPU, {"device": "cpu", "storing_device": "meta"}, META),
    (CPU, {"device": "meta", "env_device": "cpu", "storing_device": "cpu"}, CPU),
]


@pytest.mark.parametrize(("env_device", "options", "expected"), RESOLUTION)
def test_the_batch_is_on_the_storing_device(make, env_device, options, expected):
    """``storing_device``, else ``device``, else the environment's when it equals the policy's, else None."""
    collector = make(CountingEnv(device=env_device), blind, frames_per_batch=3, total_frames=6, **options)
    assert collector.storing_device == expected
    for batch in collector if expected != META else ():  # what lies there has no values
        assert batch.device == expected
        if expected is not None:
            assert {value.device for value in batch.values(True, True)} == {expected}


def test_device_sets_what_is_not_set_by_itself(make):
    collector = make(CountingEnv(), blind, frames_per_batch=3, device="cpu", policy_device="meta")
    assert collector.policy_device == META
    assert collector.env_device == CPU
    assert collector.storing_device == CPU
    assert collector.env.device == CPU


def test_resolved_devices_are_shown(make):
    collector = make(CountingEnv(), blind, frames_per_batch=3, device="cpu", policy_device="meta")
    assert "meta" in repr(collector)
    assert collector.stats()["devices"] == {"policy": "meta", "env": "cpu", "storing": "cpu"}


def test_the_legacy_class_stores_on_the_cpu():
    collector = SyncDataCollector(CountingEnv(), blind, frames_per_batch=3, total_frames=3)
    assert collector.next().device == CPU
    collector.shutdown()


FLAGS = [
    ({"policy_device": "cpu", "env_device": "cpu", "storing_device": "cpu"}, False, False),
    ({"policy_device": "meta", "env_device": "cpu", "storing_device": "cpu"}, True, True),
    ({"policy_device": "meta", "env_device": "cpu"}, True, True),
    ({"policy_device": "cpu", "env_device": "cpu", "storing_device": "meta"}, False, True),
    ({"device": "cpu"}, False, False),
    ({}, False, False),
]


@pytest.mark.parametrize(("options", "to_policy", "to_env"), FLAGS)
def test_cast_flags(make, options, to_policy, to_env):
    """To the policy iff its device differs from the environment's; to the environment then, or iff storing differs."""
    collector = make(CountingEnv(), blind, frames_per_batch=3, **options)
    assert collector._cast_to_policy_device is to_policy
    assert collector._cast_to_env_device is to_env


def test_the_policy_reads_on_its_device_and_the_environment_on_its_own(make):
    seen = []

    class Watched(CountingEnv):
        def _step(self, tensordict):
            seen.append(("env", tensordict["action"].device, tensordict["observation"].device))
            return super()._step(tensordict)

    def policy(td):
        seen.append(("policy", td.device, td["observation"].device))
        return blind(td)

    collector = make(
        Watched(device="cpu", max_steps=2), policy, frames_per_batch=7, policy_device="meta", storing_device="cpu"
    )
    batch = collector.next()
    assert seen == [("policy", META, META), ("env", CPU, CPU)] * 7
    assert batch["observation"].flatten().tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert batch["next", "observation"].flatten().tolist() == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("options", [{}, {"compact_obs": True}, {"use_buffers": False}, {"track_policy_version": True}])
def test_a_second_device_does_not_change_the_data(make, options, same):
    def batch(**devices):
        env = CountingEnv(device="cpu", max_steps=2, batch_size=[2])

        def policy(td):
            return TensorDict({"action": torch.ones(2, 1, dtype=torch.int8)}, [2])

        return make(env, policy, frames_per_batch=12, storing_device="cpu", **options, **devices).next()

    same(batch(policy_device="meta"), batch(), but=[("collector", "boundaries")])


# What synchronisation a destination needs, by what the machine has.


def pretend(monkeypatch, *, cuda=False, mps=False, npu=False, initialized=True):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda and initialized)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: calls.append("cuda"))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: calls.append("mps"))

    class Npu:
        is_available = staticmethod(lambda: npu)
        synchronize = staticmethod(lambda: calls.append("npu"))

    monkeypatch.setattr(torch, "npu", Npu, raising=False)
    return calls


SYNC = [
    ("cuda:0", {"cuda": True}, []),
    ("cpu", {"cuda": True}, ["cuda"]),
    ("meta", {"cuda": True}, ["cuda"]),
    ("cpu", {"mps": True}, ["mps"]),
    ("cpu", {"npu": True}, ["npu"]),
    ("cpu", {}, []),
    (None, {"cuda": True}, []),
    ("cpu", {"cuda": True, "mps": True}, ["cuda"]),
]


@pytest.mark.parametrize(("destination", "machine", "expected"), SYNC)
def test_synchronisation_by_destination(make, monkeypatch, destination, machine, expected):
    collector = make(CountingEnv(), blind, frames_per_batch=3)
    calls = pretend(monkeypatch, **machine)
    collector._get_sync_fn(None if destination is None else torch.device(destination))()
    assert calls == expected


def test_a_process_that_never_used_cuda_does_not_start_it(make, monkeypatch):
    """A forked worker on the CPU must not make a CUDA context."""
    collector = make(CountingEnv(), blind, frames_per_batch=3)
    calls = pretend(monkeypatch, cuda=True, initialized=False)
    collector._get_sync_fn(CPU)()
    assert calls == []


def test_every_copy_is_synchronised_once(make, monkeypatch):
    calls = pretend(monkeypatch, cuda=True)
    collector = make(
        CountingEnv(device="cpu"),
        blind,
        frames_per_batch=5,
        policy_device="meta",
        env_device="cpu",
        storing_device="cpu",
    )
    collector.next()
    assert len(calls) >= 10  # to the policy and to the environment, at each of 5 steps
    assert len(calls) <= 15  # and at most once a step to the storage


def test_no_cuda_sync_skips_all_of_them(make, monkeypatch):
    calls = pretend(monkeypatch, cuda=True)
    collector = make(
        CountingEnv(device="cpu"),
        blind,
        frames_per_batch=5,
        policy_device="meta",
        env_device="cpu",
        storing_device="cpu",
        no_cuda_sync=True,
    )
    batch = collector.next()
    assert calls == []
    assert batch["observation"].flatten().tolist() == [0, 1, 2, 3, 4]


def test_one_device_needs_neither_casts_nor_copies(make, monkeypatch):
    """No TensorDict is moved in a rollout when everything lives on the CPU."""
    collector = make(CountingEnv(device="cpu"), blind, frames_per_batch=5, device="cpu")
    monkeypatch.setattr(TensorDict, "to", None)
    assert collector.next().device == CPU


# With a real second device.


def linear_policy():
    return TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])


@pytest.mark.cuda
@pytest.mark.parametrize("storing", [None, "cpu", "cuda:0"])
def test_cuda_policy_cpu_environment(make, storing):
    policy = linear_policy()
    collector = make(
        lambda: SerialEnv(2, lambda: GymEnv("Pendulum-v1", device="cpu")),
        policy,
        frames_per_batch=100,
        total_frames=300,
        policy_device="cuda:0",
        storing_device=storing,
    )
    collector.set_seed(0)
    for batch in collector:
        assert batch.device == (None if storing is None else torch.device(storing))
        obs, action = batch["observation"].cpu(), batch["action"].cpu()
        torch.testing.assert_close(
            action, policy(TensorDict({"observation": obs}))["action"].detach(), rtol=1e-3, atol=1e-4
        )
        assert torch.equal(batch["next", "observation"][:, :-1].cpu(), obs[:, 1:])


@pytest.mark.cuda
def test_cuda_environment_and_policy(make, count):
    env = CountingEnv(device="cuda:0", batch_size=[4], max_steps=3)
    batch = make(env, count(env), frames_per_batch=24, device="cuda:0").next()
    assert batch.device == torch.device("cuda:0")
    assert batch["observation"][0].flatten().tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.cuda
def test_cuda_copy_of_the_policy_follows_the_original_when_told(make):
    policy = linear_policy()
    collector = make(
        lambda: GymEnv("Pendulum-v1", device="cpu"),
        policy,
        frames_per_batch=8,
        policy_device="cuda:0",
        storing_device="cpu",
    )
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    assert bool(collector.next()["action"].any())  # a copy acts: it does not change by itself
    collector.update_policy_weights_()
    assert not bool(collector.next()["action"].any())


@pytest.mark.cuda
def test_cudagraph_policy(make):
    policy = linear_policy().cuda()
    collector = make(
        lambda: GymEnv("Pendulum-v1", device="cuda:0"),
        policy,
        frames_per_batch=20,
        total_frames=60,
        device="cuda:0",
        cudagraph_policy=True,
    )
    for batch in collector:
        expected = policy(batch.select("observation").clone())["action"].detach()
        torch.testing.assert_close(batch["action"], expected)


def test_the_users_policy_is_not_moved(make, pendulum_actor):
    """A copy acts on another device; the learner's own stays where it is."""
    policy = pendulum_actor()
    collector = Collector(
        lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=3, policy_device="meta", env_device="cpu"
    )
    assert {parameter.device for parameter in policy.parameters()} == {CPU}
    collector.shutdown()
