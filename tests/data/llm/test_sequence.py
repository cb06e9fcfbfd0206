"""Conversations as training sequences, and advantages within groups."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from tensordict import TensorDict
from tests.data.llm.turn_examples import conversation, turn

from rollwright.data.llm import RecordLayout, group_advantages, record, records, training_sequences

NESTED, FLAT = RecordLayout(), RecordLayout(nested=False)
SIZES = ((4, 3), (2, 5), (3, 1))


@pytest.mark.parametrize("form", ["turns", "nested", "flat", "flattened", "list"])
def test_a_conversation_is_one_sequence_with_each_sampled_token_once(form: str) -> None:
    turns = conversation(*SIZES)
    source: Any = turns
    if form != "turns":
        batch = records([turns], FLAT if form == "flat" else NESTED, traj_ids=[5])
        source = batch.flatten() if form == "flattened" else [batch[0, 2], batch[0, :2]] if form == "list" else batch
    (sequence,) = training_sequences(source)
    assert sequence["tokens"].tolist() == list(range(18))
    sampled = [*range(4, 7), *range(9, 14), 17]
    assert sequence["assistant_mask"].nonzero().flatten().tolist() == sampled
    assert sequence["log_probs"].tolist() == [-float(n) if n in sampled else 0.0 for n in range(18)]
    assert sequence["policy_version"].tolist() == [-1] * 4 + [7] * 3 + [-1] * 2 + [8] * 5 + [-1] * 3 + [9]
    assert sequence["turn"].tolist() == [-1] * 4 + [0] * 3 + [-1] * 2 + [1] * 5 + [-1] * 3 + [2]
    assert sequence["reward"].tolist() == [1.0]
    assert sequence["tokens"].data_ptr() == turns[-1].tokens.data_ptr()


def test_a_rewritten_conversation_is_a_sequence_for_each_part() -> None:
    turns = conversation(*SIZES, sequences=[0, 0, 1])
    first, second = training_sequences(records([turns], NESTED, [5]))
    assert (len(first["tokens"]), len(second["tokens"])) == (14, 4)
    assert (int(first["assistant_mask"].sum()), int(second["assistant_mask"].sum())) == (8, 1)
    assert (int(first["sequence"]), int(second["sequence"])) == (0, 1)


def test_conversations_of_unequal_lengths_and_padding() -> None:
    table = [conversation(*SIZES), conversation((6, 2)), conversation((1, 1), (2, 2))]
    batch = records(table, NESTED, [5, 6, 7])
    sequences = training_sequences(batch)
    assert [int(one["collector", "traj_ids"]) for one in sequences] == [5, 6, 7]
    assert [int(one["assistant_mask"].sum()) for one in sequences] == [9, 2, 3]
    assert sum(int(one["assistant_mask"].sum()) for one in sequences) == sum(
        int(one["masks", "all_assistant_mask"].sum()) for row in range(3) for one in batch[row].unbind(0)
    )


def test_versions_may_be_uuids_and_log_probs_missing() -> None:
    one = turn(0, 1, 2, versions=["a", "b"], version="b", log_probs=None)
    (sequence,) = training_sequences([one])
    assert sequence["policy_version"] == ["", "a", "b"]
    assert "log_probs" not in sequence


def test_a_conversation_that_is_not_whole_is_an_error() -> None:
    turns = conversation(*SIZES)
    with pytest.raises(ValueError, match=r"whole conversations; of conversation 5 it holds the turns \[0, 2\]"):
        training_sequences(records([[turns[0], turns[2]]], NESTED, [5]))
    with pytest.raises(ValueError, match=r"group 0, prompt 3, epoch 1, repeat 2 it holds the turns \[1\]"):
        training_sequences(turns[1:2])
    turns[1].tokens = turns[1].tokens + 1
    with pytest.raises(ValueError, match=r"tokens of turn 1 of .* must extend those before"):
        training_sequences(turns)


def _rewarded(rewards: list[list[Any]], groups: list[int]) -> Any:
    table = []
    for row, (values, group) in enumerate(zip(rewards, groups, strict=True)):
        turns = conversation(*((2, 3) for _ in values), group=group)
        for one, value in zip(turns, values, strict=True):
            one.reward = value
        table.append((turns, row))
    return records([turns for turns, _ in table], NESTED, [row for _, row in table])


def test_the_advantage_is_the_reward_within_its_group() -> None:
    batch = group_advantages(_rewarded([[1.0], [0.0], [4.0], [3.0]], [7, 7, 8, 8]))
    assert tuple(batch["advantage"].shape) == (4, 1, 1, 1)
    half = 0.5**0.5
    assert batch["advantage"].flatten().tolist() == pytest.approx([half, -half, half, -half])
    centred = group_advantages(_rewarded([[1.0], [0.0], [4.0], [3.0]], [7, 7, 8, 8]), scale=False)
    assert centred["advantage"].flatten().tolist() == [0.5, -0.5, 0.5, -0.5]


def test_rewards_of_all_turns_and_tokens_count() -> None:
    batch = group_advantages(_rewarded([[0.0, 1.0], [5.0]], [7, 7]))
    values = torch.tensor([0.0, 1.0, 5.0])
    expected = (values - values.mean()) / values.std()
    assert batch[0, 0]["advantage"].item() == pytest.approx(float(expected[0]))
    assert batch[1, 0]["advantage"].item() == pytest.approx(float(expected[2]))
    assert batch[1, 1]["advantage"].item() == 0  # padding
    tokens = group_advantages(_rewarded([[torch.tensor([0.0, 1.0, 5.0])], [torch.zeros(3)]], [7, 7]))
    values = torch.tensor([0.0, 1.0, 5.0, 0.0, 0.0, 0.0])
    expected = ((values - values.mean()) / values.std())[:3]
    assert torch.allclose(tokens[0, 0]["advantage"].flatten(), expected)
    (sequence, _) = training_sequences(tokens)
    assert torch.allclose(sequence["advantage"][2:], expected)


@pytest.mark.parametrize(("how", "values"), [("sum", [3.0, 5.0]), ("mean", [1.5, 5.0]), ("max", [2.0, 5.0])])
def test_the_return_of_a_conversation_is_given_to_all_of_its_turns(how: Any, values: list[float]) -> None:
    batch = group_advantages(_rewarded([[1.0, 2.0], [5.0]], [7, 7]), trajectory_return=how)
    returns = torch.tensor(values)
    expected = (returns - returns.mean()) / returns.std()
    assert batch[0]["advantage"].flatten().tolist() == pytest.approx([float(expected[0])] * 2)
    assert batch[1, 0]["advantage"].item() == pytest.approx(float(expected[1]))


def test_leave_one_out_takes_off_the_mean_of_the_others() -> None:
    rewards = [[1.0], [0.0], [4.0], [3.0], [8.0], [5.0]]
    batch = group_advantages(_rewarded(rewards, [7, 7, 7, 8, 8, 9]), baseline="leave_one_out")
    assert batch["advantage"].flatten().tolist() == [1.0 - 2.0, 0.0 - 2.5, 4.0 - 0.5, 3.0 - 8.0, 8.0 - 3.0, 0.0]
    scaled = group_advantages(_rewarded(rewards[:2], [7, 7]), baseline="leave_one_out", scale=True)
    assert scaled["advantage"].flatten().tolist() == pytest.approx([2**0.5, -(2**0.5)])
    turns = _rewarded([[1.0, 2.0], [5.0]], [7, 7])
    summed = group_advantages(turns, baseline="leave_one_out", trajectory_return="sum")
    assert summed[0]["advantage"].flatten().tolist() == [-2.0, -2.0]
    assert summed[1, 0]["advantage"].item() == 2.0


def test_without_a_baseline_the_advantage_is_the_reward() -> None:
    batch = group_advantages(_rewarded([[1.0], [0.0], [4.0]], [7, 7, 8]), baseline="none")
    assert batch["advantage"].flatten().tolist() == [1.0, 0.0, 4.0]
    with pytest.raises(ValueError, match="baseline must be 'mean', 'leave_one_out' or 'none'; got 'median'"):
        group_advantages(batch, baseline="median")  # type: ignore[arg-type]


def test_equal_rewards_and_groups_of_one_have_no_advantage() -> None:
    batch = group_advantages(_rewarded([[1.0], [1.0], [3.0]], [7, 7, 8]))
    assert not batch["advantage"].any()


def test_a_batch_that_is_not_lazy_gets_advantages_too() -> None:
    rows = [record(turn(reward=float(n)), NESTED) for n in range(2)]
    batch = group_advantages(cast(TensorDict, torch.stack(rows)))
    assert batch["advantage"].flatten().tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_an_unknown_return_is_an_error() -> None:
    with pytest.raises(ValueError, match="trajectory_return must be None, 'sum', 'mean' or 'max'; got 'first'"):
        group_advantages(_rewarded([[1.0]], [7]), trajectory_return="first")  # type: ignore[arg-type]


def test_records_without_rewards_or_groups_are_named() -> None:
    batch = _rewarded([[1.0], [0.0]], [7, 7])
    with pytest.raises(KeyError, match="reward_key: a record has no entry"):
        group_advantages(batch, reward_key="rewards")
    with pytest.raises(KeyError, match="group_key: a record has no entry"):
        group_advantages(batch, group_key="groups")
