"""Collectors of conversations without a model, that end with the test."""

from __future__ import annotations

import pytest
from tests.collectors.llm.fakes import FakeEnv, FakePolicy

from rollwright.collectors.llm import LLMCollector


@pytest.fixture
def build():
    """``build(slots, policy=..., env={...}, **options)``: an LLMCollector of fakes."""
    made = []

    def of(slots=2, *, env=None, policy=None, cls=LLMCollector, **options):
        collector = cls(FakeEnv(slots, **(env or {})), policy or FakePolicy(), **options)
        made.append(collector)
        return collector

    yield of
    for collector in made:
        collector.shutdown()
