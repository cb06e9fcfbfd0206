"""What nobody got begins again, before other prompts are drawn; what was dropped on purpose does not."""

from __future__ import annotations

import pytest

from rollwright.envs.llm.conversations import DatasetConversations
from rollwright.envs.llm.sources import DatasetSource
from rollwright.envs.llm.undelivered import Undelivered


@pytest.fixture
def conversations():
    made = DatasetConversations(DatasetSource([f"p{number}" for number in range(6)], epochs=1), 4)
    yield made
    made.close()


def prompt(opening):
    return opening.messages[0]["content"]


def drawn(conversations, undelivered, count):
    return [prompt(undelivered.open(slot % 4)) for slot in range(count)]


def begun(undelivered, count):
    return {10 + slot: undelivered.open(slot) for slot in range(count)}


def after_restore(conversations):
    other = DatasetSource([f"p{number}" for number in range(6)], epochs=1)
    other.load_state_dict(conversations.source.state_dict())
    return [other.draw().row["text"] for _ in range(2)]


def test_the_place_in_the_data_follows_what_was_delivered(conversations):
    undelivered = Undelivered(conversations)
    undelivered.ended(begun(undelivered, 3))
    undelivered.delivered([10])
    assert after_restore(conversations) == ["p1", "p2"]
    undelivered.delivered()
    assert after_restore(conversations) == ["p3", "p4"]
    assert len(undelivered) == 0


def test_what_nobody_got_begins_again_once_and_in_the_order_of_the_data_before_others(conversations):
    undelivered = Undelivered(conversations)
    first, second, third = begun(undelivered, 3).values()
    undelivered.ended({10: first})
    undelivered.begin_again([third, second, third])
    assert drawn(conversations, undelivered, 3) == ["p1", "p2", "p3"]
    assert list(undelivered.openings) == [10]


def test_what_was_dropped_on_purpose_counts_as_delivered(conversations):
    undelivered = Undelivered(conversations)
    undelivered.ended(begun(undelivered, 2))
    undelivered.dropped()
    undelivered.drop([undelivered.open(2)])
    assert undelivered.num_dropped == 3
    assert after_restore(conversations) == ["p3", "p4"]


def test_a_saved_state_goes_on_under_other_ids(conversations):
    undelivered = Undelivered(conversations)
    undelivered.ended(begun(undelivered, 3))
    undelivered.begin_again(undelivered.take([12, 12, 99]))
    state = {"source": conversations.source.state_dict(), **undelivered.state_dict()}
    other = DatasetConversations(DatasetSource([f"p{number}" for number in range(6)], epochs=1), 4)
    restored = Undelivered(other)
    other.source.load_state_dict(state["source"])
    restored.load_state_dict(state, lambda number: number + 100)
    assert drawn(other, restored, 2) == ["p2", "p3"]
    assert {number: prompt(opening) for number, opening in restored.openings.items()} == {110: "p0", 111: "p1"}
    restored.delivered([110])
    assert after_restore(other) == ["p1", "p2"]
    other.close()
