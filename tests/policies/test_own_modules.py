"""Modules of the user's own: taken apart into calls on tensors, or called whole, with the bits of a call either way."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from tests.policies.own_modules import OWN
from torch import nn
from torch.nn import functional

from rollwright.collectors import Collector, MultiSyncCollector
from rollwright.envs import GymEnv
from rollwright.errors import NotNative
from rollwright.policies import array_policy, compile_policy

BATCHES = [(), (3,)]
STEPS = 3


def flat_of(policy, keys, batch=()):
    return array_policy(policy, exploration_type=InteractionType.DETERMINISTIC, batch_shape=batch, available=["a", "b"])


def policy_of(case, module):
    return TensorDictModule(module, list(case.inputs), list(case.outputs))


def entries(case, batch, seed):
    rng = np.random.default_rng(seed)
    made = {}
    for key, (shape, dtype) in case.inputs.items():
        value = rng.integers(0, 255, (*batch, *shape)) if dtype == "uint8" else rng.normal(size=(*batch, *shape))
        made[key] = value.astype(dtype)
    return made


def called(case, module, given):
    """What a call of the module returns, by key."""
    made = module(*[torch.from_numpy(value.copy()) for value in given.values()])
    if isinstance(made, dict):
        return {key: made[key].detach().numpy().copy() for key in case.outputs}
    values = made if isinstance(made, tuple) else (made,)
    return {key: value.detach().numpy().copy() for key, value in zip(case.outputs, values, strict=True)}


def assert_same_steps(case, flat, module, batch, first=0):
    """Steps of both, with equal inputs and random numbers: equal bits, buffers and random numbers after them."""
    state, of_numpy = torch.get_rng_state(), np.random.get_state()
    expected = [called(case, module, entries(case, batch, first + i)) for i in range(STEPS)]
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    np.random.set_state(of_numpy)
    flat.start(STEPS)
    for i, theirs in enumerate(expected):
        given = entries(case, batch, first + i)
        written = flat(*[given[key] for key in flat.in_keys])
        for key, value in zip(flat.out_keys, written, strict=True):
            assert (value.shape, value.dtype) == (theirs[key].shape, theirs[key].dtype)
            assert value.tobytes() == theirs[key].tobytes(), (key, i)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", OWN)
@pytest.mark.usefixtures("no_grad")
def test_an_own_module_has_the_bits_of_its_call(name, batch):
    case = OWN[name]
    if batch and not case.batched:
        batch = ()
    torch.manual_seed(0)
    module = case.make()
    reference = copy.deepcopy(module)
    flat = flat_of(policy_of(case, module), case.inputs, batch)
    assert_same_steps(case, flat, reference, batch)
    assert ("whole" in flat.how) == (case.why is not None), flat.how
    assert flat.varies == (case.why is not None)
    if case.why is not None:
        assert case.why in flat.how
    for own, other in zip(module.buffers(), reference.buffers(), strict=True):
        assert torch.equal(own, other)
    for parameter, other in zip(module.parameters(), reference.parameters(), strict=True):
        assert not parameter.is_inference()
        parameter.add_(0.25)
        other.add_(0.25)
    assert_same_steps(case, flat, reference, batch, first=10)


@pytest.mark.parametrize("change", ["optimizer", "loaded", "assigned", "data", "replaced"])
def test_new_weights_act_at_once(change):
    case = OWN["softplus head"]
    module, other = case.make(), case.make()
    flat = flat_of(policy_of(case, module), case.inputs)
    with torch.no_grad():
        assert_same_steps(case, flat, copy.deepcopy(module), ())
    if change == "optimizer":
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        sum(value.sum() for value in module(torch.ones(4))).backward()
        optimizer.step()
    elif change == "data":
        module.body.weight.data = other.body.weight.data.clone()
    elif change == "replaced":
        module.body.weight = nn.Parameter(other.body.weight.detach().clone())
    else:
        module.load_state_dict(other.state_dict(), assign=change == "assigned")
    with torch.no_grad():
        assert_same_steps(case, flat, copy.deepcopy(module), (), first=5)


SCALE = 2.0


class Reading(nn.Module):
    """Reads a global, an attribute, an item, a class attribute and a closure."""

    bias = 0.5

    def __init__(self):
        super().__init__()
        self.layer, self.factor, self.sizes = nn.Linear(4, 4), 3.0, [1, 3]

    def forward(self, a):
        return torch.cat(self.layer(a).split(self.sizes, -1), -1) * SCALE * self.factor + self.bias


CHANGES = {
    "an attribute": lambda module, monkeypatch: setattr(module, "factor", 4.0),
    "an item": lambda module, monkeypatch: module.sizes.reverse(),
    "a global": lambda module, monkeypatch: monkeypatch.setitem(globals(), "SCALE", 5.0),
    "an attribute of the class": lambda module, monkeypatch: monkeypatch.setattr(Reading, "bias", 1.0),
    "the code": lambda module, monkeypatch: monkeypatch.setattr(Reading, "forward", lambda self, a: a),
    "a module": lambda module, monkeypatch: setattr(module, "layer", nn.Linear(4, 4)),
    "a hook": lambda module, monkeypatch: module.layer.register_forward_hook(lambda *each: None),
    "a form": lambda module, monkeypatch: module.double(),
    "a bias that goes": lambda module, monkeypatch: setattr(module.layer, "bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("no_grad")
def test_what_the_code_reads_is_watched(change, monkeypatch):
    module = Reading()
    flat = flat_of(TensorDictModule(module, ["a"], ["out"]), ["a"])
    for _ in range(2):
        flat.start(1)
        flat(np.ones(4, np.float32))
    assert flat.how == "6 calls on tensors"
    CHANGES[change](module, monkeypatch)
    with pytest.raises(NotNative, match="the policy has changed"):
        flat.start(1)


@pytest.mark.usefixtures("no_grad")
def test_a_parameter_of_two_modules_is_taken_apart_again_when_they_part():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, a):
            return self.net(a)

    module = Net()
    flat = flat_of(TensorDictModule(module, ["a"], ["out"]), ["a"])
    for _ in range(2):
        flat.start(1)
        flat(np.ones(4, np.float32))
    net[0].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(NotNative, match="the policy has changed"):
        flat.start(1)


@pytest.mark.usefixtures("no_grad")
def test_an_input_of_another_form_is_given_to_the_module():
    case = OWN["branch on the shape"]
    module = case.make()
    flat = flat_of(policy_of(case, module), case.inputs)
    flat.start(4)
    for shape in ((4,), (4,), (2, 4), (4,)):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        (written,) = flat(x)
        assert np.array_equal(written, module(torch.from_numpy(x)).numpy())


@pytest.mark.usefixtures("no_grad")
def test_outputs_have_memory_of_their_own():
    case = OWN["parts of the input"]
    flat = flat_of(policy_of(case, case.make()), case.inputs)
    flat.start(3)
    for _ in range(3):
        x = np.ones(4, np.float32)
        written = flat(x)
        x[:] = 0
        assert all((value == 1).all() for value in written)
        for i, value in enumerate(written):
            assert not any(np.shares_memory(value, other) for other in written[i + 1 :])


# In NumPy -----------------------------------------------------------------------------------------

IN_NUMPY = [name for name, case in OWN.items() if case.why is None]


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", IN_NUMPY)
@pytest.mark.usefixtures("no_grad")
def test_an_own_module_becomes_numpy_calls(name, batch):
    case = OWN[name]
    if batch and not case.batched:
        batch = ()
    module = case.make()
    flat = flat_of(policy_of(case, module), case.inputs, batch)
    compiled = compile_policy(flat, example=entries(case, batch, 9))
    assert compiled.how.startswith("NumPy program")
    for first in (0, 10):
        compiled.start(STEPS)
        for i in range(STEPS):
            given = entries(case, batch, first + i)
            expected = called(case, module, given)
            for key, value in zip(compiled.out_keys, compiled(*[given[k] for k in compiled.in_keys]), strict=True):
                assert (value.shape, value.dtype) == (expected[key].shape, expected[key].dtype)
                np.testing.assert_allclose(value, expected[key], rtol=1e-5, atol=1e-5)
        for parameter in module.parameters():  # they act from the next rollout on
            parameter.add_(0.25)


@pytest.mark.usefixtures("no_grad")
def test_a_module_that_is_called_whole_is_compiled_by_torch():
    case = OWN["control flow by values"]
    flat = flat_of(policy_of(case, case.make()), case.inputs)
    compiled = compile_policy(flat, example=entries(case, (), 0), arguments={"backend": "eager"})
    assert compiled.how.startswith("torch.compile")


# Collected ----------------------------------------------------------------------------------------


class Actions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, observation):
        loc, raw = self.layer(observation).chunk(2, -1)
        return loc * functional.softplus(raw)


class Counting(nn.Module):
    """Keeps count of its calls, in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, observation):
        self.calls += 1
        return self.layer(observation) + 0 * self.calls


