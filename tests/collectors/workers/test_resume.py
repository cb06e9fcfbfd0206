"""States of many workers: the weights of the moment, in those that are restored and in those that are replaced."""

from __future__ import annotations

import os
import random
import signal
import warnings

import numpy as np
import pytest
import torch
from tests.collectors.workers.envs import VERSION, gain, makers
from tests.collectors.workers.processes import wait_until
from tests.variants import in_turn

from rollwright.errors import WorkerError

KINDS = ["sync", "async"]


def acted(batches):
    """The gains, and the tags, of batches."""
    batches = list(batches)
    values = {float(value) for batch in batches for value in batch["action"].unique()}
    return values, {int(tag) for batch in batches for tag in batch[VERSION].unique()}


@pytest.mark.parametrize(("kind", "some"), in_turn(KINDS, [None, [1]]))
def test_a_state_right_after_an_update_holds_the_new_weights(make, kind, some):
    options = {"frames_per_batch": 10, "track_policy_version": True}
    first = make(kind, makers(), gain(1.0), **options)
    first.next()
    assert first.update_policy_weights_(gain(5.0), worker_ids=some) == 1
    state = first.state_dict()
    gains = [float(state[f"worker{i}"]["policy_state_dict"]["module.gain"]) for i in range(2)]
    assert gains == [5.0 if some is None else 1.0, 5.0]
    assert state["policy_version"] == 1
    second = make(kind, makers(), gain(9.0), **options)
    second.load_state_dict(state)
    undelivered = len(state["undelivered"]["waiting"])  # these were acted before the update
    batches = [second.next() for _ in range(undelivered + 4)][undelivered:]
    values, tags = acted(batches)
    assert values <= set(gains)
    assert 5.0 in values or kind == "async"
    assert tags <= {0, 1}
    for batch in batches:
        assert bool(((batch["action"].squeeze(-1) == 5.0) == (batch[VERSION] == 1)).all())
    assert second.stats()["policy_version"] == 1
    assert second.update_policy_weights_(gain(7.0)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_that_the_loop_draws_go_on_too(make, kind):
    def drawn():
        return torch.randperm(100).tolist(), np.random.permutation(100).tolist(), random.random()

    collector = make(kind, makers(), gain(1.0), frames_per_batch=10)
    collector.next()
    state, expected = collector.state_dict(), drawn()
    assert drawn() != expected
    damaged = {**state, "streams": {**state["streams"], "torch": torch.zeros(3, dtype=torch.uint8)}}
    with pytest.raises(RuntimeError):
        collector.load_state_dict(damaged)
    collector.load_state_dict({name: value for name, value in state.items() if name != "streams"})  # an older one
    assert drawn() != expected
    collector.load_state_dict(state)
    assert drawn() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_published_before_a_load_is_not_taken_after_it(make, kind):
    collector = make(kind, makers(), gain(1.0), frames_per_batch=10, track_policy_version=True)
    state = collector.state_dict()
    collector.update_policy_weights_(gain(2.0))
    collector.load_state_dict(state)
    assert acted(collector.next() for _ in range(4)) == ({1.0}, {0})
    assert collector.policy_version == 0
    assert collector.update_policy_weights_(gain(3.0)) == 1
    assert wait_until(lambda: acted([collector.next()]) == ({3.0}, {1}), 30.0)


@pytest.mark.parametrize(("lacks", "kind"), in_turn(["policy_state_dict", "streams"], KINDS))
def test_no_worker_loads_what_another_one_refuses(make, kind, lacks):
    options = {"frames_per_batch": 10, "track_policy_version": True}
    state = make(kind, makers(), gain(5.0), **options).state_dict()
    if lacks == "streams":
        state["worker1"] = {name: value for name, value in state["worker1"].items() if name != lacks}
    else:
        state["worker1"] = {**state["worker1"], lacks: {}}
    collector = make(kind, makers(), gain(1.0), **options)
    with pytest.raises((KeyError, WorkerError), match=r"worker.?1.*(streams|module\.gain)|worker 1: RuntimeError"):
        collector.load_state_dict(state)
    assert acted(collector.next() for _ in range(4)) == ({1.0}, {0})


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_is_replaced_after_a_load_acts_with_the_loaded_weights(make, kind):
    options = {"frames_per_batch": 10, "track_policy_version": True, "restart_delay": 0.0}
    first = make(kind, makers(), gain(1.0), **options)
    for value in (2.0, 3.0, 4.0):
        first.update_policy_weights_(gain(value))
    second = make(kind, makers(), gain(9.0), on_worker_failure="restart", **options)
    second.update_policy_weights_(gain(8.0))
    second.load_state_dict(first.state_dict())
    old = second.stats()["workers"][0]["pid"]
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        os.kill(old, signal.SIGKILL)

        def replaced():
            assert acted([second.next()]) == ({4.0}, {3})
            worker = second.stats()["workers"][0]
            return worker["restarts"] == 1 and worker["alive"] and worker["policy_version"] == 3

        assert wait_until(replaced, 40.0)
        assert acted(second.next() for _ in range(4)) == ({4.0}, {3})
