"""The layers written out in torch operations: values, gradients and weights of those of torch.nn."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from rollwright.modules import GRU, LSTM, GRUCell, LSTMCell

ORIGINALS = {GRU: nn.GRU, LSTM: nn.LSTM}


def gradients(module, loss):
    module.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kind", "original"), [(GRUCell, nn.GRUCell), (LSTMCell, nn.LSTMCell)])
def test_a_cell_equals_torchs(kind, original, bias):
    torch.manual_seed(0)
    cell, reference = kind(3, 5, bias), original(3, 5, bias)
    cell.load_state_dict(reference.state_dict())
    x = torch.randn(4, 3)
    states = torch.randn(4, 5) if kind is GRUCell else (torch.randn(4, 5), torch.randn(4, 5))
    for hx in (None, states):
        torch.testing.assert_close(cell(x, hx), reference(x, hx))
    torch.testing.assert_close(cell(x[0]), reference(x[0]))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_first": True},
        {"num_layers": 3, "bias": False},
        {"num_layers": 2, "batch_first": True, "dropout": 0.0, "dtype": torch.float64},
    ],
)
@pytest.mark.parametrize("kind", [GRU, LSTM])
def test_a_layer_equals_torchs_with_its_gradients(kind, settings):
    torch.manual_seed(0)
    layer, reference = kind(3, 5, **settings), ORIGINALS[kind](3, 5, **settings)
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(4, 6, 3, dtype=settings.get("dtype"))
    y, states = layer(x)
    expected, expected_states = reference(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(states, expected_states)
    for mine, theirs in zip(
        gradients(layer, y.square().sum()), gradients(reference, expected.square().sum()), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    again, _ = layer(x, states)
    torch.testing.assert_close(again, reference(x, expected_states)[0])


@pytest.mark.parametrize("kind", [GRU, LSTM])
def test_a_sequence_without_a_batch_dimension(kind):
    layer, x = kind(3, 5, num_layers=2), torch.randn(6, 3)
    reference = ORIGINALS[kind](3, 5, num_layers=2)
    reference.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), reference(x))
    torch.testing.assert_close(layer(x, layer(x)[1]), reference(x, reference(x)[1]))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_an_lstm_with_a_projection_equals_torchs():
    layer, x = LSTM(3, 5, num_layers=2, proj_size=2), torch.randn(6, 4, 3)
    reference = nn.LSTM(3, 5, num_layers=2, proj_size=2)
    reference.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), reference(x))


def test_dropout_acts_between_layers_in_training_only():
    torch.manual_seed(0)
    layer, x = GRU(3, 5, num_layers=2, dropout=0.5), torch.randn(6, 4, 3)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


@pytest.mark.parametrize("kind", [GRU, LSTM])
def test_bidirectional_is_refused(kind):
    with pytest.raises(ValueError, match=r"bidirectional: .* runs forward in time only"):
        kind(3, 5, bidirectional=True)


def test_other_inputs_are_refused():
    with pytest.raises(TypeError, match=r"input: GRU expected a tensor of 2 or 3 dimensions, got \[3\]"):
        GRU(3, 5)(torch.randn(3))


@pytest.mark.parametrize("kind", [GRU, LSTM, GRUCell, LSTMCell])
def test_copies_are_equal(kind):
    torch.manual_seed(0)
    module, x = kind(3, 5), torch.randn(2, 3)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(twin(x), module(x), rtol=0, atol=0)
