"""Conversations whose environment cannot be saved: after an error or a restore, no turn comes twice."""

from __future__ import annotations

import collections
import itertools
import re
import warnings
from functools import partial

import pytest
import torch
from tests.collectors.llm.fakes import FakePolicy, FakeTokenizer
from tests.collectors.llm.shares import delivered_under_kills, expected, make, turns
from tests.collectors.llm.test_errors import Failing
from tests.collectors.llm.test_resume import copied
from tests.collectors.llm.test_shares import MODES
from tests.variants import in_turn

from rollwright.collectors.core import RolloutObserver
from rollwright.collectors.llm import LLMCollector
from rollwright.envs import AsyncEnvPool
from rollwright.envs.llm import ChatEnv
from rollwright.errors import EnvError

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
    create, policy, options = KINDS[kind]
    found, errors = collections.Counter(), 0
    with LLMCollector(create(environment=environment), policy=policy(), postproc=postproc, **options) as collector:
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
    monkeypatch.setattr(fails, "calls", itertools.count(1))
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


@pytest.mark.parametrize(("kind", "batches"), in_turn(KINDS, (1, 2, 3)))
def test_no_turn_comes_twice_after_restores(kind, batches):
    create, policy, options = KINDS[kind]
    wanted, _, _ = taken(kind, Talks)
    found, state, said, over = collections.Counter(), None, "", False
    while not over:
        with LLMCollector(create(), policy=policy(), **options) as collector:
            if state is not None:
                collector.load_state_dict(state)
            for _ in range(batches):
                batch = collector.next()
                over = batch is None
                if over:
                    break
                rows = [row for row in batch.reshape(-1).unbind(0) if row["collector", "traj_ids"] >= 0]
                found.update(tuple(int(row[key]) for key in KEYS) for row in rows)
            stats = collector.stats()
            with warnings.catch_warnings(record=True, action="always") as caught:
                state = copied(collector.state_dict())
            said += "".join(str(warning.message) for warning in caught)
    assert set(found.values()) == {1}
    lost = {number for number, _ in wanted.keys() - found.keys()}
    assert {number for number, turn in found if not turn} == set(range(8))
    assert stats["conversations_dropped"] == len(lost) > 0
    assert all(re.search(rf"prompt {number} \(epoch 0, repeat 0\)[^;]*counts as dropped", said) for number in lost)


@pytest.mark.parametrize("kind", KINDS)
def test_no_turn_comes_twice_where_all_begins_anew(kind):
    """As in a worker one of whose batches was lost: conversations that were delivered in part end."""
    create, policy, options = KINDS[kind]
    found, times = collections.Counter(), 0
    with LLMCollector(create(environment=Saved), policy=policy(), **options) as collector:
        while (batch := collector.next()) is not None:
            rows = [row for row in batch.reshape(-1).unbind(0) if row["collector", "traj_ids"] >= 0]
            found.update(tuple(int(row[key]) for key in KEYS) for row in rows)
            if collector.stats()["conversations_in_progress"] and times < 2:
                times += 1
                with pytest.warns(RuntimeWarning, match="turns of it were delivered"):
                    collector._rollout.start_over()
        dropped = collector.stats()["conversations_dropped"]
    wanted = {(number, turn) for number in range(8) for turn in range(number % 4 + 1)}
    assert set(found.values()) == {1}
    assert {number for number, turn in found if not turn} == set(range(8))
    assert dropped == len({number for number, _ in wanted - found.keys()}) > 0


@pytest.mark.filterwarnings("ignore:.*turns of it were delivered")
@pytest.mark.parametrize("kind", KINDS)
def test_no_turn_comes_twice_where_a_batch_is_refused(kind, monkeypatch):
    """As one whose weights are too old: its turns are taken again."""
    calls = itertools.count(1)
    monkeypatch.setattr(RolloutObserver, "accepts", lambda self, frames: next(calls) not in (2, 4, 5))
    found, _, stats = taken(kind, Saved)
    wanted = {(number, turn) for number in range(8) for turn in range(number % 4 + 1)}
    assert set(found.values()) == {1}
    lost = {number for number, _ in wanted - found.keys()}
    assert stats["conversations_dropped"] == len(lost)
    assert not lost or kind == "pool"  # whose environments cannot go back to an earlier turn


def one_chat(slots=1):
    return ChatEnv.from_dataloader(
        [{"tokens": [1, 1], "turns": 3}],
        batch_size=slots,
        input_mode="tokens",
        tokenizer=FakeTokenizer(),
        environment=Talks,
        epochs=1,
    )


@pytest.mark.filterwarnings("ignore:.*turns of it were delivered")
@pytest.mark.parametrize("kind", KINDS)
def test_the_data_is_over_where_the_last_conversation_has_ended_by_an_error(kind, monkeypatch):
    _, policy, options = KINDS[kind]
    env = AsyncEnvPool([one_chat], backend="threading") if kind == "pool" else one_chat()
    monkeypatch.setattr(fails, "calls", itertools.count(1))
    monkeypatch.setattr(fails, "at", {2})
    with LLMCollector(env, policy=policy(), **{**options, "dialog_turns_per_batch": 1}) as collector:
        assert collector.next().numel() == 1
        with pytest.raises(EnvError, match="no connection"):
            collector.next()
        assert collector.next() is None
        stats = collector.stats()
    assert stats["completed"]
    assert stats["conversations_dropped"] == 1


@pytest.mark.filterwarnings("ignore:.*turns of it were delivered")
@pytest.mark.parametrize(("mode", "stored"), in_turn(("turns", "stream"), (False, True)))
def test_no_turn_of_a_worker_that_is_replaced_comes_twice(mode, stored):
    env = {"prompts": 24, "repeats": 3, "saves": False}
    wanted = expected(env=env, **MODES[mode])
    found, killed = delivered_under_kills(3, 1, stored=stored, every=0.25, env=env, **MODES[mode])
    assert killed == 3
    assert set(found.values()) == {1}
    assert found.keys() <= wanted.keys()
    assert {name[:-1] for name in found} == {name[:-1] for name in wanted}


@pytest.mark.filterwarnings("ignore:.*delivers whole batches")
@pytest.mark.parametrize("mode", ["turns", "stream"])
def test_no_turn_comes_twice_with_another_number_of_workers(mode):
    env = {"prompts": 14, "saves": False}
    wanted = expected(env=env, **MODES[mode])
    found = collections.Counter()
    with make(2, env=env, **MODES[mode]) as first:
        for _ in range(6):
            found.update(turns(first.next()))
        with pytest.warns(UserWarning, match=r"state_dict: not all .*worker0: the conversation of prompt .* dropped"):
            state = copied(first.state_dict())
        first.state_dict()  # it warns once
    with make(3, env=env, **MODES[mode]) as second:
        second.load_state_dict(state)
        for batch in second:
            found.update(turns(batch))
        dropped = second.stats()["conversations_dropped"]
    assert set(found.values()) == {1}
    assert {name[:-1] for name in found} == {name[:-1] for name in wanted}
    assert dropped == len({name[:-1] for name in wanted.keys() - found.keys()}) > 0
