"""What programs for TorchRL's collectors with workers do, and ours take as they are."""

from __future__ import annotations

import os
import threading
from functools import partial
from multiprocessing import Manager

import pytest
import torch
from tensordict import TensorDict
from tests.collectors.workers.envs import DRAW, IDENT, IDS, VERSION, gain, makers, tally
from tests.variants import one_quick

from rollwright.collectors import RandomPolicy
from rollwright.envs import GymEnv, SerialEnv
from rollwright.testing.mocking_classes import CountingEnvWithString
from rollwright.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

KINDS = ["sync", "async"]
SCHEMES = [MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme]


# Environments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_environments_that_are_made_already(make, kind):
    """Each worker has a copy, with episodes of its own, whatever the one that was passed had been used for."""
    env = tally()
    env.reset(seed=3)
    collector = make(kind, [env, env], gain(), frames_per_batch=40)
    drawn = set()
    for _ in range(4):
        batch = collector.next()
        drawn |= set(batch["observation"].reshape(-1, 5)[:, DRAW].tolist())
    assert len(drawn) == 4 * batch.numel()  # no two frames alike
    with pytest.raises(ValueError, match="create_env_kwargs"):
        make(kind, [tally()] * 2, gain(), frames_per_batch=40, create_env_kwargs={"ident": 1})


def test_actions_of_one_environment_for_as_many_as_an_action_has_numbers(make):
    """One-hot actions ``[2]`` of two environments: two of them."""
    policy = RandomPolicy(GymEnv("CartPole-v1").action_spec)
    env = SerialEnv(2, lambda: GymEnv("CartPole-v1"))
    collector = make("sync", [env, env], policy, frames_per_batch=40)
    action = collector.next()["action"]
    assert action.shape == (2, 2, 10, 2)
    assert bool((action.sum(-1) == 1).all())


# Options -----------------------------------------------------------------------------------------------------------


def test_to_stack_is_the_default_of_asynchronous_workers_too(make):
    batch = make("async", makers(), gain(), frames_per_batch=10, cat_results="stack").next()
    assert batch.shape == (10,)
    assert (
        make("front", makers(), gain(), num_collectors=2, frames_per_batch=10, cat_results="stack").next() is not None
    )
    for how in (0, -1):
        with pytest.raises(ValueError, match=f"cat_results={how} .* sync=True"):
            make("async", makers(), gain(), frames_per_batch=10, cat_results=how)


@pytest.mark.parametrize(("how", "shape"), [("stack", (3, 10)), (0, (30,)), (-1, (30,))])
def test_a_mask_says_what_interrupted_workers_took(make, how, shape):
    envs = [partial(tally, 0), partial(tally, 1), partial(tally, 2, step_s=0.05)]
    options = {"frames_per_batch": 30, "cat_results": how, "preemptive_threshold": 0.6}
    batch = make("sync", envs, gain(), **options).next()
    mask = batch["collector", "mask"]
    assert mask.shape == shape
    assert torch.equal(mask, batch[IDS] != -1)
    assert 21 <= int(mask.sum()) < 30
    assert batch["observation"][..., IDENT][mask][:20].tolist() == [0.0] * 10 + [1.0] * 10


@pytest.mark.parametrize("threshold", [None, 1.0])
def test_no_mask_where_all_workers_are_waited_for(make, threshold):
    collector = make("sync", makers(), gain(), frames_per_batch=20, preemptive_threshold=threshold)
    assert (collector.preemptive_threshold, collector.interruptor) == (1.0, None)
    assert ("collector", "mask") not in collector.next().keys(True)


def test_threads_of_this_process_are_given_back(make):
    before = torch.get_num_threads()
    collector = make("sync", makers(), gain(), frames_per_batch=20, num_threads=before + 3)
    assert torch.get_num_threads() == before + 3
    collector.shutdown()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_buffers", [True, False])
