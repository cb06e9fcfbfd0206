"""Schemes by themselves: between two processes, and what a collector does with those it receives through."""

import copy
import pickle

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from rollwright._processes.child import Child
from rollwright.collectors.options import CollectorOptions
from rollwright.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)
from rollwright.weight_update.schemes import Publisher, as_schemes, receive_all, register_receivers

LIMIT_S = 100.0  # for what comes at once, on a busy machine too
SENDING = [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme]


def model(value=0.0):
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    for tensor in (*module.parameters(), module[0].running_mean):
        nn.init.constant_(tensor, value)
    return module


def value_of(module):
    return float(module[1].bias.detach()), float(module[0].running_mean[0])


def receiving(channel, scheme, worker):
    """Receive when told to; answer with what the model holds."""
    module = model(-1.0)
    scheme.init_on_receiver(model=module, worker_idx=worker)
    scheme.connect(timeout=LIMIT_S)
    channel.send((scheme.version, value_of(module)))
    while channel.recv(LIMIT_S) == "receive":
        channel.send((scheme.receive(), value_of(module)))


@pytest.fixture
def start():
    started = []

    def build(*args):
        started.append(Child(receiving, *args, name="receiver"))
        return started[-1]

    yield build
    for child in started:
        child.channel.close()
        child.end(5.0)


def asked(child):
    child.channel.send("receive")
    return child.channel.recv(LIMIT_S)


@pytest.mark.parametrize("kind", SENDING)
def test_between_processes(start, kind):
    scheme, learner = kind(), model(1.0)
    scheme.init_on_sender("policy", model=learner, num_workers=2)
    children = [start(scheme, worker) for worker in range(2)]
    scheme.connect()
    assert [child.channel.recv(LIMIT_S) for child in children] == [(1, (1.0, 1.0))] * 2
    assert scheme.send(model(2.0)) == 2
    assert [asked(child) for child in children] == [(2, (2.0, 2.0))] * 2
    scheme.wait_until_taken(LIMIT_S)
    assert [asked(child)[0] for child in children] == [None, None]
    scheme.send(model(3.0), worker_ids=1)
    with pytest.raises(TimeoutError, match=r"workers \[1\] to receive the weights of 'policy'"):
        scheme.wait_until_taken(0.0)
    assert [asked(child) for child in children] == [(None, (2.0, 2.0)), (3, (3.0, 3.0))]
    scheme.send({0: model(4.0), 1: model(5.0).state_dict()})
    assert [asked(child) for child in children] == [(4, (4.0, 4.0)), (4, (5.0, 5.0))]
    nn.init.constant_(learner[1].bias, 6.0)
    scheme.send()
    assert [asked(child)[1][0] for child in children] == [6.0, 6.0]


FORMS = [
    lambda module: module,
    lambda module: TensorDict.from_module(module),
    lambda module: module.state_dict(),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SENDING)
@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_forms_and_strategies(kind, strategy, form):
    sender, target = kind(strategy), model()
    sender.init_on_sender(model=model())
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model=target)
    sender.send(form(model(2.0)))
    assert receiver.receive() == 1
    assert value_of(target) == (2.0, 2.0)


class Counting(nn.Linear):
    count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


@pytest.mark.parametrize(("strategy", "expected"), [("tensordict", 0), ("state_dict", 3)])
def test_extra_state(strategy, expected):
    learner, target = Counting(2, 1), Counting(2, 1)
    learner.count = 3
    sender = SharedMemWeightSyncScheme(strategy)
    sender.init_on_sender(model=learner)
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model=target)
    sender.send()
    receiver.receive()
    assert target.count == expected
    assert torch.equal(target.weight, learner.weight)


def test_nothing_travels():
    sender, target = NoWeightSyncScheme(), model(1.0)
    sender.init_on_sender(model=model())
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model=target)
    sender.connect()
    receiver.connect()
    sender.send(model(2.0))
    assert receiver.receive(timeout=10.0) is None
    assert value_of(target) == (1.0, 1.0)
    sender.wait_until_taken(0.0)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("none", NoWeightSyncScheme),
        ("direct", NoWeightSyncScheme),
        ("shared", SharedMemWeightSyncScheme),
        ("thread", SharedMemWeightSyncScheme),
        ("process", MultiProcessWeightSyncScheme),
        ("multiprocessing", MultiProcessWeightSyncScheme),
    ],
)
def test_from_backend(backend, kind):
    scheme = WeightSyncScheme.from_backend(backend, strategy="state_dict")
    assert type(scheme) is kind
    assert scheme.strategy == "state_dict"


def test_weights_that_do_not_fit_are_not_sent():
    sender = SharedMemWeightSyncScheme()
    sender.init_on_sender(model=model(), num_workers=2)
    with pytest.raises(ValueError, match="names differ"):
        sender.send({0: model(1.0), 1: nn.Linear(2, 1)})
    assert sender.version == 0
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model=model(), worker_idx=0)
    assert receiver.receive() is None


