"""Conversations whose environment cannot be saved: after an error, no turn comes twice."""

from __future__ import annotations

import collections
import warnings
from functools import partial

import pytest
import torch
from tests.collectors.llm.fakes import FakePolicy, FakeTokenizer
from tests.collectors.llm.test_errors import Failing

from rollwright.collectors.llm import LLMCollector
from rollwright.envs import AsyncEnvPool
from rollwright.envs.llm import ChatEnv

KEYS = ("prompt_index", "turn")
fails = Failing(set())


class Talks:
    """Replies up to three times; it cannot be saved."""

    def __init__(self, row):
        self.left = row["turns"]

    def reply(self, messages):
        fails()
        self.left -= 1
        return "go on", 1.0, self.left < 0


class Saved(Talks):
    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


def chats(slots=3, environment=Talks):
    rows = [{"tokens": [1 + number, 1], "turns": number % 4} for number in range(8)]
    options = {"input_mode": "tokens", "tokenizer": FakeTokenizer(), "environment": environment, "epochs": 1}
    return ChatEnv.from_dataloader(rows, batch_size=slots, **options)


def answer(td):
    rows = []
    for row in td.unbind(0):
        row = row.copy()
        row["tokens", "response"] = torch.tensor([1, 2])
        rows.append(row)
    return torch.stack(rows) if len(rows) == 1 else type(td).lazy_stack(rows, 0)


KINDS = {
    "native": (chats, FakePolicy, {"dialog_turns_per_batch": 6}),
    "stream": (chats, FakePolicy, {"dialog_turns_per_batch": 4, "async_envs": True}),
    "plain": (chats, lambda: answer, {"dialog_turns_per_batch": 6}),
    "pool": (
        lambda **options: AsyncEnvPool([partial(chats, 1, **options)], backend="threading"),
        lambda: answer,
        {"dialog_turns_per_batch": 3},
    ),
}


def taken(kind, environment, postproc=None):
    make, policy, options = KINDS[kind]
    found, errors = collections.Counter(), 0
    with LLMCollector(make(environment=environment), policy=policy(), postproc=postproc, **options) as collector:
        while True:
            try:
                batch = collector.next()
            except Exception as error:
                if "no connection" not in str(error):
                    raise
                errors += 1
                continue
            if batch is None:
                return found, errors, collector.stats()
            rows = [row for row in batch.reshape(-1).unbind(0) if row["collector", "traj_ids"] >= 0]
            found.update(tuple(int(row[key]) for key in KEYS) for row in rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["postproc", "environment"])
def test_no_turn_comes_twice(kind, what, monkeypatch):
    wanted, _, _ = taken(kind, Talks)
    assert set(wanted) == {(number, turn) for number in range(8) for turn in range(number % 4 + 1)}
    monkeypatch.setattr(fails, "calls", 0)
    monkeypatch.setattr(fails, "at", {9, 13} if what == "environment" else set())
    with warnings.catch_warnings(record=True, action="always") as caught:
        found, errors, stats = taken(kind, Talks, Failing({2, 3}) if what == "postproc" else None)
    assert errors
    assert set(found.values()) == {1}
    lost = {number for number, _ in wanted.keys() - found.keys()}
    assert {number for number, turn in found if not turn} == set(range(8))
    assert stats["conversations_dropped"] == len(lost)
    said = " ".join(str(warning.message) for warning in caught)
    assert all(f"prompt {number} (epoch 0" in said for number in lost)
    assert not lost or "state_dict() and load_state_dict()" in said


def test_others_go_on_where_one_cannot_be_begun(monkeypatch):
    """The environment of the next conversation raises when it is made: those in progress lose no turn."""
    wanted, _, _ = taken("native", Saved)
    made, begin = Failing({5}), Saved.__init__
    monkeypatch.setattr(Saved, "__init__", lambda self, row: (made(), begin(self, row))[1])
    found, errors, _ = taken("native", Saved)
    assert errors == 1
    assert set(found.values()) == {1}
    assert {number for number, _ in wanted.keys() - found.keys()} <= {4}  # the one that could not be begun
