"""parse_update_for_workers: which weights go to which workers, and what is wrong with an update."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from rollwright.collectors.weights import parse_update_for_workers
from rollwright.weight_update.forms import describe, flat_state


class Tracked(nn.Linear):
    def get_extra_state(self):
        return torch.ones(3)

    def set_extra_state(self, state):
        pass


MODELS = {"policy": nn.Linear(2, 1), "env.transform[0]": nn.BatchNorm1d(2), "tracked": Tracked(2, 1)}
DEVICES = [torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1"), None]


def parse(given=None, **options):
    options.setdefault("signature", lambda worker, model: describe(MODELS[model], model))
    return parse_update_for_workers(given, num_workers=4, devices=DEVICES, **options)


def named(updates):
    return [(update.workers, sorted(update.models)) for update in updates]


FORMS = {
    "module": lambda module: module,
    "TensorDict": lambda module: TensorDict.from_module(module),
    "data": lambda module: TensorDict.from_module(module).data.clone(),
    "state_dict": lambda module: module.state_dict(),
    "dictionary": lambda module: dict(module.state_dict()),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    module = nn.Linear(2, 1)
    (update,) = parse(FORMS[form](module))
    assert update.workers is None
    assert {name: value.tolist() for name, value in update.models["policy"].items()} == {
        name: value.tolist() for name, value in module.state_dict().items()
    }


@pytest.mark.parametrize(
    ("worker_ids", "expected"),
    [
        (None, None),
        (2, [2]),
        ([2], [2]),
        ((3, 1, 3), [1, 3]),
        (range(4), None),
        (torch.device("cuda:1"), [2]),
        ("cuda:0", [1]),
        (["cuda:0", torch.device("cpu"), 3], [0, 1, 3]),
        ([torch.device("cuda")], [1]),
    ],
)
def test_workers(worker_ids, expected):
    assert named(parse(nn.Linear(2, 1), worker_ids=worker_ids)) == [(expected, ["policy"])]


def test_by_worker():
    modules = {2: nn.Linear(2, 1), 0: nn.Linear(2, 1).state_dict()}
    updates = parse(modules)
    assert named(updates) == [([0], ["policy"]), ([2], ["policy"])]
    assert torch.equal(updates[1].models["policy"]["weight"], modules[2].weight)
    assert named(parse({1: nn.BatchNorm1d(2)}, model_id="env.transform[0]")) == [([1], ["env.transform[0]"])]


def test_several_models_in_one_update():
    weights = {"policy": nn.Linear(2, 1), "env.transform[0]": nn.BatchNorm1d(2)}
    assert named(parse(weights_dict=weights)) == [(None, ["env.transform[0]", "policy"])]
    assert named(parse(weights_dict=weights, worker_ids=[1])) == [([1], ["env.transform[0]", "policy"])]


def test_nothing_given():
    assert torch.equal(parse(fallback=MODELS["policy"])[0].models["policy"]["weight"], MODELS["policy"].weight)
    assert named(parse()) == [(None, [])]


def test_strategies():
    tracked = Tracked(2, 1)
    assert parse(tracked, model_id="tracked")[0].models["tracked"].keys() == {"weight", "bias", "_extra_state"}
    (update,) = parse(
        tracked,
        model_id="tracked",
        state_of=lambda name, weights, _: flat_state(weights, name, strategy="tensordict"),
    )
    assert update.models["tracked"].keys() == {"weight", "bias"}


WRONG = {
    "two ways": (
        {"given": nn.Linear(2, 1), "weights_dict": {"policy": nn.Linear(2, 1)}},
        ValueError,
        "weights_dict excl",
    ),
    "no dictionary": ({"weights_dict": [1]}, TypeError, "expected weights by model, got list"),
    "by worker, twice": ({"given": {0: nn.Linear(2, 1)}, "worker_ids": 0}, ValueError, "Drop one of them"),
    "no weights": ({"model_id": "env.transform[0]"}, ValueError, "no weights for it"),
    "a worker that is not there": ({"given": nn.Linear(2, 1), "worker_ids": 4}, ValueError, "0 to 3.*got 4"),
    "a negative worker": ({"given": nn.Linear(2, 1), "worker_ids": [-1]}, ValueError, "got -1"),
    "an unknown key": ({"given": {0: nn.Linear(2, 1), 9: nn.Linear(2, 1)}}, ValueError, "got 9"),
    "a device without workers": ({"given": nn.Linear(2, 1), "worker_ids": "cuda:7"}, ValueError, "got 'cuda:7'"),
    "no worker": ({"given": nn.Linear(2, 1), "worker_ids": []}, ValueError, "got none"),
    "a boolean": ({"given": nn.Linear(2, 1), "worker_ids": True}, TypeError, "got bool"),
    "shapes": ({"given": nn.Linear(3, 1)}, ValueError, r"shape \[1, 3\], expected \[1, 2\]"),
    "names": ({"given": {"weight": torch.zeros(1, 2)}}, ValueError, "Missing: 'bias'"),
    "unknown names": ({"given": nn.Sequential(nn.Linear(2, 1))}, ValueError, "unknown: '0.bias'"),
    "no tensors": ({"given": {"weight": 1.0, "bias": 2.0}}, TypeError, "expected a tensor at 'weight', got float"),
    "no weights at all": ({"given": 3}, TypeError, "expected a module, a TensorDict or a state_dict, got int"),
    "one of several": (
        {"weights_dict": {"policy": nn.Linear(2, 1), "env.transform[0]": nn.BatchNorm1d(3)}},
        ValueError,
        r"weights for env.transform\[0\]",
    ),
    "one worker of several": ({"given": {0: nn.Linear(2, 1), 1: nn.Linear(2, 2)}}, ValueError, "has shape"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_updates(wrong):
    options, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        parse(**options)


def test_workers_may_have_different_models():
    shapes = [nn.Linear(2, 1), nn.Linear(2, 3)]
    options = {"num_workers": 2, "signature": lambda worker, model: describe(shapes[worker], model)}
    assert named(parse_update_for_workers({0: nn.Linear(2, 1), 1: nn.Linear(2, 3)}, **options))
    with pytest.raises(ValueError, match="has shape"):
        parse_update_for_workers(nn.Linear(2, 1), **options)


def test_buffers_that_are_not_saved():
    """TensorDict.from_module has them, state_dict has not: both fit."""
    module = nn.Module()
    module.register_buffer("saved", torch.zeros(2))
    module.register_buffer("scratch", torch.zeros(2), persistent=False)
    for weights in (module, TensorDict.from_module(module), module.state_dict()):
        (update,) = parse(weights, signature=lambda worker, model: describe(module, model))
        assert update.models["policy"].keys() >= {"saved"}
