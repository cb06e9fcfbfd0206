"""Sum and minimum trees agree with NumPy over the whole array, whatever is updated and in whatever order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollwright.data.replay_buffers.samplers.prioritized import FAN_OUT, TOP, MinTree, SumTree

# One level, the border of one level, two, three, and sizes that fill no row.
SIZES = [1, 2, 31, TOP, TOP + 1, 5000, TOP * FAN_OUT, TOP * FAN_OUT + 1, 70_001]


def search(values, mass):
    return np.searchsorted(np.cumsum(values), mass, "right")


@pytest.mark.parametrize("size", SIZES)
def test_batches_of_updates_equal_an_array(size):
    rng = np.random.default_rng(size)
    sums, least, values = SumTree(size), MinTree(size), np.zeros(size)
    for n in (1, 7, 300, 2000):
        index, value = rng.integers(0, size, n), rng.integers(0, 100, n).astype(float)
        index = np.sort(index) if n == 2000 else index
        sums.update(index, value)
        least.update(index, np.where(value > 0, value, np.inf))
        for i, v in zip(index, value, strict=True):  # the last of equal indices counts
            values[i] = v
        np.testing.assert_array_equal(sums.leaves, values)
        assert sums.total == values.sum()  # integers add up without rounding
        assert least.least == values[values > 0].min()
        mass = rng.integers(0, int(values.sum()), 200).astype(float)
        np.testing.assert_array_equal(sums.find(mass), search(values, mass))


@pytest.mark.parametrize("size", SIZES)
def test_fills_equal_an_array(size):
    rng = np.random.default_rng(size)
    sums, least, values = SumTree(size), MinTree(size), np.zeros(size)
    for i in range(20):
        start, stop = np.sort(rng.integers(0, size + 1, 2))
        value = rng.integers(1, 9, stop - start).astype(float) if i % 2 else float(i)
        values[start:stop] = value
        sums.fill(start, stop, value)
        least.fill(start, stop, np.where(np.asarray(value) > 0, value, np.inf))
        assert sums.total == values.sum()
        assert least.least == values[values > 0].min(initial=np.inf)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(SIZES), st.booleans(), st.sampled_from([30, 1]))
def test_no_draw_hits_a_zero(seed, size, apart, orders):
    """Values over many orders of magnitude, most of them 0, and masses at either end."""
    rng = np.random.default_rng(seed)
    tree = SumTree(size)
    filled = rng.integers(0, size, 20) if apart else np.arange(size)[-FAN_OUT + 3 :]
    tree.update(filled, 10.0 ** rng.uniform(-orders, 0, len(filled)))
    mass = np.concatenate(
        [rng.random(100) * tree.total, [0.0, tree.total, np.nextafter(tree.total, 0), tree.total * 2]]
    )
    found = tree.find(mass)
    assert (tree.leaves[found] > 0).all()
    assert found[-1] == found[-2]


def test_sums_do_not_drift():
    rng = np.random.default_rng(0)
    tree = SumTree(5000)
    for _ in range(2000):
        tree.update(rng.integers(0, 5000, 16), 10.0 ** rng.uniform(-12, 12, 16))
    tree.fill(0, 5000, 0.0)
    assert tree.total == 0.0
    tree.fill(10, 20, 0.1)
    assert tree.total == pytest.approx(1.0, rel=1e-15)


def test_drawn_in_proportion():
    rng = np.random.default_rng(1)
    values = rng.random(40_000) * (rng.random(40_000) < 0.001)
    tree = SumTree(len(values))
    tree.fill(0, len(values), values)
    n = 200_000
    counts = np.bincount(tree.find(rng.random(n) * tree.total), minlength=len(values))
    expected = n * values / values.sum()
    held = values > 0
    assert counts[~held].sum() == 0
    chi_square = ((counts - expected)[held] ** 2 / expected[held]).sum()
    assert chi_square < held.sum() + 5 * np.sqrt(2 * held.sum())


def test_empty_trees_are_refused():
    with pytest.raises(ValueError, match=r"size: expected at least 1 leaf, got 0"):
        SumTree(0)
    with pytest.raises(ValueError, match="all values are 0"):
        SumTree(3).find(np.zeros(1))
    assert MinTree(3).least == np.inf