def acting():
    torch.manual_seed(3)
    return TensorDictSequential(
        TensorDictModule(Counting(), ["observation"], ["counted"]),
        TensorDictModule(Actions(), ["observation"], ["action"]),
    )


def assert_collected(batch, policy):
    for row in batch.reshape(-1).unbind(0):
        for part in policy.module:
            assert torch.equal(row[part.out_keys[0]], part.module(row["observation"]))


@pytest.mark.usefixtures("no_grad")
def test_a_collector_says_what_is_taken_apart():
    policy = acting()
    collector = Collector(lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=8, total_frames=24)
    reference = copy.deepcopy(policy)
    for batch in collector:
        assert_collected(batch, reference)
        assert policy.module[0].module.calls == reference.module[0].module.calls
        for each in (*policy.parameters(), *reference.parameters()):
            each.mul_(0.5)
    paths = collector.stats()["paths"]
    collector.shutdown()
    assert paths["policy"] == ("native: 5 calls on tensors, and Counting called whole (its code sets 'calls')")


@pytest.mark.usefixtures("no_grad")
def test_workers_take_modules_apart_themselves():
    policy = acting()
    collector = MultiSyncCollector(
        [lambda: GymEnv("Pendulum-v1")] * 2, policy, frames_per_batch=16, total_frames=48, update_at_each_batch=True
    )
    reference = copy.deepcopy(policy)
    for batch in collector:
        assert_collected(batch, reference)
        for each in (*policy.parameters(), *reference.parameters()):
            each.mul_(0.5)
    paths = collector.stats()["paths"]
    collector.shutdown()
    assert "5 calls on tensors, and Counting called whole" in paths["policy"]


