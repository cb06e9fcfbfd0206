"""When workers are replaced, and how often."""

from __future__ import annotations

import pytest

from rollwright.collectors.workers.handles import Restarts
from rollwright.errors import WorkerError

ERROR = WorkerError("worker 0 was killed")


class Clock:
    """Stands still until it is told."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def restarts(clock):
    return Restarts(wanted=True, most=5, delay_s=1.0, clock=clock)


def failed(restarts, clock):
    """A failure; seconds until the replacement, which starts then."""
    assert restarts.plan(0, ERROR)
    delay = restarts.next_in()
    assert restarts.due() == []
    clock.now += delay
    assert restarts.due() == [0]
    assert restarts.due() == []
    return delay


def test_each_delay_is_twice_the_last(restarts, clock):
    assert [failed(restarts, clock) for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert restarts.counts == {0: 5}
    assert not restarts.plan(0, ERROR)
    assert "replaced 5 times before (max_restarts)" in str(restarts.verdict(0, ERROR))


@pytest.mark.parametrize(("at_work_s", "then"), [(19.0, 4.0), (21.0, 1.0)])
def test_the_delay_begins_again_after_a_time_of_health(restarts, clock, at_work_s, then):
    assert [failed(restarts, clock), failed(restarts, clock)] == [1.0, 2.0]
    restarts.began(0)
    clock.now += at_work_s
    assert failed(restarts, clock) == then
    assert failed(restarts, clock) == 2 * then
    assert restarts.counts == {0: 4}  # of all, healthy or not
    assert "number 4 of 5 at most" in restarts.notes[-1]


def test_a_long_start_is_no_health(restarts, clock):
    for delay in (1.0, 2.0, 4.0):
        assert failed(restarts, clock) == delay
        clock.now += 1000.0  # and it has not made its environment


def test_no_delay_is_longer_than_a_minute(clock):
    restarts = Restarts(wanted=True, most=3, delay_s=40.0, clock=clock)
    assert [failed(restarts, clock) for _ in range(3)] == [40.0, 60.0, 60.0]


def test_workers_have_delays_of_their_own(restarts, clock):
    assert failed(restarts, clock) == 1.0
    assert restarts.plan(1, ERROR)
    assert restarts.next_in() == 1.0
    assert restarts.plan(0, ERROR)
    clock.now += 2.0
    assert sorted(restarts.due()) == [0, 1]
