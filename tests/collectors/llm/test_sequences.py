"""deliver="sequences": whole conversations as training sequences; leave_out: records without some entries."""

from __future__ import annotations

import queue

import pytest
from tests.collectors.llm.fakes import FakeEnv, FakePolicy

from rollwright.collectors.llm import LLMCollector
from rollwright.data import RaggedStorage, ReplayBuffer
from rollwright.data.llm import training_sequences
from rollwright.data.llm.records import RecordLayout

GROUPS, REPEATS = 6, 2


def env():
    return FakeEnv(REPEATS, prompts=GROUPS, repeats=REPEATS)


def policy():
    return FakePolicy()


def named(sequences):
    """Sequences by group and repeat, as plain data."""
    return {
        (int(one["group_id"]), int(one["repeat"])): {
            key: one[key].tolist()
            for key in ("tokens", "assistant_mask", "log_probs", "policy_version", "turn", "reward", "sequence")
        }
        for one in sequences
    }


@pytest.fixture(scope="module")
def expected():
    with LLMCollector(env(), policy(), trajs_per_batch=1) as collector:
        found = named(sequence for batch in collector for sequence in training_sequences(batch))
    assert len(found) == GROUPS * REPEATS
    return found


@pytest.mark.parametrize("async_envs", [False, True])
@pytest.mark.parametrize("how", [{"trajs_per_batch": 3}, {"groups_per_batch": 2}])
def test_batches_of_sequences(expected, how, async_envs):
    with LLMCollector(env(), policy(), deliver="sequences", async_envs=async_envs, **how) as collector:
        batches = list(collector)
    assert [tuple(batch.batch_size) for batch in batches] == [(3,)] * 4 if "trajs_per_batch" in how else [(4,)] * 3
    assert named(one for batch in batches for one in batch.unbind(0)) == expected


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize("into", ["batches", "buffer", "queue"])
def test_the_same_sequences_wherever_they_go(expected, workers, into):
    buffer, items = ReplayBuffer(storage=RaggedStorage(100), shared=workers is not None), queue.Queue()
    where = {"buffer": {"replay_buffer": buffer}, "queue": {"queue": items}}.get(into, {})
    more = {} if workers is None else {"num_collectors": workers}
    make = {"policy_factory": policy} if workers else {"policy": policy()}
    given = env if workers else env()
    with LLMCollector(given, groups_per_batch=1, deliver="sequences", **make, **where, **more) as collector:
        found = [one for batch in collector if batch is not None for one in batch.unbind(0)]
    if into == "buffer":
        found = list(buffer[:].unbind(0))
    elif into == "queue":
        found = [items.get_nowait() for _ in range(items.qsize())]
    assert len(found) == GROUPS * REPEATS
    assert named(found) == expected


def test_postproc_gets_sequences_also_when_it_is_replaced(expected):
    seen = []

    def note(batch):
        seen.append(batch.batch_size[0])
        return batch

    with LLMCollector(env(), policy(), trajs_per_batch=3, deliver="sequences", postproc=note) as collector:
        first = collector.next()
        collector.set_postproc(lambda batch: batch[:1])
        second = collector.next()
    assert (seen, len(first), len(second)) == ([3], 3, 1)
    assert "assistant_mask" in second


@pytest.mark.parametrize("workers", [None, 2])
def test_a_resumed_run_delivers_each_sequence_once(expected, workers):
    more = {} if workers is None else {"num_collectors": workers}
    make = {"policy_factory": policy} if workers else {"policy": policy()}

    def collecting():
        return LLMCollector(env if workers else env(), trajs_per_batch=2, deliver="sequences", **make, **more)

    with collecting() as collector:
        found = [one for _ in range(2) for one in collector.next().unbind(0)]
        state = collector.state_dict()
    with collecting() as collector:
        collector.load_state_dict(state)
        found += [one for batch in collector for one in batch.unbind(0)]
    assert len(found) == GROUPS * REPEATS
    assert named(found) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dialog_turns_per_batch": 4}, "deliver='sequences': expected complete conversations, got turns of any"),
        ({"yield_only_last_steps": True}, "yield_only_last_steps=True delivers turns"),
        ({"trajs_per_batch": 1, "flatten_data": False}, "flatten_data=False delivers turns"),
        ({"trajs_per_batch": 1, "deliver": "tokens"}, "deliver: expected"),
    ],
)
def test_what_contradicts_it_is_refused_at_construction(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        LLMCollector(env(), policy(), **{"deliver": "sequences", **options})


# Entries that records do not have --------------------------------------------------------------------


def nested():
    made = env()
    made.layout = RecordLayout(nested=True, history=True)
    return made


@pytest.mark.parametrize("workers", [None, 2])
def test_entries_that_are_left_out(workers):
    left = ["text", "seconds", "log_prob_mode", ("log_probs", "full"), ("next", "tokens")]
    more = {"policy": policy()} if workers is None else {"policy_factory": policy, "num_collectors": workers}
    given = nested if workers else nested()
    with LLMCollector(given, dialog_turns_per_batch=4, leave_out=left, **more) as collector:
        batch = collector.next()
    keys = set(batch.keys(True))
    assert not {"text", "seconds", "log_prob_mode", ("log_probs", "full"), ("next", "tokens")} & keys
    assert {("log_probs", "response"), ("next", "history"), ("tokens", "full"), ("next", "text"), "turn"} <= keys


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["texts"], "leave_out: 'texts' is no entry of a record"),
        (["group_id"], "leave_out: 'group_id' is no entry.*told apart"),
        ([("next", "reward")], "leave_out: .'next', 'reward'. is no entry"),
        ("text", "leave_out: expected a list of keys, got str"),
    ],
)
def test_entries_that_cannot_be_left_out(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        LLMCollector(env(), policy(), dialog_turns_per_batch=4, leave_out=given)


def test_where_tensordicts_are_passed_nothing_is_left_out():
    class Plain:
        def __call__(self, td):
            return td

    with pytest.raises(ValueError, match="leave_out: expected an environment and a policy that pass turns"):
        LLMCollector(env(), Plain(), dialog_turns_per_batch=4, leave_out=["text"])
