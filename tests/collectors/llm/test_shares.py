"""Workers that are killed and replaced go on with their share of the data: no turn is skipped, none comes twice."""

from __future__ import annotations

import collections
import os
import pickle
import signal
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tests.collectors.llm.shares import buffer, delivered_under_kills, expected, make, tally, turns
from tests.collectors.llm.test_resume import copied
from tests.variants import in_turn

from rollwright._memory import Segment
from rollwright.collectors.options import CollectorOptions
from rollwright.collectors.workers.counters import DeliveredPosition, Publications, WorkerCounters

MODES = {
    "turns": {"dialog_turns_per_batch": 10},
    "stream": {"dialog_turns_per_batch": 6, "async_envs": True},
    "conversations": {"trajs_per_batch": 2},
    "groups": {"groups_per_batch": 1, "async_envs": True},
}


# Native ones and plain ones, each yielded or stored; where both are, not the same.
KILLED = [*MODES, "groups plain", "turns plain", "conversations plain"]


@pytest.mark.parametrize(("kind", "where"), in_turn(KILLED, ("yielded", "stored")))
def test_replaced_workers_go_on_behind_what_was_delivered(kind, where):
    (mode, *plain), stored = kind.split(), where == "stored"
    plain = bool(plain)
    options = {name: value for name, value in MODES[mode].items() if name != "async_envs" or not plain}
    options |= {"plain": plain, "env": {"prompts": 24, "repeats": 3}}
    wanted = expected(**options)
    found, killed = delivered_under_kills(3, 1, stored=stored, every=0.25, **options)
    assert killed == 3
    assert found == wanted, tally(found, wanted)


@pytest.mark.parametrize("options", [*MODES.values(), {"dialog_turns_per_batch": 20, "cat_results": 0}], ids=str)
@pytest.mark.timeout(60)
def test_workers_in_step_end_one_by_one_with_their_data(options):
    env = {"prompts": 5}  # three prompts for one worker, and two for the other
    found, sizes = collections.Counter(), []
    with make(env=env, sync=True, **options) as collector:
        for batch in collector:
            found.update(turns(batch))
            sizes.append(tuple(batch.batch_size))
        assert collector.completed
    wanted = expected(env=env, **{name: value for name, value in options.items() if name != "cat_results"})
    assert found == wanted, tally(found, wanted)
    assert min(min(size) for size in sizes) > 0


@pytest.mark.filterwarnings("ignore:.*delivers whole batches")
@pytest.mark.parametrize(("mode", "numbers"), in_turn(MODES, ((2, 3), (3, 2))))
def test_another_number_of_workers_goes_on_from_a_saved_state(mode, numbers):
    before, after = numbers
    found = collections.Counter()
    with make(before, env={"prompts": 14}, **MODES[mode]) as first:
        for _ in range(6):
            found.update(turns(first.next()))
        state = copied(first.state_dict())
    with make(after, env={"prompts": 14, "slots": 12}, **MODES[mode]) as second:
        second.load_state_dict(state)
        for batch in second:
            found.update(turns(batch))
    wanted = expected(env={"prompts": 14}, **MODES[mode])
    assert found == wanted, tally(found, wanted)


def test_fewer_workers_without_room_for_what_is_in_progress_say_so():
    with make(3, dialog_turns_per_batch=10) as first:
        for _ in range(3):
            first.next()
        state = copied(first.state_dict())
    with make(1, dialog_turns_per_batch=10) as second, pytest.raises(ValueError, match=r"room for 5.*num_collectors=3"):
        second.load_state_dict(state)


def test_the_warning_of_a_replacement_says_what_it_goes_on_with():
    with make(dialog_turns_per_batch=10) as collector:
        for _ in range(4):
            collector.next()
        for worker in collector.stats()["workers"]:
            os.kill(worker["pid"], signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match=r"the other one goes on behind what was delivered"):
            assert sum(1 for _ in collector)


# What a worker announces before it writes ----------------------------------------------------------------------------


def test_a_publication_that_follows_says_whether_the_last_one_was_published():
    rb, sent = buffer(), []
    counters, options = WorkerCounters(Segment(), 0), CollectorOptions(frames_per_batch=1, replay_buffer=rb)
    publications = Publications(counters, options, sent.append)
    known = DeliveredPosition(counters, options)
    for number in range(4):
        publications.begin(SimpleNamespace(place=lambda ids, number=number: number), None)
        known.announce(sent[-1])
        if number != 2:
            rb.extend(TensorDict({"a": torch.zeros(2)}, [2]))
    assert [message.last_is_published for message in sent] == [False, True, True, False]
    assert pickle.loads(known.of_dead()) == 3
    publications.begin(SimpleNamespace(place=lambda ids: 4), None)
    known.announce(sent[-1])
    assert pickle.loads(known.of_dead()) == 3, "number 4 was announced and not written"
    rb.shutdown()


def test_a_replaced_worker_sees_that_its_share_is_over():
    with make(0, trajs_per_batch=2) as first, make(0, trajs_per_batch=2) as second:
        assert sum(1 for _ in first)
        cursor = second._rollout.cursor
        cursor.load_state_dict(first._rollout.cursor.place(), ids_are_free=True)
        cursor.look_ahead()
        assert cursor.is_over
        assert list(second) == []
