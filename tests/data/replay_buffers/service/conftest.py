"""Replay services that end with their test."""

from __future__ import annotations

from functools import partial

import pytest

from rollwright.data import LazyTensorStorage, TensorDictReplayBuffer


@pytest.fixture
def serve():
    """``serve(kind=..., size=..., **options)``: a buffer in a process of its own."""
    made = []

    def build(kind=TensorDictReplayBuffer, size=1000, *, service=None, **options):
        options.setdefault("storage", partial(LazyTensorStorage, size))
        buffer = kind(service_backend="process", service_backend_options=service, **options)
        made.append(buffer)
        return buffer

    yield build
    for buffer in made:
        buffer.shutdown()
