"""Distributions beside closed forms and torch's own."""

import math

import pytest
import torch
from torch import distributions as D

from rollwright.modules import (
    IndependentNormal,
    MaskedCategorical,
    OneHotCategorical,
    TanhDelta,
    TanhNormal,
    TruncatedNormal,
)

LOC, SCALE = torch.tensor([[0.3, -1.0], [2.0, 0.0]]), torch.tensor([[0.5, 1.0], [0.1, 2.0]])


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-2.0, torch.tensor([3.0, 0.5]))])
def test_tanh_normal_is_a_transformed_normal(low, high):
    ours = TanhNormal(LOC, SCALE, low=low, high=high)
    half, mid = (torch.as_tensor(high) - low) / 2, (torch.as_tensor(high) + low) / 2
    torchs = D.TransformedDistribution(
        D.Independent(D.Normal(LOC, SCALE), 1), [D.TanhTransform(), D.AffineTransform(mid, half, event_dim=0)]
    )
    value, log_prob = ours.rsample_and_log_prob((5,))
    assert bool(((value > low) & (value < high)).all())
    torch.testing.assert_close(log_prob, torchs.log_prob(value), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.log_prob(value), torchs.log_prob(value), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.deterministic_sample, mid + half * LOC.tanh())


def test_tanh_normal_scores_what_saturates():
    dist = TanhNormal(torch.tensor([50.0]), torch.tensor([1.0]))
    value, log_prob = dist.rsample_and_log_prob()
    assert float(value) < 1
    assert bool(torch.isfinite(log_prob))
    assert bool(torch.isfinite(dist.log_prob(torch.tensor([1.0]))))


def test_tanh_normal_has_gradients_and_no_mode():
    loc = LOC.clone().requires_grad_()
    TanhNormal(loc, SCALE).rsample().sum().backward()
    assert bool((loc.grad != 0).all())
    with pytest.raises(RuntimeError, match="deterministic_sample"):
        _ = TanhNormal(LOC, SCALE).mode
    with pytest.raises(NotImplementedError, match="no formula"):
        _ = TanhNormal(LOC, SCALE).mean
    with pytest.raises(RuntimeError, match="high: expected"):
        TanhNormal(LOC, SCALE, low=1.0, high=-1.0)


def test_tanh_normal_finds_its_mode():
    mode = TanhNormal(torch.zeros(2), torch.full((2,), 0.1)).get_mode()
    assert float(mode.abs().max()) < 0.05


def test_independent_normal_is_independent():
    value = torch.randn(2, 2)
    expected = D.Independent(D.Normal(LOC, SCALE), 1).log_prob(value)
    assert torch.equal(IndependentNormal(LOC, SCALE).log_prob(value), expected)
    assert torch.equal(IndependentNormal(LOC, torch.ones_like).stddev, torch.ones(2, 2))


def test_truncated_normal_integrates_to_one():
    dist = TruncatedNormal(torch.tensor([[0.4]]), torch.tensor([[0.7]]), low=-0.5, high=2.0)
    x = torch.linspace(-0.4999, 1.9999, 20001).reshape(-1, 1, 1)
    density = dist.log_prob(x).exp().flatten()
    step = float(x[1] - x[0])
    assert math.isclose(float(density.sum()) * step, 1.0, rel_tol=1e-3)
    assert math.isclose(float((density * x.flatten()).sum()) * step, float(dist.mean), rel_tol=1e-3)
    samples = dist.sample((20000,))
    assert bool(((samples >= -0.5) & (samples <= 2)).all())
    assert math.isclose(float(samples.mean()), float(dist.mean), abs_tol=0.02)
    assert math.isclose(float(samples.var()), float(dist.variance), abs_tol=0.02)


def test_tanh_delta():
    dist = TanhDelta(LOC)
    assert torch.equal(dist.sample(), dist.mode)
    torch.testing.assert_close(dist.mode, LOC.tanh())
    with pytest.raises(ValueError, match="high: expected"):
        TanhDelta(LOC, low=1.0, high=0.0)


@pytest.mark.parametrize("parameter", ["logits", "probs"])
def test_one_hot_categorical_is_torchs(parameter):
    given = {parameter: torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8]])}
    ours, torchs = OneHotCategorical(**given), D.OneHotCategorical(**given)
    torch.manual_seed(0)
    value = ours.sample((9,))
    torch.manual_seed(0)
    assert torch.equal(value, torchs.sample((9,)).long())
    assert torch.equal(ours.log_prob(value), torchs.log_prob(value.float()))
    assert ours.rsample().dtype == torch.float32


@pytest.mark.parametrize("cross", [True, False])
def test_masked_categorical_is_one_of_fewer_outcomes(cross):
    logits = torch.tensor([0.1, 9.0, -0.3, 2.0])
    mask = torch.tensor([True, False, True, True])
    ours = MaskedCategorical(logits=logits, mask=mask, use_cross_entropy=cross)
    fewer = D.Categorical(logits=logits[mask])
    allowed = torch.tensor([0, 2, 3])
    torch.testing.assert_close(ours.log_prob(allowed), fewer.log_prob(torch.arange(3)))
    torch.testing.assert_close(ours.entropy(), fewer.entropy())
    assert int(ours.mode) == 3
    assert float(ours.log_prob(torch.tensor(1))) == -math.inf
    assert 1 not in ours.sample((200,))


def test_masked_categorical_refuses_two_masks():
    with pytest.raises(ValueError, match="mask: expected a mask or indices, got neither"):
        MaskedCategorical(logits=torch.zeros(2))


BOUNDS = {
    "numbers": (-2.0, 2.0),
    "unit": (-1, 1),
    "tensors": (torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 2.0])),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler about its own parts
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("kind", [TanhNormal, TanhDelta])
def test_bounded_distributions_are_traced_in_one_graph(kind, bounds):
    low, high = BOUNDS[bounds]

    def value(loc):
        scales = (loc.exp(),) if kind is TanhNormal else ()
        return (
            kind(loc, *scales, low=low, high=high).deterministic_sample
            if scales
            else kind(loc, low=low, high=high).mode
        )

    loc = torch.tensor([0.3, -0.2])
    torch.testing.assert_close(torch.compile(value, backend="eager", fullgraph=True)(loc), value(loc))
