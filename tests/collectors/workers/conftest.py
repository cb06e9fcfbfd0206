"""Collectors of many workers that end with their test, and a look at what they leave behind."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from rollwright.data import LazyTensorStorage, ReplayBuffer

ROOT = Path(__file__).parents[3]
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # workers import what tests send them

from tests.collectors.workers import processes  # noqa: E402

LIMIT_S = 60


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No test of this folder may take longer than a minute, unless it says so."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_S))


def _class(kind):
    from rollwright import collectors

    names = {"sync": "MultiSyncCollector", "async": "MultiAsyncCollector", "multi": "MultiCollector"}
    return getattr(collectors, names.get(kind, "Collector"))


@pytest.fixture
def make():
    """``make(kind, envs, policy, **options)``: a collector ("sync", "async", "multi" or "front") of the test's own."""
    made = []

    def build(kind, *args, **options):
        collector = _class(kind)(*args, **options)
        made.append(collector)
        return collector

    yield build
    for collector in made:
        collector.shutdown(raise_on_error=False)


@pytest.fixture(autouse=True)
def nothing_left():
    """After each test: no process."""
    yield
    if processes.strangers():
        gc.collect()
        assert processes.left_behind() == []


@pytest.fixture
def buffer():
    """``buffer(size, **options)``: a replay buffer that processes share."""

    def build(size=20_000, *, ndim=1, cls=ReplayBuffer, **options):
        return cls(storage=LazyTensorStorage(size, ndim=ndim), **{"shared": True, **options})

    return build


@pytest.fixture
def same():
    """``same(left, right, but=(...))``: two batches have equal entries, apart from those named."""

    def compare(left, right, *, but=()):
        left, right = left.exclude(*but), right.exclude(*but)
        keys = set(left.keys(True, True))
        assert keys == set(right.keys(True, True))
        assert left.batch_size == right.batch_size
        for key in keys:
            assert left[key].dtype == right[key].dtype, key
            assert torch.equal(left[key], right[key]), key

    return compare
