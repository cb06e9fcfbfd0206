"""Weights of many workers: every form, versions, who gets what and when, and nothing torn."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tests.collectors.workers.envs import VERSION, ActorCritic, gain, makers, running, tallies, tally
from tests.collectors.workers.frames import check, flat
from tests.collectors.workers.processes import wait_until
from tests.variants import in_turn, one_quick
from torch import nn

from rollwright.data import LazyTensorStorage, ReplayBuffer
from rollwright.envs import GymEnv, ObservationNorm, TransformedEnv
from rollwright.weight_update import SharedMemWeightSyncScheme

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


def test_every_form_without_synchronisation(make):
    collector = make("async", makers(), gain(), frames_per_batch=10)
    collector.next()
    for value, form in enumerate(FORMS, 2):
        collector.update_policy_weights_(FORMS[form](gain(value)))
        assert acts_soon(collector, value), form


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


def env_of_pendulum():
    return GymEnv("Pendulum-v1")


class Marked(nn.Module):
    """A transform that writes its weight into what is stored."""

    def __init__(self, mark: float) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.tensor(mark), requires_grad=False)

    def forward(self, data):
        return data

    def inv(self, data):
        return data.set("mark", self.mark.expand(data.batch_size).clone())


def test_a_path_to_a_transform_of_the_buffer(make):
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), transform=Marked(1.0), shared=True, batch_size=4)
    collector = make("sync", [env_of_pendulum] * 2, frames_per_batch=10, replay_buffer=buffer)
    collector.next()
    collector.update_policy_weights_(weights_dict={"replay_buffer.transform[0]": Marked(5.0)})
    collector.next()
    assert buffer.storage[:]["mark"].tolist() == [1.0] * 10 + [5.0] * 10


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


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
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


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_running_statistics_and_extra_state_travel(make, kind):
    collector = make(kind, makers(), running(1.0), frames_per_batch=10)
    collector.next()
    collector.update_policy_weights_(running(5.0))
    batches = (collector.next() for _ in range(SEVERAL))  # a rollout of the other worker may have begun before
    batch = next(batch for batch in batches if bool((batch["action"] == 5.0).all()))
    assert bool((batch["mean"] == 5.0).all())
    assert bool((batch["count"] == 5.0).all())


# Staleness ---------------------------------------------------------------------------------------------------------


def stepped(collector):
    """Frames that all environments have taken."""
    return sum(collector.get_distant_attr("env._env.calls"))


@pytest.mark.parametrize("max_policy_lag", [0, 2])
def test_staleness_at_delivery_is_bounded_by_waiting(make, max_policy_lag):
    """Another thread publishes without pause; what was published before a batch was asked for is published then."""
    collector = make(
        "async", makers(), gain(0.0), frames_per_batch=10, total_frames=400, track_policy_version=True,
        max_policy_lag=max_policy_lag,
    )  # fmt: skip
    over = threading.Event()

    def publish():
        while not over.is_set():
            collector.update_policy_weights_(gain(collector.policy_version + 1))

    thread = threading.Thread(target=publish)
    thread.start()
    batches = []
    try:
        while True:
            published = collector.policy_version
            batch = collector.next()
            if batch is None:
                break
            assert published - int(batch[VERSION].min()) <= max_policy_lag
            batches.append(batch)
    finally:
        over.set()
        thread.join()
    frames = flat(batches)
    assert torch.equal(frames["action"].flatten().long(), frames[VERSION])
    assert frames[VERSION].max() > 5
    assert check(batches, gaps=True).frames == 400  # a consumer that pauses for long makes publishers go on
    assert stepped(collector) == 400 + collector.stats()["frames_stale"]


@pytest.mark.parametrize("max_policy_lag", [0, 2])
def test_staleness_at_delivery_is_bounded_by_dropping(make, max_policy_lag):
    """Another thread publishes while rollouts are under way and the consumer does something else."""
    collector = make(
        "async", makers(), gain(0.0), frames_per_batch=10, total_frames=400, track_policy_version=True,
        max_policy_lag=max_policy_lag, policy_lag="drop",
    )  # fmt: skip
    batches = []

    def publish():
        for _ in range(3):
            collector.update_policy_weights_(gain(collector.policy_version + 1))

    while True:
        if len(batches) % 4 == 3:
            thread = threading.Thread(target=publish)
            thread.start()
            thread.join()
        batch = collector.next()
        if batch is None:
            break
        assert 0 <= collector.policy_version - int(batch[VERSION].min()) <= max_policy_lag
        batches.append(batch)
    frames = flat(batches)
    assert torch.equal(frames["action"].flatten().long(), frames[VERSION])
    assert check(batches, gaps=True).frames == collector.stats()["frames"] == 400
    dropped = collector.stats()["frames_stale"]
    assert dropped > 0
    assert stepped(collector) == 400 + dropped


# Bad weights -------------------------------------------------------------------------------------------------------


BAD = {
    "missing": ({}, ValueError, "names differ|Missing"),
    "unknown": ({"module.gain": torch.ones(1), "other": torch.ones(1)}, ValueError, "other"),
    "shape": ({"module.gain": torch.ones(7)}, ValueError, "shape"),
    "type": ({"module.gain": "heavy"}, TypeError, "tensor"),
    "form": (3.5, TypeError, "float"),
    "module": (nn.Linear(2, 2), ValueError, "names differ"),
}


@pytest.mark.parametrize("kind", one_quick(KINDS, "sync"))
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


@pytest.mark.parametrize("kind", one_quick(KINDS, "async"))
def test_nothing_to_publish_is_an_error_and_counts_no_version(make, kind):
    def policy(td):
        return td.set("action", torch.ones(1))

    in_module = TensorDictModule(lambda _: torch.ones(1), in_keys=["observation"], out_keys=["action"])
    for options in ({"policy": policy}, {"policy": in_module}, {"policy_factory": gain}):
        collector = make(kind, makers(), frames_per_batch=10, **options)
        for arguments in ({}, {"model_id": "policy"}, {"worker_ids": 0}):
            with pytest.raises(RuntimeError, match="found no module whose weights could be published to the workers"):
                collector.update_policy_weights_(**arguments)
        assert collector.policy_version == 0
        assert collector.increment_version() == 1
    with pytest.raises(RuntimeError, match="update_at_each_batch: found no module"):
        make(kind, makers(), policy, frames_per_batch=10, update_at_each_batch=True)
    at_random = make(kind, makers(), frames_per_batch=10)
    assert at_random.update_policy_weights_() == 1  # as of a collector in one process


# Schemes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"), in_turn(["SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"], KINDS)
)
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


WRONG_SCHEMES = {
    "no dictionary": ([SharedMemWeightSyncScheme()], TypeError, "expected schemes by model, got list"),
    "a number": ({"policy": 3}, TypeError, r"\['policy'\]: expected a WeightSyncScheme, got int: 3"),
    "None": ({"policy": None}, TypeError, r"\['policy'\]: expected a WeightSyncScheme, got NoneType"),
    "a class": ({"policy": SharedMemWeightSyncScheme}, TypeError, r"Make one: SharedMemWeightSyncScheme\(\)"),
    "no name": ({0: SharedMemWeightSyncScheme()}, TypeError, "expected names of models, got int: 0"),
}


@pytest.mark.parametrize("wrong", WRONG_SCHEMES)
@pytest.mark.parametrize("argument", ["weight_sync_schemes", "weight_recv_schemes"])
def test_wrong_schemes_are_refused_at_construction(make, argument, wrong):
    schemes, error, message = WRONG_SCHEMES[wrong]
    for kind, env in (("sync", makers()), ("front", tally)):
        with pytest.raises(error, match=f"{argument}.*{message}"):
            make(kind, env, gain(), frames_per_batch=10, **{argument: schemes})


def test_schemes_of_models_that_workers_do_not_have_are_refused(make):
    schemes = {"policy": SharedMemWeightSyncScheme(), "nobody": SharedMemWeightSyncScheme()}
    with pytest.raises(ValueError, match=r"weight_sync_schemes\['nobody'\].*worker 0.*no 'nobody'"):
        make("sync", makers(), gain(), frames_per_batch=10, weight_sync_schemes=schemes)
    with pytest.raises(RuntimeError, match="comes from no sender"):
        make("sync", makers(), gain(), frames_per_batch=10, weight_recv_schemes=schemes)


def normed():
    return TransformedEnv(GymEnv("Pendulum-v1"), ObservationNorm(loc=0.0, scale=1.0, in_keys=["observation"]))


@pytest.mark.parametrize("known", [True, False], ids=["policy", "factory"])
def test_what_is_received_for_any_model_reaches_the_workers(make, known):
    """The policy may be in this process, and the transform is not; both arrive as one version."""
    senders = {name: SharedMemWeightSyncScheme() for name in ("policy", "env.transform")}
    for name, sender in senders.items():
        sender.init_on_sender(name)
    senders["policy"].send(gain(2.0))
    policy = {"policy": gain(1.0)} if known else {"policy_factory": gain}
    collector = make("sync", [normed] * 2, frames_per_batch=10, track_policy_version=True, **policy)
    collector.register_scheme_receiver({name: copy.copy(s) for name, s in senders.items()}, synchronize_weights=False)
    collector.receive_weights()
    batch = collector.next()
    assert actions(batch) == [2.0, 2.0]
    assert float(batch["next", "observation"].abs().max()) < 50
    moved = normed().transform
    moved.loc.fill_(100.0)
    senders["env.transform"].send(moved)
    senders["policy"].send(gain(3.0))
    collector.receive_weights()
    collector.receive_weights()  # nothing is new
    batch = collector.next()
    assert actions(batch) == [3.0, 3.0]
    assert float(batch["next", "observation"].abs().min()) > 50
    assert bool((batch[VERSION] == 2).all())
    assert collector.policy_version == 2
