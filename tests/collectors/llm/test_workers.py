"""Dialogues from several processes: the same conversations, shared out by groups."""

from __future__ import annotations

import os
import threading
import time
from functools import partial

import psutil
import pytest
import torch
from tests.collectors.llm.fakes import FakeEnv, FakePolicy
from tests.collectors.workers.processes import wait_until
from tests.patience import patient

from rollwright.collectors.llm import LLMCollector
from rollwright.envs import AsyncEnvPool
from rollwright.envs.llm import ChatEnv, FunctionTool, LLMEnv, PythonInterpreter, Reward, Toolset
from rollwright.errors import EnvError, WorkerError


def tokens_of(collector, seed=None):
    """Tokens of each turn by where they come from; each comes once."""
    found = {}
    with collector:
        if seed is not None:
            collector.set_seed(seed)
        for batch in collector:
            for row in batch.reshape(-1).unbind(0):
                if row["collector", "traj_ids"] >= 0:
                    name = tuple(int(row[key]) for key in ("prompt_index", "epoch", "repeat", "turn"))
                    assert name not in found
                    found[name] = row["tokens"].tolist()
    return found


@pytest.mark.parametrize("options", [{"dialog_turns_per_batch": 4}, {"groups_per_batch": 1}, {"trajs_per_batch": 1}])
def test_two_workers_deliver_the_conversations_of_one_process(options):
    env = partial(FakeEnv, 4, prompts=12, repeats=2)
    expected = tokens_of(LLMCollector(env, policy_factory=FakePolicy, **options), seed=5)
    found = tokens_of(LLMCollector(env, policy_factory=FakePolicy, num_collectors=2, **options), seed=5)
    assert len({name[0] for name in expected}) == 12
    assert found == expected


def test_a_stream_of_two_workers_with_a_count():
    env = partial(FakeEnv, 2, epochs=None)
    options = {"dialog_turns_per_batch": 6, "total_dialog_turns": 36, "async_envs": True}
    with LLMCollector(create_env_fn=[env] * 2, policy_factory=FakePolicy, num_collectors=2, **options) as collector:
        batches = list(collector)
        assert [tuple(batch.batch_size) for batch in batches] == [(6,)] * 6
        groups = [set(batch["group_id"].tolist()) for batch in batches]
        assert all(len({group % 2 for group in each}) == 1 for each in groups)
        assert collector.dialog_turns_per_batch == 6
        assert collector.stats()["workers_alive"] == 2


def test_an_engine_is_not_sent_to_a_worker():
    with pytest.raises(TypeError, match="policy_factory="):
        LLMCollector(partial(FakeEnv, 2), policy=FakePolicy(), dialog_turns_per_batch=2, num_collectors=2)


def test_a_restored_collector_goes_on_where_the_data_was():
    make = partial(
        LLMCollector,
        partial(FakeEnv, 3, prompts=20, repeats=2),
        policy_factory=FakePolicy,
        groups_per_batch=1,
        num_collectors=2,
    )
    groups = []
    with make() as first:
        groups += [int(first.next()["group_id"][0]) for _ in range(5)]
        state = first.state_dict()
    with make() as second:
        second.load_state_dict(state)
        groups += [int(batch["group_id"][0]) for batch in second]
    assert sorted(groups) == list(range(20))


@pytest.mark.parametrize("async_envs", [False, True])
def test_conversations_of_all_workers_are_counted_and_named(async_envs):
    env = partial(FakeEnv, 3, prompts=12, repeats=2)
    options = {"dialog_turns_per_batch": 6, "async_envs": async_envs, "num_collectors": 2}
    with LLMCollector(env, policy_factory=FakePolicy, **options) as collector:
        seen = []
        for _ in collector:
            stats = collector.stats()
            names, open_ = stats["conversations_unfinished"], stats["conversations_in_progress"]
            assert len(names) == len(set(names)) >= open_ >= 0
            seen.append(open_)
        stats = collector.stats()
    assert max(seen) > 3  # more than one worker has environments
    assert stats["conversations_in_progress"] == stats["conversations_dropped"] == 0
    assert stats["conversations_undelivered"] == stats["turns_ahead"] == 0
    assert stats["conversations_unfinished"] == []


