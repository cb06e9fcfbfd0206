"""What an element of a replay buffer is: a turn, or with flatten_data=False the turns of one environment."""

from __future__ import annotations

import queue

import pytest
from tests.collectors.llm.shares import buffer, expected, make, turns

from rollwright.collectors.llm import LLMCollector
from rollwright.data import ListStorage, RaggedStorage, ReplayBuffer
from rollwright.data.replay_buffers import SliceSampler

ENV = {"prompts": 7, "repeats": 2}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("storage", [RaggedStorage, ListStorage])
def test_an_element_is_what_one_environment_took(plain, storage):
    rb = ReplayBuffer(storage=storage(200), batch_size=2)
    options = {"dialog_turns_per_batch": 10, "env": ENV, "plain": plain}
    with make(0, replay_buffer=rb, flatten_data=False, **options) as stored, make(0, **options) as yielded:
        for batch in yielded:
            assert stored.next() is None
            rows = [rb[-1 - row] for row in reversed(range(5))]
            assert [element.batch_size for element in rows] == [(batch.shape[1],)] * 5
            for element, row in zip(rows, batch.unbind(0), strict=True):
                assert element["collector", "traj_ids"].tolist() == row["collector", "traj_ids"].tolist()
                assert turns(element) == turns(row)
    assert rb.sample().batch_size == (2, rb[0].batch_size[0])


@pytest.mark.parametrize("plain", [False, True])
def test_by_default_an_element_is_a_turn(plain):
    options = {"dialog_turns_per_batch": 10, "env": ENV, "plain": plain}
    rb = buffer()
    with make(0, replay_buffer=rb, **options) as collector:
        list(collector)
    assert rb[0].batch_size == ()
    assert set(turns(rb[:])) == set(expected(**options))
    assert len(rb) == len(expected(**options))


def test_workers_store_the_turns_of_environments():
    rb = buffer()
    with make(2, replay_buffer=rb, flatten_data=False, dialog_turns_per_batch=10, env=ENV) as collector:
        list(collector)
    found = [name for number in range(len(rb)) for name in turns(rb[number])]
    assert sorted(found) == sorted(expected(dialog_turns_per_batch=10, env=ENV))


def test_what_cannot_be_is_an_error_that_says_what_to_do():
    with pytest.raises(ValueError, match=r"flatten_data=False: a queue gets each turn.*Leave flatten_data out"):
        make(0, dialog_turns_per_batch=10, queue=queue.Queue(), flatten_data=False)
    rb = ReplayBuffer(storage=RaggedStorage(200), sampler=SliceSampler(num_slices=2), batch_size=4)
    with pytest.raises(ValueError, match=r"flatten_data=False: .*SliceSampler.*Leave flatten_data out"):
        make(0, dialog_turns_per_batch=10, replay_buffer=rb, flatten_data=False)


def test_complete_conversations_are_stored_turn_by_turn():
    rb = buffer()
    with make(0, trajs_per_batch=1, replay_buffer=rb, flatten_data=False, env=ENV) as collector:
        assert isinstance(collector, LLMCollector)
        list(collector)
    assert rb[0].batch_size == ()
