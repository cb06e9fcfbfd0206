"""Conversations on disk as they happen, and runs that are replayed from there: in one process and in workers."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from tests import llm_models
from tests.collectors.llm.fakes import FakeEnv, FakePolicy
from tests.collectors.llm.test_agents import everything
from tests.collectors.llm.test_failures import BAD
from tests.collectors.llm.test_failures import env as failing
from tests.collectors.llm.test_models import leaves
from tests.collectors.llm.test_plain import Talks, chats, wrapper
from tests.envs.llm.agents.scripted import collector as agents

from rollwright.collectors.llm import LLMCollector
from rollwright.data.llm import RecordLayout, Trace
from rollwright.envs import StepCounter, TransformedEnv
from rollwright.envs.transforms import Transform
from rollwright.errors import EnvError, WorkerError

NAME = ("prompt_index", "epoch", "repeat", "turn")
ENV = partial(FakeEnv, 4, prompts=12, repeats=2)


def rows_of(batches):
    """Entries of each record, by where it comes from; each comes once."""
    found = {}
    for batch in batches:
        for row in batch.reshape(-1).unbind(0):
            if row["collector", "traj_ids"] >= 0:
                name = tuple(int(row[key]) for key in NAME)
                assert name not in found
                found[name] = leaves(row)
    return found


def traced(folder, layout):
    """The same, from a trace."""
    records = [row for each in Trace.read(folder).conversations for row in each.records(layout)]
    return {tuple(int(row[key]) for key in NAME): leaves(row) for row in records}


FLAT = RecordLayout(nested=False)
OPTIONS = [
    {"dialog_turns_per_batch": 8},
    {"dialog_turns_per_batch": 8, "async_envs": True},
    {"trajs_per_batch": 2},
    {"groups_per_batch": 1, "num_collectors": 2},
    {"dialog_turns_per_batch": 4, "num_collectors": 2, "async_envs": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_a_trace_is_what_was_delivered_and_its_replay_is_the_same_run(options, tmp_path):
    with LLMCollector(ENV, policy_factory=FakePolicy, trace=tmp_path / "run", **options) as collector:
        collector.set_seed(3)
        found = rows_of(collector)
    ends = [each.end for each in Trace.read(tmp_path / "run").conversations]
    assert ends == ["terminated"] * 24
    written = traced(tmp_path / "run", FLAT)
    if "num_collectors" in options:  # whose ids are of the whole run
        assert {name: row.pop(("collector", "traj_ids")) is None for name, row in found.items()}
        assert {name: row.pop(("collector", "traj_ids")) is None for name, row in written.items()}
    assert written == found
    again = {key: value for key, value in options.items() if key != "num_collectors"}
    with LLMCollector(ENV, replay=tmp_path / "run", policy_factory=FakePolicy, **again) as collector:
        collector.set_seed(3)
        replayed = rows_of(collector)
    for rows in (found, replayed):
        for row in rows.values():
            row.pop(("collector", "traj_ids"), None)
    assert replayed == found


@pytest.mark.parametrize("async_envs", [False, True])
def test_what_a_killed_run_has_written_is_there_and_a_resumed_one_goes_on(async_envs, tmp_path):
    options = {"dialog_turns_per_batch": 8, "async_envs": async_envs}
    with LLMCollector(ENV, policy_factory=FakePolicy, **options) as collector:
        expected = rows_of(collector)
    first = LLMCollector(ENV, policy_factory=FakePolicy, trace=tmp_path, **options)
    batches = [first.next().clone() for _ in range(2)]
    state = first.state_dict()
    first.next()  # nobody knows of it when the run is killed
    first.shutdown()
    file = next(tmp_path.iterdir())
    file.write_bytes(file.read_bytes()[:-7])
    assert Trace.read(tmp_path).num_torn == 1
    with LLMCollector(ENV, policy_factory=FakePolicy, trace=tmp_path, **options) as second:
        second.load_state_dict(state)
        batches += [batch.clone() for batch in second]
    delivered = rows_of(batches)
    assert {name: row[("tokens",)] for name, row in delivered.items()} == {
        name: row[("tokens",)] for name, row in expected.items()
    }
    assert [each.end for each in Trace.read(tmp_path).conversations] == ["terminated"] * 24
    assert traced(tmp_path, FLAT) == delivered


def test_conversations_that_are_dropped_are_there_and_those_that_go_on(tmp_path):
    options = {"dialog_turns_per_batch": 4, "reset_at_each_iter": True}
    with LLMCollector(ENV, policy_factory=FakePolicy, trace=tmp_path, **options) as collector:
        rows_of(collector)
        assert collector.stats()["conversations_dropped"] > 0
        ends = [each.end for each in Trace.read(tmp_path).conversations]
        assert ends.count("dropped") == collector.stats()["conversations_dropped"]
    assert sorted(set(ends)) == ["dropped", "terminated"]


def even(batch):
    return int(batch["group_id"][0]) % 2 == 0 or "odd"


@pytest.mark.parametrize("more", [{}, {"async_envs": False}, {"num_collectors": 2}])
def test_groups_that_are_filtered_are_there_with_the_reason(more, tmp_path):
    options = {"groups_per_batch": 1, "keep_group": even, "max_oversampling": 20, "trace": tmp_path, **more}
    with LLMCollector(ENV, policy_factory=FakePolicy, **options) as collector:
        found = rows_of(collector)
    conversations = Trace.read(tmp_path).conversations
    assert len(conversations) == 24
    for each in conversations:
        kept = each.origin.group % 2 == 0
        assert (each.end, each.why) == (("terminated", "") if kept else ("filtered", "odd"))
        assert bool(each.turns)
        assert kept == ((each.origin.index, each.origin.epoch, each.origin.repeat, 0) in found)


FAILING = {
    "turns": {"dialog_turns_per_batch": 8},
    "stream": {"dialog_turns_per_batch": 5, "async_envs": True},
    "whole": {"trajs_per_batch": 1, "async_envs": True},
    "workers": {"trajs_per_batch": 1, "num_collectors": 2},
}


@pytest.mark.parametrize("mode", FAILING)
@pytest.mark.parametrize("on_error", ["drop", "mask", "raise"])
def test_conversations_that_fail_are_there_with_the_answer_and_the_reason(on_error, mode, tmp_path):
    options = {**FAILING[mode], "on_error": on_error, "trace": tmp_path}
    batches = []
    with LLMCollector(partial(failing, "reply"), policy_factory=FakePolicy, **options) as collector:
        if on_error == "raise":
            with pytest.raises((EnvError, WorkerError), match="no connection"):
                list(collector)
        else:
            batches = list(collector)
    ended = [each for each in Trace.read(tmp_path).conversations if each.end]
    failed = [each for each in ended if each.end == "failed"]
    assert {each.origin.index for each in failed} == {BAD}
    assert len(failed) == 2 or on_error == "raise"
    assert len(ended) == 18 or on_error == "raise"
    for each in failed:
        assert "no connection" in each.why
        assert each.turns[-1].finish_reason == "error"
        assert len(each.turns[-1].tokens) > each.turns[-1].num_prompt
    if on_error == "mask":
        written, found = traced(tmp_path, FLAT), rows_of(batches)
        for row in (*written.values(), *found.values()):
            row.pop(("collector", "traj_ids"))
        assert written == found


def test_a_replay_takes_no_model_and_names_what_was_not_recorded(tmp_path):
    with LLMCollector(ENV, policy_factory=FakePolicy, trace=tmp_path, trajs_per_batch=3) as collector:
        collector.next()
    other = LLMCollector(ENV, policy_factory=FakePolicy, replay=tmp_path, trajs_per_batch=3)
    with other, pytest.raises(ValueError, match=r"the conversation of prompt \d .*, turn 0: replay: .* does not have"):
        list(other)
    file = next(tmp_path.iterdir())
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[1]["prompt"]["tokens"][1][1] = 50
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = LLMCollector(ENV, policy_factory=FakePolicy, replay=tmp_path, trajs_per_batch=3)
    with (
        other,
        pytest.raises(ValueError, match=r"the conversation of prompt 0 .* got one of 2 that differs from token 1"),
    ):
        other.next()


def test_what_cannot_be_traced_or_replayed_is_an_error_at_construction(tmp_path):
    with pytest.raises(ValueError, match=r"replay: expected a folder that LLMCollector\(trace=...\) has written, got"):
        LLMCollector(ENV, replay=tmp_path, trajs_per_batch=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"trace: expected a folder, got .*file/run"):
        LLMCollector(ENV, policy_factory=FakePolicy, trace=tmp_path / "file" / "run", trajs_per_batch=1)

    class OnTensorDicts(Transform):
        pass

    env = TransformedEnv(FakeEnv(2), OnTensorDicts())
    with pytest.raises(ValueError, match=r"trace: expected conversations .* Leave trace out"):
        LLMCollector(env, FakePolicy(), trace=tmp_path, trajs_per_batch=1)


@pytest.mark.llm
def test_messages_texts_and_transforms_are_read_back(tmp_path):
    env = chats(prompts=4, transform=StepCounter(), environment=Talks, columns=["turns"], reward_functions=length)
    with LLMCollector(env, wrapper(), trace=tmp_path, trajs_per_batch=2, track_policy_version=True) as collector:
        found = rows_of(collector)
    assert traced(tmp_path, RecordLayout(history=True)) == found
    assert max(name[-1] for name in found) > 1
    env = chats(prompts=4, transform=StepCounter(), environment=Talks, columns=["turns"], reward_functions=length)
    assert isinstance(env, TransformedEnv)
    with LLMCollector(env, replay=tmp_path, trajs_per_batch=2, track_policy_version=True) as collector:
        again = rows_of(collector)
    for name, row in again.items():
        apart = {key for key in row if key[0] == "seconds"}
        assert {key: row[key] for key in row.keys() - apart} == {key: found[name][key] for key in row.keys() - apart}


def length(completion_ids, **columns):
    return [float(len(tokens)) for tokens in completion_ids]


@pytest.mark.llm
@pytest.mark.parametrize("async_envs", [False, True])
def test_agents_that_own_their_loop_are_replayed_with_all_their_sequences(async_envs, tmp_path):
    options = {"trajs_per_batch": 2, "async_envs": async_envs}
    made, _ = agents(everything, rows=4, trace=tmp_path, **options)
    with made:
        found = rows_of(made)
    assert traced(tmp_path, made.env.layout) == found
    again, engine = agents(everything, rows=4, replay=tmp_path, **options)
    with again:
        replayed = rows_of(again)
    assert not engine.requests
    said = [  # an agent that asks side by side may ask in another order
        sorted((*name[:3], row["tokens", "full"], row["log_probs", "response"]) for name, row in rows.items())
        for rows in (found, replayed)
    ]
    assert said[0] == said[1]


@pytest.mark.llm
def test_versions_of_tokens_are_those_of_the_recorded_run(tmp_path):
    policy = wrapper()
    options = {"trajs_per_batch": 1, "track_policy_version": True}

    def versions(collector):
        found = {}
        for batch in collector:
            for row in batch.unbind(0):
                found[int(row["prompt_index"]), int(row["turn"])] = row["tokens", "policy_version"].tolist()
            collector.update_policy_weights_(llm_models.model())
        return found

    with LLMCollector(chats(2, prompts=4), policy, trace=tmp_path, **options) as collector:
        found = versions(collector)
    with LLMCollector(chats(2, prompts=4), replay=tmp_path, **options) as collector:
        assert versions(collector) == found
    assert torch.tensor([version for row in found.values() for version in row]).unique().numel() > 1
