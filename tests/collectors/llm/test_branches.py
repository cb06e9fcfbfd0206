"""Environments that write the first messages of a conversation, and choose which of its token sequences goes on."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests import llm_models
from tests.collectors.llm.fakes import FakeEnv, FakePolicy

from rollwright.collectors.llm import LLMCollector
from rollwright.data.llm import training_sequences
from rollwright.envs.llm import DatasetConversations, DatasetSource, NextTurn
from rollwright.envs.llm.replies import Dialogue, Reply

pytestmark = pytest.mark.llm
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


def said(text, role="user"):
    return [{"role": role, "content": text}]


class Switching:
    """Begins a sequence, goes on with it, begins another one with a tool, and goes back to the first."""

    def __init__(self, row):
        self.row, self.step, self.answers = row, 0, []

    def respond(self, answer):
        self.answers.append(answer)
        self.step += 1
        if self.step == 1:
            assert answer is None
            return Reply(said(f"first {self.row['number']}"), 0.0, False, NextTurn(0))
        assert len(answer.log_probs) == len(answer.tokens) > 0 < answer.num_prompt
        if self.step == 2:
            return Reply(said("go on"), 1.0, False, NextTurn(0))
        if self.step == 3:
            return Reply(said("other"), 2.0, False, NextTurn(1, template={"tools": [ADD]}))
        if self.step == 4:
            return Reply(said("back"), 3.0, False, NextTurn(0, seed=5))
        return Reply([], 4.0, True)


def last_words(prompts, completions, **columns):
    assert [prompt[0]["content"][:5] for prompt in prompts] == ["first"] * len(prompts)
    return [10.0 * (completion[-2]["content"] == "back") for completion in completions]


def collector(slots, **options):
    env = FakeEnv(slots, prompts=6)
    env.conversations = DatasetConversations(
        env.source, slots, rewards=last_words, template={}, dialogue=Dialogue(Switching, opens=True)
    )
    policy = FakePolicy()
    policy.engine.tokenizer = env.tokenizer = llm_models.tokenizer("qwen")
    policy.engine.end_ids = (env.tokenizer.eos_token_id,)
    return LLMCollector(env, policy, **options), policy.engine


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_sequences_are_begun_and_gone_back_to(streams, whole):
    how = {"trajs_per_batch": 3} if whole else {"dialog_turns_per_batch": 12}
    made, engine = collector(3, async_envs=streams, **how)
    with made:
        records = [record for batch in made for record in batch.reshape(-1).unbind(0)]
    assert made.stats()["conversations_unfinished"] == []
    records = [one for one in records if one.get(("collector", "mask"), torch.tensor(True))]
    assert len(records) == 24
    turns = {}
    for one in records:
        turns.setdefault(int(one["group_id"]), []).append(one)
    for number, own in turns.items():
        own.sort(key=lambda one: int(one["turn"]))
        assert [int(one["sequence"]) for one in own] == [0, 0, 1, 0]
        assert [one["next", "reward"].item() for one in own] == [1.0, 2.0, 3.0, 14.0]
        first, second, other, last = (one["tokens"] for one in own)
        assert second[: len(first)].equal(first)
        assert last[: len(second)].equal(second)
        assert "add" in own[2]["text"]
        assert "add" not in own[3]["text"]
        assert f"first {number}" not in own[2]["text"]
        for one, following in itertools.pairwise(own):
            assert one["next", "tokens"].equal(following["tokens"][: -len(following["tokens_response"])])
            assert one["next", "text"] == following["text"]
        united = training_sequences(own)
        assert [len(each["tokens"]) for each in united] == [len(last), len(other)]
        assert sum(int(each["assistant_mask"].sum()) for each in united) == sum(len(o["tokens_response"]) for o in own)
    assert len(set(engine.seeds)) == 24


def test_one_that_waits_for_the_rest_of_its_group_is_saved_at_its_end():
    conversations = DatasetConversations(
        DatasetSource([{"number": 0}], repeats=2),
        2,
        rewards=None,
        template={},
        dialogue=Dialogue(Switching, opens=True),
    )
    opening = conversations.open(0)
    assert not opening.messages
    outcome = conversations.outcomes()[0]
    assert (outcome.messages[0]["content"], outcome.next) == ("first 0", NextTurn(0))
    with pytest.raises(Exception, match=r"Switching has no state_dict\(\)"):
        conversations.state(0)
    conversations.close()