def test_conversations_that_a_worker_drops_are_counted():
    env = partial(FakeEnv, 4, prompts=40)
    options = {"dialog_turns_per_batch": 8, "reset_at_each_iter": True, "num_collectors": 2}
    with LLMCollector(env, policy_factory=FakePolicy, **options) as collector:
        list(collector)
        assert collector.stats()["conversations_dropped"] > 0


# What never returns ----------------------------------------------------------------------------------------------


def never(completions, **columns):
    threading.Event().wait()


class NeverReplies:
    def __init__(self, row):
        pass

    def reply(self, messages):
        threading.Event().wait()


ROWS = [{"tokens": torch.tensor([1 + number]), "text": "?"} for number in range(8)]


class Answering:
    """A policy without an engine."""

    def __init__(self, text=None):
        self.text = text

    def __call__(self, td):
        if self.text is not None:
            td["text", "response"] = [self.text] * len(td)
            return td
        for row in td.unbind(0):
            row["tokens_response"] = torch.tensor([1])
        return td


def rewarded(**limits):
    return LLMEnv.from_dataloader(ROWS, from_text=False, batch_size=2, reward_functions=Reward(never, **limits))


def replied():
    return ChatEnv.from_dataloader(
        ROWS, input_mode="tokens", batch_size=2, environment=NeverReplies, reply_timeout_s=0.2
    )


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            partial(rewarded, timeout_s=0.2),
            r"prompt [01] .*'never' took longer than 0.2 seconds.*Reward\(..., timeout_s=\)",
        ),
        (replied, r"prompt [01] .*took longer than 0.2 seconds.*reply_timeout_s="),
    ],
    ids=["reward", "reply"],
)
def test_what_never_returns_in_a_worker_is_an_error_with_conversation_limit_and_argument(env, message):
    began = time.monotonic()
    with (
        pytest.raises(EnvError, match=message) as caught,
        LLMCollector(
            env, policy_factory=FakePolicy, dialog_turns_per_batch=2, num_collectors=1, shutdown_timeout=0.5
        ) as collector,
    ):
        collector.next()
    assert isinstance(caught.value, WorkerError)
    assert collector.stats()["workers_alive"] == 0
    assert time.monotonic() - began < patient(20)


def forever() -> str:
    """Never returns."""
    threading.Event().wait()


TOOLS = {
    "function": ('{"name": "forever", "arguments": {}}', partial(FunctionTool, forever, timeout_s=0.3)),
    "interpreter": (
        '{"name": "python", "arguments": {"code": "import time\\nwhile True: time.sleep(1)"}}',
        partial(PythonInterpreter, timeout_s=0.3),
    ),
}


def with_tool(kind, on_error):
    tools = Toolset([TOOLS[kind][1]()], parser="json", max_rounds=2, on_error=on_error)
    return ChatEnv.from_dataloader(["one", "two", "three", "four"], input_mode="text", batch_size=2, tools=tools)


def lives(pid, created):
    try:
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def descendants(pid):
    return {(each.pid, each.create_time()) for each in psutil.Process(pid).children(recursive=True)}


