"""The commonest mistakes of newcomers give the errors that the FAQ lists."""

from __future__ import annotations

import re
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from rollwright import Collector, GymEnv, GymWrapper, LazyTensorStorage, TensorDictReplayBuffer, TransformedEnv
from rollwright.envs.transforms import ObservationNorm
from rollwright.modules import ProbabilisticActor

FAQ = (Path(__file__).parents[1] / "docs" / "faq.md").read_text()
QUOTED = re.findall(r'^### "(.+)"$', FAQ, re.MULTILINE)


def cartpole():
    return GymEnv("CartPole-v1")


def collect(env=cartpole, policy=None, **options):
    with Collector(env, policy, **{"frames_per_batch": 10, "total_frames": 10, **options}) as collector:
        return list(collector)


class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        raise RuntimeError("it is broken")


def diverged():
    net = nn.Linear(4, 2)
    nn.init.constant_(net.weight, float("nan"))
    actor = TensorDictModule(net, ["observation"], ["logits"])
    return ProbabilisticActor(actor, in_keys=["logits"], distribution_class=torch.distributions.OneHotCategorical)


def buffer(**options):
    return TensorDictReplayBuffer(storage=LazyTensorStorage(10), **options)


def after_shutdown():
    collector = Collector(cartpole, frames_per_batch=10)
    collector.shutdown()
    collector.next()


def without_its_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    from rollwright.modules.llm import vLLMWrapper

    vLLMWrapper("model")


def integers():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


MISTAKES = {
    "Collector has no option 'frame_per_batch'": (TypeError, lambda: collect(frame_per_batch=10)),
    "frames_per_batch: expected": (ValueError, lambda: collect(frames_per_batch=0)),
    "GymEnv('CartPol-v1'): gymnasium raised": (Exception, lambda: collect("CartPol-v1")),
    "create_env_fn: GymEnv(": (TypeError, lambda: collect(GymEnv)),
    "create_env_fn: a collector of one process": (ValueError, lambda: collect([cartpole, cartpole])),
    "create_env_fn: expected the name": (TypeError, lambda: collect(object())),
    "expected 3 features in dimension -1": (Exception, lambda: collect(policy=nn.Linear(3, 2))),
    "policy: it wrote no 'action'": (
        Exception,
        lambda: collect(policy=TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])),
    ),
    "policy: TensorDictModule reads 'obs'": (
        Exception,
        lambda: collect(policy=TensorDictModule(nn.Linear(4, 2), ["obs"], ["action"])),
    ),
    "action 'action' has shape [1] and dtype float32": (
        Exception,
        lambda: collect(integers, TensorDictModule(nn.Linear(4, 1), ["observation"], ["action"])),
    ),
    "policy: 'logits' is NaN or infinite": (Exception, lambda: collect(policy=diverged())),
    "raised in step: RuntimeError": (Exception, lambda: collect(lambda: GymWrapper(Broken()))),
    "ObservationNorm: no entry 'pixels'": (
        Exception,
        lambda: collect(lambda: TransformedEnv(cartpole(), ObservationNorm(loc=0.0, scale=1.0, in_keys=["pixels"]))),
    ),
    "batch_size: expected it in sample()": (ValueError, lambda: buffer().sample()),
    "TensorDictReplayBuffer is empty": (RuntimeError, lambda: buffer(batch_size=4).sample()),
    "max_size: expected an integer": (TypeError, lambda: LazyTensorStorage("1000")),
    "Collector was shut down.": (RuntimeError, after_shutdown),
    "Collector delivers whole batches": (UserWarning, lambda: collect(frames_per_batch=100)),
    "Collector ends without a batch of whole trajectories": (
        UserWarning,
        lambda: collect("Pendulum-v1", trajs_per_batch=2),
    ),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_gives_the_error_that_the_faq_explains(words):
    kind, mistake = MISTAKES[words]
    with pytest.raises(kind, match=re.escape(words)):
        mistake()
    assert any(words in quoted for quoted in QUOTED)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    with pytest.raises(ImportError, match=r"needs the package .*which is not installed. Install it with: pip install"):
        without_its_package(monkeypatch)


def test_every_error_of_the_faq_is_tested():
    tested = [quoted for quoted in QUOTED if any(words in quoted for words in MISTAKES)]
    assert [quoted for quoted in QUOTED if quoted not in tested] == [next(q for q in QUOTED if "not installed" in q)]
    assert len(QUOTED) == 20
