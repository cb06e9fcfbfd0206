"""ChatEnv without a dataset: prompts that are given at a reset, or added for a collector."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tests.llm_models import model, tokenizer

from rollwright.collectors.llm import LLMCollector
from rollwright.data.llm import History
from rollwright.envs import StepCounter, TransformedEnv
from rollwright.envs.llm import ChatEnv
from rollwright.envs.transforms import Compose, Transform
from rollwright.errors import EnvError
from rollwright.modules.llm import TransformersWrapper

pytestmark = pytest.mark.llm
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def asked(*queries: Any, key: str = "query") -> TensorDict:
    return TensorDict({key: list(queries)}, [len(queries)])


def wrapper(mode: Any = "history", **kwargs: Any) -> TransformersWrapper:
    return TransformersWrapper(
        model("qwen3"), tokenizer=tokenizer("qwen"), input_mode=mode, generate_kwargs={"max_new_tokens": 4}, **kwargs
    )


def chat(**kwargs: Any) -> ChatEnv:
    return ChatEnv(**{"tokenizer": tokenizer("qwen"), "system_prompt": "Be brief.", "batch_size": (1,)} | kwargs)


def messages(td: Any, row: int = 0) -> Any:
    return td["history"].prompt[row].to_chats()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (["Hi"], [SYSTEM, user("Hi")]),
        ("Hi", [SYSTEM, user("Hi")]),
        (
            [[user("a"), {"role": "assistant", "content": "b"}]],
            [SYSTEM, user("a"), {"role": "assistant", "content": "b"}],
        ),
        (History.from_chats([[user("z")]]), [SYSTEM, user("z")]),
        (History.from_chats([[{"role": "system", "content": "Own."}, user("z")]]), None),
    ],
)
def test_a_query_at_reset_is_the_prompt(query: Any, expected: Any) -> None:
    env = chat()
    td = env.reset(TensorDict({"query": query}, [1]))
    assert messages(td) == (expected or [{"role": "system", "content": "Own."}, user("z")])
    backend = tokenizer("qwen")
    written = backend.apply_chat_template(messages(td), add_generation_prompt=True, tokenize=False)
    assert td["text", "prompt"] == [written]
    assert td[0]["tokens", "prompt"].tolist() == backend.encode(written, add_special_tokens=False)
    env.close()


def test_a_query_takes_the_place_of_what_goes_on() -> None:
    env = chat(batch_size=2, data_key="ask", user_role="human", system_role="boss")
    assert messages(env.reset(asked("a", "b", key="ask")), 1)[0] == {"role": "boss", "content": "Be brief."}
    td = env.reset(asked("c", "d", key="ask"))
    assert messages(td, 1)[1] == {"role": "human", "content": "d"}
    td["text", "response"] = ["x", "y"]
    after, root = env.step_and_maybe_reset(td)
    assert not after["next", "done"].any()
    assert [m["content"] for m in messages(root, 1)] == ["Be brief.", "d", "y"]
    root["_reset"] = torch.tensor([[False], [True]])
    root["ask"] = ["e", "f"]
    root = env.reset(root)
    assert [[m["content"] for m in messages(root, row)][1:] for row in (0, 1)] == [["c", "x"], ["f"]]
    env.close()


def test_no_query_is_an_error() -> None:
    env = chat()
    with pytest.raises(EnvError, match=r"query: expected a prompt, got none.*env.reset\(TensorDict.*add_queries"):
        env.reset()
    env.reset(asked("a"))
    env.reset()  # nothing was answered: the prompt is still there
    with pytest.raises(EnvError, match=r"the column 'query' is a Tensor.*expected a string or a list of messages"):
        env.reset(asked(3))
    assert messages(env.reset())[-1] == user("a")
    with pytest.raises(EnvError, match=r"expected data of batch size \[1\]"):
        env.reset(TensorDict({"query": "a"}))
    with pytest.raises(ValueError, match=r"tokenizer: expected one with input_mode='text'"):
        chat(tokenizer=None, input_mode="text")
    rows = ChatEnv.from_dataloader(["a"], input_mode="text")
    with pytest.raises(RuntimeError, match="add_queries: this environment has a dataset"):
        rows.add_queries(["b"])
    with pytest.raises(ValueError, match="conversations: batch_size and system_prompt are theirs"):
        ChatEnv(rows.conversations, batch_size=2)


def test_steps_by_hand_with_messages_in_between() -> None:
    env, policy = chat(), wrapper()
    td, root = env.step_and_maybe_reset(policy(env.reset(asked("Hello"))))
    assert not td["next", "done"].any()
    answer = td["text", "response"][0]
    more = History.from_chats([[user("More?")]])
    root["history"].prompt = root["history"].prompt.extend(more, dim=1, inplace=False)
    answered = policy(root)
    read = [SYSTEM, user("Hello"), {"role": "assistant", "content": answer}, user("More?")]
    backend = tokenizer("qwen")
    assert answered["text", "prompt"][0] == backend.apply_chat_template(
        read, add_generation_prompt=True, tokenize=False
    )
    stepped = env.step(answered)
    assert answered["text", "prompt"][0] in stepped["next", "text", "prompt"][0]
    assert [m["content"] for m in messages(stepped["next"])][:4] == ["Be brief.", "Hello", answer, "More?"]
    assert stepped["next", "sequence"].item() == 1  # earlier answers were tokenised again: another sequence
    before, after = answered[0]["tokens", "full"], stepped[0]["next", "tokens", "prompt"]
    assert torch.equal(after[: len(before)], before)
    env.close()


def test_a_changed_prompt_that_was_written_otherwise_is_an_error() -> None:
    env = chat()
    td = env.reset(asked("Hello"))
    td["history"].prompt = td["history"].prompt.extend(History.from_chats([[user("More?")]]), dim=1, inplace=False)
    td = wrapper(chat_template_kwargs={"tools": [{"type": "function", "function": {"name": "a"}}]})(td)
    with pytest.raises(EnvError, match=r"the 3 messages of the changed prompt as other tokens.*template_kwargs"):
        env.step(td)
    env.close()


def test_a_rollout_goes_on_from_answer_to_answer() -> None:
    env, policy = chat(), wrapper()
    rollout = env.rollout(3, policy, auto_reset=False, tensordict=env.reset(asked("Hello")))
    assert rollout.shape == (1, 3)
    assert not rollout["next", "done"].any()
    chats = [len(rollout[0, t]["history"].prompt.to_chats()) for t in range(3)]
    assert chats == [2, 3, 4]
    for t in range(2):
        full, following = rollout[0, t]["tokens", "full"], rollout[0, t + 1]["tokens", "prompt"]
        assert torch.equal(following[: len(full)], full)
    env.close()


@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_the_mode_says_which_entries_there_are(mode: Any) -> None:
    env = chat(input_mode=mode, batch_size=2)
    td = env.reset(asked("Hello", "a longer one"))
    assert "history" not in td
    assert td["text", "prompt"][0].startswith("<|im_start|>system\nBe brief.")
    td = env.step(wrapper(mode)(td))
    assert td["next", "text", "prompt"][1].startswith(td["text", "full"][1])
    env.close()


class Ends(Transform):
    """Ends what the model answers for the second time, and replies before, by messages of the prompt."""

    def _step(self, td: Any, next_td: Any) -> Any:
        history = next_td["history"].prompt
        if len(history[0]) >= 4:
            next_td["done"] = next_td["terminated"] = torch.ones(1, 1, dtype=torch.bool)
        else:
            more = History.from_chats([[user("And?")]])
            next_td["history"].prompt = history.extend(more, dim=1, inplace=False)
        return next_td


def test_a_transform_replies_and_ends() -> None:
    env = TransformedEnv(chat(), Compose(StepCounter(), Ends()))
    rollout = env.rollout(5, wrapper(), auto_reset=False, tensordict=env.reset(asked("Hello")))
    assert rollout["next", "done"].flatten().tolist() == [False, True]
    assert rollout[0, 1]["text", "prompt"].count("And?") == 1
    assert rollout["step_count"].flatten().tolist() == [0, 1]
    env.close()


@pytest.mark.parametrize("plain", [False, True])
def test_a_collector_takes_given_prompts_each_once(plain: bool) -> None:
    env, policy = chat(batch_size=2, max_turns=2), wrapper()
    env.reset(asked("p", "q"))
    env.add_queries(["r", [user("s")]])
    found = []
    with LLMCollector(env, policy=(lambda td: policy(td)) if plain else policy, dialog_turns_per_batch=2) as collector:
        assert collector.stats()["paths"]["env"].startswith("plain" if plain else "native")
        for batch in collector:
            found += [(row["turn"].item(), row["text", "prompt"].count("<|im_end|>")) for row in batch.reshape(-1)]
            assert batch["next", "truncated"].flatten().tolist() == [bool(found[-1][0])] * 2
    assert found == [(0, 2)] * 2 + [(1, 3)] * 2 + [(0, 2)] * 2 + [(1, 3)] * 2


def test_a_collector_without_prompts_is_an_error() -> None:
    collector = LLMCollector(chat(), policy=wrapper(), dialog_turns_per_batch=1)
    with collector, pytest.raises(EnvError, match=r"query: expected a prompt, got none.*from_dataloader"):
        next(iter(collector))


def test_prompts_that_were_not_delivered_are_saved() -> None:
    env = chat(max_turns=1)
    env.add_queries(["a", "b", "c"])
    with LLMCollector(env, policy=wrapper(), dialog_turns_per_batch=1) as collector:
        next(iter(collector))
        state = collector.state_dict()
    with LLMCollector(chat(max_turns=1), policy=wrapper(), dialog_turns_per_batch=1) as restored:
        restored.load_state_dict(state)
        left = [batch[0, 0]["history"].prompt.to_chats()[-1] for batch in restored]
    assert left == [user("b"), user("c")]
