"""The same seed gives the same tokens, of a real model, however conversations are collected."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests import llm_models

from rollwright.collectors.llm import LLMCollector
from rollwright.envs.llm import ChatEnv
from rollwright.modules.llm import TransformersWrapper

pytestmark = [pytest.mark.llm, pytest.mark.usefixtures("_one_thread")]


@pytest.fixture(scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Goes:
    """Replies as often as the row says."""

    def __init__(self, row):
        self.left = row["turns"]

    def reply(self, messages):
        self.left -= 1
        return "again", float(len(messages)), self.left < 0


def chats(prompts, slots, group_repeats):
    rows = [{"text": f"{number} " + "x" * (1 + number % 7), "turns": number % 3} for number in range(prompts)]
    tokenizer = llm_models.tokenizer()
    options = {"environment": Goes, "repeats": 4, "epochs": 1, "group_repeats": group_repeats}
    return ChatEnv.from_dataloader(rows, tokenizer=tokenizer, batch_size=slots, **options)


def policy():
    torch.set_num_threads(1)
    return TransformersWrapper(
        llm_models.model(), tokenizer=llm_models.tokenizer(), generate_kwargs={"max_new_tokens": 8}
    )


def collected(prompts, slots, group_repeats=True, **options):
    """Tokens of each turn by where it comes from; each comes once."""
    env, found = partial(chats, prompts, slots, group_repeats), {}
    with LLMCollector(env, policy_factory=policy, dialog_turns_per_batch=64, **options) as collector:
        for batch in collector:
            for row in batch.reshape(-1).unbind(0):
                name = tuple(int(row[key]) for key in ("prompt_index", "epoch", "repeat", "turn"))
                if row["collector", "traj_ids"] >= 0:
                    assert name not in found
                    found[name] = row["tokens", "full"].tolist()
    return found


WAYS = {
    "one at a time": (1, {}),
    "32, as they come": (32, {"async_envs": True}),
    "prompts take turns": (8, {"group_repeats": False}),
    "two workers": (8, {"num_collectors": 2}),
}


@pytest.mark.parametrize("way", [way for way in WAYS if "workers" not in way])  # processes take seconds to start
def test_tokens_depend_on_the_seed_alone(way):
    slots, options = WAYS[way]
    assert collected(5, slots, **options) == collected(5, 8)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_those_of_500_conversations_do():
    expected = collected(125, 8)
    assert len({name[:3] for name in expected}) == 500
    for way, (slots, options) in WAYS.items():
        assert collected(125, slots, **options) == expected, way
