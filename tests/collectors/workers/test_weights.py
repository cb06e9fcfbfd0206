"""Weights of many workers: every form, versions, who gets what and when, and nothing torn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tests.collectors.workers.envs import VERSION, ActorCritic, gain, makers, running, tallies, twins
from tests.collectors.workers.frames import check, flat
from tests.collectors.workers.processes import wait_until
from torch import nn

from rollwright.envs import GymEnv, ObservationNorm, TransformedEnv

KINDS = ["sync", "async"]
SEVERAL = 8  # asynchronous batches within which an update acts

FORMS = {
    "module": lambda policy: policy,
    "TensorDict": lambda policy: TensorDict.from_module(policy).data.clone(),
    "parameters": lambda policy: TensorDict.from_module(policy),
    "flat TensorDict": lambda policy: TensorDict.from_module(policy).data.clone().flatten_keys("."),
    "state_dict": lambda policy: policy.state_dict(),
    "plain dictionary": lambda policy: dict(policy.state_dict()),
    "ordered dictionary": lambda policy: OrderedDict(policy.state_dict()),
    "nested dictionary": lambda policy: {"module": {"gain": policy.module.gain.detach().clone()}},
}
WAYS = {
    "positional": lambda c, w: c.update_policy_weights_(w),
    "weights=": lambda c, w: c.update_policy_weights_(weights=w),
    "model_id=": lambda c, w: c.update_policy_weights_(w, model_id="policy"),
    "weights_dict=": lambda c, w: c.update_policy_weights_(weights_dict={"policy": w}),
    "by worker": lambda c, w: c.update_policy_weights_({0: w, 1: w}),
    "worker_ids=": lambda c, w: c.update_policy_weights_(w, worker_ids=[0, 1]),
    "device": lambda c, w: c.update_policy_weights_(w, worker_ids=torch.device("cpu")),
    "devices": lambda c, w: c.update_policy_weights_(w, worker_ids=["cpu"]),
    "received": lambda c, w: c.receive_weights(w),
    "received by name": lambda c, w: c.receive_weights(weights=w),
}


def actions(batch):
    """The one action of each worker, of a stacked batch."""
    found = [row["action"].unique().tolist() for row in batch.unbind(0)]
    assert all(len(values) == 1 for values in found), found
    return [values[0] for values in found]


def acts_soon(collector, value):
    """Whether batches come to be of one action."""
    return any(bool((collector.next()["action"] == value).all()) for _ in range(SEVERAL))


# Forms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_every_form_in_every_way(make, way):
    collector = make("sync", makers(), gain(), frames_per_batch=10, track_policy_version=True, device="cpu")
    assert actions(collector.next()) == [1.0, 1.0]
    for number, form in enumerate(FORMS):
        value = number + 2.0
        version = WAYS[way](collector, FORMS[form](gain(value)))
        batch = collector.next()
        assert actions(batch) == [value, value], form
        assert bool((batch[VERSION] == number + 1).all())
        assert version in (number + 1, None)
        assert (version is None) == way.startswith("received")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_without_synchronisation(make, form):
    collector = make("async", makers(), gain(), frames_per_batch=10)
    collector.next()
    collector.update_policy_weights_(FORMS[form](gain(5.0)))
    assert acts_soon(collector, 5.0)


@pytest.mark.parametrize("call", ["update_policy_weights_", "receive_weights"])
def test_policy_by_name(make, call):
    collector = make("sync", makers(), gain(), frames_per_batch=10)
    getattr(collector, call)(policy=gain(3.0))
    assert actions(collector.next()) == [3.0, 3.0]


def test_weights_of_workers_that_are_named_and_no_other(make):
    collector = make("sync", makers(3), gain(), frames_per_batch=15)
    collector.update_policy_weights_({0: gain(2.0), 2: gain(4.0).state_dict()})
    assert actions(collector.next()) == [2.0, 1.0, 4.0]
    collector.update_policy_weights_({1: TensorDict.from_module(gain(7.0)).data})
    assert actions(collector.next()) == [2.0, 7.0, 4.0]
    collector.update_policy_weights_(gain(8.0), worker_ids=0)
    assert actions(collector.next()) == [8.0, 7.0, 4.0]
    collector.update_policy_weights_(gain(9.0), worker_ids=[1, 2])
    assert actions(collector.next()) == [8.0, 9.0, 9.0]
    collector.update_policy_weights_(gain(1.5))
    assert actions(collector.next()) == [1.5, 1.5, 1.5]


def test_workers_with_policies_of_their_own(make):
    factories = [partial(gain, 10.0), partial(gain, 20.0)]
    collector = make("sync", makers(), policy_factory=factories, frames_per_batch=10)
    assert actions(collector.next()) == [10.0, 20.0]
    collector.update_policy_weights_({0: gain(11.0), 1: gain(21.0)})
    assert actions(collector.next()) == [11.0, 21.0]


def test_a_policy_beside_a_factory_serves_for_weights_only(make):
    policy = gain(3.0)
    collector = make("sync", makers(), policy, policy_factory=gain, frames_per_batch=10)
    collector.next()
    with torch.no_grad():
        policy.module.gain.fill_(6.0)
    collector.update_policy_weights_()
    assert actions(collector.next()) == [6.0, 6.0]


def test_several_models_at_once_and_by_name(make):
    collector = make("sync", makers(), ActorCritic(1.0), frames_per_batch=10)
    new = ActorCritic(4.0)
    collector.update_policy_weights_(weights=TensorDict.from_module(new.actor).data, model_id="actor")
    batch = collector.next()
    assert actions(batch) == [4.0, 4.0]
    assert bool((batch["output1"] == 1.0).all())
    collector.update_policy_weights_(weights_dict={"actor": ActorCritic(5.0).actor, "critic": new.critic})
    batch = collector.next()
    assert actions(batch) == [5.0, 5.0]
    assert bool((batch["output1"] == 4.0).all())


@pytest.mark.parametrize("model_id", ["env.transform", "env.transform[0]"])
def test_a_path_into_the_environment(make, model_id):
    def env(loc=0.0):
        from rollwright.envs import Compose

        norm = ObservationNorm(loc=loc, scale=1.0, in_keys=["observation"])
        return TransformedEnv(GymEnv("Pendulum-v1"), Compose(norm) if model_id.endswith("]") else norm)

    collector = make("sync", [env] * 2, frames_per_batch=10)
    collector.next()
    moved = env(100.0).transform
    collector.update_policy_weights_(moved[0] if model_id.endswith("]") else moved, model_id=model_id)
    later = collector.next()["next", "observation"]
    assert float(later.abs().min()) > 50


# When --------------------------------------------------------------------------------------------------------------


def test_an_update_on_batch_i_acts_on_all_of_batch_i_plus_one(make):
    policy = gain(0.0)
    collector = make("sync", makers(), policy, frames_per_batch=10, total_frames=200, track_policy_version=True)
    for number, batch in enumerate(collector):
        assert actions(batch) == [number, number]
        assert bool((batch[VERSION] == number).all())
        assert bool((batch["next", VERSION] == number).all())
        assert batch[VERSION].dtype == torch.int64
        assert batch[VERSION].shape == batch.shape
        with torch.no_grad():
            policy.module.gain.fill_(number + 1.0)
        assert collector.update_policy_weights_() == number + 1
    assert collector.policy_version == 20


@pytest.mark.parametrize("kind", KINDS)
def test_tags_are_the_versions_that_acted(make, kind):
    """The gain is the version, so each frame says itself which weights acted."""
    collector = make(
        kind, makers(make=tallies), gain(0.0), frames_per_batch=12, total_frames=2400, track_policy_version=True
    )
    frames = []
    for number, batch in enumerate(collector):
        frames.append(batch)
        if number % 3 == 0:
            version = collector.policy_version + 1
            assert collector.update_policy_weights_(gain(version)) == version
    data = flat(frames)
    assert torch.equal(data["action"].flatten().long(), data[VERSION])
    assert torch.equal(data["next", VERSION], data[VERSION])
    assert len(data[VERSION].unique()) > 10
    check(frames)
    stats = collector.stats()
    assert [worker["policy_version"] for worker in stats["workers"]]
    assert stats["policy_version"] == collector.policy_version


def test_workers_report_the_versions_they_act_with(make):
    collector = make("sync", makers(), gain(), frames_per_batch=10)
    collector.next()
    assert collector.update_policy_weights_(gain(2.0)) == 1
    collector.next()
    assert [worker["policy_version"] for worker in collector.stats()["workers"]] == [1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_the_learner_is_never_read_by_workers(make, kind):
    """Training in place acts when it is published, and not before."""
    policy = gain(1.0)
    collector = make(kind, makers(), policy, frames_per_batch=10)
    collector.next()
    with torch.no_grad():
        policy.module.gain.fill_(2.0)
    for _ in range(4):
        assert bool((collector.next()["action"] == 1.0).all())
    collector.update_policy_weights_()
    with torch.no_grad():
        policy.module.gain.fill_(-1.0)
    assert acts_soon(collector, 2.0)


def test_parameters_stay_those_of_the_optimizer(make):
    policy = gain(1.0)
    parameter = policy.module.gain
    collector = make("sync", makers(), policy, frames_per_batch=10)
    collector.update_policy_weights_(gain(2.0))
    collector.next()
    assert policy.module.gain is parameter
    assert not parameter.is_shared()
    assert parameter.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_update_at_each_batch(make, kind):
    policy = gain(0.0)
    collector = make(kind, makers(), policy, frames_per_batch=10, update_at_each_batch=True, track_policy_version=True)
    for number in range(6):
        batch = collector.next()
        if kind == "sync":
            assert actions(batch) == [number, number]
        with torch.no_grad():
            policy.module.gain.fill_(number + 1.0)
    assert acts_soon(collector, 6.0)
    assert collector.policy_version >= 6


def test_updates_before_the_first_batch(make):
    for kind in KINDS:
        collector = make(kind, makers(), gain(), frames_per_batch=10, track_policy_version=True)
        assert [collector.update_policy_weights_(gain(v)) for v in (2.0, 3.0)] == [1, 2]
        assert acts_soon(collector, 3.0)


def test_increment_version(make):
    collector = make("sync", makers(), gain(), frames_per_batch=10, track_policy_version=True)
    collector.next()
    assert collector.increment_version() == 1
    assert bool((collector.next()[VERSION] == 1).all())
    assert collector.get_policy_version() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_running_statistics_and_extra_state_travel(make, kind):
    collector = make(kind, makers(), running(1.0), frames_per_batch=10)
    collector.next()
    collector.update_policy_weights_(running(5.0))
    assert acts_soon(collector, 5.0)
    batch = collector.next()
    assert bool((batch["mean"] == 5.0).all())
    assert bool((batch["count"] == 5.0).all())


# Nothing torn ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async", "buffer"])
def test_no_step_acts_with_a_mixture(make, buffer, kind):
    """Each publication writes two large weights; whoever copies them meanwhile must see both, or none."""
    policy, frames, options = twins(), [], {}
    rb = buffer(30_000) if kind == "buffer" else None
    if rb is not None:
        options = {"replay_buffer": rb}
    collector = make(
        "sync" if kind == "sync" else "async",
        makers(),
        policy,
        frames_per_batch=200,
        total_frames=20_000,
        track_policy_version=True,
        **options,
    )
    value = 0
    if rb is not None:
        collector.start()
    while rb is None or rb.write_count < 20_000:
        for _ in range(1 if kind == "sync" else 5):
            value += 1
            with torch.no_grad():
                policy.module.left.fill_(value)
                policy.module.right.fill_(value)
            assert collector.update_policy_weights_() == value
            with torch.no_grad():
                policy.module.left.fill_(-1.0)
        if rb is None:
            batch = collector.next()
            if batch is None:
                break
            frames.append(batch.select("left", "right", "action", VERSION).clone())
    data = rb[:] if rb is not None else flat(frames)
    assert data.numel() >= 20_000
    assert torch.equal(data["left"], data["right"])
    assert torch.equal(data["left"].flatten().long(), data[VERSION])
    assert len(data[VERSION].unique()) > 20


# Staleness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy_lag", ["wait", "drop"])
@pytest.mark.parametrize("max_policy_lag", [0, 2])
def test_staleness_is_bounded(make, policy_lag, max_policy_lag):
    """No more versions are published while a rollout is taken, whoever publishes without pause."""
    collector = make(
        "async",
        makers(step_s=0.001),
        gain(0.0),
        frames_per_batch=10,
        total_frames=400,
        track_policy_version=True,
        max_policy_lag=max_policy_lag,
        policy_lag=policy_lag,
    )
    over = threading.Event()
    period_s = 0.02 if max_policy_lag == 0 else 0.006  # a rollout takes some 12 ms; one without an update must fit in

    def publish():
        while not over.wait(period_s):
            collector.update_policy_weights_(gain(collector.policy_version + 1))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        batches = list(collector)
    finally:
        over.set()
        thread.join()
    frames = flat(batches)
    assert torch.equal(frames["action"].flatten().long(), frames[VERSION])
    assert frames[VERSION].max() > 5
    for batch in batches:
        assert int(batch[VERSION].max() - batch[VERSION].min()) <= max_policy_lag
    found = check(batches, gaps=policy_lag == "drop")
    assert found.frames == 400
    assert (collector.stats()["frames_stale"] > 0) == (policy_lag == "drop")


# Bad weights -------------------------------------------------------------------------------------------------------


BAD = {
    "missing": ({}, ValueError, "names differ|Missing"),
    "unknown": ({"module.gain": torch.ones(1), "other": torch.ones(1)}, ValueError, "other"),
    "shape": ({"module.gain": torch.ones(7)}, ValueError, "shape"),
    "type": ({"module.gain": "heavy"}, TypeError, "tensor"),
    "form": (3.5, TypeError, "float"),
    "module": (nn.Linear(2, 2), ValueError, "names differ"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_do_not_fit_change_nothing(make, kind):
    collector = make(kind, makers(), gain(), frames_per_batch=10, track_policy_version=True)
    collector.next()
    for weights, error, text in BAD.values():
        with pytest.raises(error, match=text):
            collector.update_policy_weights_(weights)
        if isinstance(weights, dict):
            with pytest.raises(error, match=text):
                collector.update_policy_weights_({0: gain(2.0), 1: weights})
            with pytest.raises(error, match=text):
                collector.update_policy_weights_(weights_dict={"policy.module": gain(2.0).module, "policy": weights})
    for arguments in (
        {"worker_ids": 2},
        {"worker_ids": [0, -1]},
        {"worker_ids": "cuda:7"},
        {"model_id": "nobody"},
        {"weights_dict": {"policy": gain()}},
        {"policy": gain()},
    ):
        with pytest.raises(ValueError, match=r"worker|model_id|weights|policy"):
            collector.update_policy_weights_(gain(2.0), **arguments)
    with pytest.raises(ValueError, match="worker"):
        collector.update_policy_weights_({0: gain(2.0), 5: gain(2.0)})
    for _ in range(3):
        batch = collector.next()
        assert bool((batch["action"] == 1.0).all())
        assert bool((batch[VERSION] == 0).all())
    assert collector.policy_version == 0


# Schemes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"])
@pytest.mark.parametrize("kind", KINDS)
def test_schemes(make, kind, name):
    from rollwright import weight_update

    for strategy in ("tensordict", "state_dict"):
        scheme = getattr(weight_update, name)(strategy=strategy)
        policy = gain()
        collector = make(kind, makers(), policy, frames_per_batch=10, weight_sync_schemes={"policy": scheme})
        collector.next()
        with torch.no_grad():
            policy.module.gain.fill_(4.0)
        collector.update_policy_weights_()
        assert acts_soon(collector, 4.0)
        collector.update_policy_weights_(gain(5.0))
        assert acts_soon(collector, 5.0)


def test_a_scheme_that_sends_nothing(make):
    from rollwright.weight_update import NoWeightSyncScheme

    collector = make(
        "sync", makers(), gain(), frames_per_batch=10, weight_sync_schemes={"policy": NoWeightSyncScheme()}
    )
    collector.next()
    collector.update_policy_weights_(gain(5.0))
    assert actions(collector.next()) == [1.0, 1.0]


def test_an_update_acts_within_a_second_of_a_long_rollout(make, buffer):
    rb = buffer(100_000)
    collector = make("async", makers(step_s=0.001), gain(), frames_per_batch=50_000, replay_buffer=rb)
    collector.start()
    version = collector.update_policy_weights_(gain(2.0))

    def acting():
        return [worker["policy_version"] for worker in collector.stats()["workers"]] == [version] * 2

    assert wait_until(acting, 2.0)
