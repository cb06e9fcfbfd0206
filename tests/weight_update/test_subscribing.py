"""WeightSubscriber: what was published reaches the models, all of it, in order."""

import random
import time

import pytest
import torch
from torch import nn

from rollwright.weight_update.forms import flat_state
from rollwright.weight_update.schemes import Publisher
from rollwright.weight_update.shared import SharedWeights
from rollwright.weight_update.subscribing import WeightSubscriber


class Worker:
    def __init__(self, **models):
        self.models = models

    def get_model(self, model_id):
        return self.models[model_id]


def linear(value=0.0):
    module = nn.Linear(2, 1)
    nn.init.constant_(module.weight, value)
    nn.init.constant_(module.bias, value)
    return module


def value_of(module):
    values = {float(value) for parameter in module.parameters() for value in parameter.detach().flatten()}
    assert len(values) == 1
    return values.pop()


@pytest.fixture
def boards():
    return [SharedWeights(), SharedWeights()]


def test_due_until_applied(boards):
    feed, worker = WeightSubscriber(boards), Worker(policy=linear())
    assert not feed.due
    assert feed.apply(worker) == 0
    boards[1].publish(3, {"policy": linear(3).state_dict()})
    assert feed.due
    assert feed.apply(worker) == feed.version == 3
    assert not feed.due
    assert value_of(worker.models["policy"]) == 3


def test_the_later_board_wins(boards):
    feed, worker = WeightSubscriber(boards), Worker(policy=linear(), other=linear())
    boards[0].publish(1, {"policy": linear(1).state_dict(), "other": linear(1).state_dict()})
    boards[1].publish(2, {"policy": linear(2).state_dict()})
    assert feed.apply(worker) == 2
    assert [value_of(module) for module in worker.models.values()] == [2, 1]
    boards[0].publish(3, {"other": linear(3).state_dict()})  # carries the policy of version 1 on
    assert feed.apply(worker) == 3
    assert [value_of(module) for module in worker.models.values()] == [2, 3]


class Parts(nn.Module):
    """A policy that has parts which are updated by themselves."""

    def __init__(self, value=0.0):
        super().__init__()
        self.actor, self.critic = linear(value), linear(value)


class Counted(Parts):
    """:class:`Parts` that have to be loaded: they have extra state."""

    count = 0

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("kind", [Parts, Counted])
@pytest.mark.parametrize("seed", range(8))
def test_of_a_model_and_its_parts_the_last_publication_wins(boards, seed, kind):
    """In whatever order they were published, on either board, however many a worker missed."""
    draw = random.Random(seed)
    policy = kind()
    worker = Worker(policy=policy, actor=policy.actor, critic=policy.critic)
    feed, expected = WeightSubscriber(boards), {"actor": 0.0, "critic": 0.0}
    for version in range(1, 60):
        model_id = draw.choice(["policy", "actor", "critic"])
        new = kind(version) if model_id == "policy" else linear(version)
        draw.choice(boards).publish(version, {model_id: new.state_dict()})
        expected.update(dict.fromkeys(expected if model_id == "policy" else [model_id], float(version)))
        if draw.random() < 0.3:
            assert feed.apply(worker) == version
            assert {name: value_of(getattr(policy, name)) for name in expected} == expected
        if draw.random() < 0.1:
            new_policy = kind()
            WeightSubscriber(boards).apply(Worker(policy=new_policy, actor=new_policy.actor, critic=new_policy.critic))
            assert {name: value_of(getattr(new_policy, name)) for name in expected} == expected


def test_a_new_worker_gets_the_last_of_each_model(boards):
    boards[0].publish(1, {"policy": linear(1).state_dict(), "other": linear(1).state_dict()})
    boards[1].publish(2, {"policy": linear(2).state_dict()})
    boards[0].publish(3, {"other": linear(3).state_dict()})
    worker = Worker(policy=linear(), other=linear())
    assert WeightSubscriber(boards).apply(worker) == 3
    assert [value_of(module) for module in worker.models.values()] == [2, 3]


def test_nothing_older_is_missing(boards):
    """What is published on the first board while the second is taken is older than what the second gets later."""

    class Meddled(Worker):
        def get_model(self, model_id):
            if model_id == "other" and boards[0].version == 1:
                boards[0].publish(3, {"policy": linear(3).state_dict()})
                boards[1].publish(4, {"other": linear(4).state_dict()})
                boards[1].publish(5, {"other": linear(5).state_dict()})  # overtakes the reader, which copies again
            return super().get_model(model_id)

    boards[0].publish(1, {"policy": linear(1).state_dict()})
    boards[1].publish(2, {"other": linear(2).state_dict()})
    worker = Meddled(policy=linear(), other=linear())
    assert WeightSubscriber(boards).apply(worker) == 5
    assert [value_of(module) for module in worker.models.values()] == [3, 5]


def test_skip(boards):
    worker = Worker(policy=linear(7), other=linear(7))
    boards[0].publish(1, {"policy": linear(1).state_dict(), "other": linear(1).state_dict()})
    feed = WeightSubscriber(boards)
    feed.skip()
    assert not feed.due
    boards[0].publish(2, {"policy": linear(2).state_dict()})
    assert feed.apply(worker) == 2
    assert [value_of(module) for module in worker.models.values()] == [2, 7]


