"""Layers and distributions of the user's own: on the fast path, bit for bit as on the plain one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType as Type
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential, set_interaction_type
from torch import distributions as D
from torch import nn

from rollwright.collectors import Collector
from rollwright.envs import GymEnv
from rollwright.errors import PolicyError
from rollwright.policies import (
    array_policy,
    compile_policy,
    distributions,
    layers,
    register_distribution,
    register_layer,
)


class ScaledTanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.power = 2.0

    def forward(self, x):
        return torch.tanh(x) * self.scale**self.power


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class View(nn.Module):
    def forward(self, x):
        return x.flip(-1) if self.training else x


def scaled_tanh(module, x, *, scale):
    return np.tanh(x) * scale**module.power


def draw_laplace(loc, scale):
    u = torch.empty_like(loc).uniform_(torch.finfo(loc.dtype).eps - 1, 1)
    return loc - scale * u.sign() * torch.log1p(-u.abs())


def score_laplace(value, loc, scale):
    return -torch.log(2 * scale) - torch.abs(value - loc) / scale


def location(loc, scale):
    return loc


LAPLACE = {"sample": draw_laplace, "mode": location, "mean": location, "log_prob": score_laplace}


@pytest.fixture(autouse=True)
def _forgotten_afterwards():
    tables = [layers.LAYERS, distributions.DISTRIBUTIONS]
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def with_layer(layer):
    return TensorDictModule(nn.Sequential(nn.Linear(4, 8), layer, nn.Tanh(), nn.Linear(8, 3)), ["observation"], ["a"])


def gaussian_like(kind, *, scored=True):
    head = nn.Sequential(nn.Linear(3, 2), nn.Softplus())
    return TensorDictSequential(
        TensorDictModule(nn.Linear(3, 2), ["observation"], ["loc"]),
        TensorDictModule(head, ["observation"], ["scale"]),
        ProbabilisticTensorDictModule(
            {"scale": "scale", "loc": "loc"}, ["action"], distribution_class=kind, return_log_prob=scored
        ),
    )


def flat_of(lab, policy, kind=Type.RANDOM, batch=()):
    return array_policy(policy, exploration_type=kind, batch_shape=batch, available=lab.available)


def assert_equals_plain(lab, policy, flat, batch, kind):
    torch.manual_seed(3)
    expected = lab.plain_steps(policy, batch, kind)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    written = lab.flat_steps(flat, batch, kind)
    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(written, expected, strict=True):
        assert set(ours) == set(theirs)
        for key, value in ours.items():
            assert value.tobytes() == theirs[key].numpy().tobytes()


# Layers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [ScaledTanh, Noisy, View], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_registered_layer_equals_the_plain_path(lab, layer, mode, batch):
    policy = getattr(with_layer(layer()), mode)()
    assert flat_of(lab, policy, batch=batch).varies  # of an unknown module, outputs may vary
    register_layer(layer)
    flat = flat_of(lab, policy, batch=batch)
    assert not flat.varies
    assert_equals_plain(lab, policy, flat, batch, Type.RANDOM)


def test_a_function_may_take_the_place_of_forward(lab):
    calls = []

    def function(module, x):
        calls.append(x.shape)
        return torch.tanh(x) * module.scale**module.power

    register_layer(ScaledTanh, function)
    policy = with_layer(ScaledTanh())
    assert_equals_plain(lab, policy, flat_of(lab, policy), (), Type.RANDOM)
    assert len(calls) == 4 + 1  # each step, and for the comparison


@pytest.mark.parametrize("batch", [(), (5,)], ids=str)
def test_a_registered_layer_in_numpy(lab, batch):
    register_layer(ScaledTanh, in_numpy=scaled_tanh)
    policy = with_layer(ScaledTanh())
    flat = flat_of(lab, policy, batch=batch)
    compiled = compile_policy(flat, example=lab.root(batch))
    assert compiled.how.startswith("NumPy program")
    with torch.no_grad():
        policy.module[1].scale.fill_(0.3)  # acts from the next rollout on
    for ours, theirs in zip(*(lab.flat_steps(each, batch, Type.RANDOM) for each in (compiled, flat)), strict=True):
        np.testing.assert_allclose(ours["a"], theirs["a"], rtol=1e-5, atol=1e-6)


def test_a_wrong_function_is_an_error_at_the_first_step(lab):
    register_layer(ScaledTanh, lambda module, x: torch.tanh(x) * module.scale)
    flat = flat_of(lab, with_layer(ScaledTanh()))
    with pytest.raises(PolicyError, match="register_layer was given for ScaledTanh returns something else"):
        lab.flat_steps(flat, (), Type.RANDOM, 1)


def test_a_wrong_function_in_numpy_is_not_used(lab, monkeypatch):
    register_layer(ScaledTanh, in_numpy=lambda module, x, *, scale: np.tanh(x) * scale + 1)
    flat = flat_of(lab, with_layer(ScaledTanh()))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert compile_policy(flat, example=lab.root(())).how.startswith("torch.compile")


@pytest.mark.parametrize(
    ("error", "arguments", "message"),
    [
        (TypeError, (ScaledTanh(),), "kind: expected a subclass of torch.nn.Module"),
        (TypeError, (float,), "kind: expected a subclass of torch.nn.Module"),
        (ValueError, (nn.Tanh,), "Tanh is registered already"),
        (TypeError, (ScaledTanh, "tanh"), "function: expected a function or None, got str"),
    ],
    ids=["an instance", "no module", "known", "no function"],
)
def test_wrong_layers_are_refused(error, arguments, message):
    with pytest.raises(error, match=message):
        register_layer(*arguments)


# Distributions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scored", [True, False], ids=["scored", "not scored"])
@pytest.mark.parametrize("kind", [Type.RANDOM, Type.MODE, Type.MEAN], ids=str)
def test_a_registered_distribution_equals_the_plain_path(lab, kind, scored, monkeypatch):
    policy = gaussian_like(D.Laplace, scored=scored)
    policy[0].module, policy[1].module[0] = nn.Linear(4, 2), nn.Linear(4, 2)
    assert flat_of(lab, policy, kind).varies
    register_distribution(D.Laplace, ["loc", "scale"], **LAPLACE)
    flat = flat_of(lab, policy, kind, (3,))
    assert not flat.varies
    assert_equals_plain(lab, policy, flat, (3,), kind)
    monkeypatch.setattr(D.Laplace, "__init__", None)  # from the second step on, no object is built
    lab.flat_steps(flat, (3,), kind)


def test_an_exploration_type_without_a_function_builds_the_distribution(lab):
    register_distribution(D.Laplace, ["loc", "scale"], sample=draw_laplace)
    policy = gaussian_like(D.Laplace)
    assert flat_of(lab, policy, Type.MODE).varies
    assert flat_of(lab, policy, Type.RANDOM).varies  # it has no log_prob
    assert not flat_of(lab, gaussian_like(D.Laplace, scored=False)).varies


def test_parameters_that_the_distribution_refuses_are_refused(lab, monkeypatch):
    monkeypatch.setattr(D.Distribution, "_validate_args", True)  # torch.compile turns it off
    register_distribution(D.Laplace, ["loc", "scale"], **LAPLACE)
    policy = TensorDictSequential(
        TensorDictModule(lambda x: (x, x), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=D.Laplace),
    )
    flat = flat_of(lab, policy)
    flat.start(2)
    with torch.no_grad(), set_interaction_type(Type.RANDOM):
        flat(np.ones(4, np.float32))
        with pytest.raises(ValueError, match="Expected parameter scale"):
            flat(np.full(4, -1, np.float32))


@pytest.mark.parametrize(
    "wrong",
    [
        {"sample": lambda loc, scale: draw_laplace(loc, scale) + 1e-6},
        {"sample": location},
        {"log_prob": lambda value, loc, scale: -torch.abs(value - loc) / scale},
    ],
    ids=["another value", "no random numbers", "another log-prob"],
)
def test_wrong_functions_are_an_error_at_the_first_step(lab, wrong):
    register_distribution(D.Laplace, ["loc", "scale"], **{**LAPLACE, **wrong})
    policy = gaussian_like(D.Laplace)
    policy[0].module, policy[1].module[0] = nn.Linear(4, 2), nn.Linear(4, 2)
    with pytest.raises(PolicyError, match="register_distribution was given for the distribution Laplace give"):
        lab.flat_steps(flat_of(lab, policy), (), Type.RANDOM, 1)


@pytest.mark.parametrize(
    ("error", "arguments", "options", "message"),
    [
        (TypeError, ("Laplace", ["loc"]), {"sample": location}, "kind: expected a distribution class, got str"),
        (TypeError, (D.Laplace, "loc"), {"sample": location}, "parameters: expected names"),
        (TypeError, (D.Laplace, ["loc"]), {"sample": 3}, "sample: expected a function or None, got int"),
        (ValueError, (D.Laplace, ["loc"]), {"log_prob": location}, "sample: expected a function"),
        (ValueError, (D.Normal, ["loc"]), {"sample": location}, "Normal is registered already"),
    ],
    ids=["no class", "a string", "no function", "no value", "known"],
)
def test_wrong_distributions_are_refused(error, arguments, options, message):
    with pytest.raises(error, match=message):
        register_distribution(*arguments, **options)


def test_a_registered_distribution_stays_outside_of_what_is_compiled(lab, monkeypatch):
    register_distribution(D.Laplace, ["loc", "scale"], **LAPLACE)
    policy = gaussian_like(D.Laplace)
    policy[0].module, policy[1].module[0] = nn.Linear(4, 2), nn.Linear(4, 2)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    compiled = compile_policy(flat_of(lab, policy), example=lab.root(()))
    assert compiled.how.startswith("torch.compile")
    assert_equals_plain(lab, policy, compiled, (), Type.RANDOM)


# Collecting ---------------------------------------------------------------------------------------


def batches(policy, **options):
    env = GymEnv("Pendulum-v1", num_envs=2)
    with Collector(env, policy, frames_per_batch=40, total_frames=80, **options) as collector:
        collector.set_seed(0)
        collected = [batch.clone() for batch in collector]
        return collected, collector.stats()["paths"]


def test_collecting_with_both_equals_the_plain_path():
    register_layer(ScaledTanh, in_numpy=scaled_tanh)
    register_distribution(D.Laplace, ["loc", "scale"], **LAPLACE)
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 8), ScaledTanh(), nn.Linear(8, 1))
    policy = gaussian_like(D.Laplace)
    policy[0].module, policy[1].module[0] = body, nn.Linear(3, 1)
    fast, paths = batches(policy)
    assert paths["env"].startswith("native")
    assert paths["policy"] == "native: 6 calls on tensors"
    slow, paths = batches(policy, use_buffers=False)
    assert paths["policy"].startswith("plain")
    for ours, theirs in zip(fast, slow, strict=True):
        assert (ours == theirs).all()


def test_a_distribution_that_is_not_registered_is_named():
    policy = gaussian_like(D.Laplace)
    policy[0].module, policy[1].module[0] = nn.Linear(3, 1), nn.Linear(3, 1)
    _, paths = batches(policy)
    assert paths["policy"].startswith("native")
    remedy = "(register_distribution takes functions in its place)"
    assert paths["policy"].endswith(f", and the distribution Laplace, built at each step {remedy}")


def test_collecting_with_a_layer_in_numpy():
    register_layer(ScaledTanh, in_numpy=scaled_tanh)
    network = nn.Sequential(nn.Linear(3, 8), ScaledTanh(), nn.Linear(8, 1), nn.Tanh())
    policy = TensorDictModule(network, ["observation"], ["action"])
    fast, paths = batches(policy, compile_policy=True)
    assert paths["policy"].startswith("native: NumPy program")
    slow, _ = batches(policy)
    for ours, theirs in zip(fast, slow, strict=True):
        assert torch.allclose(ours["action"], theirs["action"], atol=1e-3)
