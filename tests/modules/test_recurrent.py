"""GRUModule and LSTMModule: pieces, flat and reshaped batches, single steps, gradients, states and errors."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from rollwright.errors import PolicyKeyError
from rollwright.modules import GRUModule, LSTMModule, recurrent_mode, set_recurrent_mode

KINDS = [GRUModule, LSTMModule]


class OtherGRU(nn.GRU):
    """Not exactly ``nn.GRU``: goes through a PackedSequence."""


class OtherLSTM(nn.LSTM):
    """Not exactly ``nn.LSTM``: goes through a PackedSequence."""


def make(kind, layers=1, other=False, **options):
    torch.manual_seed(layers)
    if other:
        ready = {"gru": OtherGRU(3, 5, layers, batch_first=True)}
        if kind is LSTMModule:
            ready = {"lstm": OtherLSTM(3, 5, layers, batch_first=True)}
        return kind(in_key="x", out_key="y", **ready, **options)
    return kind(3, 5, layers, in_key="x", out_key="y", **options)


def frames(module, first, seed=0):
    """Random frames with a state each; ``first``: bool ``[*B, T]``."""
    generator = torch.Generator().manual_seed(seed)
    batch = first.shape
    layers = module._rnn.num_layers
    entries = {"x": torch.randn(*batch, 3, generator=generator), "is_init": first.unsqueeze(-1)}
    entries |= {key: torch.randn(*batch, layers, 5, generator=generator) for key in module.state_keys}
    return TensorDict(entries, batch)


def step_by_step(module, batch):
    """Single steps over flat frames: states come from the step before, at first steps from the frame."""
    done = []
    for i, frame in enumerate(batch.unbind(0)):
        frame = frame.clone()
        if i and not frame["is_init"]:
            frame.update({key: done[-1]["next", key] for key in module.state_keys})
        done.append(module(frame))
    return torch.stack(done)


def recurrent(module, batch):
    with set_recurrent_mode("recurrent"):
        return module(batch.copy())


def last_frames(first):
    return torch.cat([first[1:], torch.tensor([True])])


def gradients(module, y):
    module.zero_grad()
    (y.square().sum() + y.sin().sum()).backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


VARIANTS = [{}, {"layers": 2}, {"bias": False}, {"python_based": True, "layers": 2}, {"other": True, "layers": 2}]


# Pieces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(first=st.lists(st.booleans(), min_size=1, max_size=40), seed=st.integers(0, 99))
def test_a_flat_batch_equals_single_steps(kind, variant, first, seed):
    module = make(kind, **variant)
    first = torch.tensor(first)
    batch = frames(module, first, seed)
    expected, got = step_by_step(module, batch), recurrent(module, batch)
    torch.testing.assert_close(got["y"], expected["y"], rtol=0, atol=1e-5)
    first[0] = True
    for key in module.state_keys:
        last = last_frames(first)
        torch.testing.assert_close(got["next", key][last], expected["next", key][last], rtol=0, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_single_steps(kind, variant):
    module = make(kind, **variant)
    first = torch.rand(50, generator=torch.Generator().manual_seed(1)) < 0.2
    batch = frames(module, first)
    leaves = [batch[key].requires_grad_() for key in ("x", *module.state_keys)]
    expected = gradients(module, step_by_step(module, batch)["y"])
    inputs = [leaf.grad.clone() for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    for mine, theirs in zip(gradients(module, recurrent(module, batch)["y"]), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for leaf, theirs in zip(leaves, inputs, strict=True):
        torch.testing.assert_close(leaf.grad, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_the_last_states(kind):
    module = make(kind)
    first = torch.rand(50, generator=torch.Generator().manual_seed(2)) < 0.2
    batch = frames(module, first)
    first[0] = True
    last = last_frames(first)
    stepped, run = step_by_step(module, batch), recurrent(module, batch)
    for key in module.state_keys:
        expected = gradients(module, stepped["next", key][last])
        for mine, theirs in zip(gradients(module, run["next", key][last]), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        stepped, run = step_by_step(module, batch), recurrent(module, batch)


def slices(module, lengths, num_frames):
    """Flat frames of concatenated slices of these lengths."""
    first = torch.zeros(num_frames, dtype=torch.bool)
    first[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    return frames(module, first)


@pytest.mark.parametrize("python_based", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_flat_slices_give_the_bits_of_the_reshaped_call(kind, layers, python_based):
    module = make(kind, layers, python_based=python_based)
    flat = slices(module, [8] * 6, 48)
    rows = flat.reshape(6, 8)
    out, reshaped = recurrent(module, flat), recurrent(module, rows)
    assert torch.equal(out["y"].reshape(6, 8, 5), reshaped["y"])
    h = tuple(rows[key][:, 0].transpose(0, 1).contiguous() for key in module.state_keys)
    by_hand, _ = module._rnn(rows["x"], h[0] if len(h) == 1 else h)
    assert torch.equal(reshaped["y"], by_hand)
    for key in module.state_keys:
        mine, theirs = out["next", key].reshape(6, 8, layers, 5), reshaped["next", key]
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(resets=st.lists(st.booleans(), min_size=24, max_size=24), seed=st.integers(0, 99))
def test_resets_inside_slices_give_the_same_bits_flat_and_reshaped(kind, resets, seed):
    module = make(kind)
    first = torch.tensor(resets).reshape(4, 6)
    rows = frames(module, first, seed)
    flat = rows.clone().reshape(-1)
    flat["is_init"].reshape(4, 6)[:, 0] = True  # what a sampler of slices marks
    out, reshaped = recurrent(module, flat), recurrent(module, rows)
    assert torch.equal(out["y"].reshape(4, 6, 5), reshaped["y"])
    assert torch.equal(gradients(module, out["y"])[0], gradients(module, reshaped["y"])[0])


def test_each_row_of_a_batch_of_many_dimensions_is_a_piece():
    module = make(GRUModule)
    batch = frames(module, torch.zeros(2, 3, 4, dtype=torch.bool))
    out = recurrent(module, batch)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(out["y"][i, j], recurrent(module, batch[i, j])["y"])


@pytest.mark.parametrize("kind", KINDS)
def test_long_and_short_pieces_together(kind):
    module = make(kind)
    batch = slices(module, [300, *[1] * 200, 7, 80, 80], 667)
    torch.testing.assert_close(recurrent(module, batch)["y"], step_by_step(module, batch)["y"], rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("python_based", [False, True])
def test_a_projection(python_based):
    module = LSTMModule(3, 5, 2, proj_size=2, in_key="x", out_key="y", python_based=python_based)
    batch = slices(module, [5, 1, 9, 3], 18)
    batch["recurrent_state_h"] = torch.randn(18, 2, 2)
    got, expected = recurrent(module, batch), step_by_step(module, batch)
    torch.testing.assert_close(got["y"], expected["y"], rtol=0, atol=1e-5)
    torch.testing.assert_close(got[-1]["next"], expected[-1]["next"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("python_based", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_acts_in_training_only(kind, python_based):
    module = make(kind, 2, dropout=0.5, python_based=python_based)
    batch = slices(module, [5, 1, 9, 3], 18)
    assert not torch.equal(recurrent(module, batch)["y"], recurrent(module, batch)["y"])
    module.eval()
    torch.testing.assert_close(recurrent(module, batch)["y"], step_by_step(module, batch)["y"], rtol=0, atol=1e-5)


# States ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_mode_sets_the_stored_state_to_zero(kind):
    module = make(kind)
    batch = frames(module, torch.ones(4, dtype=torch.bool))
    zeros = batch.clone()
    for key in module.state_keys:
        zeros[key].zero_()
    assert not torch.allclose(module(batch.copy())["y"], module(zeros.copy())["y"])
    torch.testing.assert_close(module(batch.copy())["y"], recurrent(module, batch)["y"])


def test_one_layer_of_a_gru_knows_every_state():
    module = make(GRUModule)
    batch = slices(module, [4, 2, 3], 9)
    out = recurrent(module, batch)
    torch.testing.assert_close(out["next", "recurrent_state"], step_by_step(module, batch)["next", "recurrent_state"])
    out["y"].zero_()
    assert out["next", "recurrent_state"].abs().sum() > 0  # memory of its own


@pytest.mark.parametrize("kind", KINDS)
def test_states_between_keep_what_was_recorded_or_are_nan(kind):
    module = make(kind, 2)
    batch = slices(module, [4, 2, 3], 9)
    last = torch.tensor([3, 5, 8])
    inside = torch.tensor([i for i in range(9) if i not in last])
    recorded = {key: torch.randn(9, 2, 5) for key in module.state_keys}
    kept = recurrent(module, batch.copy().update({"next": dict(recorded)}))
    bare = recurrent(module, batch)
    for key, value in recorded.items():
        assert torch.equal(kept["next", key][inside], value[inside])
        assert bare["next", key][inside].isnan().all()
        assert torch.equal(kept["next", key][last], bare["next", key][last])
        assert not bare["next", key][last].isnan().any()


def test_single_steps_of_a_batch_of_any_shape():
    module = make(LSTMModule, 2)
    batch = frames(module, torch.zeros(2, 3, dtype=torch.bool))
    out = module(batch.copy())
    assert out["y"].shape == (2, 3, 5)
    assert out["next", "recurrent_state_c"].shape == (2, 3, 2, 5)
    alone = module(batch[1, 2])
    torch.testing.assert_close(alone["next"], out[1, 2]["next"])


@pytest.mark.parametrize("batch", [(), (4,), (4, 6)])
@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_entries_may_be_given_by_name(kind, mode, batch):
    if mode and not batch:
        return
    module = make(kind)
    data = frames(module, torch.zeros(batch, dtype=torch.bool))
    with set_recurrent_mode(mode):
        found = module(**data)
        expected = module(data)
    assert len(found) == len(module.out_keys)
    for key, value in zip(module.out_keys, found, strict=True):
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["auto", "pad", "scan", "triton"])
def test_every_backend_is_the_one_that_there_is(kind, backend):
    plain, chosen = (make(kind, **options) for options in ({}, {"recurrent_backend": backend}))
    data = frames(plain, torch.tensor([True, False, False, True, False]))
    assert torch.equal(recurrent(plain, data)["y"], recurrent(chosen, data)["y"])


def test_the_primer_describes_the_states():
    primer = GRUModule(3, 5, 2, in_keys=["x", ("a", "h")], out_keys=["y", ("next", "a", "h")]).make_tensordict_primer()
    assert primer.primers["a", "h"].shape == (2, 5)
    primer = LSTMModule(3, 5, proj_size=2, in_key="x", out_key="y").double().make_tensordict_primer()
    assert {key: tuple(spec.shape) for key, spec in primer.primers.items()} == {
        "recurrent_state_h": (1, 2),
        "recurrent_state_c": (1, 5),
    }
    assert primer.primers["recurrent_state_c"].dtype == torch.float64


# Modes ----------------------------------------------------------------------------------------


def test_modes_nest_and_come_back():
    seen = [recurrent_mode()]
    with set_recurrent_mode("recurrent") as nothing, set_recurrent_mode(False):
        seen.append(recurrent_mode())
        with set_recurrent_mode(None):
            seen.append(recurrent_mode())
    seen.append(recurrent_mode())
    assert nothing is None
    assert seen == [None, False, None, None]
    with pytest.raises(ZeroDivisionError), set_recurrent_mode():
        seen.append(recurrent_mode() / 0)
    assert recurrent_mode() is None


def test_a_mode_decorates():
    @set_recurrent_mode("sequential")
    def mode():
        return recurrent_mode()

    assert mode() is False
    assert mode.__name__ == "mode"


def test_a_module_has_a_default_mode():
    module = make(GRUModule, default_recurrent_mode=True)
    assert module.recurrent_mode
    with set_recurrent_mode("sequential"):
        assert not module.recurrent_mode
    assert not make(GRUModule).recurrent_mode


@pytest.mark.parametrize("mode", ["parallel", 1, 0.5])
def test_other_modes_are_refused(mode):
    with pytest.raises(ValueError, match="mode: expected 'recurrent'"):
        set_recurrent_mode(mode)


# Construction ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "original", "name"), [(GRUModule, nn.GRU, "gru"), (LSTMModule, nn.LSTM, "lstm")])
def test_a_ready_layer(kind, original, name):
    layer = original(3, 5, batch_first=True)
    module = kind(in_key="x", out_key="y", **{name: layer})
    assert getattr(module, name) is layer
    assert set(module.state_dict()) == {f"{name}.{key}" for key in layer.state_dict()}
    other = kind(3, 5, in_key="x", out_key="y", python_based=True)
    other.load_state_dict(module.state_dict())
    batch = slices(module, [4, 2, 3], 9)
    torch.testing.assert_close(recurrent(other, batch)["y"], recurrent(module, batch)["y"], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=f"{name}: got a ready layer and hidden_size"):
        kind(hidden_size=5, in_key="x", out_key="y", **{name: layer})
    with pytest.raises(ValueError, match="batch_first: expected True"):
        kind(in_key="x", out_key="y", **{name: original(3, 5)})
    with pytest.raises(ValueError, match="bidirectional: expected False"):
        kind(in_key="x", out_key="y", **{name: original(3, 5, batch_first=True, bidirectional=True)})
    with pytest.raises(TypeError, match=f"{name}: expected a torch.nn.{original.__name__}, got Linear"):
        kind(in_key="x", out_key="y", **{name: nn.Linear(3, 5)})


KEYS = {"in_key": "x", "out_key": "y"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"bidirectional": True}, ValueError, "bidirectional: expected False"),
        ({"batch_first": False}, ValueError, "batch_first: expected True"),
        ({"hidden_size": None}, TypeError, "hidden_size: expected an integer, got None"),
        ({"in_keys": ["x"]}, ValueError, "in_key: expected either in_key= or in_keys=, got both"),
        ({"in_key": None}, ValueError, "in_key: expected either in_key= or in_keys=, got neither"),
        ({"in_key": None, "in_keys": ["x"]}, ValueError, "in_keys: .* expected an input, . state"),
        ({"out_key": None, "out_keys": ["y"]}, ValueError, "out_keys: .* expected an output and . state"),
        ({"recurrent_backend": "cuda"}, ValueError, "recurrent_backend: expected one of auto, pad, scan, triton"),
        ({"recurrent_recompute": True}, ValueError, "recurrent_recompute: expected one of none, full"),
        ({"default_recurrent_mode": "often"}, ValueError, "default_recurrent_mode: expected 'recurrent'"),
    ],
)
def test_wrong_arguments_are_errors(kind, changes, error, message):
    with pytest.raises(error, match=message):
        kind(**{"input_size": 3, "hidden_size": 5, **KEYS, **changes})


def test_the_mark_of_first_steps_may_have_another_name():
    module = GRUModule(3, 5, in_keys=["x", "h", ("agents", "first")], out_keys=["y", ("next", "h")])
    assert module.init_key == ("agents", "first")
    assert GRUModule(3, 5, **KEYS).in_keys == ["x", "recurrent_state", "is_init"]
    assert GRUModule(3, 5, **KEYS).out_keys == ["y", ("next", "recurrent_state")]


# Errors ---------------------------------------------------------------------------------------


def test_missing_entries_are_named():
    module = make(GRUModule)
    batch = slices(module, [4, 2], 6)
    with pytest.raises(PolicyKeyError, match=r"its state at 'recurrent_state'.*policy=.*make_tensordict_primer"):
        module(batch.exclude("recurrent_state"))
    with pytest.raises(PolicyKeyError, match=r"its state at 'recurrent_state'"):
        recurrent(module, batch.exclude("recurrent_state"))
    with pytest.raises(PolicyKeyError, match=r"reads 'is_init'.*InitTracker"):
        recurrent(module, batch.exclude("is_init"))
    with pytest.raises(PolicyKeyError, match="reads 'x', and there are 'is_init', 'recurrent_state'"):
        module(batch.exclude("x"))
    assert module(batch.exclude("is_init"))["y"].shape == (6, 5)  # a single step does not ask


def test_wrong_shapes_are_named():
    module = make(GRUModule)
    batch = slices(module, [4, 2], 6)
    with pytest.raises(ValueError, match=r"'x': GRUModule expected shape \[6, 3\].*got \[6, 4\]"):
        module(batch.copy().set("x", torch.zeros(6, 4)))
    with pytest.raises(ValueError, match=r"'recurrent_state': GRUModule expected shape \[6, 1, 5\].*got \[6, 5\]"):
        module(batch.copy().set("recurrent_state", torch.zeros(6, 5)))
    with pytest.raises(ValueError, match=r"'is_init': expected one mark for each frame"):
        recurrent(module, batch.copy().set("is_init", torch.zeros(6, 2, dtype=torch.bool)))
    with pytest.raises(
        ValueError, match=r"expected a batch of frames whose last dimension is time, got batch size \[\]"
    ):
        recurrent(module, batch[0])
    with pytest.raises(ValueError, match=r"got batch size \[0\]"):
        recurrent(module, batch[:0])


def test_a_primer_needs_states_that_the_environment_carries():
    module = GRUModule(3, 5, in_keys=["x", "h"], out_keys=["y", ("next", "other")])
    with pytest.raises(ValueError, match=r"out_keys: expected the state read at 'h' to be written at \('next', 'h'\)"):
        module.make_tensordict_primer()


# Copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("python_based", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_are_equal(kind, python_based):
    module = make(kind, python_based=python_based)
    batch = slices(module, [4, 2, 3], 9)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(recurrent(twin, batch)["y"], recurrent(module, batch)["y"])
        assert twin.in_keys == module.in_keys


def test_an_in_place_activation_may_follow():
    module = make(GRUModule)
    relu = TensorDictModule(nn.ReLU(inplace=True), in_keys=["y"], out_keys=["z"])
    batch = slices(module, [4, 2, 3], 9)
    policy = TensorDictSequential(module, relu)
    with set_recurrent_mode("recurrent"):
        out = policy(batch.copy())
    out["z"].sum().backward()
    assert module.gru.weight_hh_l0.grad.abs().sum() > 0
    assert (out["next", "recurrent_state"] < 0).any()


@pytest.mark.parametrize("options", [{}, {"layers": 2, "bias": False}, {"layers": 2, "dropout": 0.5}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_exchanged_with_its_weights(kind, options):
    module = make(kind, **options).eval()
    name = module._attribute
    batch = frames(module, torch.tensor([True, False, False, True, False]), 0)
    before, weights, expected = getattr(module, name), dict(module.named_parameters()), recurrent(module, batch)
    assert module.make_cudnn_based() is module
    assert getattr(module, name) is before
    assert module.make_python_based() is module
    assert type(getattr(module, name)).__module__.startswith("rollwright")
    assert not getattr(module, name).training
    assert {key: id(value) for key, value in module.named_parameters()} == {k: id(v) for k, v in weights.items()}
    torch.testing.assert_close(recurrent(module, batch)["y"], expected["y"])
    module.make_cudnn_based()
    assert type(getattr(module, name)) is type(before)
    assert torch.equal(recurrent(module, batch)["y"], expected["y"])


def test_a_projection_is_exchanged_too():
    module = LSTMModule(3, 5, 2, proj_size=2, in_key="x", out_key="y")
    batch = frames(module, torch.tensor([True, False, False]), 0)
    batch["recurrent_state_h"] = batch["recurrent_state_h"][..., :2]
    expected = recurrent(module, batch)["y"]
    torch.testing.assert_close(recurrent(module.make_python_based(), batch)["y"], expected)