class Statistics(nn.Module):
    """Keeps what it has seen as extra state, and a buffer that it puts a new tensor in the place of."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, value):
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * value
        self.scratch = self.scratch + value
        return value - self.mean

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def test_extra_state_and_buffers(boards):
    learner, worker = Statistics(), Worker(policy=Statistics())
    feed, copy = WeightSubscriber(boards), worker.models["policy"]
    for version in range(1, 4):
        learner(torch.ones(2))
        copy(torch.zeros(2))
        boards[0].publish(version, {"policy": flat_state(learner, "policy")})
        feed.apply(worker)
        assert (copy.count, copy.mean.tolist()) == (learner.count, learner.mean.tolist())
    boards[0].publish(9, {"policy": flat_state(learner, "policy", strategy="tensordict")})
    copy.count = 0
    feed.apply(worker)
    assert (copy.count, copy.scratch.tolist()) == (0, [3, 3])


def test_buffers_that_were_put_in_place_of_others(boards):
    """A cached tensor would be the wrong one."""
    module = nn.BatchNorm1d(2)
    worker, feed = Worker(policy=module), WeightSubscriber(boards)
    boards[0].publish(1, {"policy": module.state_dict()})
    feed.apply(worker)
    module.running_mean = torch.full((2,), 5.0)
    module.weight = nn.Parameter(torch.full((2,), 6.0))
    source = nn.BatchNorm1d(2)
    source.running_mean.fill_(3.0)
    boards[0].publish(2, {"policy": source.state_dict()})
    feed.apply(worker)
    assert (module.running_mean.tolist(), module.weight.tolist()) == ([3, 3], [1, 1])


def test_modules_that_were_put_in_place_of_others(boards):
    module = nn.Sequential(linear(1), nn.Tanh(), nn.Sequential(linear(1)))
    worker, feed = Worker(policy=module), WeightSubscriber(boards)
    for version in range(2, 5):
        source = nn.Sequential(linear(version), nn.Tanh(), nn.Sequential(linear(version)))
        boards[0].publish(version, {"policy": source.state_dict()})
        feed.apply(worker)
        assert value_of(module) == version
        module[2][0] = linear(0)
    worker.models["policy"] = linear(0)
    boards[0].publish(5, {"policy": linear(5).state_dict()})
    feed.apply(worker)
    assert value_of(worker.models["policy"]) == 5


def test_a_module_that_has_grown(boards):
    module = nn.Sequential(linear(1))
    worker, feed = Worker(policy=module), WeightSubscriber(boards)
    boards[0].publish(1, {"policy": module.state_dict()})
    feed.apply(worker)
    module.append(linear(1))
    boards[0].publish(2, {"policy": nn.Sequential(linear(2)).state_dict()})
    with pytest.raises(ValueError, match=r"Missing: '1\.bias', '1\.weight'"):
        feed.apply(worker)


def test_a_module_that_loads_in_its_own_way(boards):
    class Doubles(nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *args):
            state_dict[prefix + "weight"] = 2 * state_dict[prefix + "weight"]
            super()._load_from_state_dict(state_dict, prefix, *args)

    worker, feed = Worker(policy=nn.Sequential(Doubles(2, 1))), WeightSubscriber(boards)
    for version in (1, 2):
        boards[0].publish(version, {"policy": nn.Sequential(linear(version)).state_dict()})
        feed.apply(worker)
        assert worker.models["policy"][0].weight.tolist() == [[2 * version] * 2]


def test_dtypes_are_cast(boards):
    worker, feed = Worker(policy=linear().bfloat16()), WeightSubscriber(boards)
    boards[0].publish(1, {"policy": linear(3).state_dict()})
    feed.apply(worker)
    assert worker.models["policy"].weight.dtype == torch.bfloat16
    assert value_of(worker.models["policy"]) == 3


def test_parameters_stay_those_that_they_were(boards):
    module = linear()
    before = module.weight
    feed = WeightSubscriber(boards)
    boards[0].publish(1, {"policy": linear(3).state_dict()})
    feed.apply(Worker(policy=module))
    assert module.weight is before
    assert before.requires_grad
    assert before.is_leaf


def test_weights_that_do_not_fit(boards):
    boards[0].publish(1, {"policy": nn.Linear(3, 1).state_dict()})
    with pytest.raises(ValueError, match=r"'weight' has shape \[1, 3\], expected \[1, 2\]"):
        WeightSubscriber(boards).apply(Worker(policy=linear()))
    with pytest.raises(TypeError, match="is no nn"):
        WeightSubscriber(boards).apply(Worker(policy=print))


def test_a_small_policy_takes_little_time(boards):
    def actor():
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    worker, feed, weights, times = Worker(policy=actor()), WeightSubscriber(boards), actor().state_dict(), []
    for version in range(300):
        boards[0].publish(version, {"policy": weights})
        begun = time.perf_counter()
        feed.apply(worker)
        times.append(time.perf_counter() - begun)
    assert min(times) < 100e-6


# Publisher.


def test_what_is_for_all_is_copied_once():
    publisher = Publisher(3)
    publisher.publish(1, {"policy": linear(1).state_dict()})
    assert [[board.version for board in publisher.weights_of(worker)] for worker in range(3)] == [[1, -1]] * 3


def test_what_is_for_some_reaches_no_other():
    publisher = Publisher(3)
    workers = [Worker(policy=linear()) for _ in range(3)]
    feeds = [WeightSubscriber(publisher.weights_of(number)) for number in range(3)]
    for receiver, value in ((0, 1), (2, 2)):
        publisher.publish(1, {"policy": linear(value).state_dict()}, [receiver])
    assert [feed.due for feed in feeds] == [True, False, True]
    for feed, worker in zip(feeds, workers, strict=True):
        feed.apply(worker)
    assert [value_of(worker.models["policy"]) for worker in workers] == [1, 0, 2]
    assert [feed.version for feed in feeds] == [1, 0, 1]


def test_a_dead_worker_is_forgotten():
    publisher = Publisher(2)
    for board in publisher.weights_of(1):
        board.ask_to_pause(True)
    publisher.forget(1)
    for receivers in (None, [1]):
        publisher.publish(1, {}, receivers, timeout_s=1e9)
