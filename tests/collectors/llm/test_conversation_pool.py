"""Pools of environments of conversations: the place in the data follows delivery, and what is in progress is saved."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
import warnings
from functools import partial

import pytest
from tests.collectors.llm.shares import Talks, delivered_under_kills, expected, tally
from tests.collectors.llm.test_resume import copied
from tests.variants import in_turn

from rollwright.collectors.llm import LLMCollector
from rollwright.data import RaggedStorage, ReplayBuffer
from rollwright.envs import AsyncEnvPool, StepCounter, TransformedEnv
from rollwright.envs.llm import ChatEnv

PROMPTS = 4
MODES = {
    "turns": {"dialog_turns_per_batch": 5},
    "conversations": {"trajs_per_batch": 2},
    "groups": {"groups_per_batch": 1},
    "last": {"yield_only_last_steps": True},
}


class Unsaved(Talks):
    state_dict = None


class Failing(Talks):
    """Raises at some calls of all of its kind."""

    calls = itertools.count(1)

    def reply(self, messages):
        if next(Failing.calls) in (5, 11, 20):
            raise OSError("no connection")
        return super().reply(messages)


def chat(number, *, prompts=PROMPTS, repeats=2, environment=Talks, transformed=False):
    """The environment of one row of a pool, with data of its own."""
    rows = [{"text": f"{number}:{'x' * (1 + each)}", "turns": each * 7 % 4} for each in range(prompts)]
    env = ChatEnv.from_dataloader(
        rows, input_mode="text", environment=environment, repeats=repeats, epochs=1, batch_size=1
    )
    return TransformedEnv(env, StepCounter()) if transformed else env


def answer(td):
    td["text", "response"] = [f"{len(prompt)} letters" for prompt in td["text", "prompt"]]
    return td


def make(mode="turns", *, slots=3, backend="threading", policy=answer, **options):
    kinds = {
        name: options.pop(name) for name in ("prompts", "repeats", "environment", "transformed") if name in options
    }
    pool = AsyncEnvPool([partial(chat, number, **kinds) for number in range(slots)], backend=backend, stack="lazy")
    return LLMCollector(pool, policy, **MODES[mode], **options)


KEYS = ("prompt_index", "epoch", "repeat", "turn")


def names(batch, slots=3):
    """Environment, prompt, epoch, repeat and turn of each record."""
    found = []
    for row in batch.reshape(-1).unbind(0):
        index = int(row["group_id"]) % slots
        assert row["text", "prompt"].startswith(f"{index}:")
        assert row["text", "response"] == f"{len(row['text', 'prompt'])} letters"
        found.append((index, *(int(row[key]) for key in KEYS)))
    return found


def every(mode="turns", slots=3, prompts=PROMPTS, repeats=2):
    last = mode == "last"
    return sorted(
        (index, prompt, 0, repeat, turn)
        for index in range(slots)
        for prompt in range(prompts)
        for repeat in range(repeats)
        for turn in range(prompt * 7 % 4 if last else 0, 1 + prompt * 7 % 4)
    )


@pytest.mark.parametrize(("mode", "backend"), [*((mode, "threading") for mode in MODES), ("groups", "multiprocessing")])
def test_each_turn_comes_once_to_the_end_of_the_data(mode, backend):
    with make(mode, backend=backend) as collector:
        assert "by themselves" in collector.stats()["paths"]["env"]
        found = [name for batch in collector for name in names(batch)]
        stats = collector.stats()
    assert sorted(found) == every(mode)
    assert stats["completed"]
    assert stats["conversations_unfinished"] == []


@pytest.mark.parametrize(("mode", "transformed"), [*((mode, False) for mode in MODES), ("turns", True)])
def test_nothing_is_skipped_and_nothing_comes_twice_after_restores(mode, transformed):
    collector, found = make(mode, transformed=transformed), []
    while (batch := collector.next()) is not None:
        found += names(batch)
        if mode == "groups":
            assert [int(row["repeat"]) for row in batch.unbind(0) if not int(row["turn"])] == [0, 1]
        state = copied(collector.state_dict())
        assert not state["unsaved"]
        collector.shutdown()
        collector = make(mode, transformed=transformed)
        collector.load_state_dict(state)
    collector.shutdown()
    assert sorted(found) == every(mode)


def test_pools_of_processes_are_saved():
    with make(backend="multiprocessing") as collector:
        found = [name for _ in range(4) for name in names(collector.next())]
        state = copied(collector.state_dict())
        found_here = [name for batch in collector for name in names(batch)]
    assert sorted(found + found_here) == every()
    with make(backend="multiprocessing") as collector:
        collector.load_state_dict(state)
        found += [name for batch in collector for name in names(batch)]
    assert sorted(found) == every()


@pytest.mark.parametrize("mode", ["conversations", "groups"])
def test_conversations_that_cannot_be_saved_begin_again(mode):
    collector, found = make(mode, environment=Unsaved), []
    while (batch := collector.next()) is not None:
        found += names(batch)
        with warnings.catch_warnings(action="ignore"):
            state = copied(collector.state_dict())
        assert all("begins again" in line for line in state["unsaved"])
        collector.shutdown()
        collector = make(mode, environment=Unsaved)
        collector.load_state_dict(state)
    collector.shutdown()
    assert sorted(found) == every(mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_restore_into_a_collector_that_has_stepped(mode):
    with make(mode) as first, make(mode) as second:
        found = [name for _ in range(2) for name in names(first.next())]
        used = {int(number) for _ in range(3) for number in second.next()["collector", "traj_ids"]}
        second.load_state_dict(copied(first.state_dict()))
        batches = list(second)
        found += [name for batch in batches for name in names(batch)]
        assert not used & {int(number) for batch in batches for number in batch["collector", "traj_ids"]}
    assert sorted(found) == every(mode)


@pytest.mark.parametrize(("mode", "stored"), in_turn(MODES, (False, True)))
def test_a_postproc_that_raises(mode, stored):
    calls = []

    def fails(batch):
        calls.append(len(batch))
        if len(calls) in (1, 4, 5):
            raise OSError("no connection")
        return batch

    options = {"replay_buffer": ReplayBuffer(storage=RaggedStorage(500))} if stored else {}
    found, failed = [], 0
    with make(mode, postproc=fails, **options) as collector:
        while not collector.completed or collector.stats().get("trajectories_held"):
            try:
                batch = collector.next()
            except OSError:
                failed += 1
                continue
            if batch is not None:
                found += names(batch)
    if stored:
        found = names(options["replay_buffer"][:])
    assert failed == 3
    assert sorted(found) == every(mode)


@pytest.mark.parametrize("mode", ["conversations", "groups"])
def test_an_environment_that_raises_begins_its_conversation_again(mode):
    Failing.calls = itertools.count(1)
    found, failed = [], 0
    with make(mode, environment=Failing) as collector:
        while True:
            try:
                batch = collector.next()
            except Exception as error:
                if "no connection" not in str(error):
                    raise
                failed += 1
                continue
            if batch is None:
                break
            found += names(batch)
    assert failed  # several environments may fail at once
    assert sorted(found) == every(mode)


def test_a_policy_that_raises():
    calls = []

    def fails(td):
        calls.append(len(td))
        if len(calls) in (3, 8):
            raise OSError("no connection")
        return answer(td)

    found, failed = [], 0
    with make(policy=fails) as collector:
        while True:
            try:
                batch = collector.next()
            except OSError:
                failed += 1
                continue
            if batch is None:
                break
            found += names(batch)
    assert failed == 2
    assert sorted(found) == every()


def test_reset_drops_what_is_in_progress_and_counts_it():
    with make(slots=2) as collector:
        found = names(collector.next(), 2)
        collector.reset()
        dropped = collector.stats()["conversations_dropped"]
        state = copied(collector.state_dict())
        left = [name for batch in collector for name in names(batch, 2)]
    assert dropped
    assert len(set(found + left)) == len(found + left) < len(every(slots=2))
    with make(slots=2) as again:
        again.load_state_dict(state)
        assert sorted(name for batch in again for name in names(batch, 2)) == sorted(left)


def test_each_batch_may_begin_with_a_reset():
    with make(reset_at_each_iter=True) as collector:
        found = [name for batch in collector for name in names(batch)]
        assert collector.completed
    assert len(found) == len(set(found))
    assert {name[:4] for name in found} <= {name[:4] for name in every()}


class Waiting(Talks):
    """The first one replies when another one has."""

    gate = threading.Event()

    def __init__(self, row):
        super().__init__(row)
        self.waits = row["text"] == "0:xx"

    def reply(self, messages):
        if self.waits:
            assert Waiting.gate.wait(30)
        return super().reply(messages)


def test_a_seed_begins_the_data_again_while_a_step_is_in_progress():
    Waiting.gate.clear()
    with make(environment=Waiting) as collector:
        while not any(name[:2] == (1, 2) for name in names(collector.next())):
            pass
        assert collector.stats()["environments_busy"]
        threading.Timer(0.05, Waiting.gate.set).start()
        collector.set_seed(3)
        assert sorted(name for batch in collector for name in names(batch)) == every()


def test_the_state_of_another_pool_is_refused():
    with make(slots=2) as first, make(slots=3) as second:
        first.next()
        with pytest.raises(ValueError, match="expected that of a pool of 3 environments, got one of 2"):
            second.load_state_dict(copied(first.state_dict()))


@pytest.mark.parametrize(("mode", "where"), in_turn(["turns", "groups"], ("yielded", "stored")))
def test_replaced_workers_go_on_behind_what_was_delivered(mode, where):
    options = {**MODES[mode], "env": {"prompts": 24, "repeats": 2, "slots": 3}, "plain": "pool"}
    wanted = expected(**options)
    found, killed = delivered_under_kills(3, 2, stored=where == "stored", every=0.3, **options)
    assert killed == 3
    assert found == wanted, tally(found, wanted)


class Waits(Talks):
    """Waits in its first reply until there is a file."""

    def __init__(self, row):
        super().__init__(row)
        self.gate = row["gate"]

    def reply(self, messages):
        if self.gate:
            while not os.path.exists(self.gate):
                time.sleep(5e-3)
            self.gate = None
        return super().reply(messages)


def waiting_chat(number, gate):
    rows = [{"text": f"{number}:{'x' * (1 + each)}", "turns": 2, "gate": None} for each in range(6)]
    rows[0]["gate"] = gate if number == 0 else None
    return ChatEnv.from_dataloader(rows, input_mode="text", environment=Waits, epochs=1, batch_size=1)


def waiting_pool(gate):
    return AsyncEnvPool([partial(waiting_chat, number, gate) for number in range(3)], backend="threading", stack="lazy")


@pytest.mark.filterwarnings("ignore:.*It is replaced")
@pytest.mark.parametrize("mode", ["turns", "conversations"])
@pytest.mark.parametrize("killed", [False, True])
def test_batches_of_a_worker_that_may_be_replaced_wait_for_no_step(mode, killed, tmp_path):
    gate = tmp_path / "gate"
    options = {"dialog_turns_per_batch": 4} if mode == "turns" else {"trajs_per_batch": 1}
    options |= {"on_worker_failure": "restart", "restart_delay": 0.0, "num_collectors": 1}
    with LLMCollector(partial(waiting_pool, str(gate)), policy_factory=lambda: answer, **options) as collector:
        found = [name for _ in range(6) for name in names(collector.next())]
        assert {name[0] for name in found} == {1, 2}
        if killed:
            os.kill(collector.stats()["workers"][0]["pid"], signal.SIGKILL)
            found += names(collector.next())
        gate.touch()
        found += [name for batch in collector for name in names(batch)]
    assert sorted(found) == [
        (index, prompt, 0, 0, turn) for index in range(3) for prompt in range(6) for turn in range(3)
    ]
