"""Weights while a thread collects: published, never shared, never torn."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from tests.patience import patient
from torch import nn

from rollwright.envs import GymEnv
from rollwright.testing.mocking_classes import CountingEnv

IDS = ("collector", "traj_ids")


# Weights -------------------------------------------------------------------------------------------------------


def test_no_step_acts_with_a_mixture_of_weights_while_the_learner_trains(tools, started):
    """Steps are taken while the learner's weights are torn; what acts was published, and the tag says which."""
    policy = tools.twins()
    collector, buffer = started(CountingEnv(max_steps=9), policy, track_policy_version=True, extend_buffer=False)
    for value in range(1, 40):
        with torch.no_grad():
            policy.module.left.fill_(float(value))
            buffer.reach(buffer.write_count + 3)
            policy.module.right.fill_(float(value))
        assert collector.update_policy_weights_() == value
        with torch.no_grad():
            policy.module.left.fill_(-1.0)
        buffer.reach(buffer.write_count + 3)
    assert collector.policy_version == collector.stats()["policy_version_acting"] == 39
    collector.async_shutdown()
    data = buffer[:]
    assert torch.equal(data["left"], data["right"])
    assert torch.equal(data["left"].flatten().long(), data["policy_version"])
    assert torch.equal(data["next", "policy_version"], data["policy_version"])
    assert data["policy_version"].unique().tolist() == list(range(40))
    assert data["policy_version"].diff().min() >= 0


def test_an_update_in_the_middle_of_a_step_acts_after_it_as_it_was_published(tools, started):
    policy = tools.twins()
    policy.module.gate = gate = tools.Gate(at=25)
    collector, buffer = started(CountingEnv(max_steps=9), policy, track_policy_version=True)
    assert gate.reached.wait(tools.LIMIT)
    for value in (1.0, 2.0):
        with torch.no_grad():
            policy.module.left.fill_(value)
            policy.module.right.fill_(value)
        collector.update_policy_weights_()
    with torch.no_grad():
        policy.module.left.fill_(-1.0)
    assert collector.stats()["policy_version_acting"] == 0
    gate.opened.set()
    buffer.reach(60)
    collector.async_shutdown()
    data = buffer[:60]
    assert data["policy_version"].tolist() == [0] * 25 + [2] * 35
    assert torch.equal(data["left"].flatten().long(), data["policy_version"])
    assert torch.equal(data["right"], data["left"])


def test_a_compiled_policy_takes_new_weights_at_the_next_batch(started):
    policy = nn.Linear(3, 1)
    module = TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])
    collector, buffer = started(
        GymEnv("Pendulum-v1"), module, compile_policy=True, track_policy_version=True, frames_per_batch=25
    )
    for version in range(1, 6):
        with torch.no_grad():
            policy.weight.zero_()
            policy.bias.fill_(version / 10)
        assert collector.update_policy_weights_() == version
        buffer.reach(buffer.write_count + 60)
    collector.async_shutdown()
    assert "NumPy program" in collector.stats()["paths"]["policy"]
    data = buffer[: len(buffer) // 25 * 25]
    tags = data["policy_version"]
    assert tags.unique().tolist() == [0, 1, 2, 3, 4, 5]
    known = tags > 0
    assert torch.allclose(data["action"].flatten()[known], tags[known] / 10)
    assert bool((tags.reshape(-1, 25) == tags.reshape(-1, 25)[:, :1]).all())  # constant in a batch


@pytest.mark.parametrize("form", ["module", "state_dict", "tensordict", "model_id", "weights_dict"])
def test_weights_in_every_form_are_copied(tools, started, form):
    policy = tools.twins()
    collector, buffer = started(CountingEnv(max_steps=9), policy, track_policy_version=True)
    other = tools.twins()
    with torch.no_grad():
        other.module.left.fill_(5.0)
        other.module.right.fill_(5.0)
    forms = {
        "module": lambda: collector.update_policy_weights_(other),
        "state_dict": lambda: collector.update_policy_weights_(other.state_dict()),
        "tensordict": lambda: collector.update_policy_weights_(TensorDict.from_module(other)),
        "model_id": lambda: collector.update_policy_weights_(other.module, model_id="module"),
        "weights_dict": lambda: collector.update_policy_weights_(weights_dict={"policy": other}),
    }
    assert forms[form]() == 1
    with torch.no_grad():
        other.module.left.fill_(-1.0)
    buffer.reach(buffer.write_count + 60)
    collector.async_shutdown()
    data = buffer[:][-1]
    assert (data["left"].item(), data["right"].item(), data["policy_version"].item()) == (5.0, 5.0, 1)


def test_weights_that_do_not_fit_are_refused_at_once(tools, started):
    collector, _ = started(CountingEnv(), tools.twins())
    with pytest.raises(ValueError, match="names differ"):
        collector.update_policy_weights_({"other": torch.zeros(1)})
    assert collector.policy_version == 0
    assert collector.stats()["background"]["running"]


def test_an_update_acts_within_a_second(started):
    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    collector, buffer = started(GymEnv("Pendulum-v1"), policy, track_policy_version=True, frames_per_batch=20_000)
    version = collector.update_policy_weights_()
    begun = time.monotonic()
    while collector.stats()["policy_version_acting"] < version:
        assert time.monotonic() - begun < patient(1.0)
    assert buffer.write_count == 0  # in the middle of a batch


def test_updates_during_a_pause_act_when_it_goes_on(tools, started):
    policy = tools.twins()
    collector, buffer = started(CountingEnv(max_steps=9), policy, track_policy_version=True, extend_buffer=False)
    buffer.reach(1)
    with collector.pause():
        count = buffer.write_count
        assert [collector.update_policy_weights_() for _ in range(3)] == [1, 2, 3]
    buffer.reach(count + 5)
    collector.async_shutdown()
    assert buffer[:]["policy_version"][count - 1 : count + 3].tolist() == [0, 3, 3, 3]


def test_the_thread_acts_with_a_copy(tools, started):
    policy = tools.twins()
    collector, buffer = started(CountingEnv(max_steps=9), policy)
    buffer.reach(20)
    with torch.no_grad():
        policy.module.left.fill_(7.0)
    buffer.reach(buffer.write_count + 60)
    assert collector.policy is not policy
    assert float(buffer[:]["left"].max()) == 0.0


def test_a_policy_that_cannot_be_copied(tools, make):
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

        def forward(self, observation):
            return torch.ones_like(observation, dtype=torch.int8)

    collector = make(
        CountingEnv(),
        TensorDictModule(Fixed(), ["observation"], ["action"]),
        frames_per_batch=4,
        replay_buffer=tools.Noted(),
    )
    with pytest.raises(TypeError, match=r"cannot be copied.*policy_factory"):
        collector.start()
    assert collector.next() is None  # as before
