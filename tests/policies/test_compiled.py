"""Compiled policies: the results of the policy on arrays to rounding, its actions, its random numbers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tensordict.nn import InteractionType as Type
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torch import nn

from rollwright.errors import NotNative
from rollwright.policies import array_policy, compile_policy, distributions
from rollwright.policies.draws.noise import Noise, noise_stream

MIXTURES = [
    (Type.RANDOM, ()),
    (Type.RANDOM, (4, 16)),
    (Type.DETERMINISTIC, (3,)),
    pytest.param(Type.RANDOM, (3,), marks=pytest.mark.slow),
    pytest.param(Type.RANDOM, (64,), marks=pytest.mark.slow),
    pytest.param(Type.DETERMINISTIC, (), marks=pytest.mark.slow),
]
IN_NUMPY = [
    "a linear layer",
    "categorical",
    "categorical without log-prob",
    "categorical of many outcomes",
    "one-hot",
    "one-hot without log-prob",
    "normal",
    "normal without log-prob",
    "normal with a free scale",
    "one-hot of integers",
    "independent normal by name",
    "independent normal without log-prob",
    "tanh normal",
    "tanh normal without log-prob",
    "tanh normal with bounds",
    "probabilistic actor",
    "independent normal",
    "truncated normal",
    "partial",
    "scaled independent normal",
    "greedy values",
    "greedy one-hot values",
    "epsilon-greedy",
    "additive noise",
    "delta",
    "nested sequence",
    "two draws",
    "identity",
    "selected keys",
]


def both(lab, policy, batch=(), kind=Type.RANDOM, dtype=np.float32):
    flat = array_policy(policy, exploration_type=kind, batch_shape=batch, available=lab.available)
    return flat, compile_policy(flat, example=lab.root(batch, dtype=dtype))


def assert_alike(written, expected, atol=2e-6):
    for ours, theirs in zip(written, expected, strict=True):
        assert list(ours) == list(theirs)
        for key, value in ours.items():
            assert (value.dtype, value.shape) == (theirs[key].dtype, theirs[key].shape)
            np.testing.assert_allclose(value, theirs[key], rtol=1e-5, atol=atol, err_msg=str(key))


@pytest.mark.parametrize("inverted", [False, True])
@pytest.mark.parametrize("policy_name", ["tanh normal", "tanh normal with bounds", "tanh normal of numbers"])
def test_a_tanh_normal_in_numpy_is_scored_as_it_is_on_tensors(lab, monkeypatch, policy_name, inverted):
    monkeypatch.setattr(distributions, "scores_its_draw", lambda module: not inverted)
    flat, compiled = both(lab, lab.policies[policy_name](), (64,))
    torch.manual_seed(5)
    expected = lab.flat_steps(flat, (64,), Type.RANDOM)
    torch.manual_seed(5)
    alike = lab.flat_steps(compiled, (64,), Type.RANDOM)
    assert_alike(alike, expected, 2e-4 if inverted else 2e-6)  # the inverse of tanh makes more of a rounding error


@pytest.mark.parametrize("policy_name", IN_NUMPY)
@pytest.mark.parametrize(("kind", "batch"), MIXTURES, ids=str)
def test_numpy_program_equals_flat_to_rounding(lab, monkeypatch, policy_name, batch, kind):
    monkeypatch.setattr(distributions, "scores_its_draw", lambda module: True)
    flat, compiled = both(lab, lab.policies[policy_name](), batch, kind)
    assert compiled.how.startswith("NumPy program")
    torch.manual_seed(5)
    expected = lab.flat_steps(flat, batch, kind)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    assert_alike(lab.flat_steps(compiled, batch, kind), expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "layer",
    [
        nn.ELU(),
        nn.ELU(0.5),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.LayerNorm(16),
        nn.LayerNorm(16, elementwise_affine=False),
        nn.LeakyReLU(0.1),
        nn.LogSoftmax(-1),
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.SiLU(),
        nn.Sigmoid(),
        nn.Softmax(-1),
        nn.Softplus(),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_layers_in_numpy(lab, layer, dtype):
    network = nn.Sequential(nn.Linear(4, 16), layer, nn.Linear(16, 2, bias=False))
    policy = TensorDictModule(network, ["observation"], ["action"]).to(torch.from_numpy(np.empty(0, dtype)).dtype)
    for batch in ((), (5,)):
        flat, compiled = both(lab, policy, batch, dtype=dtype)
        example = 30 * lab.root(batch, dtype=dtype)["observation"]
        with torch.no_grad():
            compiled.start(1)
            np.testing.assert_allclose(compiled(example)[0], flat(example)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("change", ["in place", "replaced", "loaded", "assigned"])
def test_new_weights_keep_the_program(lab, change):
    policy = lab.logits_policy()
    flat, compiled = both(lab, policy)
    layer, other = policy[0].module[2], copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    if change == "in place":
        with torch.no_grad():
            layer.weight.mul_(2)
    elif change == "replaced":
        layer.weight = nn.Parameter(torch.randn_like(layer.weight))
    else:
        policy.load_state_dict(other.state_dict(), assign=change == "assigned")
    torch.manual_seed(1)
    expected = lab.plain_steps(policy, (), Type.RANDOM)
    torch.manual_seed(1)
    written = lab.flat_steps(compiled, (), Type.RANDOM)
    assert_alike(written, [{key: step[key].numpy() for key in compiled.out_keys} for step in expected])
    assert flat.in_keys == compiled.in_keys


def test_compiling_leaves_random_numbers_alone(lab):
    state = torch.get_rng_state()
    flat = array_policy(lab.logits_policy(), exploration_type=Type.RANDOM, batch_shape=(), available=lab.available)
    state = torch.get_rng_state()
    compile_policy(flat, example=lab.root(()))
    assert torch.equal(torch.get_rng_state(), state)


def test_compiled_outputs_are_never_overwritten(lab):
    _, compiled = both(lab, lab.policies["identity"](), (3,))
    compiled.start(2)
    first = compiled(np.ones((3, 4), np.float32))[0]
    compiled(np.zeros((3, 4), np.float32))
    assert (first == 1).all()


def test_more_calls_than_announced_go_on_drawing(lab):
    flat, compiled = both(lab, lab.logits_policy())
    torch.manual_seed(3)
    expected = lab.flat_steps(flat, (), Type.RANDOM, 40)
    torch.manual_seed(3)
    compiled.start(1)
    x = [lab.root((), i)["observation"] for i in range(40)]
    assert_alike([dict(zip(compiled.out_keys, compiled(value), strict=True)) for value in x], expected)


def test_nan_weights_show_in_the_finite_keys(lab):
    policy = lab.logits_policy()
    flat, compiled = both(lab, policy)
    with torch.no_grad():
        policy[0].module[0].weight.fill_(torch.nan)
    for each in (flat, compiled):
        written = lab.flat_steps(each, (), Type.RANDOM, 1)[0]
        assert all(np.isnan(written[key]) for key in each.finite_keys)


def test_a_changed_policy_is_noticed_by_its_program(lab):
    policy = lab.logits_policy()
    _, compiled = both(lab, policy)
    policy[0].module[1] = nn.ReLU()
    with pytest.raises(NotNative, match=r"changed \(Sequential\)"):
        compiled.start(1)


# torch.compile ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy_name", "batch"),
    [("categorical", ()), ("normal", (3,)), ("independent normal", ()), ("recurrent", (3,)), ("two draws", (3,))],
    ids=str,
)
def test_torch_compile_equals_flat(lab, policy_name, batch):
    policy = lab.policies[policy_name]()
    flat = array_policy(copy.deepcopy(policy), exploration_type=Type.RANDOM, batch_shape=batch, available=lab.available)
    again = array_policy(policy, exploration_type=Type.RANDOM, batch_shape=batch, available=lab.available)
    compiled = compile_policy(again, arguments={"backend": "eager"}, example=lab.root(batch))
    assert compiled.how.startswith("torch.compile")
    torch.manual_seed(5)
    expected = lab.flat_steps(flat, batch, Type.RANDOM)
    torch.manual_seed(5)
    assert_alike(lab.flat_steps(compiled, batch, Type.RANDOM), expected)


def test_arguments_reach_torch_compile(lab):
    seen = []

    def backend(graph, inputs):
        seen.append(len(inputs))
        return graph.forward

    flat = array_policy(lab.logits_policy(), exploration_type=Type.RANDOM, batch_shape=(), available=lab.available)
    compiled = compile_policy(flat, arguments={"backend": backend}, example=lab.root(()))
    lab.flat_steps(compiled, (), Type.RANDOM, 3)
    assert len(seen) == 1


def test_torch_compile_keeps_its_program_for_new_weights(lab):
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    policy = lab.logits_policy()
    flat = array_policy(policy, exploration_type=Type.DETERMINISTIC, batch_shape=(), available=lab.available)
    compiled = compile_policy(flat, arguments={"backend": backend}, example=lab.root(()))
    layer = policy[0].module[2]
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))
    with torch.no_grad():
        layer.bias.add_(1)
    expected = lab.flat_steps(flat, (), Type.DETERMINISTIC)
    assert_alike(lab.flat_steps(compiled, (), Type.DETERMINISTIC), expected)
    assert len(made) == 1


def test_a_failing_compiler_is_a_reason(lab):
    def backend(graph, inputs):
        raise OSError("no compiler here")

    flat = array_policy(lab.logits_policy(), exploration_type=Type.RANDOM, batch_shape=(), available=lab.available)
    state = torch.get_rng_state()
    with pytest.raises(NotNative, match=r"torch\.compile failed"):
        compile_policy(flat, arguments={"backend": backend}, example=lab.root(()))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_unknown_modules_go_through_inductor(lab):
    policy = lab.policies["recurrent"]()
    flat = array_policy(policy, exploration_type=Type.RANDOM, batch_shape=(3,), available=lab.available)
    compiled = compile_policy(flat, example=lab.root((3,)))
    assert compiled.how.startswith("torch.compile")
    written = lab.flat_steps(compiled, (3,), Type.RANDOM)
    policy.module.kept.zero_()
    assert_alike(written, lab.flat_steps(flat, (3,), Type.RANDOM))


# Noise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["exponential", "normal"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (15,), (16,), (17,), (64, 2), (40, 3)], ids=str)
def test_noise_of_a_rollout_is_that_of_its_steps(kind, shape):
    noise = Noise(kind, shape, torch.float32, torch.device("cpu"))
    torch.manual_seed(2)
    rows = noise.draw(30)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    single = [getattr(torch.empty(shape), f"{kind}_")() for _ in range(30)]
    assert torch.equal(rows, torch.stack(single))
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_of_several_draws_comes_in_the_order_of_use():
    noises = [Noise("exponential", (2,), torch.float32, torch.device("cpu"))]
    noises.append(Noise("normal", (3,), torch.float32, torch.device("cpu")))
    torch.manual_seed(2)
    stream = noise_stream(noises, 5, torch.Tensor.unbind)
    rows = [next(stream) for _ in range(10)]
    torch.manual_seed(2)
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        assert torch.equal(first, torch.empty(2).exponential_())
        assert torch.equal(second, torch.empty(3).normal_())


def test_a_split_scale_of_odd_size(lab):
    body = nn.Sequential(nn.Linear(4, 5), NormalParamExtractor())
    module = TensorDictModule(body, ["observation"], ["a", "b"])
    flat, compiled = both(lab, TensorDictSequential(module), (3,))
    assert_alike(lab.flat_steps(compiled, (3,), Type.RANDOM), lab.flat_steps(flat, (3,), Type.RANDOM))


def test_probabilities_have_no_numpy_program(lab):
    flat = array_policy(
        lab.policies["categorical of probabilities"](),
        exploration_type=Type.RANDOM,
        batch_shape=(),
        available=lab.available,
    )
    compiled = compile_policy(flat, arguments={"backend": "eager"}, example=lab.root(()))
    assert compiled.how.startswith("torch.compile")


class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, place, direction):
        return self.layer(torch.cat([place, direction.unsqueeze(-1).float()], -1))


def test_a_number_among_the_entries_stays_one_in_a_compiled_policy():
    policy = TensorDictModule(Joined(), ["place", "direction"], ["action"])
    flat = array_policy(policy, exploration_type=Type.RANDOM, batch_shape=(), available=["place", "direction"])
    given = {"place": np.ones(2, np.float32), "direction": np.array(1)}
    with torch.no_grad():
        compiled = compile_policy(flat, example=given, arguments={"backend": "eager"})
        flat.start(1)
        compiled.start(1)
        for written, expected in zip(compiled(*given.values()), flat(*given.values()), strict=True):
            np.testing.assert_allclose(written, expected, rtol=1e-5)