@pytest.mark.parametrize("kind", TOOLS)
@pytest.mark.parametrize("on_error", ["raise", "message"])
def test_a_tool_that_never_returns_in_a_worker_ends_with_its_limit(kind, on_error):
    before, began = descendants(os.getpid()), time.monotonic()
    options = {"policy_factory": partial(Answering, TOOLS[kind][0]), "num_collectors": 1, "shutdown_timeout": 0.5}
    with LLMCollector(partial(with_tool, kind, on_error), dialog_turns_per_batch=2, **options) as collector:
        if on_error == "raise":
            with pytest.raises(EnvError, match=r"prompt [01] .*turn 0: the tool .* took longer than 0.3 seconds"):
                collector.next()
        else:
            for row in collector.next().reshape(-1).unbind(0):
                assert "took longer than 0.3 seconds" in row["next", "text", "prompt"]
        left = descendants(collector.stats()["workers"][0]["pid"]) if collector.stats()["workers_alive"] else set()
    assert time.monotonic() - began < patient(20)
    assert wait_until(lambda: not any(lives(*each) for each in left)), left
    assert len(descendants(os.getpid()) - before) <= 2  # the server that forks workers, and its helper


@pytest.mark.filterwarnings("ignore:.*left behind")
def test_a_pool_whose_step_outlasts_its_limit_names_conversation_and_turn(request):
    over = threading.Event()
    request.addfinalizer(over.set)

    class Once:
        def __init__(self, row):
            self.turns = 0

        def reply(self, messages):
            self.turns += 1
            if self.turns == 2:
                over.wait()
            return "more", 0.0, False

    def make():
        return ChatEnv.from_dataloader(["one"], input_mode="text", environment=Once, reply_timeout_s=100.0)

    pool = AsyncEnvPool([make, make], backend="threading", env_step_timeout=0.5)
    named = r"conversation of prompt 0 \(epoch 0, repeat 0\), turn 1.*did not come back"
    with LLMCollector(pool, policy=Answering("?"), dialog_turns_per_batch=4) as collector:
        with pytest.raises(EnvError, match=named):
            list(collector)
        over.set()  # so that its threads end


@pytest.mark.parametrize("plain", [False, True])
def test_a_worker_whose_step_outlasts_its_limit_is_terminated(plain):
    with (
        LLMCollector(
            partial(rewarded, timeout_s=1000.0),
            policy_factory=Answering if plain else FakePolicy,
            dialog_turns_per_batch=2,
            num_collectors=1,
            env_step_timeout=0.5,
        ) as collector,
        pytest.raises(
            WorkerError,
            match=r"worker 0 has taken longer than env_step_timeout=0.5 s .*waits for what follows the answer in the "
            r"conversation of prompt 0 \(epoch 0, repeat 0\), turn 0, and 1 more",
        ),
    ):
        collector.next()
    assert collector.stats()["workers_alive"] == 0


def test_conversations_that_make_no_batch_at_the_end_are_counted_and_named():
    env = partial(FakeEnv, 2, prompts=5)
    with LLMCollector(env, policy_factory=FakePolicy, num_collectors=2, trajs_per_batch=3) as collector:
        delivered = {int(index) for batch in collector for index in batch["prompt_index"]}
        stats = collector.stats()
    left = set(range(5)) - delivered
    assert (len(delivered), stats["conversations_undelivered"], stats["trajectories_held"]) == (3, 2, 2)
    assert set(stats["conversations_unfinished"]) == {f"prompt {index} (epoch 0, repeat 0)" for index in left}
    assert collector.stats()["conversations_unfinished"] == stats["conversations_unfinished"]  # after shutdown, too


def test_counts_of_conversations_are_there_before_the_first_rollout():
    make = partial(LLMCollector, partial(FakeEnv, 4, prompts=9, repeats=3), policy_factory=FakePolicy, num_collectors=2)
    with make(groups_per_batch=4) as first:
        before = first.stats()
        assert [len(batch["group_id"].unique()) for batch in first] == [4, 4]
        state, over = first.state_dict(), first.stats()
    counts = ("conversations_in_progress", "conversations_dropped", "conversations_undelivered")
    assert [before[name] for name in counts] == [0, 0, 0]
    assert before["conversations_failed"] == before["groups_filtered"] == {}
    with make(groups_per_batch=4) as second:
        second.load_state_dict(state)
        restored = second.stats()
    for found in (over, restored):  # a group that makes no batch
        assert found["conversations_undelivered"] == len(found["conversations_unfinished"]) == 3
