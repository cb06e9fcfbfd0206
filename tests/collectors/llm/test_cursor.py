"""The account of conversations from prompt to delivery, without a path."""

from __future__ import annotations

import pytest
from tests.collectors.llm.fakes import FakeEnv

from rollwright.collectors.rollout.paths.conversations.cursor import ConversationCursor, Saved
from rollwright.collectors.rollout.state import TrajectoryPool
from rollwright.envs.llm.undelivered import Undelivered


class Slots:
    """Conversations in progress, of a list."""

    sizes = None
    only_rest = False

    def __init__(self):
        self.going_on = []

    @property
    def is_over(self):
        return not self.going_on

    def delivered(self): ...

    def begun(self):
        return self.going_on

    def interrupt(self):
        found, self.going_on = self.going_on, []
        return found

    def go_back(self, mark, *, keeps):
        return self.interrupt()

    def look_ahead(self): ...

    def save(self, *, waits, alone):
        return Saved({"row_ids": None}, [(each, "a file is open") for each in self.going_on])

    def check_state(self, state_dict): ...

    def load(self, state_dict, names, place):
        place()


def made(*, whole=False, conversations=None):
    undelivered = Undelivered(FakeEnv(4, prompts=9).conversations if conversations is None else conversations)
    cursor, slots = ConversationCursor(lambda: undelivered, TrajectoryPool(), delivers_whole=whole), Slots()
    cursor.follow(slots)
    return cursor, slots


def begun(cursor, slots, count):
    slots.going_on = [cursor.undelivered.open(slot) for slot in range(count)]
    return list(slots.going_on)


def taken(cursor, slots, openings, *, ended=()):
    """A batch with a turn of each."""
    cursor.begin("here")
    slots.going_on = [each for each in slots.going_on if each not in ended]
    cursor.finish(openings, {10 + each.draw.origin.group: each for each in ended})


def again(cursor):
    return [each.draw.origin.index for each in cursor.undelivered.again]


def test_what_was_delivered_in_part_ends_and_the_rest_begins_again():
    cursor, slots = made()
    first, second, third = begun(cursor, slots, 3)
    taken(cursor, slots, [first, second], ended=[second])
    cursor.delivered()
    taken(cursor, slots, [first, third])
    with pytest.warns(RuntimeWarning, match=r"prompt 0 \(epoch 0, repeat 0\): turns of it were delivered"):
        assert cursor.go_back()
    assert again(cursor) == [2]
    assert cursor.stats()["conversations_dropped"] == 1
    assert cursor.go_back()  # nothing is dropped twice
    assert cursor.stats()["conversations_dropped"] == 1


def test_what_ended_in_a_batch_that_nobody_got_has_not_ended():
    cursor, slots = made()
    first, second = begun(cursor, slots, 2)
    taken(cursor, slots, [first, second], ended=[first])
    cursor.go_back()
    assert cursor.stats()["conversations_undelivered"] == 0
    assert not made()[0].go_back()  # no batch was begun


@pytest.mark.parametrize("whole", [False, True])
def test_whole_conversations_are_held_where_all_begins_again(whole):
    cursor, slots = made(whole=whole)
    first, second = begun(cursor, slots, 2)
    taken(cursor, slots, [first, second], ended=[first])
    cursor.start_over()
    assert again(cursor) == ([1] if whole else [0, 1])
    assert cursor.stats()["conversations_undelivered"] == whole


@pytest.mark.parametrize("published", [False, True])
def test_a_place_is_behind_what_is_about_to_be_published(published):
    cursor, slots = made()
    first, second, _ = begun(cursor, slots, 3)
    taken(cursor, slots, [first, second], ended=[second])
    place = cursor.place(None if published else ())
    other, _ = made()
    other.load_state_dict(place, ids_are_free=True)
    undelivered = other.undelivered
    assert undelivered.num_dropped == published  # the first one cannot be saved
    drawn = [undelivered.open(slot).draw.origin.index for slot in range(2)]
    assert drawn == ([2, 3] if published else [0, 2])


def test_another_path_begins_again_what_is_in_progress():
    cursor, slots = made()
    first, _ = begun(cursor, slots, 2)
    taken(cursor, slots, [first])
    cursor.delivered()
    cursor.follow(Slots())
    assert again(cursor) == [1]
    assert cursor.undelivered.num_dropped == 1
