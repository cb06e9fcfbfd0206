"""pass@k is the share of all choices of k answers in which one is right."""

from __future__ import annotations

import itertools

import pytest
import torch
from tensordict import LazyStackedTensorDict

from rollwright.data.llm import FinishReason, Origin, RecordLayout, Turn, pass_at_k, record

RIGHT = {0: [1, 0, 0, 1, 0], 1: [0, 0, 0, 0], 2: [1, 1, 1, 1, 1, 1], 3: [0, 1, 0, 0]}


def batch(right=RIGHT, *, failed=()):
    """Conversations of two turns, whose rewards add up to 1 where they are right."""
    message, zero = {"role": "assistant", "content": ""}, torch.zeros(1)
    turns = []
    for prompt, answers in right.items():
        for repeat, is_right in enumerate(answers):
            reason = FinishReason.ERROR if (prompt, repeat) in failed else FinishReason.STOP
            origin = Origin(index=prompt, epoch=0, repeat=repeat, group=prompt, seed=0)
            for number in range(2):
                tokens = torch.arange(2 + number)
                said = (origin, number, 0, [], message, "", "", tokens, 1 + number, zero, "raw", zero, 0, reason)
                turns.append(Turn(*said, reward=is_right / 2))
    return LazyStackedTensorDict(*(record(turn, RecordLayout()) for turn in turns), stack_dim=0)


def by_hand(right, k):
    shares = []
    for answers in right.values():
        chosen = [any(one) for one in itertools.combinations(answers, k)]
        shares.append(sum(chosen) / len(chosen))
    return sum(shares) / len(shares)


def test_it_is_the_share_of_all_choices():
    found = pass_at_k(batch(), k=(1, 2, 3, 4))
    assert found == {f"pass@{k}": pytest.approx(by_hand(RIGHT, k)) for k in (1, 2, 3, 4)}
    assert pass_at_k(batch()) == {"pass@1": pytest.approx(by_hand(RIGHT, 1))}
    assert pass_at_k(batch(), at_least=1.1) == {"pass@1": 0.0}


def test_conversations_that_failed_do_not_count():
    found = pass_at_k(batch(failed={(0, 1), (0, 2)}), k=3)
    assert found == {"pass@3": pytest.approx(by_hand({**RIGHT, 0: [1, 1, 0]}, 3))}


@pytest.mark.parametrize(
    ("k", "message"), [(5, r"got 5, and 4 of prompt 1\. Pass repeats=5"), (0, "from 1 to .*got 0")]
)
def test_more_than_there_are_is_an_error_with_the_prompt(k, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(batch(), k=k)