class Counted(Actions):
    def forward(self, observation):
        self.last = super().forward(observation)
        return self.last


@pytest.mark.parametrize("compiled", [False, {"backend": "eager"}], ids=["as it is", "compiled"])
@pytest.mark.usefixtures("no_grad")
def test_a_bare_module_that_is_called_whole_says_why(compiled):
    collector = Collector(
        lambda: GymEnv("Pendulum-v1"), Counted(), frames_per_batch=8, total_frames=16, compile_policy=compiled
    )
    for _ in collector:
        pass
    how = collector.stats()["paths"]["policy"]
    collector.shutdown()
    assert how.endswith("1 call on tensors, and Counted called whole (its code sets 'last')")
    assert how.startswith("native: torch.compile of" if compiled else "native: 1")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("no_grad")
def test_a_bare_module_is_taken_apart_too(compiled):
    policy = Actions()
    collector = Collector(
        lambda: GymEnv("Pendulum-v1"), policy, frames_per_batch=8, total_frames=24, compile_policy=compiled
    )
    for batch in collector:
        for row in batch.unbind(0):
            torch.testing.assert_close(
                row["action"], policy(row["observation"]), rtol=1e-5 * compiled, atol=1e-6 * compiled
            )
        policy.layer.weight.mul_(0.5)
    paths = collector.stats()["paths"]
    collector.shutdown()
    assert paths["policy"].startswith("native: NumPy program" if compiled else "native: 4 calls on tensors")
