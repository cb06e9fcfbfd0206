"""Rewards of one number for each token, where TensorDicts are passed between environment and policy."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests import llm_models
from tests.collectors.llm.test_plain import leaves, wrapper

from rollwright.collectors.llm import LLMCollector
from rollwright.envs import AsyncEnvPool, RewardSum, TransformedEnv
from rollwright.envs.llm import ChatEnv, Reward

pytestmark = pytest.mark.llm
TOKENS = 3  # of each answer


class EachToken:
    """Rewards each token of the first answer, and the second one by one number."""

    def __init__(self, row):
        self.turns = 0

    def reply(self, messages):
        self.turns += 1
        return ("go on", torch.arange(1.0, TOKENS + 1), False) if self.turns == 1 else ("", 0.5, True)


class Counted(EachToken):
    """Rewards each token of an answer of any length."""

    def reply(self, messages):
        number = len(llm_models.tokenizer().encode(messages[-1]["content"]))
        return "", torch.full((number,), 0.25), True


def chats(slots=2, *, transform=None, environment=EachToken, **options):
    rows = [{"text": "x" * (1 + number)} for number in range(4)]
    options = {"epochs": 1, "environment": environment, "tokenizer": llm_models.tokenizer(), **options}
    env = ChatEnv.from_dataloader(rows, batch_size=slots, **options)
    return env if transform is None else TransformedEnv(env, transform)


def policy():
    return wrapper(generate_kwargs={"max_new_tokens": TOKENS})


def answer(td):
    td["text", "response"] = ["word " * len(prompt) for prompt in td["text", "prompt"]]
    return td


@pytest.mark.parametrize("options", [{}, {"transform": RewardSum}], ids=["bare", "summed"])
def test_both_paths_record_them(options):
    made = [kind() for kind in options.values()], [kind() for kind in options.values()]
    records, stats = [], []
    for plain, transforms in zip((False, True), made, strict=True):
        acting = policy()
        env = chats(transform=transforms[0] if transforms else None)
        call = (lambda td, acting=acting: acting(td)) if plain else acting
        with LLMCollector(env, policy=call, dialog_turns_per_batch=4) as collector:
            assert collector.stats()["paths"]["env"].startswith("plain" if plain else "native")
            records.append([row for batch in collector for row in batch.reshape(-1).unbind(0)])
            stats.append({name: value for name, value in collector.stats().items() if name.startswith("episode")})
    assert [row["next", "reward"].shape for row in records[0][:2]] == [(TOKENS, 1), (1,)]
    for native, plain in zip(*records, strict=True):
        assert torch.equal(native["next", "reward"], plain["next", "reward"])
        if options:
            for key in ("episode_reward", ("next", "episode_reward")):
                assert torch.equal(native.get(key), plain.get(key))
            assert native["next", "episode_reward"].item() == (6.5 if native["turn"] else 6.0)
        assert leaves(native).keys() - leaves(plain).keys() <= {("seconds", "tool"), ("seconds", "reward")}
    assert stats[0] == stats[1]
    assert stats[0]["episodes"] == 4


def test_answers_of_unequal_lengths_by_hand():
    env = chats(environment=Counted, reward_functions=Reward(lambda completions, **columns: [1.0] * len(completions)))
    env = TransformedEnv(env, RewardSum())
    rollout = env.rollout(1, answer)
    for row in rollout.reshape(-1).unbind(0):
        number = len(llm_models.tokenizer().encode(row["text", "response"]))
        assert row["next", "reward"].flatten().tolist() == [0.25] * (number - 1) + [
            1.25
        ]  # that of the end is the last's
        assert row["next", "episode_reward"].item() == 0.25 * number + 1.0
    assert rollout[0, 0]["next", "reward"].shape != rollout[1, 0]["next", "reward"].shape
    env.close()


def test_in_a_pool_of_environments():
    pool = AsyncEnvPool([partial(chats, 1)] * 2, backend="threading")
    with LLMCollector(pool, policy=policy(), dialog_turns_per_batch=2) as collector:
        rows = [row for batch in collector for row in batch.unbind(0)]
        stats = collector.stats()
    assert len(rows) == 16
    for row in rows:
        assert row["next", "reward"].flatten().tolist() == ([0.5] if row["turn"] else [1.0, 2.0, 3.0])
    assert stats["episodes"] == 8
    assert stats["mean_return"] == 6.5
