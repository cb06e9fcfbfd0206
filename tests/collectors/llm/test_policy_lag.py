"""In one process, no token is older at its delivery than ``max_policy_lag`` versions."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from tests.collectors.llm.fakes import FakeEngine, FakeEnv, FakePolicy
from tests.collectors.llm.shares import answers, buffer, chats, turns
from tests.collectors.llm.test_groups import even, groups_of
from tests.collectors.llm.test_resume import copied

from rollwright.collectors.llm import LLMCollector
from rollwright.envs.llm import PolicyVersion

OPTIONS = {"groups": {"groups_per_batch": 2}, "conversations": {"trajs_per_batch": 4}}


class Uneven(FakeEngine):
    """Every fifth answer is twenty times as slow as the others."""

    calls = 0

    def step(self, tokens=1):
        self.calls += 1
        for key in list(self._open):
            request, text, written = self._open[key]
            if request.seed % 5 or self.calls % 20 == 0:
                written.append(self._version)
                if len(written) == len(text):
                    self._end(key)


def make(kind="groups", engine=Uneven, *, slots=32, prompts=30, repeats=2, **options):
    policy = FakePolicy()
    policy.engine = engine(longest=12)
    env = FakeEnv(slots, prompts=prompts, repeats=repeats)
    return LLMCollector(env, policy, **{"track_policy_version": True, **OPTIONS[kind], **options})


def update(collector, times=1):
    for _ in range(times):
        collector.update_policy_weights_(collector.policy.engine.version)


def age(collector, batch):
    assert (batch["oldest_policy_version"] <= batch["policy_version"]).all()
    assert int(min(row["tokens_policy_version"][0] for row in batch.unbind(0))) == int(
        batch["oldest_policy_version"].min()
    )
    return collector.policy.engine.version - int(batch["oldest_policy_version"].min())


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("async_envs", [None, False])
def test_a_batch_waits_for_what_would_be_too_old(kind, lag, async_envs):
    ages, found = [], []
    with make(kind, max_policy_lag=lag, async_envs=async_envs) as collector:
        for batch in collector:
            ages.append(age(collector, batch))
            found += groups_of(batch)
            update(collector)
        stats = collector.stats()
    assert max(ages) <= lag
    assert max(ages) == lag or async_envs is False
    assert stats["groups_filtered"] == {}
    assert sorted(found) == [(number, 0, repeat) for number in range(30) for repeat in range(2)]


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("policy_lag", ["wait", "drop"])
def test_what_is_too_old_is_counted_and_not_delivered(lag, policy_lag):
    ages, found = [], []
    with make(max_policy_lag=lag, policy_lag=policy_lag) as collector:
        for batch in collector:
            ages.append(age(collector, batch))
            found += groups_of(batch)
            update(collector, times=2 if policy_lag == "wait" else 1)
        stats = collector.stats()
    assert max(ages) <= lag
    too_old = stats["groups_filtered"].get(f"older than max_policy_lag={lag}", 0)
    assert len({name[0] for name in found}) + too_old + len(stats["conversations_unfinished"]) / 2 == 30
    assert lag == 0 or policy_lag == "drop" or too_old


def test_without_a_bound_some_are_older():
    with make() as collector:
        ages = []
        for batch in collector:
            ages.append(age(collector, batch))
            update(collector)
    assert max(ages) > 3


@pytest.mark.filterwarnings("ignore:.*ends without a batch")
def test_a_bound_goes_with_a_choice_of_groups_and_a_resume():
    ages, found, state = [], [], None
    while True:
        with make(max_policy_lag=1, keep_group=even) as collector:
            if state is not None:
                with warnings.catch_warnings(action="ignore"):
                    collector.load_state_dict(state)
            batch = collector.next()
            if batch is None:
                break
            ages.append(age(collector, batch))
            found += groups_of(batch)
            update(collector)
            state = copied(collector.state_dict())
    assert max(ages) <= 1
    assert len(found) == len(set(found))
    assert {name[0] for name in found} <= set(range(0, 30, 2))


def test_a_buffer_gets_nothing_that_is_too_old():
    storage = buffer()
    with make(max_policy_lag=1, replay_buffer=storage) as collector:
        written = 0
        for _ in collector:
            rows = storage[written:] if len(storage) > written else None
            if rows is not None:
                assert age(collector, rows) <= 1
                written = len(storage)
            update(collector)
    assert written == len(turns(storage[:]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups_per_batch": None, "dialog_turns_per_batch": 32}, "max_policy_lag=0: expected complete conversations"),
        ({"track_policy_version": PolicyVersion("uuid")}, "max_policy_lag=0: expected versions that are counted"),
    ],
)
def test_a_bound_that_cannot_be_met_is_an_error_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        make(max_policy_lag=0, **options)


def uneven():
    made = FakePolicy()
    made.engine = Uneven(longest=12)
    return made


@pytest.mark.parametrize("kind", OPTIONS)
def test_workers_drop_and_count_what_has_older_tokens(kind):
    options = {"num_collectors": 2, "max_policy_lag": 1, "policy_lag": "drop", "track_policy_version": True}
    ages, found = [], []
    env = partial(FakeEnv, 8, prompts=16, repeats=2)
    with LLMCollector(env, policy_factory=uneven, **options, **OPTIONS[kind]) as collector:
        for batch in collector:
            ages.append(collector.policy_version - int(batch["oldest_policy_version"].min()))
            found += groups_of(batch)
            collector.update_policy_weights_({"weight": torch.ones(1)})
        stats = collector.stats()
    too_old = stats["groups_filtered"]["older than max_policy_lag=1"]
    assert 0 <= min(ages) <= max(ages) == 1
    assert too_old
    assert len(found) == len(set(found))
    repeats = 2 if kind == "groups" else 1
    assert len(found) + repeats * too_old + len(stats["conversations_unfinished"]) == 32


def test_prompts_that_take_turns_need_room():
    env = FakeEnv(4, repeats=2)
    env.source.interleave = 4
    with pytest.raises(
        ValueError, match=r"at most 2 prompts that take turns, .* got 4: none would be complete in time"
    ):
        LLMCollector(env, FakePolicy(), groups_per_batch=2, max_policy_lag=0)


def test_a_bound_needs_an_engine():
    with pytest.raises(ValueError, match=r"max_policy_lag=1: expected conversations .* with an engine"):
        LLMCollector(lambda: chats(2, prompts=3, repeats=1), answers(0.0), trajs_per_batch=1, max_policy_lag=1)