def test_sides():
    sender = SharedMemWeightSyncScheme()
    for call in (sender.send, sender.receive, sender.connect):
        with pytest.raises(RuntimeError, match="init_on"):
            call()
    with pytest.raises(RuntimeError, match="comes from no sender"):
        sender.init_on_receiver(model=model())
    sender.init_on_sender(model=model())
    sender.connect()
    receiver = copy.copy(sender)
    assert (sender.initialized_on_sender, sender.synchronized_on_sender) == (True, True)
    assert (receiver.initialized_on_sender, receiver.synchronized_on_sender, receiver.model) == (False, False, None)
    with pytest.raises(RuntimeError, match="a sender already"):
        sender.init_on_sender(model=model())
    with pytest.raises(ValueError, match="expected 0 to 0, got 3"):
        receiver.init_on_receiver(model=model(), worker_idx=3)
    with pytest.raises(ValueError, match="got neither"):
        receiver.init_on_receiver()
    receiver.init_on_receiver(model=model())
    receiver.connect()
    assert (receiver.initialized_on_receiver, receiver.synchronized_on_receiver) == (True, True)
    sender.shutdown()
    sender.shutdown()
    with pytest.raises(RuntimeError, match="no sender"):
        sender.send(model())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SharedMemWeightSyncScheme("pickle"), ValueError, "strategy: expected 'tensordict' or 'state_dict'"),
        (lambda: WeightSyncScheme.from_backend("pigeon"), ValueError, "backend: expected one of 'direct'"),
        (lambda: SharedMemWeightSyncScheme().init_on_sender(num_workers=0), ValueError, "num_workers"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_receiver_waits_with_a_limit():
    sender = SharedMemWeightSyncScheme()
    sender.init_on_sender()
    sender.connect()  # it has nothing to send
    receiver = copy.copy(sender)
    receiver.init_on_receiver(model=model())
    with pytest.raises(TimeoutError, match="first weights of 'policy'"):
        receiver.connect(timeout=0.01)


# Collectors.


class Worker:
    _worker_idx = 1

    def __init__(self):
        self.models = {"actor": model(), "critic": model()}

    def get_model(self, model_id):
        return self.models[model_id]


def test_receivers_of_a_collector():
    senders = {name: SharedMemWeightSyncScheme() for name in ("actor", "critic")}
    for name, sender in senders.items():
        sender.init_on_sender(name, num_workers=2)
        sender.send(model(1.0))
    worker = Worker()
    receivers = register_receivers(worker, {name: copy.copy(sender) for name, sender in senders.items()})
    assert [value_of(module)[0] for module in worker.models.values()] == [1.0, 1.0]
    assert receive_all(receivers) == []
    senders["critic"].send(model(2.0), worker_ids=[1])
    assert receive_all(receivers) == ["critic"]
    assert [value_of(module)[0] for module in worker.models.values()] == [1.0, 2.0]
    with pytest.raises(TypeError, match=r"weight_recv_schemes\['policy'\]: expected a WeightSyncScheme, got str"):
        register_receivers(worker, {"policy": "shared"})


@pytest.mark.parametrize("together", [True, False])
def test_an_update_of_several_models_travels_on_one_board(together):
    """Whatever their schemes are: a worker must not get one without the other."""
    schemes = {"actor": SharedMemWeightSyncScheme(), "still": NoWeightSyncScheme()}
    if not together:
        schemes["critic"] = MultiProcessWeightSyncScheme()
    publisher = Publisher(2, schemes)
    publisher.publish(1, {name: model().state_dict() for name in ("actor", "critic", "still")})
    common, own = publisher.weights_of(1)
    assert (common.version, own.version) == ((1, -1) if together else (-1, 1))
    found = []
    (common if together else own).take({}, lambda publication: found.append(sorted(publication.models)))
    assert found == [["actor", "critic"]]


def test_one_board_for_each_worker_on_request():
    publisher = Publisher(2, {"policy": SharedMemWeightSyncScheme(per_worker_weights=True)})
    publisher.publish(1, {"policy": model().state_dict()})
    assert [[board.version for board in publisher.weights_of(worker)] for worker in range(2)] == [[-1, 1]] * 2


def test_a_sender_for_actors_of_ray_is_not_sent_by_hand():
    scheme = WeightSyncScheme.from_backend("ray")
    assert pickle.loads(pickle.dumps(scheme)).strategy == "tensordict"
    scheme.init_on_sender(model=nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"a sender cannot be sent to an actor\. Pass the scheme to RayCollector"):
        pickle.dumps(scheme)


def torchrls(name, **attributes):
    """What TorchRL's scheme of that name looks like from here."""
    base = type("WeightSyncScheme", (), {"__module__": "torchrl.weight_update.weight_sync_schemes"})
    return type(name, (base,), {"__module__": "torchrl.weight_update", "strategy_str": "state_dict", **attributes})()


@pytest.mark.parametrize("kind", [*SENDING, NoWeightSyncScheme])
def test_collectors_take_the_scheme_of_the_same_name_for_one_of_torchrl(kind):
    schemes = {"policy": torchrls(kind.__name__), "env.transform[0]": SharedMemWeightSyncScheme()}
    taken = as_schemes("weight_sync_schemes", schemes)
    assert type(taken["policy"]) is kind
    assert taken["policy"].strategy == "state_dict"
    assert taken["env.transform[0]"] is schemes["env.transform[0]"]
    assert CollectorOptions(weight_sync_schemes=schemes).weight_sync_schemes["policy"].strategy == "state_dict"


def test_a_scheme_of_torchrl_keeps_its_option():
    given = torchrls("SharedMemWeightSyncScheme", per_worker_weights=True)
    assert not as_schemes("weight_sync_schemes", {"policy": given})["policy"].shares


def test_a_scheme_derived_from_torchrls_is_refused():
    with pytest.raises(TypeError, match="expected a WeightSyncScheme, got Mine"):
        as_schemes("weight_sync_schemes", {"policy": torchrls("Mine")})
