"""Turns as TensorDicts."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from tests.data.llm.turn_examples import conversation, turn

from rollwright.data.llm import RecordLayout, empty_record, record, records

NESTED, FLAT = RecordLayout(history=True), RecordLayout(nested=False)


def _start(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_nested_record_has_the_entries_of_the_field() -> None:
    one = turn(1, next_prompt=torch.arange(9), next_prompt_text="next", added=[{"role": "tool", "content": "t"}])
    td = record(one, NESTED, traj_id=5)
    assert td["tokens", "full"].tolist() == list(range(7))
    assert td["tokens", "prompt"].tolist() == [0, 1, 2, 3]
    assert td["tokens", "response"].tolist() == [4, 5, 6]
    assert td["tokens", "policy_version"].tolist() == [8, 8, 8]
    assert td["log_probs", "response"].tolist() == [-4, -5, -6]
    assert td["log_probs", "full"].tolist() == [0, 0, 0, 0, -4, -5, -6]
    assert td["masks", "all_attention_mask"].tolist() == [True] * 7
    assert td["masks", "all_assistant_mask"].tolist() == [False] * 4 + [True] * 3
    assert td["text"].to_dict() == {
        "prompt": "user: question 1\n",
        "response": "answer 1",
        "full": "user: question 1\nanswer 1",
    }
    assert td["history"].prompt.to_chats() == one.prompt
    assert td["history"].response.to_chats() == [one.response]
    assert td["history"].full.to_chats() == [*one.prompt, one.response]
    assert td["next", "history"].prompt.to_chats() == [*one.prompt, one.response, *one.added]
    assert td["next", "tokens", "prompt"].tolist() == list(range(9))
    assert td["next", "text", "prompt"] == "next"
    assert {key: int(td[key]) for key in ("group_id", "repeat", "prompt_index", "epoch", "turn", "sequence")} == {
        "group_id": 0,
        "repeat": 2,
        "prompt_index": 3,
        "epoch": 1,
        "turn": 1,
        "sequence": 0,
    }
    assert int(td["policy_version"]) == 8
    assert int(td["collector", "traj_ids"]) == 5
    assert td["finish_reason"] == "stop"
    assert type(td["finish_reason"]) is str
    assert td["log_prob_mode"] == "sampled"
    assert td["seconds"].to_dict() == {"queue": 0.0, "generation": 0.5, "tool": 0.0, "reward": 0.0}


def test_a_flat_record_has_the_keys_of_text_environments() -> None:
    td = record(turn(next_prompt=torch.arange(8), next_prompt_text="n"), FLAT)
    assert td["tokens"].tolist() == list(range(7))
    assert td["tokens_response"].tolist() == [4, 5, 6]
    assert td["attention_mask"].tolist() == [1] * 7
    assert td["attention_mask"].dtype == torch.int64
    assert td["assistant_mask"].tolist() == [False] * 4 + [True] * 3
    assert td["log_probs"].tolist() == [-4, -5, -6]
    assert td["tokens_policy_version"].tolist() == [7, 7, 7]
    assert (td["text"], td["text_response"]) == ("user: question 0\n", "answer 0")
    assert td["next", "tokens"].tolist() == list(range(8))
    assert td["next", "text"] == "n"


@pytest.mark.parametrize("layout", [NESTED, FLAT])
@pytest.mark.parametrize(("terminated", "truncated"), [(False, False), (True, False), (False, True)])
def test_flags_and_reward(layout: RecordLayout, terminated: bool, truncated: bool) -> None:
    td = record(turn(reward=0.25, terminated=terminated, truncated=truncated), layout)
    assert [bool(td[key]) for key in ("done", "terminated", "truncated")] == [False] * 3
    after = td["next"]
    assert (bool(after["terminated"]), bool(after["truncated"])) == (terminated, truncated)
    assert bool(after["done"]) == (terminated or truncated)
    assert after["reward"].tolist() == [0.25]
    assert tuple(after["done"].shape) == tuple(td["done"].shape) == (1,)


def test_a_reward_for_each_token() -> None:
    td = record(turn(reward=torch.tensor([0.0, 0.5, 1.0])), NESTED)
    assert td["next", "reward"].tolist() == [[0.0], [0.5], [1.0]]


@pytest.mark.parametrize("layout", [NESTED, FLAT])
def test_tokens_and_versions_are_views(layout: RecordLayout) -> None:
    one = turn(next_prompt=torch.arange(9))
    assert isinstance(one.versions, torch.Tensor)
    assert one.next_prompt is not None
    td = record(one, layout)
    tokens = [("tokens", "full"), ("tokens", "prompt"), ("tokens", "response")]
    keys: list[Any] = tokens if layout.nested else ["tokens", "tokens_response"]
    assert {_start(td[key]) for key in keys} == {_start(one.tokens)}
    versions: Any = ("tokens", "policy_version") if layout.nested else "tokens_policy_version"
    assert _start(td[versions]) == _start(one.versions)
    following: Any = ("tokens", "prompt") if layout.nested else "tokens"
    assert _start(td["next"][following]) == _start(one.next_prompt)
    log_probs: Any = ("log_probs", "response") if layout.nested else "log_probs"
    assert one.log_probs is not None
    assert _start(td[log_probs]) == _start(one.log_probs)


def test_versions_may_be_uuids() -> None:
    td = record(turn(versions=["a", "b", "b"], version="b"), NESTED)
    assert td["policy_version"] == "b"
    assert td["tokens", "policy_version"] == ["a", "b", "b"]


def test_what_is_missing_has_no_entry() -> None:
    td = record(turn(log_probs=None), RecordLayout(text=False))
    assert not {"log_probs", "text", "history", "collector"} & set(td.keys())
    assert "log_probs" not in record(turn(), RecordLayout(nested=False, log_probs=False))


def test_further_entries_are_carried_along() -> None:
    td = record(turn(extras={"entropy": torch.ones(3), ("next", "score"): torch.tensor(0.5), "note": "x"}), NESTED)
    assert td["entropy"].tolist() == [1, 1, 1]
    assert td["next", "score"] == 0.5
    assert td["note"] == "x"


@pytest.mark.parametrize("layout", [NESTED, FLAT])
def test_a_batch_is_lazily_stacked_along_turns(layout: RecordLayout) -> None:
    batch = records([conversation((4, 3), (2, 5)), conversation((6, 1), (1, 1))], layout, traj_ids=[8, 9])
    assert isinstance(batch, LazyStackedTensorDict)
    assert (tuple(batch.batch_size), batch.stack_dim) == ((2, 2), 1)
    assert batch["collector", "traj_ids"].tolist() == [[8, 8], [9, 9]]
    assert batch["turn"].tolist() == [[0, 1], [0, 1]]
    assert batch["next", "done"].squeeze(-1).tolist() == [[False, True], [False, True]]
    assert "mask" not in batch["collector"]
    response: Any = ("tokens", "response") if layout.nested else "tokens_response"
    assert batch[0, 1][response].tolist() == list(range(9, 14))
    assert pickle.loads(pickle.dumps(batch))[0, 1][response].tolist() == list(range(9, 14))


@pytest.mark.parametrize("layout", [NESTED, FLAT])
def test_rows_of_fewer_turns_are_filled_with_empty_records(layout: RecordLayout) -> None:
    batch = records([conversation((4, 3)), conversation((4, 3), (2, 5))], layout, traj_ids=[8, 9])
    assert batch["collector", "mask"].tolist() == [[True, False], [True, True]]
    filled = batch[0, 1]
    for key, value in filled.items(True, True, is_leaf=lambda kind: not issubclass(kind, TensorDict)):
        if isinstance(value, torch.Tensor):
            assert not value.any(), key
    text: Any = ("text", "response") if layout.nested else "text_response"
    tokens: Any = ("tokens", "full") if layout.nested else "tokens"
    assert filled[text] == ""
    assert len(filled[tokens]) == 0
    assert filled["finish_reason"] == ""
    assert set(filled.keys(True)) == set(batch[1, 1].keys(True))
    if layout.history:
        assert filled["history"].full.to_chats() == []


def test_an_empty_record_of_rewards_for_each_token_has_none() -> None:
    empty = empty_record(record(turn(reward=torch.ones(3), versions=["a"] * 3, version="a"), NESTED))
    assert tuple(empty["next", "reward"].shape) == (0, 1)
    assert empty["policy_version"] == ""
    assert empty["tokens", "policy_version"] == []


def test_the_sum_of_the_masks_is_the_number_of_sampled_tokens() -> None:
    turns = conversation((4, 3), (2, 5), (3, 2))
    assert sum(int(record(one, NESTED)["masks", "all_assistant_mask"].sum()) for one in turns) == 3 + 5 + 2


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="history=True needs nested=True"):
        RecordLayout(nested=False, history=True)
    with pytest.raises(ValueError, match="at least one turn; got 2 rows"):
        records([[], []], NESTED)
