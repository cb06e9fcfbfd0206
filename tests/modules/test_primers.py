"""Primers of all recurrent modules of a policy, for environments that are made without it."""

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from rollwright.envs import TransformedEnv
from rollwright.modules import (
    GRUModule,
    LSTMModule,
    RandomPolicy,
    get_env_transforms_from_module,
    get_primers_from_module,
)
from rollwright.testing.mocking_classes import ContinuousActionVecMockEnv

GRU_KEYS = {"in_keys": ["observation", "h"], "out_keys": ["a", ("next", "h")]}
LSTM_KEYS = {"in_keys": ["a", "b", "c"], "out_keys": ["features", ("next", "b"), ("next", "c")]}


def policy():
    head = TensorDictModule(nn.Linear(5, 7), ["features"], ["action"])
    return TensorDictSequential(GRUModule(7, 4, **GRU_KEYS), LSTMModule(4, 5, **LSTM_KEYS), head)


class Speaker(nn.Module):
    """Has a primer for the module inside of it."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.inner, self.fails = GRUModule(7, 4, **GRU_KEYS), fails

    def make_tensordict_primer(self):
        if self.fails:
            raise RuntimeError("no shape is known")
        return self.inner.make_tensordict_primer()


def test_a_recurrent_policy_acts_where_its_transforms_were_appended():
    env = TransformedEnv(ContinuousActionVecMockEnv(), get_env_transforms_from_module(policy()))
    rollout = env.rollout(3, policy())
    assert rollout["is_init"].squeeze(-1).tolist() == [True, False, False]
    assert (rollout["h"].shape, rollout["c"].shape) == (torch.Size([3, 1, 4]), torch.Size([3, 1, 5]))
    assert get_env_transforms_from_module(RandomPolicy(env.action_spec), init_key="first").init_key == "first"


def test_primers_of_all_parts_but_those_inside_of_one_that_speaks_for_them():
    assert [sorted(primer.primers.keys()) for primer in get_primers_from_module(policy())] == [["h"], ["b", "c"]]
    assert list(get_primers_from_module(nn.Sequential(Speaker())).primers.keys()) == ["h"]


def test_a_policy_without_primers():
    with pytest.warns(UserWarning, match="module: Linear has no part with a method make_tensordict_primer"):
        assert get_primers_from_module(nn.Linear(2, 2)) is None
    assert get_primers_from_module(nn.Linear(2, 2), warn=False) is None


def test_a_part_that_cannot_make_its_primer_is_an_error_or_named():
    parts = nn.Sequential(Speaker(fails=True), LSTMModule(4, 5, **LSTM_KEYS))
    with pytest.raises(RuntimeError, match="no shape is known"):
        get_primers_from_module(parts)
    with pytest.warns(UserWarning, match=r"no primers of .*Speaker.*no shape is known"):
        assert sorted(get_primers_from_module(parts, strict=False).primers.keys()) == ["b", "c"]
