"""Saved state: what is delivered follows from where the data was, and nothing is skipped or comes twice."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from tests.collectors.llm.fakes import FakeEnv, FakePolicy
from tests.collectors.llm.test_workers import tokens_of
from tests.variants import in_turn

from rollwright.collectors.llm import LLMCollector


def made(slots=3, *, env=None, **options):
    return LLMCollector(FakeEnv(slots, **{"prompts": 24, **(env or {})}), FakePolicy(), **options)


def copied(state):
    """What a file holds of it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def rows(batch):
    keys = ("prompt_index", "epoch", "repeat", "turn")
    found = {}
    for row in batch.reshape(-1).unbind(0):
        if row["collector", "traj_ids"] >= 0:
            found[tuple(int(row[key]) for key in keys)] = (int(row["collector", "traj_ids"]), row["tokens"].tolist())
    return found


OPTIONS = [
    {"dialog_turns_per_batch": 6},
    {"dialog_turns_per_batch": 5, "async_envs": True},
    {"trajs_per_batch": 2},
    {"groups_per_batch": 1, "async_envs": True},
]


@pytest.mark.parametrize(("options", "after"), in_turn(OPTIONS, (4, 1, 0)))
def test_a_restored_collector_goes_on_bit_for_bit(options, after):
    env = {"repeats": 2, "most_turns": 4}
    with made(env=env, **options) as first, made(env=env, **options) as second:
        for _ in range(after):
            first.next()
        second.load_state_dict(copied(first.state_dict()))
        if options.get("async_envs"):  # which turn ends first is not part of the promise
            expected, found = (
                {name: tokens for batch in each for name, (_, tokens) in rows(batch).items()}
                for each in (first, second)
            )
            assert found == expected
            return
        for _ in range(4):
            assert rows(second.next()) == rows(first.next())


@pytest.mark.parametrize(("options", "saves"), [*((options, True) for options in OPTIONS), (OPTIONS[2], False)])
def test_nothing_is_skipped_and_nothing_comes_twice(options, saves):
    env = {"repeats": 2, "most_turns": 4, "saves": saves}
    expected = tokens_of(made(env=env, **options))
    collector, found = made(env=env, **options), {}
    while (batch := collector.next()) is not None:
        new = {name: tokens for name, (_, tokens) in rows(batch).items()}
        assert not new.keys() & found.keys()
        found |= new
        with warnings.catch_warnings(action="error" if saves else "ignore"):
            state = copied(collector.state_dict())
        assert saves or all("a file is open" in line for line in state["unsaved"])
        collector.shutdown()
        collector = made(env=env, **options)
        collector.load_state_dict(state)
    collector.shutdown()
    assert found == expected


def test_a_collector_that_has_stepped_gives_new_ids():
    with made(dialog_turns_per_batch=6) as first, made(dialog_turns_per_batch=6) as second:
        first.next()
        for _ in range(3):
            used = rows(second.next())
        second.load_state_dict(first.state_dict())
        expected, found = rows(first.next()), rows(second.next())
        assert {name: tokens for name, (_, tokens) in found.items()} == {
            name: tokens for name, (_, tokens) in expected.items()
        }
        assert not {number for number, _ in found.values()} & {number for number, _ in used.values()}


def test_a_group_that_was_dropped_on_purpose_counts_as_done():
    options = {"groups_per_batch": 1}
    with made(env={"repeats": 2, "most_turns": 4}, **options) as first, made(env={"repeats": 2}, **options) as second:
        first.next()
        first.reset()
        dropped = first.stats()["conversations_dropped"]
        second.load_state_dict(first.state_dict())
        left = {int(batch["group_id"][0]) for batch in second}
    assert dropped
    assert len(left) < 23


def test_the_state_holds_no_model():
    with made(dialog_turns_per_batch=3) as collector:
        collector.next()
        assert "policy_state_dict" not in collector.state_dict()


@pytest.mark.parametrize("options", [{"dialog_turns_per_batch": 5}, {"dialog_turns_per_batch": 3, "async_envs": True}])
def test_a_group_that_waits_for_its_reward_is_saved(options):
    def rewarded():
        return LLMCollector(FakeEnv.rewarded(5, prompts=9), FakePolicy(), **options)

    expected = tokens_of(rewarded())
    collector, found = rewarded(), {}
    while (batch := collector.next()) is not None:
        new = {name: tokens for name, (_, tokens) in rows(batch).items()}
        assert not new.keys() & found.keys()
        found |= new
        turns = [row for row in batch.reshape(-1).unbind(0) if row["collector", "traj_ids"] >= 0]
        assert all(float(row["next", "reward"]) > 0 for row in turns if row["next", "done"])
        state = copied(collector.state_dict())
        assert not state["unsaved"]
        collector.shutdown()
        collector = rewarded()
        collector.load_state_dict(state)
    collector.shutdown()
    assert found == expected


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots": 2}, "saved with 3 environments that take turns, and this collector has 2 environments"),
        ({"async_envs": True}, "saved with 3 environments that take turns, and this collector has async_envs=True"),
    ],
)
def test_the_state_of_another_make_is_refused_and_changes_nothing(change, says):
    options = {"dialog_turns_per_batch": 6}
    with made(**options) as first, made(**{**options, **change}) as second, made(**{**options, **change}) as plain:
        first.next()
        with pytest.raises(ValueError, match=says):
            second.load_state_dict(copied(first.state_dict()))
        found, expected = (
            {name: tokens for name, (_, tokens) in rows(each.next()).items()} for each in (second, plain)
        )
        assert found == expected
