"""Groups and whole conversations: begun as slots get free, delivered in order of completion or of the data."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
from tests.collectors.llm.fakes import FakeEngine, FakeEnv, FakePolicy
from tests.collectors.llm.shares import buffer, kill_one, turns
from tests.collectors.llm.shares import make as make_shared
from tests.collectors.llm.test_failures import BAD
from tests.collectors.llm.test_failures import make as make_failing
from tests.collectors.llm.test_resume import copied

from rollwright.collectors.llm import LLMCollector
from rollwright.data.llm import rewards_differ

WHOLE = {"groups": {"groups_per_batch": 2}, "conversations": {"trajs_per_batch": 3}}


class Counting(FakeEngine):
    """Counts how often the model is called: each call writes a token of all answers in progress."""

    calls = 0

    def step(self, tokens=1):
        self.calls += 1
        super().step(tokens)


def policy():
    made = FakePolicy()
    made.engine = Counting(longest=16)
    return made


def make(kind="groups", *, workers=0, slots=8, prompts=24, repeats=4, of_env=None, **options):
    count = {"num_collectors": workers} if workers else {}
    env = partial(FakeEnv, slots, prompts=prompts, repeats=repeats, **(of_env or {}))
    return LLMCollector(env, policy_factory=policy, **{**WHOLE[kind], **count, **options})


def groups_of(batch):
    """Conversations in the order of a batch, each once."""
    return list(dict.fromkeys(name[:3] for name in turns(batch)))


@pytest.mark.parametrize("kind", WHOLE)
def test_conversations_begin_as_slots_get_free(kind):
    calls, found = {}, {}
    for async_envs in (None, True, False):
        with make(kind, async_envs=async_envs) as collector:
            found[async_envs] = sorted(name for batch in collector for name in turns(batch))
            calls[async_envs] = collector.policy.engine.calls
    assert found[None] == found[True] == found[False]
    assert calls[None] == calls[True]
    assert calls[None] < 0.75 * calls[False]


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("async_envs", [None, False])
@pytest.mark.parametrize("of_env", [{}, {"slow": True}])
def test_the_order_of_the_data_is_kept_where_it_is_asked_for(kind, async_envs, of_env):
    orders = {}
    for order in ("completion", "data"):
        with make(kind, delivery_order=order, async_envs=async_envs, of_env=of_env) as collector:
            orders[order] = [name for batch in collector for name in groups_of(batch)]
    assert orders["data"] == [(number, 0, repeat) for number in range(24) for repeat in range(4)]
    assert sorted(orders["completion"]) == orders["data"]
    assert async_envs is False or orders["completion"] != orders["data"]


@pytest.mark.parametrize("kind", WHOLE)
def test_the_order_of_the_data_is_kept_over_resumes(kind):
    found, state = [], None
    while True:
        with make(kind, delivery_order="data", prompts=12) as collector:
            if state is not None:
                collector.load_state_dict(state)
            batch = collector.next()
            if batch is None:
                break
            found += groups_of(batch)
            state = copied(collector.state_dict())
    assert found == [(number, 0, repeat) for number in range(12) for repeat in range(4)]


@pytest.mark.parametrize("kind", WHOLE)
def test_each_worker_keeps_the_order_of_its_part(kind):
    with make(kind, delivery_order="data", workers=2, prompts=12) as collector:
        found = [name for batch in collector for name in groups_of(batch)]
    for part in range(2):
        mine = [name for name in found if name[0] % 2 == part]
        assert mine == [(number, 0, repeat) for number in range(part, 12, 2) for repeat in range(4)]


def test_one_that_failed_leaves_its_place_to_the_next():
    with make_failing("groups", "reward", on_error="drop", delivery_order="data") as collector:
        found = [name for batch in collector for name in groups_of(batch)]
    assert found == [(number, 0, repeat) for number in range(9) for repeat in range(2) if number != BAD]


def test_an_order_needs_whole_conversations():
    with pytest.raises(ValueError, match="delivery_order='data': expected complete conversations, got turns"):
        LLMCollector(FakeEnv(1), FakePolicy(), dialog_turns_per_batch=1, delivery_order="data")


# Which groups are delivered -------------------------------------------------------------------------


def even(batch):
    """Keeps every other group, for a reason, whatever came of it."""
    return int(batch["prompt_index"][0]) % 2 == 0 or "odd prompt"


def long_enough(batch):
    return bool((batch["turn"] > 0).any())


@pytest.mark.parametrize(
    ("async_envs", "workers", "order"),
    [(None, 0, "completion"), (False, 0, "completion"), (None, 0, "data"), (None, 2, "completion")],
)
def test_groups_that_are_not_kept_are_counted_and_others_collected(async_envs, workers, order):
    with make(keep_group=even, async_envs=async_envs, workers=workers, delivery_order=order) as collector:
        batches = [groups_of(batch) for batch in collector]
        stats = collector.stats()
    assert [len(batch) for batch in batches] == [8] * 6
    found = [name for batch in batches for name in batch]
    assert sorted(found) == [(number, 0, repeat) for number in range(0, 24, 2) for repeat in range(4)]
    assert order == "completion" or found == sorted(found)
    assert stats["groups_filtered"] == {"odd prompt": 12}
    assert stats["conversations_unfinished"] == []


def test_a_function_without_a_reason_is_the_reason():
    with make(keep_group=long_enough, groups_per_batch=1, of_env={"most_turns": 2}) as collector:
        found = {name[0] for batch in collector for name in groups_of(batch)}
        assert collector.stats()["groups_filtered"] == {"long_enough": 24 - len(found)}
    assert 0 < len(found) < 24


def test_what_was_filtered_counts_as_consumed_after_a_resume():
    found, state, counts = [], None, []
    while True:
        with make(keep_group=even, prompts=16) as collector:
            if state is not None:
                collector.load_state_dict(state)
            batch = collector.next()
            counts.append(collector.stats()["groups_filtered"].get("odd prompt", 0))
            if batch is None:
                break
            found += groups_of(batch)
            state = copied(collector.state_dict())
    assert sorted(found) == [(number, 0, repeat) for number in range(0, 16, 2) for repeat in range(4)]
    assert counts == sorted(counts)
    assert counts[-1] == 8  # each once


@pytest.mark.parametrize("workers", [0, 2])
def test_collecting_in_vain_is_an_error_with_the_counts(workers):
    with (
        make(keep_group=lambda batch: "never", max_oversampling=3, workers=workers) as collector,
        pytest.raises(Exception, match=r"of 6 groups that were collected for a batch, 0 were kept.*'never': 6"),
    ):
        collector.next()


def test_a_decision_that_raises_loses_no_group():
    calls = iter(range(1000))

    def flaky(batch):
        if next(calls) % 3 == 1:
            raise OSError("no connection")
        return even(batch)

    found, errors = [], 0
    with make(keep_group=flaky) as collector:
        while True:
            try:
                batch = collector.next()
            except OSError:
                errors += 1
                continue
            if batch is None:
                break
            found += groups_of(batch)
        assert collector.stats()["groups_filtered"] == {"odd prompt": 12}
    assert errors
    assert sorted(found) == [(number, 0, repeat) for number in range(0, 24, 2) for repeat in range(4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 1}, "keep_group: expected groups of at least 2 conversations, got repeats=1. Pass repeats="),
        ({"max_oversampling": 0.5}, "max_oversampling: expected a number of at least 1, got 0.5"),
        ({"kind": "conversations"}, "keep_group: expected groups_per_batch=, .* got None"),
    ],
)
def test_groups_that_cannot_be_chosen_are_an_error_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        make(keep_group=even, **options)


def test_groups_of_equal_rewards_are_not_kept():
    def one_reward(batch):
        batch["next", "reward"]  # whole records are there
        return rewards_differ(batch)

    with make(keep_group=one_reward, slots=4, repeats=2) as collector:
        batches = list(collector)
        stats = collector.stats()
    equal = 0
    for batch in batches:
        totals = {}
        for row in batch.unbind(0):
            name = turns(row)[0][:3]
            totals[name] = totals.get(name, 0.0) + float(row["next", "reward"].sum())
        groups = {name[0] for name in totals}
        equal += sum(len({totals[name] for name in totals if name[0] == group}) == 1 for group in groups)
    assert not equal
    assert set(stats["groups_filtered"]) <= {"equal rewards"}


def p_value(one, other):
    """Of the two-sample test of Kolmogorov and Smirnov, asymptotic."""
    points = np.sort(np.concatenate([one, other]))
    of = [np.searchsorted(np.sort(each), points, side="right") / len(each) for each in (one, other)]
    size = np.sqrt(len(one) * len(other) / (len(one) + len(other)))
    distance = float(np.abs(of[0] - of[1]).max()) * size
    return min(1.0, 2 * sum((-1) ** (k - 1) * np.exp(-2 * (k * distance) ** 2) for k in range(1, 100)))


class Noting(FakeEngine):
    """Notes how long each answer will be that is asked for."""

    def submit(self, requests):
        super().submit(requests)
        self.lengths = [*getattr(self, "lengths", []), *(len(self._open[each.key][1]) for each in requests)]


@pytest.mark.parametrize("async_envs", [None, False])
def test_nobody_is_left_out_for_being_slow(async_envs):
    made = FakePolicy()
    made.engine = Noting(longest=31)
    env = FakeEnv(16, prompts=400, repeats=4, epochs=None, most_turns=1)
    with LLMCollector(env, made, groups_per_batch=4, keep_group=even, async_envs=async_envs) as collector:
        delivered = [len(row["tokens_response"]) for _ in range(25) for row in collector.next().unbind(0)]
    admitted = made.engine.lengths
    assert len(admitted) >= 2 * len(delivered)
    assert p_value(delivered, admitted) > 0.01
    fast = sorted(admitted)[: len(delivered)]
    assert p_value(fast, admitted) < 0.01  # the test sees it


# Groups of workers that are killed ------------------------------------------------------------------

SHARED = {"env": {"prompts": 24, "repeats": 3}, "groups_per_batch": 2, "keep_group": even}
KEPT = [(number, 0, repeat) for number in range(0, 24, 2) for repeat in range(3)]


@pytest.mark.filterwarnings("ignore:.*It is replaced", "ignore:.*ends without a batch")
@pytest.mark.parametrize("stored", [False, True])
def test_groups_of_killed_workers_are_delivered_or_counted_once(stored):
    draw, killed, found = random.Random(5), 0, []
    options = {"replay_buffer": buffer()} if stored else {}
    with make_shared(2, delay_s=0.002, **SHARED, **options) as collector:
        for batch in collector:
            found += [] if batch is None else groups_of(batch)
            if killed < 3:
                killed += kill_one(collector, draw)
        stats = collector.stats()
    if stored:
        found = groups_of(options["replay_buffer"][:])
    assert killed == 3
    assert sorted(found) == KEPT
    assert stats["groups_filtered"] == {"odd prompt": 12}
    assert stats["conversations_unfinished"] == []


@pytest.mark.filterwarnings("ignore:.*ends without a batch")
@pytest.mark.parametrize("counts", [(2, 2), (2, 3), (2, 1)])
def test_groups_are_delivered_or_counted_once_when_workers_go_on_from_a_state(counts):
    with make_shared(counts[0], **SHARED) as collector:
        found = [name for _ in range(2) for name in groups_of(collector.next())]
        state = copied(collector.state_dict())
    with make_shared(counts[1], **SHARED) as collector:
        collector.load_state_dict(state)
        found += [name for batch in collector for name in groups_of(batch)]
        stats = collector.stats()
    assert sorted(found) == KEPT
    assert stats["groups_filtered"] == {"odd prompt": 12}
    assert stats["conversations_unfinished"] == []
