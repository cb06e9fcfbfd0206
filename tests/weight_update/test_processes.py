"""Boards between processes: nothing is torn, whoever is killed, and whenever."""

import contextlib
import random
import time

import pytest
import torch
from tests.patience import patient

from rollwright._processes.channel import ChannelClosed
from rollwright._processes.child import Child
from rollwright.weight_update.shared import SharedWeights
from rollwright.weight_update.subscribing import WeightSubscriber

LIMIT_S = 100.0  # for what comes at once, on a busy machine too
SIZES = (7, 5000, 300)


def weights(version):
    """Tensors that all hold the version, and their sum, so that a mixture shows."""
    return {f"w{index}": torch.full((size,), float(version)) for index, size in enumerate(SIZES)}


def is_torn(found):
    held = set()
    for model in found.models.values():
        for tensor in model.tensors.values():
            held |= {float(tensor.min()), float(tensor.max())}
    return held != {float(found.version)} or {model["_extra_state"] for model in extras(found)} != {found.version}


def extras(found):
    return [model.extras for model in found.models.values()]


def update(version):
    return {name: {**weights(version), "_extra_state": version} for name in ("actor", "critic")}


def publishing(channel, board, alternate=False):
    """Publish as fast as it goes, until told to stop; the extra state holds the version."""
    version = board.version
    with contextlib.suppress(ChannelClosed):
        while not channel.poll():
            version += 1
            found = update(version)
            if alternate and version % 2:
                found["actor"]["another"] = torch.full((random.randrange(1, 3000),), float(version))
            board.publish(version, found)
    channel.send(version)


def reading(channel, board, least_reads, least_versions):
    """Count the torn publications among what is taken, the reads, and the tries that they took."""
    torn = tries = reads = 0
    versions = set()

    def apply(found):
        nonlocal tries
        tries += 1
        copies = {
            name: model._replace(tensors={key: value.clone() for key, value in model.tensors.items()})
            for name, model in found.models.items()
        }
        last[:] = [found._replace(models=copies)]

    last = []
    while reads < least_reads or len(versions) < least_versions:
        reads += 1
        board.take({}, apply)
        torn += is_torn(last[0])
        versions.add(last[0].version)
    channel.send((torn, reads, tries))


def wishing(channel, board):
    board.ask_to_pause(True)
    channel.send("wishing")
    channel.recv(LIMIT_S)


def run_out(children):
    for child in children:
        child.channel.close()
        child.kill()
        child.end(5.0)


@pytest.fixture
def start():
    started = []

    def build(serve, *args):
        started.append(Child(serve, *args, name=serve.__name__))
        return started[-1]

    yield build
    run_out(started)


@pytest.mark.parametrize("alternate", [False, True], ids=["the same layout", "changing layouts"])
def test_nothing_is_torn_under_continuous_publication(start, alternate):
    board = SharedWeights()
    board.publish(0, update(0))
    publisher = start(publishing, board, alternate)
    readers = [start(reading, board.as_reader(number), 500, 200) for number in range(2)]
    results = [reader.channel.recv(LIMIT_S, "a reader") for reader in readers]
    publisher.channel.send("stop")
    assert publisher.channel.recv(LIMIT_S) >= 200
    assert [torn for torn, _, _ in results] == [0, 0]
    assert any(tries > reads for _, reads, tries in results), "no reader was ever overtaken: the test shows nothing"


@pytest.mark.slow
def test_nothing_is_torn_in_many_reads(start):
    board = SharedWeights()
    board.publish(0, update(0))
    publisher = start(publishing, board)
    readers = [start(reading, board.as_reader(number), 100_000, 1000) for number in range(2)]
    results = [reader.channel.recv(600.0, "a reader") for reader in readers]
    publisher.channel.send("stop")
    versions = publisher.channel.recv(LIMIT_S)
    print(f"{versions} publications; (torn, reads, tries) by reader: {results}")
    assert [torn for torn, _, _ in results] == [0, 0]


@pytest.mark.parametrize("alternate", [False, True], ids=["the same layout", "changing layouts"])
def test_a_publisher_is_killed(start, alternate):
    """Whenever that happens, the last publication is whole, and another publisher goes on."""
    board, generator = SharedWeights(), random.Random(0)
    board.publish(0, update(0))
    versions = [0]
    for _ in range(6):
        publisher = start(publishing, board, alternate)
        until = time.monotonic() + patient(LIMIT_S)
        while board.version < versions[-1] + 20:
            assert time.monotonic() < until, "the publisher does not go on"
        time.sleep(generator.uniform(0.0, 2e-3))  # the moment is what is tested
        publisher.kill()
        publisher.end(5.0)
        taken = []
        found = board.as_reader(0).take({}, lambda found, taken=taken: taken.append(is_torn(found)))
        assert taken == [False]
        versions.append(found.version)
    assert versions == sorted(set(versions))


def test_a_reader_is_killed(start):
    board = SharedWeights()
    board.publish(0, update(0))
    reader = start(wishing, board.as_reader(5))
    assert reader.channel.recv(LIMIT_S) == "wishing"
    reader.kill()
    reader.end(5.0)
    assert board._pauses[5] == 1
    begun = time.monotonic()
    for version in range(1, 20):
        board.publish(version, update(version), timeout_s=0.05)
    assert 0.05 <= time.monotonic() - begun < 1.0


class Holder:
    """A worker with two models, that tells which versions they hold."""

    def __init__(self):
        self.models = {name: torch.nn.Linear(40, 30) for name in ("actor", "critic")}

    def get_model(self, model_id):
        return self.models[model_id]

    def values(self, model_id):
        tensors = self.models[model_id].parameters()
        return {float(value) for tensor in tensors for value in tensor.detach().aminmax()}


def state(version):
    return {"weight": torch.full((30, 40), float(version)), "bias": torch.full((30,), float(version))}


def publishing_on_both(channel, boards):
    """The actor on one board, the critic on the other, in turn, as fast as it goes: even versions and odd ones."""
    version = 1
    with contextlib.suppress(ChannelClosed):
        while not channel.poll():
            version += 1
            boards[version % 2].publish(version, {("actor", "critic")[version % 2]: state(version)})
    channel.send(version)


def acting(channel, boards, steps):
    worker, feed, wrong = Holder(), WeightSubscriber(boards), []
    for _ in range(steps):
        while not feed.due:
            pass
        version = feed.apply(worker)
        expected = version - version % 2, version - 1 + version % 2
        held = worker.values("actor"), worker.values("critic")
        if held != ({float(expected[0])}, {float(expected[1])}):
            wrong.append((version, held))
    channel.send(wrong[:3])


def test_models_on_two_boards_are_as_one_version_left_them(start):
    boards = [SharedWeights(), SharedWeights()]
    boards[0].publish(0, {"actor": state(0)})
    boards[1].publish(1, {"critic": state(1)})
    publisher = start(publishing_on_both, boards)
    worker = start(acting, [board.as_reader(0) for board in boards], 300)
    assert worker.channel.recv(LIMIT_S, "the worker") == []
    publisher.channel.send("stop")
    assert publisher.channel.recv(LIMIT_S) > 100
