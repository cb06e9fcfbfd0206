"""Prompts that cannot be answered, conversations without room, and policies that answer in text alone."""

from __future__ import annotations

import pytest
import torch
from tests import llm_models

from rollwright.collectors.llm import LLMCollector
from rollwright.envs import StepCounter, TransformedEnv
from rollwright.envs.llm import ChatEnv, LLMEnv, Reward
from rollwright.errors import EnvError
from rollwright.modules.llm import TransformersWrapper

pytestmark = [pytest.mark.llm, pytest.mark.usefixtures("_one_thread")]


@pytest.fixture
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class GoOn:
    """Never ends a conversation."""

    def __init__(self, row):
        pass

    def reply(self, messages):
        return "Go on.", 1.0, False


def policy(**options):
    return TransformersWrapper(
        llm_models.model(), tokenizer=llm_models.tokenizer(), generate_kwargs={"max_new_tokens": 4}, **options
    )


def chats(slots=2, **options):
    rows = [{"query": f"question {number}"} for number in range(8)]
    return ChatEnv.from_dataloader(
        rows, tokenizer=llm_models.tokenizer(), batch_size=slots, environment=GoOn, **options
    )


@pytest.mark.parametrize("async_envs", [False, True])
@pytest.mark.parametrize("per", ["conversation", "group"])
def test_a_conversation_without_room_has_the_rewards_of_its_end(per, async_envs):
    lengths = []

    def hundred(completions, **columns):
        lengths.extend(len(completion) for completion in completions)
        return [100.0] * len(completions)

    env = chats(reward_functions=Reward(hundred, per=per), repeats=2, group_repeats=True)
    collector = LLMCollector(env, policy(max_length=96), trajs_per_batch=1, async_envs=async_envs)
    for _ in range(4):
        batch = collector.next()
        turns = len(batch)
        assert turns > 1
        assert batch["next", "truncated"].reshape(-1).tolist() == [False] * (turns - 1) + [True]
        assert batch["next", "reward"].reshape(-1).tolist() == [1.0] * (turns - 1) + [101.0]
        assert 2 * turns in lengths  # answers and what followed them
        last = batch[-1]
        assert last["next", "history"].prompt.to_chats()[-1]["content"] == "Go on."
        assert len(last["next", "tokens", "prompt"]) >= 96
    collector.shutdown()


@pytest.mark.parametrize(
    ("rows", "from_text", "problem"),
    [
        ([{"tokens": torch.tensor([3, -2])}], False, "token ids must be at least 0; got -2"),
        ([{"text": ""}], True, "at least one token; got none; take empty rows out"),
        ([{"text": "a\ud800"}], True, r"half of a surrogate pair, .* behind 'a', .* take it out"),
    ],
)
def test_a_prompt_that_cannot_be_read_names_its_conversation(rows, from_text, problem):
    env = LLMEnv.from_dataloader(rows, tokenizer=llm_models.tokenizer(), from_text=from_text)
    with (
        LLMCollector(env, policy(), dialog_turns_per_batch=1) as collector,
        pytest.raises(ValueError, match=r"conversation of prompt 0 \(epoch 0, repeat 0\), turn 0: .*" + problem),
    ):
        collector.next()


def test_a_tokenizer_without_a_chat_template_is_an_error_at_construction():
    with pytest.raises(ValueError, match=r"no chat template, .*template_kwargs="):
        ChatEnv.from_dataloader([{"query": "2 + 2?"}], tokenizer=llm_models.tokenizer("plain"))
    with (
        pytest.raises(ValueError, match="chat messages are written as tokens by a tokenizer; got none"),
    ):
        LLMCollector(chats(), TransformersWrapper(llm_models.model()), dialog_turns_per_batch=2)


class SaysHalf(GoOn):
    def reply(self, messages):
        return "a\ud800", 0.0, False


def test_a_reply_that_is_no_text_names_its_conversation():
    env = ChatEnv.from_dataloader([{"query": "one"}], tokenizer=llm_models.tokenizer(), environment=SaysHalf)
    with (
        LLMCollector(env, policy(), dialog_turns_per_batch=1) as collector,
        pytest.raises(EnvError, match=r"conversation of prompt 0 \(epoch 0, repeat 0\), turn 0: .*surrogate pair"),
    ):
        collector.next()


def test_tokenizers_that_differ_are_an_error_at_construction():
    model = llm_models.model()
    for kind, differs in (("llama", "vocabularies, of"), ("qwen", "chat templates")):
        other = llm_models.tokenizer(kind)
        if kind == "qwen":
            other.chat_template = llm_models.TEMPLATES["qwen3"]
        with pytest.raises(ValueError, match=f"tokenizer: those of environment and policy have different {differs}"):
            LLMCollector(chats(), TransformersWrapper(model, tokenizer=other), dialog_turns_per_batch=2)


def test_a_policy_that_knows_no_end_of_an_answer_warns_of_it():
    tokenizer = llm_models.tokenizer()
    tokenizer.eos_token = None
    kwargs = {"max_new_tokens": 4}
    env = ChatEnv.from_dataloader([{"query": "one"}], tokenizer=tokenizer)
    with pytest.warns(UserWarning, match=r"a token that ends an answer.*stop_token_ids"):
        LLMCollector(
            env, TransformersWrapper(llm_models.model(), tokenizer=tokenizer, generate_kwargs=kwargs), trajs_per_batch=1
        ).shutdown()
    kwargs["stop_token_ids"] = (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    env = ChatEnv.from_dataloader([{"query": "one"}], tokenizer=tokenizer)
    wrapper = TransformersWrapper(llm_models.model(), tokenizer=tokenizer, generate_kwargs=kwargs)
    with LLMCollector(env, wrapper, trajs_per_batch=1) as collector:
        assert collector.next().numel() == 1


def test_several_samples_of_a_prompt_are_an_error_at_construction():
    with pytest.raises(ValueError, match=r"num_samples: the policy writes 4 answers .*pass repeats=4 to the env"):
        LLMCollector(chats(), policy(num_samples=4), dialog_turns_per_batch=2)


@pytest.mark.parametrize("transformed", [False, True])
def test_a_policy_may_answer_in_text_alone(transformed):
    def answer(td):
        td["text", "response"] = [f"{len(prompt)} letters" for prompt in td["text", "prompt"]]
        return td

    env = TransformedEnv(chats(), StepCounter()) if transformed else chats()
    with LLMCollector(env, answer, dialog_turns_per_batch=4) as collector:
        rows = [row for _ in range(2) for row in collector.next().reshape(-1).unbind(0)]
    for row in rows:
        prompt, response = row["text", "prompt"], row["text", "response"]
        assert response == f"{len(prompt)} letters"
        assert row["next", "text", "prompt"].startswith(prompt + response)
