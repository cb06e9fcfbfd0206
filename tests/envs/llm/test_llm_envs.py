"""LLMEnv, ChatEnv and DatasetChatEnv: conversations as environments on TensorDicts."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tests.llm_models import tokenizer

from rollwright.data.llm.history import History
from rollwright.data.llm.turns import Origin, turn_seed
from rollwright.data.specs import Composite, Unbounded
from rollwright.envs import RewardSum, StepCounter, TransformedEnv, check_env_specs
from rollwright.envs.llm.chat import ChatEnv, DatasetChatEnv
from rollwright.envs.llm.envs import LLMEnv
from rollwright.envs.llm.rewards import Reward
from rollwright.errors import EnvError
from rollwright.testing.mocking_classes import DummyStrDataLoader, DummyTensorDataLoader

pytestmark = pytest.mark.llm

ROWS = [{"query": f"question {'x' * i}", "answer": i} for i in range(6)]


class Until:
    """Replies until an answer of the row's number of turns."""

    def __init__(self, row: Any) -> None:
        self.left = row["answer"] + 1

    def reply(self, messages: Any) -> Any:
        self.left -= 1
        return f"{self.left} to go", 0.5, self.left == 0


def chat(**kwargs: Any) -> ChatEnv:
    options: dict[str, Any] = {
        "tokenizer": tokenizer("qwen"),
        "batch_size": 2,
        "environment": Until,
        "group_repeats": True,
    }
    return ChatEnv.from_dataloader(ROWS, **options | kwargs)


def responded(td: TensorDictBase, *tokens: list[int]) -> TensorDictBase:
    rows = []
    for row, ids in zip(td.unbind(0), tokens, strict=True):
        row.set(
            ("tokens", "response") if isinstance(row.get("tokens"), TensorDictBase) else "tokens_response",
            torch.tensor(ids),
        )
        rows.append(row)
    return LazyStackedTensorDict(*rows, stack_dim=0)


def test_prompts_of_a_dataloader_of_strings() -> None:
    tok = tokenizer("plain")
    env = LLMEnv.from_dataloader(
        dataloader=DummyStrDataLoader(1), tokenizer=tok, from_text=True, batch_size=1, group_repeats=True
    )
    assert env.batch_size == torch.Size([1])
    seen = set()
    td = env.reset()
    for _ in range(3):
        row = td[0]
        assert len(row["text"]) == 10
        assert row["tokens"].tolist() == tok.encode(row["text"])
        assert row["attention_mask"].tolist() == [1] * len(row["tokens"])
        seen.add(row["text"])
        stepped, td = env.step_and_maybe_reset(responded(td, [5, 6, 7]))
        assert stepped["next", "done"].all()
        assert stepped["next", "terminated"].all()
        assert stepped[0]["next", "tokens"].numel() == 0
    assert len(seen) == 3
    env.close()


def test_prompts_of_a_dataloader_of_tokens_without_a_tokenizer() -> None:
    loader = DummyTensorDataLoader(2, max_length=5, padding=True)
    env = LLMEnv.from_dataloader(loader, from_text=False, batch_size=2)
    td = env.reset()
    assert all(bool((row["tokens"] > 0).all()) for row in td.unbind(0))
    assert td.get("text", None) is None
    assert env.step(responded(td, [1], [2, 3]))["next", "done"].all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: LLMEnv.from_dataloader(DummyStrDataLoader(2), tokenizer=tokenizer("plain")),
        lambda: LLMEnv.from_dataloader(DummyStrDataLoader(2)),
        lambda: LLMEnv.from_dataloader(DummyTensorDataLoader(3), from_text=False),
        chat,
        lambda: chat(tokenizer=None, input_mode="text"),
        lambda: DatasetChatEnv(ROWS, num_envs=3, tokenizer=tokenizer("llama"), system_prompt="Be brief."),
        lambda: TransformedEnv(chat(), StepCounter(max_steps=2)),
        lambda: LLMEnv.from_dataloader(ROWS, primers=Composite(answer=Unbounded((), dtype=torch.int64))),
    ],
)
def test_specs_describe_what_they_do(make: Any) -> None:
    env = make()
    check_env_specs(env)
    env.close()


def test_each_row_says_where_it_comes_from() -> None:
    env = chat(repeats=2, seed=7)
    td = env.reset()
    first = Origin(index=0, epoch=0, repeat=1, group=0, seed=7)
    assert env.origins[1] == first
    assert int(td["seed"][1]) == turn_seed(first, 0)
    assert td["repeat"].tolist() == [0, 1]
    assert td["group_id"].tolist() == [0, 0]
    rollout = env.rollout(6, break_when_any_done=False)
    assert rollout["prompt_index"].tolist() == [[0, 1, 1, 2, 2, 2], [0, 1, 1, 2, 2, 2]]
    assert rollout["turn"].tolist()[0] == [0, 0, 1, 0, 1, 2]
    assert rollout["next", "turn"].tolist()[0] == [1, 1, 2, 1, 2, 3]
    origin = Origin(index=2, epoch=0, repeat=1, group=2, seed=7)
    assert int(rollout["seed"][1, 5]) == turn_seed(origin, 2)
    assert len(set(rollout["seed"].flatten().tolist())) == 12


