"""The index of runs equals a scan of the whole ring, whatever was written, trimmed, skipped and asked before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.data.replay_buffers.samplers.runs import Grid, RunIndex


def scan(ids, ends, held, low, period):
    """Runs as sorted (lane, start, stop), by looking at every frame; arrays are [ticks, lanes] from tick 0."""
    found = []
    for lane in range(ids.shape[1]):
        start = None
        for tick in range(low, len(ids)):
            here = held[tick] and ids[tick, lane] >= 0
            new = (
                start is None
                or ids[tick, lane] != ids[tick - 1, lane]
                or ends[tick - 1, lane]
                or (period and tick % period == 0)
            )
            if start is not None and (new or not here):
                found.append((lane, start, tick))
                start = None
            if here and start is None:
                start = tick
        if start is not None:
            found.append((lane, start, len(ids)))
    return sorted(found)


def left(index, length):
    lane, start, stop = index.runs(length)
    return sorted(zip(lane.tolist(), np.maximum(start, index.low).tolist(), stop.tolist(), strict=True))


class History:
    """All that was ever written, for :func:`scan`."""

    def __init__(self, rng, lanes):
        self.rng, self.lanes = rng, lanes
        self.ids = np.zeros((0, lanes), np.int64)
        self.ends = np.zeros((0, lanes), bool)
        self.held = np.zeros(0, bool)

    def frames(self, n, p_change):
        change = self.rng.random((n, self.lanes)) < p_change
        ids = np.where(self.rng.random((n, self.lanes)) < 0.05, -1, 0) + np.cumsum(change, 0) % 3
        return ids, self.rng.random((n, self.lanes)) < p_change / 2

    def append(self, ids, ends, held):
        self.ids, self.ends = np.concatenate([self.ids, ids]), np.concatenate([self.ends, ends])
        self.held = np.concatenate([self.held, np.full(len(ids), held)])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    lanes=st.integers(1, 4),
    period=st.sampled_from([0, 0, 5]),
    capacity=st.integers(1, 60),
    p_change=st.sampled_from([0.02, 0.2, 0.7]),
    use=st.sampled_from(["ids", "ends", "both"]),
)
def test_equals_a_scan(seed, lanes, period, capacity, p_change, use):
    rng = np.random.default_rng(seed)
    capacity *= period or 1
    index, history = RunIndex(lanes, period), History(rng, lanes)
    for _ in range(25):
        n = int(rng.integers(0, 2 * capacity if rng.random() < 0.1 else min(capacity, 12) + 1))
        n -= n % (period or 1)
        ids, ends = history.frames(n, p_change)
        if use == "ends":
            ids = np.zeros_like(ids)
        if use == "ids":
            ends = np.zeros_like(ends)
        if n and rng.random() < 0.15:
            index.skip(index.high + n)
            history.append(ids, ends, False)
        else:
            index.extend(None if use == "ends" else ids, None if use == "ids" else ends)
            history.append(ids, ends, True)
        low = max(len(history.ids) - capacity, 0)
        if rng.random() < 0.7:  # trimming may lag
            index.trim(low)
        assert index.high == len(history.ids)
        expected = scan(history.ids, history.ends, history.held, index.low, period)
        for length in rng.permutation([1, 2, 3, 7, 11, 20])[:3]:
            assert left(index, int(length)) == [run for run in expected if run[2] - run[1] >= length]


def test_what_closed_since():
    index = RunIndex(2)
    index.extend(np.array([[0, 5], [0, 5], [1, 5], [2, 6]]))
    assert index.closed_since(0).tolist() == [[0, 0, 1], [0, 2, 0], [2, 3, 3]]
    before = index.num_closed
    index.extend(np.array([[2, 7]]))
    assert index.closed_since(before).tolist() == [[1], [3], [4]]
    index.trim(4)
    assert index.closed_since(0).size == 0


def test_a_run_over_many_extends_stays_one():
    index = RunIndex(1)
    for _ in range(50):
        index.extend(np.zeros((3, 1), np.int64), np.zeros((3, 1), bool))
    assert index.runs(140).tolist() == [[0], [0], [150]]
    assert index.runs(151).shape == (3, 0)


def test_memory_is_bounded_by_what_is_left():
    index = RunIndex(1)
    for i in range(300):
        index.extend(np.arange(100)[:, None] + 1000 * i)
        index.trim(index.high - 200)
        index.runs(2)
    assert index.runs().shape[1] == 200
    assert index._queues[1].table.shape[1] < 2000


def test_ids_of_any_number_type():
    for dtype in (np.int32, np.uint8, np.float32):
        index = RunIndex(1)
        index.extend(np.array([[0], [0], [3]], dtype))
        assert index.runs().tolist() == [[0, 0], [0, 2], [2, 3]]


@pytest.mark.parametrize(("columns", "period"), [(1, 0), (3, 0), (4, 4), (12, 4)])
def test_grid_places_every_frame_once(columns, period):
    capacity = 5
    grid = Grid(capacity, columns, period)
    first = 7 * grid.ticks  # wraps around
    tick, lane = np.meshgrid(first + np.arange(capacity * grid.ticks), np.arange(grid.lanes), indexing="ij")
    elements = grid.elements(lane, tick)
    assert sorted(elements.ravel().tolist()) == list(range(capacity * columns))
    ring = np.arange(7, 7 + capacity) % capacity
    stored = np.arange(capacity * columns).reshape(capacity, columns)[ring]
    np.testing.assert_array_equal(grid.by_tick(stored), elements)
    inside = period or capacity  # from the start of a stretch to its end
    ahead = grid.ahead(elements[:1], np.arange(inside)[:, None])
    np.testing.assert_array_equal(ahead, elements[:inside])
