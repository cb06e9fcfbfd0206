"""The store of blocks: what is free is used again, what is not collected any more goes, what is read stays."""

from __future__ import annotations

import pytest
import torch

from rollwright._memory.segment import Segment
from rollwright.collectors.workers.memory import BatchForm, BlockLayout, BlockStore


@pytest.fixture
def store():
    segment = Segment()
    yield BlockStore(segment, 8)
    segment.close()


def layout(steps=5, *, width=4, env=(), dtype=torch.float32):
    return BlockLayout(BatchForm((("obs", (*env, width), dtype),), env, 0), (steps,), "alone")


def test_a_free_block_is_used_again(store):
    first = store.take(layout())
    first.runs.add(0)
    second = store.take(layout())
    assert second.offset != first.offset
    first.runs.clear()
    assert store.take(layout()) is first
    tensors = first.borrow()
    assert store.num_borrowed == 1
    assert store.take(layout()) is second
    kept = tensors["obs"][0]
    del tensors
    assert store.take(layout()) is second
    del kept
    assert store.take(layout()) is first


def test_blocks_that_a_worker_reads_are_not_free(store):
    blocks = [store.take(layout(steps)) for steps in (5, 6)]
    store.read_by(0, [block.offset for block in blocks])
    store.read_by(1, [blocks[0].offset])
    store.read_by(0, [])
    assert [block.free for block in blocks] == [False, True]
    store.read_by(1, [blocks[1].offset])
    assert [block.free for block in blocks] == [True, False]


@pytest.mark.parametrize(
    "other", [layout(7), layout(env=(3,)), layout(width=9), layout(dtype=torch.float64)], ids=["steps", "env", "w", "d"]
)
def test_layouts_that_are_collected_no_more_go(store, other):
    big = layout(1000)
    first = store.take(big)
    held = store.take(other)
    held.runs.add(0)
    reached = store.num_bytes
    for _ in range(200):
        store.take(layout())
    again = store.take(big)
    assert again is not first
    assert again.number != first.number  # who knows the old one asks
    assert store.num_bytes <= reached + layout().num_bytes  # in the place of the first
    assert store.take(other) is not held  # which is still written
    assert held.offset != again.offset


def test_layouts_in_turn_keep_their_blocks(store):
    layouts = [layout(steps) for steps in range(1, 20)]
    first = [store.take(one) for one in layouts]
    for _ in range(20):
        assert all(store.take(one) is block for one, block in zip(layouts, first, strict=True))
