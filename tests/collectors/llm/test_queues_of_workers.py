"""Turns of workers in a queue: the collector's process puts each once, whatever becomes of the workers."""

from __future__ import annotations

import collections
import queue
import random
import threading
import warnings

import pytest
from tests.collectors.llm.shares import KEYS, expected, kill_one, make, tally
from tests.collectors.llm.test_buffer_kills import wait_for
from tests.collectors.llm.test_resume import copied
from tests.variants import in_turn

MODES = {
    "turns": {"dialog_turns_per_batch": 10},
    "stream": {"dialog_turns_per_batch": 6, "async_envs": True},
    "conversations": {"trajs_per_batch": 3, "dialog_turns_per_batch": 10},
    "groups": {"groups_per_batch": 2, "async_envs": True},
}


def taken(items):
    """Names of the turns that are in the queue; they are taken out."""
    found = collections.Counter()
    while not items.empty():
        row = items.get()
        assert row.batch_size == ()
        found[tuple(int(row[key]) for key in KEYS)] += 1
    return found


@pytest.mark.parametrize(("mode", "sync"), in_turn(MODES, (False, True)))
def test_each_turn_is_put_once_though_workers_are_killed(mode, sync):
    items, draw, killed = queue.Queue(), random.Random(3), 0
    env = {"prompts": 24}  # whole batches of each mode in one process
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*It is replaced", RuntimeWarning)
        with make(env=env, queue=items, sync=sync, **MODES[mode]) as collector:
            for batch in collector:
                assert batch is None
                if killed < 3 and items.qsize() > 10 * (1 + killed):
                    killed += kill_one(collector, draw)
            assert collector.completed
            assert collector.stats()["write_count"] == items.qsize()
    wanted = expected(env=env, **MODES[mode])
    found = taken(items)
    assert killed == 3
    assert found == wanted, tally(found, wanted)


def test_a_thread_fills_a_queue_that_is_full_most_of_the_time():
    items, found = queue.Queue(maxsize=2), collections.Counter()
    with make(env={"prompts": 6}, queue=items, trajs_per_batch=1) as collector:
        collector.start()
        wait_for(lambda: "room in the queue" in str(collector.stats()["waiting_for"]), collector)
        assert not collector.completed
        while not (collector.completed and items.empty()):
            found += taken(items)
    wanted = expected(env={"prompts": 6}, trajs_per_batch=1)
    assert found == wanted, tally(found, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_a_saved_state_has_what_was_not_put(mode):
    items, found = queue.Queue(maxsize=5), collections.Counter()
    with make(env={"prompts": 6}, queue=items, **MODES[mode]) as first:
        first.start()
        wait_for(lambda: "room in the queue" in str(first.stats()["waiting_for"]), first)
        state = copied(first.state_dict())
    found += taken(items)  # it was full all the time
    assert sum(found.values()) == 5
    found_later = queue.Queue()
    with make(env={"prompts": 6}, queue=found_later, **MODES[mode]) as second:
        second.load_state_dict(state)
        list(second)
    found += taken(found_later)
    wanted = expected(env={"prompts": 6}, **MODES[mode])
    assert found == wanted, tally(found, wanted)


def test_shutdown_ends_the_wait_for_a_full_queue():
    with make(env={"epochs": None}, queue=queue.Queue(maxsize=1), dialog_turns_per_batch=5) as collector:
        collector.start()
        wait_for(lambda: "room in the queue" in str(collector.stats()["waiting_for"]), collector)
        collector.async_shutdown(timeout=10)
        assert "rollwright-schedule" not in [thread.name for thread in threading.enumerate()]
