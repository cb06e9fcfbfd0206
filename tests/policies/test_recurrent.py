"""GRU and LSTM policies on arrays, one step a call: the bits of the plain path, and compiled to rounding."""

import pytest
import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from tests.variants import in_turn
from torch import nn
from torch.distributions import OneHotCategorical

from rollwright.collectors import Collector
from rollwright.envs import GymEnv, SerialEnv
from rollwright.modules import GRUModule, LSTMModule

KINDS = {"gru": GRUModule, "lstm": LSTMModule}
CASES = {
    "one": {},
    "no bias": {"bias": False},
    "two layers": {"num_layers": 2},
    "written out": {"python_based": True},
}


def actor(recurrent):
    head = TensorDictModule(nn.Linear(8, 2), ["hidden"], ["logits"])
    draw = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=OneHotCategorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(recurrent, head, draw)


def collect(make_recurrent, num_envs, prepare=lambda recurrent: None, **options):
    def one():
        return GymEnv("CartPole-v1")

    torch.manual_seed(0)
    recurrent = make_recurrent()
    prepare(recurrent)
    env = one() if num_envs == 1 else SerialEnv(num_envs, one)
    env.set_seed(0)
    torch.manual_seed(1)
    policy = actor(recurrent)
    frames = num_envs * (30 if num_envs < 33 else 8)
    with Collector(env, policy, frames_per_batch=frames, total_frames=3 * frames, **options) as collector:
        batches = [batch.clone() for batch in collector]
        return torch.cat(batches, -1), collector.stats()["paths"]["policy"], recurrent


def maker(kind, **settings):
    return lambda: KINDS[kind](4, 8, in_key="observation", out_key="hidden", **settings)


@pytest.mark.parametrize("kind", KINDS)
class TestOneStep:
    @pytest.mark.parametrize(("case", "num_envs"), in_turn(CASES, [1, 8, 33]))
    def test_bits_of_the_plain_path(self, kind, case, num_envs):
        make = maker(kind, **CASES[case])
        native, how, _ = collect(make, num_envs)
        plain, _, _ = collect(make, num_envs, use_buffers=False)
        assert how == "native: 3 calls on tensors"
        assert set(native.keys(True, True)) == set(plain.keys(True, True))
        for key in plain.keys(True, True):
            assert torch.equal(native[key], plain[key]), key

    @pytest.mark.parametrize(("case", "num_envs"), in_turn(["one", "no bias", "two layers"], [8, 1]))
    def test_compiled_to_rounding(self, kind, case, num_envs):
        make = maker(kind, **CASES[case])
        compiled, how, _ = collect(make, num_envs, compile_policy=True)
        plain, _, _ = collect(make, num_envs, use_buffers=False)
        assert how.startswith("native: NumPy program")
        for key in plain.keys(True, True):
            torch.testing.assert_close(compiled[key], plain[key], rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("options", [{}, {"compile_policy": True}])
    def test_states_begin_at_zero(self, kind, options):
        batch, _, recurrent = collect(maker(kind), 8, **options)
        first = batch["is_init"].squeeze(-1)
        assert first.sum() > 8
        for key in recurrent.state_keys:
            assert (batch[key][first] == 0).all()
            follows = ~first[:, 1:]
            assert torch.equal(batch[key][:, 1:][follows], batch["next", key][:, :-1][follows])
            assert (batch["next", key] != 0).any()

    def test_new_weights_act_from_the_next_batch_on(self, kind):
        for options in ({}, {"compile_policy": True}):
            recurrent = maker(kind)()
            with Collector(GymEnv("CartPole-v1"), actor(recurrent), frames_per_batch=5, **options) as collector:
                collector.next()
                with torch.no_grad():
                    for weight in recurrent.parameters():
                        weight.zero_()
                batch, key = collector.next(), recurrent.state_keys[-1]
                torch.testing.assert_close(batch["next", key], batch[key] / 2)  # all gates are half open

    def test_hooks_hold_it_back(self, kind):
        def hooked(recurrent):
            next(recurrent.children()).register_forward_hook(lambda *_: None)

        _, how, _ = collect(maker(kind), 1, prepare=hooked)
        assert "it has hooks" in how

    def test_wrong_widths_are_errors(self, kind):
        def make():
            return KINDS[kind](5, 8, in_key="observation", out_key="hidden")

        with pytest.raises(ValueError, match="expected shape"):
            collect(make, 1)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2}, {"bias": False}], ids=["one", "layers", "no bias"])
@pytest.mark.parametrize("name", ["GRUModule", "LSTMModule"])
def test_modules_of_torchrl(name, settings, num_envs):
    kind = getattr(pytest.importorskip("torchrl.modules"), name)

    def make():
        return kind(4, 8, in_key="observation", out_key="hidden", **settings)

    native, how, _ = collect(make, num_envs)
    plain, _, _ = collect(make, num_envs, use_buffers=False)
    compiled, program, _ = collect(make, num_envs, compile_policy=True)
    assert how == "native: 3 calls on tensors"
    assert program.startswith("native: NumPy program")
    for key in plain.keys(True, True):
        assert torch.equal(native[key], plain[key]), key
        torch.testing.assert_close(compiled[key], plain[key], rtol=1e-3, atol=1e-4)
