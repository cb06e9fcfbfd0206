"""The end of a collector whose conversations wait for something that does not come."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from tests.collectors.llm.fakes import FakeEnv, FakePolicy
from tests.patience import patient

from rollwright.collectors.llm import LLMCollector
from rollwright.data import RaggedStorage, ReplayBuffer
from rollwright.envs.llm import LLMEnv


class Stuck:
    """A reward function that returns when it is released."""

    def __init__(self):
        self.called, self.released = threading.Event(), threading.Event()

    def __call__(self, completions, **columns):
        self.called.set()
        self.released.wait(60)
        return [0.0] * len(completions)


@pytest.mark.parametrize("async_envs", [False, True])
def test_a_thread_that_waits_for_a_reward_ends_within_the_limit_and_says_what_it_has_not_delivered(async_envs):
    stuck = Stuck()
    data = [{"tokens": torch.tensor([number + 1])} for number in range(8)]
    env = LLMEnv.from_dataloader(data, from_text=False, batch_size=2, reward_functions=stuck)
    buffer = ReplayBuffer(storage=RaggedStorage(100))
    collector = LLMCollector(env, FakePolicy(), dialog_turns_per_batch=2, replay_buffer=buffer, async_envs=async_envs)
    collector.start()
    assert stuck.called.wait(20)
    began = time.monotonic()
    collector.shutdown(timeout=10.0)
    assert time.monotonic() - began < patient(5.0)
    stuck.released.set()
    assert "rollwright-collector" not in [thread.name for thread in threading.enumerate()]
    assert len(buffer) == 0
    assert collector.stats()["conversations_in_progress"] == 2


def test_a_thread_that_waits_for_answers_ends_within_the_limit():
    policy = FakePolicy()
    policy.engine.step = lambda tokens=1: time.sleep(0.01)  # never writes a token
    buffer = ReplayBuffer(storage=RaggedStorage(100))
    collector = LLMCollector(FakeEnv(2), policy, dialog_turns_per_batch=2, replay_buffer=buffer)
    collector.start()
    began = time.monotonic()
    collector.shutdown(timeout=10.0)
    assert time.monotonic() - began < patient(5.0)