def test_strings_beside_buffers(make, kind, use_buffers):
    frames = 10 if kind == "sync" else 5  # of each worker 5, in which no episode ends
    batch = make(kind, [CountingEnvWithString] * 2, frames_per_batch=frames, use_buffers=use_buffers).next()
    assert batch.names[-1] == "time"
    strings, following = batch["string"], batch["next", "string"]
    if kind == "sync":
        strings, following = strings[0], following[0]
    assert list(strings)[1:] == list(following)[:-1]


# Weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["policy_or_weights", "policy_weights"])
@pytest.mark.parametrize("kind", ["sync", "front"])
def test_weights_by_every_name(make, kind, name):
    collector = make(kind, makers() if kind == "sync" else tally, gain(), frames_per_batch=20)
    collector.update_policy_weights_(**{name: gain(3.0)})
    assert bool((collector.next()["action"] == 3.0).all())
    with pytest.raises(ValueError, match=f"{name} were both given|{name} and .* were both given"):
        collector.update_policy_weights_(policy=gain(), **{name: gain()})


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_scheme_that_was_made_ready_before(make, scheme):
    """For the devices of workers, whose policies a factory makes: weights are passed by the program."""
    sender, weights = scheme(), TensorDict.from_module(gain())
    sender.init_on_sender(model=gain(), devices=["cpu"] * 2, model_id="policy")
    with pytest.raises(ValueError, match="devices: expected one for each of 3 receivers, got 2"):
        scheme().init_on_sender(devices=["cpu"] * 2, num_workers=3)
    schemes = {"weight_sync_schemes": {"policy": sender}}
    collector = make("sync", makers(), policy_factory=gain, frames_per_batch=20, device="cpu", **schemes)
    collector.update_policy_weights_(weights)
    assert bool((collector.next()["action"] == 1.0).all())
    weights.data.zero_()
    collector.update_policy_weights_(weights)
    assert bool((collector.next()["action"] == 0.0).all())


# Objects of a manager ----------------------------------------------------------------------------------------------


class Counted:
    """A factory that notes its calls where the program sees them."""

    def __init__(self, lock, calls):
        self.lock, self.calls = lock, calls

    def __call__(self):
        with self.lock:
            self.calls.append(os.getpid())
        return gain()


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_hooks_and_factories_that_write_to_a_manager(make, kind):
    with Manager() as manager:
        calls, made = manager.list(), manager.list()

        def before():
            calls.append(("before", os.getpid()))

        def after(batch):
            calls.append(("after", os.getpid()))

        factory = Counted(manager.Lock(), made)
        options = {"policy_factory": factory, "frames_per_batch": 20, "total_frames": 200, "pre_collect_hook": before}
        collector = make(kind, makers(), **options)
        collector.post_collect_hook = after
        pids = {worker["pid"] for worker in collector.stats()["workers"]}
        list(collector)
        assert {name for name, _ in calls} == {"before", "after"}
        assert {pid for _, pid in calls} == pids
        assert sorted(made) == sorted(pids)
        collector.shutdown()


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
def test_versions_of_both_schemes(make, kind):
    for scheme in SCHEMES:
        schemes = {"weight_sync_schemes": {"policy": scheme()}}
        collector = make(kind, makers(), gain(), frames_per_batch=20, track_policy_version=True, **schemes)
        assert bool((collector.next()["next", VERSION] == 0).all())
        collector.update_policy_weights_()
        seen = [collector.next()["next", VERSION] for _ in range(6)]
        assert bool((seen[-1] == 1).all())


# Buffers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"extend_buffer": False}], ids=["rollouts", "steps"])
def test_what_a_worker_has_written_is_there_when_it_is_delivered(make, buffer, options):
    """Also where another process holds rows before it, which keep everyone from reading on."""
    rb = buffer()
    collector = make("async", makers(), gain(), frames_per_batch=10, replay_buffer=rb, **options)
    collector.next()
    held = rb.storage.ledger.reserve(1)
    late = threading.Timer(1.0, rb.storage.ledger.abandon, [held])
    late.start()
    for count in range(1, 8):
        collector.next()
        assert rb.write_count >= 10 + 10 * count
    late.join()
