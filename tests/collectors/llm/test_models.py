"""Real parts: a tiny model, its tokenizer, environments of text and of chats."""

from __future__ import annotations

import pytest
import torch
from tensordict import LazyStackedTensorDict, is_non_tensor
from tests import llm_models

from rollwright.collectors.llm import LLMCollector
from rollwright.envs.llm import ChatEnv, LLMEnv, Toolset
from rollwright.modules.llm import TransformersWrapper
from rollwright.testing.mocking_classes import DummyStrDataLoader

pytestmark = pytest.mark.llm


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_example_of_the_reference_page():
    tokenizer = llm_models.tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    policy = TransformersWrapper(
        llm_models.model(), tokenizer=tokenizer, input_mode="text", generate_kwargs={"max_new_tokens": 8}
    )
    env = LLMEnv.from_dataloader(
        dataloader=DummyStrDataLoader(1), tokenizer=tokenizer, from_text=True, batch_size=1, group_repeats=True
    )
    collector = LLMCollector(
        env=env,
        policy_factory=lambda: policy,
        dialog_turns_per_batch=env.batch_size[0],
        total_dialog_turns=3,
    )
    prompts = []
    for data in collector:
        assert isinstance(data, LazyStackedTensorDict)
        assert data.batch_size == (1, 1)
        assert data.stack_dim == 1
        for key in ("attention_mask", "done", "terminated", "text", "text_response", "tokens", "tokens_response"):
            assert key in data
        row = data[0, 0]
        assert data["collector", "traj_ids"].shape == (1, 1)
        assert len(row["text"]) == 10
        prompts.append(row["text"])
        response = row["tokens_response"]
        assert row["text_response"] == tokenizer.decode(
            response[:-1] if response[-1] == tokenizer.eos_token_id else response
        )
        assert row["tokens"][-len(response) :].tolist() == response.tolist()
        assert tokenizer.decode(row["tokens"][: -len(response)]) == row["text"]
    assert len(set(prompts)) == 3
    collector.shutdown()


def calculator(expression: str) -> str:
    """Compute.

    Args:
        expression: what to compute.
    """
    return "4"


class Guess:
    """Answers twice, then it is over."""

    def __init__(self, row):
        self.left = len(row["text"]) % 3

    def reply(self, messages):
        self.left -= 1
        return [{"role": "user", "content": "again"}], float(len(messages)), self.left < 0


def leaves(td, place=()):
    found = {}
    for key, value in td.items():
        if is_non_tensor(value):
            found[(*place, key)] = value.tolist() if hasattr(value, "tolist") else value.data
        elif isinstance(value, torch.Tensor):
            found[(*place, key)] = value.tolist()
        else:
            found |= leaves(value, (*place, key))
    return found


ORIGIN = ("attention_mask", "epoch", "group_id", "prompt_index", "repeat", "seed", "sequence", "turn")


def environment(kind):
    rows = [{"text": "x" * (1 + number)} for number in range(6)]
    tokenizer = llm_models.tokenizer()
    if kind == "text":
        return LLMEnv.from_dataloader(rows, tokenizer=tokenizer, batch_size=2)
    return ChatEnv.from_dataloader(
        rows, tokenizer=tokenizer, batch_size=2, environment=Guess, tools=Toolset([calculator])
    )


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_the_native_path_gives_what_the_plain_path_gives(kind):
    found = []
    for plain in (False, True):
        policy = TransformersWrapper(
            llm_models.model(), tokenizer=llm_models.tokenizer(), generate_kwargs={"max_new_tokens": 6}
        )
        acting = (lambda td, policy=policy: policy(td)) if plain else policy
        collector = LLMCollector(environment(kind), policy=acting, dialog_turns_per_batch=4)
        assert collector.stats()["paths"]["env"].startswith("plain" if plain else "native")
        found.append([collector.next() for _ in range(3)])
        collector.shutdown()
    for native, plain in zip(*found, strict=True):
        for one, other in zip(native.reshape(-1).unbind(0), plain.reshape(-1).unbind(0), strict=True):
            first, second = leaves(one), leaves(other)
            only_plain = {("seed",), *(key for key in second if key[0] == "next" and key[-1] in ORIGIN)}
            assert first.keys() - second.keys() == {("seconds", "tool"), ("seconds", "reward")}
            assert second.keys() - first.keys() <= only_plain
            shared = {key for key in first.keys() & second.keys() if key[0] != "seconds"}
            assert {key: first[key] for key in shared} == {key: second[key] for key in shared}
