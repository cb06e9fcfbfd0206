"""Batches of turns: shapes, order, counts, and what they say of where they come from."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import pytest
import torch
from tensordict import LazyStackedTensorDict
from tests.collectors.llm.fakes import FakeConversations, FakeEngine, FakeEnv, FakePolicy

from rollwright.collectors.llm import LLMCollector
from rollwright.collectors.reports.statistics import CollectorStats
from rollwright.data.llm.turns import FinishReason
from rollwright.envs.llm import LLMEnv
from rollwright.envs.llm.conversations import DatasetConversations
from rollwright.envs.llm.opening import PromptFormat
from rollwright.envs.llm.sources import DatasetSource
from rollwright.errors import EnvError


def names(batch):
    """Prompt, repeat and turn of each record, in order."""
    keys = ("prompt_index", "epoch", "repeat", "turn")
    return list(zip(*(batch[key].reshape(-1).tolist() for key in keys), strict=True))


def turns_of(collector):
    """The tokens of each turn, by where they come from; each comes once."""
    found = {}
    for batch in collector:
        for row in batch.reshape(-1).unbind(0):
            if row["collector", "traj_ids"] >= 0:
                name = tuple(int(row[key]) for key in ("prompt_index", "epoch", "repeat", "turn"))
                assert name not in found
                found[name] = row["tokens"].tolist()
    return found


def test_batches_are_lazy_stacks_of_all_environments(build):
    collector = build(3, env={"prompts": 30}, dialog_turns_per_batch=6, total_dialog_turns=18)
    batches = list(collector)
    assert [type(batch) for batch in batches] == [LazyStackedTensorDict] * 3
    assert {batch.batch_size for batch in batches} == {torch.Size([3, 2])}
    assert batches[0].stack_dim == 1
    assert batches[0].names == [None, "time"]
    assert batches[0]["collector", "traj_ids"].shape == (3, 2)
    assert collector.stats()["frames"] == 18
    assert len(collector) == 3


def test_prompts_are_drawn_in_order_and_none_is_skipped(build):
    found = turns_of(build(3, env={"prompts": 20}, dialog_turns_per_batch=3))
    assert sorted({name[0] for name in found}) == list(range(20))
    last = {name[0]: max(turn for index, _, _, turn in found if index == name[0]) for name in found}
    assert len(found) == sum(turn + 1 for turn in last.values())


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("async_envs", [False, True])
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_tokens_depend_on_prompt_repeat_turn_and_seed_alone(build, slots, async_envs, slow):
    env = {"prompts": 12, "repeats": 2}
    expected = turns_of(build(2, env=env, dialog_turns_per_batch=2))
    found = turns_of(build(slots, env={**env, "slow": slow}, dialog_turns_per_batch=5 * slots, async_envs=async_envs))
    assert found == expected
    assert len({tuple(tokens) for tokens in found.values()}) > 12


def test_a_seed_changes_the_tokens(build):
    one, other, again = (build(2, env={"prompts": 6}, dialog_turns_per_batch=2) for _ in range(3))
    for collector, seed in ((one, 1), (other, 2), (again, 1)):
        collector.set_seed(seed)
    first = turns_of(one)
    assert first == turns_of(again)
    assert first != turns_of(other)


def test_the_next_prompt_extends_the_tokens_before_it(build):
    found = turns_of(build(3, env={"prompts": 20, "most_turns": 6}, dialog_turns_per_batch=3))
    pairs = [(tokens, found.get((*name[:3], name[3] + 1))) for name, tokens in found.items()]
    followed = [(one, other) for one, other in pairs if other is not None]
    assert len(followed) > 20
    assert all(other[: len(one)] == one for one, other in followed)


def test_a_stream_has_turns_in_the_order_in_which_they_end(build):
    collector = build(4, env={"prompts": 20}, dialog_turns_per_batch=7, async_envs=True)
    batches = list(collector)
    assert {tuple(batch.batch_size) for batch in batches[:-1]} == {(7,)}
    assert len(batches[-1]) <= 7
    order = [name for batch in batches for name in names(batch)]
    assert order != sorted(order)
    for index in range(20):  # of one conversation, in order
        assert [turn for at, _, _, turn in order if at == index] == sorted(
            turn for at, _, _, turn in order if at == index
        )


def test_conversations_generate_while_others_wait_for_their_environment(build):
    collector = build(2, env={"prompts": 2, "most_turns": 1, "slow": True}, dialog_turns_per_batch=1, async_envs=True)
    conversations, engine = collector.env.conversations, collector.policy.engine
    conversations.num_outcomes = 2  # the next one is late
    seen = []
    outcomes = conversations.outcomes
    conversations.outcomes = lambda timeout=None: seen.append((timeout, len(engine._open))) or outcomes(timeout)
    assert len(list(collector)) == 2
    assert (0.0, 1) in seen  # one was asked for without waiting, while the other one generated


def test_times_that_have_no_turn_are_blank_when_the_data_ends(build):
    batches = list(build(3, env={"prompts": 4}, dialog_turns_per_batch=9))
    last = batches[-1]
    blank = last["collector", "traj_ids"] < 0
    assert blank.any()
    assert not blank.all()
    assert all(not len(row["tokens"]) for row in last.reshape(-1).unbind(0) if row["collector", "traj_ids"] < 0)


def test_flat_batches_hold_turns_alone(build):
    batches = list(build(3, env={"prompts": 4}, dialog_turns_per_batch=9, flatten_data=True))
    assert all(batch.ndim == 1 and (batch["collector", "traj_ids"] >= 0).all() for batch in batches)
    stacked = list(build(3, env={"prompts": 4}, dialog_turns_per_batch=9))
    real = stacked[0]["collector", "traj_ids"].reshape(-1) >= 0
    assert names(batches[0]) == [name for name, taken in zip(names(stacked[0]), real.tolist(), strict=True) if taken]


def test_data_that_is_over_ends_the_collector(build):
    collector = build(2, env={"prompts": 3}, dialog_turns_per_batch=2)
    found = turns_of(collector)
    stats = collector.stats()
    assert stats["completed"]
    assert stats["frames"] == len(found)
    assert stats["episodes"] == 3
    with pytest.raises(EnvError, match=r"no prompt to begin .* more epochs"):
        collector.reset()


def test_rounding_is_announced_once_in_the_words_of_the_user(build):
    with pytest.warns(UserWarning, match="dialog_turns_per_batch=5 becomes 6.*total_dialog_turns=7 becomes 12") as seen:
        collector = build(3, dialog_turns_per_batch=5, total_dialog_turns=7)
    assert len(seen) == 1
    assert collector.dialog_turns_per_batch == 6
    assert collector.total_dialog_turns == 12
    stream = build(3, dialog_turns_per_batch=5, total_dialog_turns=10, async_envs=True)  # no warning
    assert [tuple(batch.batch_size) for batch in stream] == [(5,), (5,)]


def test_what_is_in_progress_at_the_end_is_counted(build):
    collector = build(4, env={"most_turns": 9}, dialog_turns_per_batch=4, total_dialog_turns=8)
    ended = sum(int(batch["next", "done"].sum()) for batch in collector)
    stats = collector.stats()
    assert ended == stats["episodes"]
    assert stats["conversations_in_progress"] > 0


def test_reset_at_each_iter_drops_what_is_in_progress_and_nothing_else(build):
    env = {"prompts": 12, "most_turns": 3}
    collector = build(2, env=env, dialog_turns_per_batch=2, reset_at_each_iter=True)
    found = turns_of(collector)
    assert sorted({name[0] for name in found}) == list(range(12))
    assert {name[3] for name in found} == {0}
    stats = collector.stats()
    assert stats["conversations_dropped"] == 12 - stats["episodes"] > 0


def test_one_turn_and_a_reset_at_each_iter_skips_no_prompt(build):
    env = {"prompts": 9, "most_turns": 1}
    collector = build(2, env=env, dialog_turns_per_batch=2, reset_at_each_iter=True)
    assert sorted(turns_of(collector)) == [(index, 0, 0, 0) for index in range(9)]


def test_an_error_begins_conversations_again(build):
    collector = build(3, env={"prompts": 9}, dialog_turns_per_batch=6)
    conversations = collector.env.conversations
    outcomes, fails = conversations.outcomes, iter([False, False, True, False, True] + [False] * 999)

    def failing(timeout=None):
        if next(fails):
            raise EnvError("the tool broke")
        return outcomes(timeout)

    conversations.outcomes = failing
    found, errors = {}, 0
    while not collector.stats()["completed"]:
        try:
            batch = collector.next()
        except EnvError:
            errors += 1
            continue
        if batch is None:
            break
        for name, row in zip(names(batch), batch.reshape(-1).unbind(0), strict=True):
            if row["collector", "traj_ids"] >= 0:
                found.setdefault(name, []).append(row["tokens"].tolist())
    expected = turns_of(build(3, env={"prompts": 9}, dialog_turns_per_batch=6))
    assert errors == 2
    assert {name: tokens[-1] for name, tokens in found.items()} == expected


def test_a_prompt_that_is_refused_names_its_conversation(build):
    policy = FakePolicy()
    policy.engine.max_length = 2
    with pytest.raises(ValueError, match=r"conversation of prompt 0 \(epoch 0, repeat 0\), turn 0: prompt: expected"):
        build(2, policy=policy, dialog_turns_per_batch=2).next()


def test_a_conversation_without_room_is_cut(build):
    policy = FakePolicy()
    policy.engine.max_length = 16
    batch = build(1, policy=policy, env={"most_turns": 20}, dialog_turns_per_batch=12).next()
    cut = batch["next", "truncated"].reshape(-1)
    assert cut.any()
    assert all(len(row["tokens"]) <= 32 for row in batch.reshape(-1).unbind(0))


def test_the_path_is_native_and_says_so(build):
    paths = build(2, dialog_turns_per_batch=2).stats()["paths"]
    assert paths["env"].startswith("native")
    assert "FakeEngine" in paths["policy"]


def test_shutdown_closes_what_the_collector_made_and_nothing_else():
    given = FakePolicy()
    collector = LLMCollector(FakeEnv(1), given, dialog_turns_per_batch=1)
    collector.shutdown()
    assert collector.env.conversations.closed
    assert not given.engine.closed
    assert not collector.is_initialized()
    collector = LLMCollector(lambda: FakeEnv(1), policy_factory=FakePolicy, dialog_turns_per_batch=1)
    assert collector.is_initialized()
    collector.shutdown()
    assert collector.policy.engine.closed


class Cutting(FakeEngine):
    """Cuts every other answer by its length."""

    number = 0

    def _end(self, key, reason=FinishReason.STOP):
        self.number += 1
        super()._end(key, FinishReason.LENGTH if self.number % 2 else reason)


class Calling(FakeConversations):
    """Every answer holds a whole call of a tool."""

    def submit(self, answers):
        super().submit(answers)
        for slot, (delayed, outcome) in self._waiting.items():
            call = {"role": "assistant", "content": "", "tool_calls": [{"name": "search", "arguments": {}}]}
            self._waiting[slot] = (delayed, dataclasses.replace(outcome, response=call))


def test_an_answer_that_is_cut_by_its_length_says_so_although_it_calls_a_tool():
    env, policy = FakeEnv(1, prompts=12), FakePolicy()
    env.conversations, policy.engine = Calling(1, env.source), Cutting()
    with LLMCollector(env, policy, dialog_turns_per_batch=4, total_dialog_turns=8) as collector:
        reasons = [row["finish_reason"] for batch in collector for row in batch.reshape(-1).unbind(0)]
    assert reasons == ["length", "tool"] * 4


def answers_that_are_cut(td):
    td["text_response"] = ["half of"] * len(td)
    td["finish_reason"] = ["length"] * len(td)
    return td


@pytest.mark.parametrize("how", ["turn by turn", "stream", "on TensorDicts"])
def test_a_single_answer_that_is_cut_by_its_length_is_truncated(how):
    rows = [{"text": "one", "tokens": [5, 6]}] * 4
    if how == "on TensorDicts":
        env, policy = LLMEnv.from_dataloader(rows, batch_size=2, from_text=True, epochs=1), answers_that_are_cut
    else:
        env, policy = FakeEnv(2), FakePolicy()
        policy.engine = Cutting()
        env.source = DatasetSource(rows, epochs=1)
        env.conversations = DatasetConversations(env.source, 2, prompts=PromptFormat("tokens"))
    with LLMCollector(env, policy, dialog_turns_per_batch=2, async_envs=how == "stream") as collector:
        found = [row for batch in collector for row in batch.reshape(-1).unbind(0)]
    ends = [[bool(row["next", key]) for key in ("terminated", "truncated", "done")] for row in found]
    reasons = {row["finish_reason"]: flags for row, flags in zip(found, ends, strict=True)}
    assert reasons["length"] == [False, True, True]
    assert reasons.get("stop", [True, False, True]) == [True, False, True]


@pytest.mark.parametrize(
    "options", [{"yield_completed_trajectories": True}, {"dialog_turns_per_batch": 6, "async_envs": True}]
)
def test_every_key_of_stats_is_declared(build, options):
    collector = build(2, env={"prompts": 30}, **options)
    collector.next()
    stats = collector.stats()
    assert stats.keys() - get_type_hints(CollectorStats).keys() == set()
    assert CollectorStats.__required_keys__ - stats.keys() == set()
