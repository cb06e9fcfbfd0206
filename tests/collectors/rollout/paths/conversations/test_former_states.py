"""States that an earlier version saved still load: what was delivered before is not delivered again."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch
from tests.collectors.llm.fakes import FakeEnv, FakePolicy
from tests.collectors.llm.test_plain import answer, chats, turns

from rollwright.collectors.llm import LLMCollector
from rollwright.envs import StepCounter

SAVED = Path(__file__).parent / "saved"
OPTIONS = {
    "turns": {"dialog_turns_per_batch": 6},
    "stream": {"dialog_turns_per_batch": 5, "async_envs": True},
    "conversations": {"trajs_per_batch": 2, "async_envs": False},
    "groups": {"groups_per_batch": 1, "async_envs": True},
}
KEYS = ("prompt_index", "epoch", "repeat", "turn")


def former(name):
    with gzip.open(SAVED / f"{name}.pt.gz") as file:
        found = torch.load(file, weights_only=True)
    return found["state"], [tuple(each) for each in found["done"]]


def names_of(batch):
    rows = batch.reshape(-1).unbind(0)
    return [tuple(int(row[key]) for key in KEYS) for row in rows if row["collector", "traj_ids"] >= 0]


@pytest.mark.parametrize("mode", OPTIONS)
def test_turns_of_an_engine_go_on_from_a_former_state(mode):
    def make():
        return LLMCollector(FakeEnv(3, prompts=8, repeats=2, most_turns=4), FakePolicy(), **OPTIONS[mode])

    with make() as collector:
        expected = [name for batch in collector for name in names_of(batch)]
    state, found = former(f"native_{mode}")
    with make() as collector:
        collector.load_state_dict(state)
        found += [name for batch in collector for name in names_of(batch)]
    assert sorted(found) == sorted(expected)


@pytest.mark.llm
@pytest.mark.parametrize("mode", ["turns", "conversations"])
def test_rows_of_tensordicts_go_on_from_a_former_state(mode):
    state, found = former(f"plain_{mode}")
    with LLMCollector(chats(repeats=2, transform=StepCounter()), answer, **OPTIONS[mode]) as collector:
        collector.load_state_dict(state)
        for batch in collector:
            found += turns(batch)
    assert len(found) == len(set(found)) == 2 * sum(1 + number * 7 % 4 for number in range(6))