def test_the_next_prompt_extends_the_tokens_before_it() -> None:
    env = chat()
    rollout = env.rollout(12, break_when_any_done=False)
    checked = 0
    for row in rollout.reshape(-1).unbind(0):
        if bool(row["next", "done"]):
            assert row["next", "text", "prompt"] == ""
            continue
        before = torch.cat([row["tokens", "prompt"], row["tokens", "response"]])
        after = row["next", "tokens", "prompt"]
        assert torch.equal(after[: len(before)], before)
        assert len(after) > len(before)
        roles = [message["role"] for message in row["next", "history"].prompt.to_chats()]
        assert roles[-2:] == ["assistant", "user"]
        checked += 1
    assert checked > 5


@pytest.mark.parametrize("wrap", [False, True])
def test_an_answer_is_not_carried_on_to_the_next_step(wrap: bool) -> None:
    env = TransformedEnv(chat(), StepCounter()) if wrap else chat()
    stepped, td = env.step_and_maybe_reset(responded(env.reset(), [5], [6]))
    assert stepped[1]["tokens", "response"].tolist() == [6]
    assert all(list(row["tokens"].keys()) == ["prompt"] for row in td.unbind(0))
    flat = LLMEnv.from_dataloader(ROWS, batch_size=1)
    td = flat.reset()
    td["text_response"] = ["a"]
    assert td.get("text_response", None) is not None
    assert flat.step_and_maybe_reset(td)[1].get("text_response", None) is None


def test_a_prompt_that_was_not_answered_stays_through_resets() -> None:
    env = chat()
    first = env.reset()["prompt_index"].tolist()
    assert env.reset()["prompt_index"].tolist() == first == [0, 1]
    td = env.step_mdp(env.step(responded(env.reset(), [5], [6])))
    td["_reset"] = torch.tensor([[True], [False]])
    after = env.reset(td)
    assert after["prompt_index"].tolist() == [2, 1]
    assert after["turn"].tolist() == [0, 1]


def test_the_seed_begins_the_data_again() -> None:
    env = chat(shuffle=True)
    env.set_seed(3)
    first = env.rollout(6, break_when_any_done=False)["prompt_index"]
    env.set_seed(3)
    assert torch.equal(env.rollout(6, break_when_any_done=False)["prompt_index"], first)


def test_its_state_follows_what_was_delivered() -> None:
    env = chat()
    rollout = env.rollout(4, break_when_any_done=False)
    ended = rollout["prompt_index"][rollout["next", "done"].squeeze(-1)].tolist()
    assert ended
    env.delivered(rollout)
    other = chat()
    other.load_state_dict(pickle.loads(pickle.dumps(env.state_dict())))
    drawn = other.reset()["prompt_index"].tolist()
    assert not set(drawn) & set(ended)
    assert set(drawn) == set(sorted(set(range(6)) - set(ended))[:2])


def test_steps_are_counted_and_rewards_summed() -> None:
    env = TransformedEnv(chat(), StepCounter())
    env.append_transform(RewardSum())
    rollout = env.rollout(5, break_when_any_done=False)
    assert torch.equal(rollout["next", "step_count"].squeeze(-1), rollout["next", "turn"])
    assert torch.equal(rollout["next", "episode_reward"].squeeze(-1), 0.5 * rollout["next", "turn"])


def test_columns_of_the_dataset_are_observations() -> None:
    env = LLMEnv.from_dataloader(ROWS, batch_size=3, primers=Composite(answer=Unbounded((), dtype=torch.int64)))
    assert env.reset()["answer"].tolist() == [0, 1, 2]


def test_an_answer_of_text_alone() -> None:
    env = chat(batch_size=1)
    td = env.reset()
    td[0].set(("text", "response"), "what")
    stepped = env.step(td)
    assert stepped["next", "done"].all()


def both(completions: list[Any]) -> list[float]:
    return [1.0] * len(completions)


def test_a_group_is_rewarded_where_it_steps_together_and_an_error_where_it_cannot() -> None:
    env = chat(repeats=2, reward_functions=[Reward(both, per="group")])
    assert env.rollout(3, break_when_any_done=False)["next", "reward"].squeeze(-1).tolist() == [[1.5, 0.5, 1.5]] * 2
    apart = ChatEnv.from_dataloader(
        ROWS[2:],
        tokenizer=tokenizer("qwen"),
        batch_size=3,
        repeats=2,
        group_repeats=True,
        reward_functions=[Reward(both, per="group")],
    )
    with pytest.raises(EnvError, match=r"the rewards in slots \[2\] wait for others .* Use LLMCollector"):
        apart.rollout(3, break_when_any_done=False)


