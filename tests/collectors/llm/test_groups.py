"""Groups and whole conversations: begun as slots get free, delivered in order of completion or of the data."""

from __future__ import annotations

from functools import partial

import pytest
from tests.collectors.llm.fakes import FakeEngine, FakeEnv, FakePolicy
from tests.collectors.llm.shares import turns
from tests.collectors.llm.test_failures import BAD
from tests.collectors.llm.test_failures import make as make_failing
from tests.collectors.llm.test_resume import copied

from rollwright.collectors.llm import LLMCollector

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
