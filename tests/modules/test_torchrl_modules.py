"""Distributions and modules beside TorchRL's of the same names, where torchrl is installed."""

import pytest
import torch
from tensordict import TensorDict

import rollwright.data as our_data
import rollwright.modules as ours

theirs = pytest.importorskip("torchrl.modules")
their_data = pytest.importorskip("torchrl.data")

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
MASK = torch.rand(6, 4, generator=torch.Generator().manual_seed(1)) > 0.4
MASK[:, 0] = True
INDICES = torch.tensor([[0, 2]] * 6)


def close(one, other, within=1e-5):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    torch.testing.assert_close(one, other, rtol=within, atol=within)


def seeded(function, *arguments):
    torch.manual_seed(7)
    return function(*arguments)


def normal_parameters():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(5, 3, generator=generator), torch.rand(5, 3, generator=generator) + 0.1


@pytest.mark.parametrize(
    "options", [{}, {"low": -2.0, "high": 3.0}, {"tanh_loc": True}, {"event_dims": 0}, {"safe_tanh": False}], ids=str
)
def test_tanh_normal(options):
    one, other = (kind.TanhNormal(*normal_parameters(), **options) for kind in (theirs, ours))
    assert (one.batch_shape, one.event_shape) == (other.batch_shape, other.event_shape)
    close(one.deterministic_sample, other.deterministic_sample)
    for expected, found in zip(seeded(one.rsample_and_log_prob), seeded(other.rsample_and_log_prob), strict=True):
        assert torch.equal(expected, found)
    value = seeded(one.sample, (4,))
    close(value, seeded(other.sample, (4,)))
    close(one.log_prob(value), other.log_prob(value), 1e-3)


@pytest.mark.parametrize("options", [{}, {"low": -2.0, "high": 3.0}, {"tanh_loc": True}], ids=str)
def test_truncated_normal(options):
    one, other = (kind.TruncatedNormal(*normal_parameters(), **options) for kind in (theirs, ours))
    for name in ("deterministic_sample", "mode", "variance"):
        close(getattr(one, name), getattr(other, name), 1e-3)
    value = seeded(one.sample)
    close(value, seeded(other.sample), 1e-3)
    close(one.log_prob(value), other.log_prob(value), 1e-3)
    close(one.log_prob(value + 5), other.log_prob(value + 5))


@pytest.mark.parametrize("options", [{}, {"low": -2.0, "high": 3.0}], ids=str)
def test_tanh_delta(options):
    one, other = (kind.TanhDelta(LOGITS, **options) for kind in (theirs, ours))
    close(one.mode, other.mode)
    close(one.sample(), other.sample())
    close(one.log_prob(one.mode), other.log_prob(other.mode))


def test_independent_normal():
    one, other = (kind.IndependentNormal(*normal_parameters()) for kind in (theirs, ours))
    value = seeded(one.sample)
    assert torch.equal(value, seeded(other.sample))
    assert torch.equal(one.log_prob(value), other.log_prob(value))


@pytest.mark.parametrize("parameter", ["logits", "probs"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("OneHotCategorical", {}),
        ("MaskedCategorical", {"mask": MASK}),
        ("MaskedCategorical", {"mask": MASK, "use_cross_entropy": False}),
        ("MaskedCategorical", {"indices": INDICES}),
    ],
)
def test_categorical(name, options, parameter):
    given = {parameter: LOGITS if parameter == "logits" else LOGITS.softmax(-1)}
    one, other = (getattr(kind, name)(**given, **options) for kind in (theirs, ours))
    value = seeded(one.sample)
    assert torch.equal(value, seeded(other.sample))
    for expected, found in [(one.mode, other.mode), (one.entropy(), other.entropy())]:
        close(expected, found)
    close(one.log_prob(value), other.log_prob(value))


@pytest.mark.parametrize(
    ("name", "options", "entries"),
    [
        ("QValueModule", {"action_space": "one_hot"}, {"action_value": LOGITS}),
        ("QValueModule", {"action_space": "categorical", "action_mask_key": "m"}, {"action_value": LOGITS, "m": MASK}),
        ("QValueModule", {"action_space": "mult_one_hot", "var_nums": [2, 2]}, {"action_value": LOGITS}),
        ("TanhModule", {"in_keys": ["a"], "low": -2.0, "high": 4.0, "clamp": True}, {"a": LOGITS}),
    ],
)
def test_modules(name, options, entries):
    one, other = (getattr(kind, name)(**options)(TensorDict(entries, 6)) for kind in (theirs, ours))
    assert set(one.keys()) == set(other.keys())
    for key, value in one.items():
        close(value, other[key])


def bounded(kind):
    return kind.Bounded(-1, 1, shape=(4,))


@pytest.mark.parametrize(
    ("name", "spec", "options", "entries"),
    [
        ("EGreedyModule", lambda kind: kind.Categorical(4), {"eps_init": 0.5}, {"action": LOGITS.argmax(-1)}),
        ("EGreedyModule", lambda kind: kind.OneHot(4), {"eps_init": 0.5}, {"action": (LOGITS > 1).long()}),
        ("AdditiveGaussianModule", bounded, {}, {"action": LOGITS}),
        (
            "OrnsteinUhlenbeckProcessModule",
            bounded,
            {"sigma_min": 0.1},
            {"action": LOGITS, "is_init": torch.ones(6, 1, dtype=torch.bool)},
        ),
    ],
)
def test_exploration(name, spec, options, entries):
    one, other = (getattr(kind, name)(spec(data), **options) for kind, data in ((theirs, their_data), (ours, our_data)))
    first, second = TensorDict(entries, 6), TensorDict(entries, 6)
    for i in range(3):
        first, second = seeded(one, first), seeded(other, second)
        one.step(10)
        other.step(10)
        if "is_init" in entries and i == 1:
            first["is_init"] = second["is_init"] = LOGITS[:, :1] > 0
        assert set(first.keys()) == set(second.keys())
        for key, value in first.items():
            close(value, second[key])
