"""Columns of the data and rewards by name, in the records of one process and of workers, on turns and TensorDicts."""

from __future__ import annotations

import pytest
import torch
from tests.collectors.llm.fakes import FakePolicy
from tests.collectors.llm.test_plain import Talks, chats, same, wrapper

from rollwright.collectors.llm import LLMCollector
from rollwright.data import Composite, Unbounded
from rollwright.data.replay_buffers import LazyStackStorage, ReplayBuffer
from rollwright.envs.llm import ChatEnv, LLMEnv, Reward
from rollwright.errors import EnvError


def length(completion_ids):
    return [float(len(tokens)) for tokens in completion_ids]


def number(completions, number):
    return [float(each) for each in number]


def env(columns=("name",)):
    return LLMEnv.from_dataloader(
        [{"tokens": [1 + place, 1], "name": f"prompt {place}", "number": place} for place in range(12)],
        from_text=False,
        batch_size=3,
        epochs=1,
        repeats=2,
        reward_functions=[length, Reward(number, weight=0.5)],
        columns=columns,
        primers=Composite(number=Unbounded((), dtype=torch.int64)),
    )


@pytest.mark.parametrize("options", [{}, {"async_envs": True}, {"num_collectors": 2}])
def test_records_have_columns_and_the_number_of_each_reward(options):
    with LLMCollector(env, policy_factory=FakePolicy, trajs_per_batch=4, **options) as collector:
        records = [row for batch in collector for row in batch.unbind(0)]
    assert sorted(row["columns", "name"] for row in records) == sorted(f"prompt {n}" for n in range(12) for _ in "ab")
    for row in records:
        place = int(row["prompt_index"])
        assert row["columns", "name"] == f"prompt {place}"
        assert int(row["number"]) == place
        values = [float(row["next", "rewards", name]) for name in ("length", "number")]
        assert values == [len(row["tokens_response"]), place]
        assert float(row["next", "reward"]) == values[0] + 0.5 * values[1]


def test_they_reach_a_buffer_and_a_column_that_is_not_there_is_named():
    buffer = ReplayBuffer(storage=LazyStackStorage(100), batch_size=5)
    with LLMCollector(env, policy_factory=FakePolicy, dialog_turns_per_batch=24, replay_buffer=buffer) as collector:
        assert next(iter(collector)) is None
    sample = buffer.sample()
    assert sample["next", "rewards", "number"].shape == (5, 1)
    assert list(sample["columns", "name"]) == [f"prompt {place}" for place in sample["number"].tolist()]
    misspelt = LLMCollector(lambda: env(["nam"]), policy_factory=FakePolicy, trajs_per_batch=1)
    missing = r"columns: the row has no column 'nam'; it has \['name', 'number', 'tokens'\]. Correct the key"
    with misspelt, pytest.raises(EnvError, match=missing):
        misspelt.next()
    with pytest.raises(TypeError, match=r"columns: expected names of columns of the data, got 'name'. Pass a list"):
        env("name")


@pytest.mark.llm
def test_they_are_the_same_on_tensordicts():
    found = []
    for plain in (False, True):
        policy = wrapper()
        acting = (lambda td, policy=policy: policy(td)) if plain else policy
        rewarded = chats(reward_functions=[Reward(length, name="long")], columns=["turns"], environment=Talks)
        assert isinstance(rewarded, ChatEnv)
        with LLMCollector(rewarded, acting, dialog_turns_per_batch=6) as collector:
            assert collector.stats()["paths"]["env"].startswith("plain" if plain else "native")
            found.append(list(collector))
    for native, other in zip(*found, strict=True):
        same(native, other, apart=[("rewards", "long"), ("next", "columns", "turns")])
        for row in native.reshape(-1).unbind(0):
            if row["collector", "traj_ids"] < 0:
                continue
            ended = bool(row["next", "done"])
            assert (float(row["next", "rewards", "long"]) > 0) == ended
            assert row["columns", "turns"] == int(row["prompt_index"]) * 7 % 4
