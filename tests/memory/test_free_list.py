"""The free list: stretches never overlap, and what is released is used again."""

from __future__ import annotations

import random

from rollwright._memory import FreeList


def test_no_byte_is_lost():
    """Stretches never overlap, and when all are given back, all is free."""
    memory, draw, taken = FreeList(), random.Random(3), {}
    for _ in range(2000):
        if taken and draw.random() < 0.5:
            start = draw.choice(sorted(taken))
            memory.release(start, taken.pop(start))
        else:
            size = draw.randrange(1, 2000)
            start = memory.allocate(size)
            assert start % 64 == 0
            assert all(start >= other + held or other >= start + size for other, held in taken.items())
            taken[start] = size
    assert memory.end < 2000 * 200
    for start, size in taken.items():
        memory.release(start, size)
    assert memory.end == 0


def test_the_rest_of_a_stretch_is_used():
    memory = FreeList()
    first, _ = memory.allocate(640), memory.allocate(64)
    memory.release(first, 640)
    assert [memory.allocate(64) for _ in range(10)] == [first + 64 * n for n in range(10)]
    assert memory.end == 704