@pytest.mark.parametrize(("mode", "added"), [("history", "<|im_start|>user\n<|im_end|>\n"), ("text", "")])
def test_an_empty_reply_is_a_message_without_content(mode: Any, added: str) -> None:
    class Silent(Until):
        def reply(self, messages: Any) -> Any:
            return "", 0.0, False

    env = chat(environment=Silent, input_mode=mode)
    td = env.reset()
    td["text", "response"] = ["a", "b"]
    after = env.step(td)["next"]
    assert not after["done"].any()
    prompt = after["text", "prompt"][0]
    assert (added in prompt) if added else prompt == td["text", "prompt"][0] + "a"
    env.close()


class PerToken(Until):
    def reply(self, messages: Any) -> Any:
        return "", torch.ones(3), True


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: (env := chat(tokenizer=None)).step(env.reset()), "found no answer. Expected .*'response'"),
        (lambda: chat(tokenizer=tokenizer("plain")).reset(), "has no chat template"),
        (lambda: chat(batch_size=0), "batch_size: expected one number, at least 1"),
        (lambda: chat(batch_size=(2, 2)), r"batch_size: expected one number, at least 1, got \(2, 2\)"),
        (lambda: chat(repeats=0), "repeats: expected at least 1, got 0"),
        (lambda: LLMEnv.from_dataloader(["one"], repeats=0), "repeats: expected at least 1, got 0"),
        (
            lambda: chat(template_kwargs={"chat_template": "\n{% for x in %}"}),
            r"not written in Jinja: line 2: .*; give another one \(template_kwargs=",
        ),
        (lambda: LLMEnv.from_dataloader([]), "dataset: expected at least one row"),
        (lambda: chat(input_mode="words"), "input_mode: expected 'history'"),
        (lambda: chat(input_mode="text", system_prompt="x"), "system_prompt: a prompt of text"),
        (lambda: chat(max_turns=0), "max_turns: expected at least 1"),
        (lambda: chat(epochs=1).rollout(99, break_when_any_done=False), "dataset: all its epochs are over"),
        (lambda: chat(environment=PerToken).rollout(2), "PerToken returned 3 rewards for the 1 tokens of the answer"),
        (lambda: LLMEnv.from_dataloader(DummyStrDataLoader(1), from_text=False, str2str=True), "str2str: expected"),
    ],
)
def test_what_cannot_be_is_an_error_with_a_remedy(act: Any, message: str) -> None:
    with pytest.raises((ValueError, EnvError), match=message):
        act()


@pytest.mark.parametrize("key", ["response", "full"])
def test_a_policy_may_answer_by_a_message(key: str) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        said = History.from_chats([[{"role": "assistant", "content": f"said {i}"}] for i in range(2)])
        td["history"].set(key, said if key == "response" else td["history"].prompt.extend(said, inplace=False))
        return td

    for env in (chat(tokenizer=None), chat()):
        td = env.rollout(2, policy, break_when_any_done=False)
        assert [chat[-1]["content"] for chat in td["next", "history"].prompt[:, 0].to_chats()] == ["said 0", "1 to go"]
        env.close()


def test_messages_are_written_by_the_tokenizer_of_the_policy_where_there_is_no_other() -> None:
    class Policy:
        def __init__(self) -> None:
            self.tokenizer = tokenizer("qwen")

        def __call__(self, td: TensorDictBase) -> TensorDictBase:
            td["text", "response"] = ["yes"] * 2
            return td

    own, lacking = chat(), chat(tokenizer=None)
    assert "tokens" not in lacking.reset().keys()  # noqa: SIM118
    for env in (lacking, TransformedEnv(chat(tokenizer=None), StepCounter())):
        policy = Policy()
        found = env.rollout(4, policy, break_when_any_done=False)
        expected = own.rollout(4, policy, break_when_any_done=False)
        for one, other in zip(found.reshape(-1).unbind(0), expected.reshape(-1).unbind(0), strict=True):
            assert torch.equal(one["tokens", "prompt"], other["tokens", "prompt"])
            assert one["text", "prompt"] == other["text", "prompt"]
        assert ("tokens", "prompt") in env.observation_keys
        own.set_seed(0)
        env.close()


def test_a_step_without_a_prompt_is_an_error() -> None:
    env = LLMEnv.from_dataloader(ROWS, batch_size=1)
    td = env.reset()
    td["text_response"] = ["a"]
    env.step(td)
    with pytest.raises(EnvError, match=r"slot 0: there is no prompt to answer.*Call reset\(\)"):
        env.step(td)


def test_environments_are_reachable_at_the_package_and_imported_on_demand():
    code = (
        "import sys, rollwright.envs as envs\n"
        "assert 'rollwright.envs.llm' not in sys.modules\n"
        "from rollwright.envs import ChatEnv, DatasetChatEnv, LLMEnv\n"
        "import rollwright.envs.llm as llm\n"
        "assert LLMEnv is llm.LLMEnv and ChatEnv is llm.ChatEnv\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
