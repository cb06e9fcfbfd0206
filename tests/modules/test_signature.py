"""Plain and compiled modules as policies."""

from __future__ import annotations

import pytest
import torch
from tensordict.nn import TensorDictModule
from tests.variants import in_turn
from torch import nn

from rollwright.collectors import Collector


class Lean(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2, bias=False)
        nn.init.constant_(self.linear.weight, 0.0)
        self.linear.weight.data[1, 2] = 1.0  # to the side to which the pole leans

    def forward(self, observation):
        return self.linear(observation).argmax(-1)


def collect(policy, **options):
    with Collector("CartPole-v1", policy, frames_per_batch=40, total_frames=40, **options) as collector:
        collector.set_seed(0)
        (batch,) = [found.clone() for found in collector]
        return batch


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch imports it for torch.compile
@pytest.mark.parametrize(("as_module", "options"), in_turn([True, False], [{}, {"num_collectors": 2, "sync": True}]))
def test_a_compiled_module_acts_as_the_module_does(as_module, options):
    policy = TensorDictModule(Lean(), ["observation"], ["action"]) if as_module else Lean()
    expected = collect(policy, **options)
    assert expected["action"].unique().numel() == 2
    batch = collect(torch.compile(policy, backend="eager"), **options)
    assert set(batch.keys(True, True)) == set(expected.keys(True, True))
    assert (batch == expected).all()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_an_error_about_a_compiled_module_names_the_module():
    class Wrong(nn.Module):
        def forward(self, first, second):
            return first

    with pytest.raises(TypeError, match=r"policy: Wrong.forward takes \(first, second\)"):
        Collector("CartPole-v1", torch.compile(Wrong(), backend="eager"), frames_per_batch=40)
