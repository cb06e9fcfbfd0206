"""What nobody got: frames of a batch that failed do not count, and a queue that took a part of it gets the rest."""

from __future__ import annotations

import pytest

from rollwright.collectors import Collector
from rollwright.envs import GymEnv

KEYS = ("prompt_index", "epoch", "repeat", "turn")


class Refusing:
    """A queue that refuses some puts."""

    def __init__(self, *refused):
        self.items, self.refused, self.attempts = [], set(refused), 0

    def put(self, item):
        self.attempts += 1
        if self.attempts in self.refused:
            raise OSError("no connection")
        self.items.append(item)


def names(items):
    return [tuple(int(item[key]) for key in KEYS) for item in items]


OPTIONS = [{"dialog_turns_per_batch": 4}, {"groups_per_batch": 1}, {"trajs_per_batch": 1}]


def taken(collector):
    """Iterate until the end, through errors; returns how many there were."""
    errors = 0
    while True:
        try:
            for _ in collector:
                pass
            return errors
        except OSError:
            errors += 1


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("refused", [(1,), (2,), (3, 4), (7, 8, 9, 14), (12,)])
def test_a_queue_gets_each_turn_once(build, options, refused):
    whole, broken = Refusing(), Refusing(*refused)
    for sink in (whole, broken):
        collector = build(2, env={"prompts": 4, "repeats": 2}, queue=sink, **options)
        assert taken(collector) == (len(refused) if sink is broken else 0)
        assert collector.stats()["write_count"] == len(sink.items)
    assert len(set(names(broken.items))) == len(broken.items)
    assert sorted(names(broken.items)) == sorted(names(whole.items))
    assert len(whole.items) > 14


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_what_is_left_of_a_batch_is_saved(build, options):
    whole, first, second = Refusing(), Refusing(2), Refusing()
    list(build(2, env={"prompts": 3, "repeats": 2}, queue=whole, **options))
    collector = build(2, env={"prompts": 3, "repeats": 2}, queue=first, **options)
    with pytest.raises(OSError, match="no connection"):
        list(collector)
    state = collector.state_dict()
    restored = build(2, env={"prompts": 3, "repeats": 2}, queue=second, **options)
    restored.load_state_dict(state)
    list(restored)
    assert sorted(names([*first.items, *second.items])) == sorted(names(whole.items))


def failing(at):
    calls = []

    def postproc(batch):
        calls.append(len(calls))
        if len(calls) in at:
            raise OSError("no connection")
        return batch

    return postproc


def test_turns_of_a_batch_that_failed_do_not_count(build):
    collector = build(2, dialog_turns_per_batch=4, total_dialog_turns=12, postproc=failing({1, 3}))
    found = []
    for _ in range(2):
        with pytest.raises(OSError, match="no connection"):
            found.extend(collector)
    assert collector.stats()["frames"] == 4 * len(found)
    found.extend(collector)
    turns = names(row for batch in found for row in batch.reshape(-1).unbind(0))
    assert len(turns) == len(set(turns)) == 12
    stats = collector.stats()
    assert (stats["frames"], stats["completed"]) == (12, True)
    ended = sum(int(batch["next", "done"].sum()) for batch in found)
    assert stats["episodes"] == ended


def test_frames_of_a_batch_that_failed_do_not_count():
    collector = Collector(
        lambda: GymEnv("CartPole-v1"), None, frames_per_batch=50, total_frames=150, postproc=failing({2})
    )
    found = []
    with pytest.raises(OSError, match="no connection"):
        found.extend(collector)
    assert collector.stats()["frames"] == 50
    found.extend(collector)
    assert collector.stats()["frames"] == sum(batch.numel() for batch in found) == 150
    assert collector.stats()["episodes"] == sum(int(batch["next", "done"].sum()) for batch in found)
    collector.shutdown()
